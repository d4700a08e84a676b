mod fuzz;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::format::{self, HEADER_BYTES};
use super::*;
use crate::metrics::Metrics;
use crate::schema::Schema;
use crate::schema::preset::{self, ArchKind};
use crate::store::disk::SystemDisk;
use crate::types::{RawBatch, RawFeature, RawValues};

pub(crate) fn schema() -> Schema {
    preset::criteo(ArchKind::Dcn, 1, 100)
}

/// Samples with their numbers as dense values. Any schema's columns are fine for the log.
pub(crate) fn numbered(numbers: std::ops::Range<u32>) -> Record {
    let samples = numbers.len();
    let raw = RawBatch {
        samples,
        dense: numbers.map(|n| n as f32).collect(),
        features: Vec::new(),
        labels: Some(vec![1.0; samples]),
    };
    Record::new(&raw, schema_sum(&schema()))
}

/// All samples of a log, as [`numbered`] wrote them.
pub(crate) fn numbers(dir: &Path) -> Result<Vec<u32>, LogError> {
    Ok(batches(dir)?.iter().flat_map(|batch| batch.dense.iter().map(|&n| n as u32)).collect())
}

fn batches(dir: &Path) -> Result<Vec<RawBatch>, LogError> {
    let mut batches = Vec::new();
    for number in segments(dir)? {
        let mut segment = Segment::open(dir, number)?;
        let end = segment.bytes()?;
        while let Some(batch) = segment.next(end)? {
            batches.push(batch);
        }
    }
    Ok(batches)
}

fn open(dir: &Path, segment_bytes: u64) -> Result<Log, LogError> {
    Log::open(&SystemDisk, dir, segment_bytes)
}

fn column(samples: usize) -> impl Strategy<Value = RawFeature> {
    let strings = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 0..4);
    let ids = prop::collection::vec(any::<u64>(), 0..4);
    (any::<bool>(), prop::collection::vec((strings, ids), samples)).prop_map(|(text, rows)| {
        let mut column = if text { RawFeature::text() } else { RawFeature::ids() };
        for (strings, ids) in rows {
            match &mut column.values {
                RawValues::Ids(all) => all.extend(ids),
                RawValues::Text { bytes, ends } => strings.iter().for_each(|string| {
                    bytes.extend(string);
                    ends.push(bytes.len() as u32);
                }),
            }
            column.offsets.push(column.values.len() as u32);
        }
        column
    })
}

fn batch() -> impl Strategy<Value = RawBatch> {
    (1..5usize, 0..3usize).prop_flat_map(|(samples, columns)| {
        let dense = prop::collection::vec(-9.0f32..9.0, samples * 2);
        let labels = prop::collection::vec(0.0f32..=1.0, samples);
        let features = prop::collection::vec(column(samples), columns);
        (dense, labels, features).prop_map(move |(dense, labels, features)| RawBatch {
            samples,
            dense,
            features,
            labels: Some(labels),
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_is_written_in_any_groups_is_read_back_in_order(
        groups in prop::collection::vec(prop::collection::vec(batch(), 1..4), 1..5),
        segment_bytes in 1..600u64,
        reopen in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let sum = schema_sum(&schema());
        let mut log = open(dir.path(), segment_bytes).unwrap();
        let mut last = Position { segment: 0, samples: 0 };
        for group in &groups {
            if reopen {
                drop(log);
                log = open(dir.path(), segment_bytes).unwrap();
            }
            let records: Vec<_> = group.iter().map(|batch| Record::new(batch, sum)).collect();
            let (positions, result) = log.append(&records);
            result.unwrap();
            for (position, record) in positions.iter().zip(&records) {
                let before = if position.segment == last.segment { last.samples } else { 0 };
                prop_assert!(position.segment >= last.segment);
                prop_assert_eq!(position.samples, before + u64::from(record.samples));
                last = *position;
            }
        }
        let written: Vec<_> = groups.into_iter().flatten().collect();
        prop_assert_eq!(batches(dir.path()).unwrap(), written);
    }

    #[test]
    fn any_cut_of_the_tail_leaves_the_records_before_it(cut in 0..2000usize, more in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let mut log = open(dir.path(), u64::MAX).unwrap();
        for n in 0..10 {
            log.append(&[numbered(2 * n..2 * n + 2)]).1.unwrap();
        }
        drop(log);
        // After a power failure the file `durable` is missing.
        fs::remove_file(dir.path().join("durable")).unwrap();
        let path = dir.path().join(name_of(1));
        let mut bytes = fs::read(&path).unwrap();
        let record = (bytes.len() - HEADER_BYTES) / 10;
        let cut = cut % (bytes.len() + 1);
        bytes.truncate(cut);
        bytes.extend(if more { vec![7; 50] } else { vec![] });
        fs::write(&path, bytes).unwrap();
        if cut < HEADER_BYTES && more {
            // No crash leaves more bytes after a header that is not whole.
            let refused = open(dir.path(), 1).map(drop).unwrap_err().to_string();
            prop_assert!(refused.contains("0000000001.fllearn"), "{}", refused);
            return Ok(());
        }
        let mut log = open(dir.path(), u64::MAX).unwrap();
        let kept = 2 * (cut.saturating_sub(HEADER_BYTES) / record) as u32;
        prop_assert_eq!(numbers(dir.path()).unwrap(), (0..kept).collect::<Vec<_>>());
        log.append(&[numbered(kept..kept + 3)]).1.unwrap();
        prop_assert_eq!(numbers(dir.path()).unwrap(), (0..kept + 3).collect::<Vec<_>>());
    }

    #[test]
    fn a_payload_of_any_bytes_is_refused_or_has_its_number_of_samples(
        samples in 0..5u32,
        bytes in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        if let Some(batch) = format::decode(samples, &bytes) {
            prop_assert_eq!(batch.samples, samples as usize);
            prop_assert!(batch.features.iter().all(|column| column.offsets.len() == samples as usize + 1));
        }
    }
}

#[test]
fn a_changed_byte_is_an_error_or_a_lost_tail_and_never_a_wrong_sample() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path(), u64::MAX).unwrap();
    (0..6).for_each(|n| log.append(&[numbered(n..n + 1)]).1.unwrap());
    drop(log);
    let path = dir.path().join(name_of(1));
    let (bytes, durable) = (fs::read(&path).unwrap(), dir.path().join("durable"));
    let known = fs::read(&durable).unwrap();
    let last = bytes.len() - (bytes.len() - HEADER_BYTES) / 6;
    for at in 0..bytes.len() {
        for flip in [1, 0x80] {
            let mut changed = bytes.clone();
            changed[at] ^= flip;
            fs::write(&path, &changed).unwrap();
            assert!(numbers(dir.path()).is_err(), "byte {at}");
            // With `durable`, each byte is known to have been durable.
            let error = open(dir.path(), 1).map(drop).unwrap_err().to_string();
            assert!(error.contains("0000000001.fllearn: "), "{error}");
            fs::remove_file(&durable).unwrap();
            match open(dir.path(), 1).map(drop) {
                Ok(()) => {
                    assert!(at >= last, "byte {at}");
                    assert_eq!(numbers(dir.path()).unwrap(), [0, 1, 2, 3, 4]);
                }
                Err(_) => assert!(at < last, "byte {at}"),
            }
            fs::write(&durable, &known).unwrap();
        }
    }
}

#[test]
fn a_log_has_one_writer_and_new_segments_for_another_schema() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path(), u64::MAX).unwrap();
    let error = open(dir.path(), 1).map(drop).unwrap_err();
    assert!(error.to_string().ends_with("another process writes this log"), "{error}");
    repair(dir.path()).unwrap();
    let other = schema_sum(&preset::criteo(ArchKind::Dcn, 2, 100));
    let records = [numbered(0..1), Record { schema: other, ..numbered(1..2) }, numbered(2..3)];
    let (positions, result) = log.append(&records);
    result.unwrap();
    assert_eq!(positions.iter().map(|position| position.segment).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(Durable::read(dir.path()).unwrap().unwrap().segment, 3);
    assert_eq!(remove_consumed(dir.path(), &name_of(2)).unwrap(), 1);
    assert_eq!(segments(dir.path()).unwrap(), [2, 3]);
    assert_eq!(remove_consumed(dir.path(), &name_of(9)).unwrap(), 1, "the last segment stays");
    assert!(remove_consumed(dir.path(), "2.fllearn").is_err());
}

/// More than any request needs.
pub(super) const LONG: Duration = Duration::from_secs(600);

fn learner(dir: &Path, max_bytes: u64) -> (Arc<Learner>, Arc<crate::metrics::ModelMetrics>) {
    let metrics = Metrics::new().unwrap().model("m", &schema());
    let options = LearnerOptions { dir: dir.to_owned(), max_bytes, segment_bytes: 1000 };
    (Arc::new(Learner::start(options, metrics.clone(), Duration::ZERO).unwrap()), metrics)
}

#[test]
fn concurrent_requests_are_stored_exactly_once_where_their_answers_say() {
    let dir = tempfile::tempdir().unwrap();
    let (learner, _) = learner(dir.path(), u64::MAX >> 1);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_time().build().unwrap();
    let clients = (0..8u32).map(|client| {
        let learner = learner.clone();
        runtime.spawn(async move {
            let mut acked = Vec::new();
            for n in 0..40u32 {
                let number = client * 1000 + n;
                acked.push((learner.learn(numbered(number..number + 1), LONG).await.unwrap(), number));
            }
            acked
        })
    });
    let clients: Vec<_> = clients.collect();
    let answers: Vec<_> = clients.into_iter().map(|client| runtime.block_on(client).unwrap()).collect();
    learner.join();
    let late = runtime.block_on(learner.learn(numbered(0..1), LONG)).unwrap_err();
    assert!(matches!(late, LearnError::Closed));
    let mut by_place = Vec::new();
    for answer in answers {
        // An answer comes before the client's next request is written.
        assert!(answer.is_sorted_by_key(|(place, _)| (place.segment, place.samples)));
        by_place.extend(answer);
    }
    by_place.sort_by_key(|(place, _)| (place.segment, place.samples));
    let expected: Vec<u32> = by_place.iter().map(|(_, number)| *number).collect();
    assert_eq!(numbers(dir.path()).unwrap(), expected);
}

#[test]
fn a_full_log_refuses_samples_until_segments_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (learner, _) = learner(dir.path(), 3000);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut stored = 0;
    let error = loop {
        match runtime.block_on(learner.learn(numbered(stored..stored + 10), LONG)) {
            Ok(_) => stored += 10,
            Err(error) => break error,
        }
        assert!(stored < 1000);
    };
    assert!(error.is_full() && error.to_string().contains("limit 3000 bytes (learn.max_bytes)"), "{error}");
    assert!(stored > 100);
    assert_eq!(full_at(dir.path()).unwrap(), Some(3000), "trainers are told");
    let last = *segments(dir.path()).unwrap().last().unwrap();
    remove_consumed(dir.path(), &name_of(last)).unwrap();
    // The files are counted again after a while.
    for attempt in 0.. {
        match runtime.block_on(learner.learn(numbered(stored..stored + 10), LONG)) {
            Ok(_) => break,
            Err(error) => assert!(attempt < 1000, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(numbers(dir.path()).unwrap().last(), Some(&(stored + 9)));
    assert_eq!(full_at(dir.path()).unwrap(), None);
    // No version makes room for this.
    runtime.block_on(learner.learn(numbered(0..1000), LONG)).unwrap_err();
    assert_eq!(full_at(dir.path()).unwrap(), None);
}

#[test]
fn a_log_that_is_larger_than_a_lowered_limit_takes_samples_again() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let before = open(dir.path(), 100_000).unwrap().append(&[numbered(0..1000)]).0;
    assert!(kept_bytes(dir.path()).unwrap() > 3000 && before[0].segment == 1);
    let (learner, _) = learner(dir.path(), 3000);
    let mut stored = 1000;
    let mut fill = |learner: &Learner| loop {
        match runtime.block_on(learner.learn(numbered(stored..stored + 10), LONG)) {
            Ok(_) => stored += 10,
            Err(error) => break (stored, error.to_string()),
        }
        assert!(stored < 2000);
    };
    let (filled, _) = fill(&learner);
    assert!(filled > 1000);
    // A version was trained on them.
    remove_consumed(dir.path(), &name_of(2)).unwrap();
    learner.join();
    let (learner, _) = self::learner(dir.path(), 3000);
    let (_, full) = fill(&learner);
    assert!(full.contains("limit 3000 bytes (learn.max_bytes)"), "{full}");
    assert!(kept_bytes(dir.path()).unwrap() <= 3000);
}

#[test]
fn nothing_is_acknowledged_that_is_not_in_the_log_at_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("learn"), dir.path().join("moved"));
    let refused = |log: &mut Log| {
        let (positions, result) = log.append(&[numbered(9..10)]);
        assert!(positions.is_empty());
        result.unwrap_err().to_string()
    };
    // The last segment has room, or is full.
    for (segment_bytes, file) in [(u64::MAX, "0000000001.fllearn"), (1, "lock")] {
        let mut log = open(&path, segment_bytes).unwrap();
        log.append(&[numbered(0..1)]).1.unwrap();
        log.check().unwrap();
        fs::rename(&path, &moved).unwrap();
        for made_again in [false, true] {
            let other = made_again.then(|| open(&path, u64::MAX).unwrap());
            let error = refused(&mut log);
            assert!(error.ends_with(&format!("{file}: was removed or replaced while the log was written")));
            assert!(matches!(log.check(), Err(LogError::Gone { .. })));
            assert_eq!(numbers(&moved).unwrap(), [0]);
            assert!(other.is_none() || numbers(&path).unwrap().is_empty());
        }
        fs::remove_dir_all(&path).unwrap();
        fs::remove_dir_all(&moved).unwrap();
    }
}

#[test]
fn a_learner_whose_log_was_deleted_says_so_and_can_be_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("learn");
    let (before, _) = learner(&path, 1 << 20);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(before.learn(numbered(0..1), LONG)).unwrap();
    assert_eq!(before.gone(), None);
    fs::remove_dir_all(&path).unwrap();
    let error = runtime.block_on(before.learn(numbered(1..2), LONG)).unwrap_err();
    assert!(matches!(&error, LearnError::Log(error) if matches!(**error, LogError::Gone { .. })), "{error}");
    assert!(before.gone().unwrap().contains("was removed or replaced"));
    before.join();
    let (after, _) = learner(&path, 1 << 20);
    runtime.block_on(after.learn(numbered(2..3), LONG)).unwrap();
    assert_eq!(numbers(&path).unwrap(), [2]);
}

#[test]
fn any_request_that_is_not_too_large_fits_beside_the_last_segment() {
    let dir = tempfile::tempdir().unwrap();
    // A segment has 1000 bytes, so a record has at most half of 8000.
    let (learner, _) = learner(dir.path(), 9000);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let learn = |samples: u32| runtime.block_on(learner.learn(numbered(0..samples), LONG));
    assert_eq!((numbered(0..496).bytes(), numbered(0..110).bytes()), (4000, 912));
    let error = learn(497).unwrap_err();
    assert!(matches!(error, LearnError::TooLarge { limit: 4000, size: 4008 }), "{error}");
    // The largest last segment.
    assert_eq!(learn(110).unwrap().segment, 1);
    assert_eq!(learn(496).unwrap().segment, 1);
    for segment in 2..5 {
        let largest = (0..1000).find_map(|_| {
            let learnt = learn(496);
            if learnt.is_err() {
                std::thread::sleep(Duration::from_millis(5));
            }
            learnt.ok()
        });
        assert_eq!(largest.expect("room").segment, segment);
        // All of it was trained on.
        remove_consumed(dir.path(), &name_of(segment)).unwrap();
    }
}
