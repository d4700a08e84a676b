//! All rows of a scratchpad, list by list.

use super::*;
use crate::mem::mix64;
use crate::types::TableId;

#[test]
fn every_row_is_listed_once_and_ascending_in_as_many_lists_as_it_takes() {
    for (count, rows) in [(40_000_u64, 40_000_u64), (40_000, 17_000), (500_000, 400_000), (10, 3), (10, 0)] {
        let mut hold = SlotDirectory::new(Policy::Lru, None, count as usize, 0).unwrap();
        let key = |n: u64| Key::new(TableId((mix64(n) % 3) as u32), n);
        let mut expected: Vec<Key> = (0..rows).map(key).collect();
        for keys in expected.chunks(TOGETHER) {
            assert_eq!(hold.take_all(keys, 1, |_, _, old| assert_eq!(old, None)), keys.len());
        }
        expected.sort_unstable();
        let (mut listed, mut list, mut lists) = (Vec::new(), Vec::new(), 0);
        loop {
            hold.rows_after(listed.last().copied(), &mut list);
            if list.is_empty() {
                break;
            }
            assert!(list.iter().all(|&(key, slot)| hold.find(key) == Some(slot)));
            listed.extend(list.iter().map(|(key, _)| *key));
            lists += 1;
        }
        assert!(listed == expected, "{count} slots, {rows} rows");
        assert!(lists <= LISTS && (rows <= FEWEST_LISTED as u64 || lists > 1), "{lists} lists");
    }
}
