use super::*;
use crate::mem::mix64;
use crate::types::TableId;

#[test]
fn every_row_is_listed_once_and_ascending_over_several_lists() {
    for (count, rows) in [(40_000_u64, 40_000_u64), (40_000, 17_000), (500_000, 400_000), (10, 3), (10, 0)] {
        let mut directory = SlotDirectory::new(ScratchpadPolicy::Lru, None, count as usize, 0).unwrap();
        let row_id = |n: u64| RowId::new(TableId((mix64(n) % 3) as u32), n);
        let mut expected: Vec<RowId> = (0..rows).map(row_id).collect();
        for rows in expected.chunks(LOOKUP_ROWS) {
            assert_eq!(directory.take_all(rows, 1, |taken| assert_eq!(taken.victim, None)), rows.len());
        }
        expected.sort_unstable();
        let (mut listed, mut list, mut lists) = (Vec::new(), Vec::new(), 0);
        loop {
            directory.rows_after(listed.last().copied(), &mut list);
            if list.is_empty() {
                break;
            }
            assert!(list.iter().all(|&RowSlot { row, slot }| directory.find(row) == Some(slot)));
            listed.extend(list.iter().map(|row_slot| row_slot.row));
            lists += 1;
        }
        assert!(listed == expected, "{count} slots, {rows} rows");
        assert!(lists <= LISTS && (rows <= MIN_LISTED_ROWS as u64 || lists > 1), "{lists} lists");
    }
}
