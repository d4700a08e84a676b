//! Recordings, with and without good checksums.

use super::*;
use crate::fuzz::bytes::{Input, mutated};
use crate::fuzz::run;

const BLOCKS: &[&[(u32, u64)]] = &[&[(0, 1), (1, u64::MAX - 1), (2, 0)], &[(0, 99), (0, 0)]];

fn recording() -> (Vec<u8>, Accesses) {
    let blocks: Vec<Accesses> = BLOCKS.iter().map(|block| block.to_vec()).collect();
    (bytes(&blocks), blocks.concat())
}

#[test]
fn a_changed_recording() {
    let (seed, written) = recording();
    run(mutated([seed.clone()], &["FLTRACE1"]), |Input(file)| {
        let Ok((_, accesses, ended)) = read(&file) else { return false };
        // A block may be lost or copied, but never changed.
        assert!(accesses.iter().all(|access| written.contains(access)));
        ended == FileEnd::Whole
    });
}

#[test]
fn a_header_with_a_good_checksum() {
    let json = serde_json::to_vec(&header()).unwrap();
    let words = &["rate", "tables", "name", "rows", "null", "[", "{", "\"\""];
    run(mutated([json], words), |Input(json)| {
        let sum = xxh3_64(&json).to_le_bytes();
        let file = [MAGIC, &(json.len() as u32).to_le_bytes()[..], &json, &sum].concat();
        let Ok((header, accesses, _)) = read(&file) else { return false };
        assert!(accesses.is_empty() && header.rate > 0.0 && header.rate <= 1.0);
        assert_eq!(read(&header.bytes()).unwrap().0, header);
        true
    });
}

#[test]
fn a_payload_with_a_good_checksum() {
    let payload = |block: &[(u32, u64)]| {
        let mut payload = Vec::new();
        block.iter().for_each(|&(table, row)| push_access(&mut payload, TableId(table), row));
        payload
    };
    run(
        (mutated(BLOCKS.iter().map(|block| payload(block)), &[]), prop_oneof![2..4u32, 0..6u32]),
        |(Input(payload), count)| {
            if payload.is_empty() {
                return false;
            }
            let file = [header().bytes(), block_head(&payload, count).to_vec(), payload].concat();
            let Ok((_, accesses, ended)) = read(&file) else { return false };
            assert_eq!((accesses.len() as u32, ended), (count, FileEnd::Whole));
            assert_eq!(read(&bytes(std::slice::from_ref(&accesses))).unwrap().1, accesses);
            true
        },
    );
}
