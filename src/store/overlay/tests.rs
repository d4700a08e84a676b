use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;
use crate::store::PlainMemory;

fn bytes(content: &[u8]) -> Bytes {
    let mut bytes = Bytes::zeroed(&PlainMemory, content.len()).unwrap();
    bytes.as_mut_slice().unwrap().copy_from_slice(content);
    bytes
}

fn delta(rows: &BTreeMap<u64, u8>) -> DeltaRows {
    let keys: Vec<u64> = rows.keys().copied().collect();
    let weight: Vec<u8> = rows.values().copied().collect();
    let (keys, weight) = (bytes(bytemuck::cast_slice(&keys)), bytes(&weight));
    DeltaRows { version: Version(2), keys, weight, states: Vec::new() }
}

/// Rows of two ranges: some do not fit in 32 bits.
fn rows() -> impl Strategy<Value = BTreeMap<u64, u8>> {
    let wide = (0..200_u64).prop_map(|row| WIDE + row);
    prop_oneof![
        3 => btree_map(0..200_u64, any::<u8>(), 0..40),
        1 => btree_map(prop_oneof![0..200_u64, wide], any::<u8>(), 0..40),
    ]
}

/// The least row that does not fit in 32 bits, because a bucket holds the row plus 1, less 100.
const WIDE: u64 = u32::MAX as u64 - 100;

proptest! {
    #[test]
    fn every_changed_row_is_found_in_the_newest_delta_that_has_it(deltas in vec(rows(), 0..5)) {
        let all = || deltas.iter().map(|rows| Arc::new(delta(rows)));
        let at_once = Overlay::new(all().collect()).unwrap();
        let none = Overlay::new(Vec::new()).unwrap();
        let one_by_one = all().fold(none, |overlay, newer| overlay.with(newer).unwrap());
        let newest: BTreeMap<u64, u8> = deltas.iter().flatten().map(|(&row, &byte)| (row, byte)).collect();
        for overlay in [at_once, one_by_one] {
            prop_assert_eq!(overlay.rows(), newest.len() as u64);
            for row in (0..201).chain(WIDE..WIDE + 201).chain([u64::MAX]) {
                let found = overlay.find(row).map(|place| place.delta.weight.as_slice()[place.at]);
                prop_assert_eq!(found, newest.get(&row).copied());
            }
        }
    }
}

#[test]
fn an_overlay_takes_at_most_12_bytes_a_changed_row() {
    let rows: BTreeMap<u64, u8> = (0..100_000).map(|row| (row * 7, 1)).collect();
    let overlay = Overlay::new(vec![Arc::new(delta(&rows))]).unwrap();
    let PlaceTable::Narrow(places) = &overlay.places else { panic!("rows that need 64 bits") };
    assert!(places.bytes() <= 12 * rows.len());
}
