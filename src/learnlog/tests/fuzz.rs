//! The files of a log, and the payload of a record behind its checksum.

use std::fs;

use super::*;
use crate::fuzz::bytes::{Input, changes, mutated};
use crate::fuzz::run;
use crate::types::Batch;
use proptest::sample::Index;

/// A schema with one dense input, a hashed feature and one of ids.
fn small_schema() -> Schema {
    let mut schema = schema();
    schema.dense.truncate(1);
    schema.features.truncate(2);
    schema.features[1].hash = None;
    schema
}

/// Batches of that schema.
fn samples() -> Vec<RawBatch> {
    let text = |strings: &[&str]| {
        let mut column = RawFeature::text();
        if let RawValues::Text { bytes, ends } = &mut column.values {
            for string in strings {
                bytes.extend(string.bytes());
                ends.push(bytes.len() as u32);
                column.offsets.push(ends.len() as u32);
            }
        }
        column
    };
    let ids =
        |ids: Vec<u64>| RawFeature { offsets: (0..=ids.len() as u32).collect(), values: RawValues::Ids(ids) };
    let batch = |first, second| RawBatch {
        samples: 3,
        dense: vec![1.0, -2.0, 0.5],
        features: vec![first, second],
        labels: Some(vec![0.0, 1.0, 0.25]),
    };
    let jagged = RawFeature { offsets: vec![0, 2, 2, 3], values: RawValues::Ids(vec![1, 2, 3]) };
    vec![batch(text(&["a", "", "bc"]), ids(vec![7, 8, 9])), batch(ids(vec![1, 2, u64::MAX]), jagged)]
}

#[test]
fn a_payload_with_a_good_checksum() {
    let schema = small_schema();
    let payloads = samples().into_iter().map(|raw| Record::new(&raw, schema_sum(&schema)).payload);
    run((mutated(payloads, &[]), prop_oneof![4 => Just(3u32), 1 => 0..5u32]), |(Input(payload), samples)| {
        let Some(raw) = format::decode(samples, &payload) else { return false };
        let written = Record::new(&raw, schema_sum(&schema));
        let again = format::decode(samples, &written.payload).unwrap();
        assert_eq!(Record::new(&again, schema_sum(&schema)), written);
        schema.encode(&raw, &mut Batch::default()).is_ok()
    });
}

/// Changes of one file. Whatever is read afterwards was written, in its order.
#[test]
fn a_log_with_a_changed_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path(), 100).unwrap();
    for n in 0..6 {
        log.append(&[numbered(4 * n..4 * n + 4)]).1.unwrap();
    }
    drop(log);
    let written = numbers(dir.path()).unwrap();
    let paths = segments(dir.path()).unwrap().into_iter().map(|number| dir.path().join(name_of(number)));
    let paths: Vec<_> = paths.chain([dir.path().join("durable")]).collect();
    let seeds: Vec<_> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    let restore = || paths.iter().zip(&seeds).for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    run((any::<Index>(), changes(&[]), any::<bool>()), |(file, changes, lost)| {
        // Nothing of another file, whose copy in place of this one would be a log that somebody wrote.
        let seed: &Vec<u8> = file.get(&seeds);
        let mut bytes = seed.clone();
        changes.iter().for_each(|change| change.apply(&mut bytes, seed));
        fs::write(file.get(&paths), bytes).unwrap();
        if lost {
            let _ = fs::remove_file(dir.path().join("durable"));
        }
        let repaired = repair(dir.path());
        let read = numbers(dir.path());
        restore();
        if let Ok(read) = &read {
            // Each segment may lose its end.
            let mut rest = written.iter();
            assert!(read.iter().all(|number| rest.any(|other| other == number)), "{read:?}");
        }
        repaired.is_ok() && read.is_ok()
    });
}
