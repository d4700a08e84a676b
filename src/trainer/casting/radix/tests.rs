use proptest::prelude::*;

use super::*;

/// Rows that differ only in some bits, so that some digits are equal in all rows.
fn rows() -> impl Strategy<Value = Vec<u64>> {
    let bits = prop_oneof![Just(0), Just(1 << 39), Just(0x7ff), Just(0xff_ffff_ffff), 0u64..1 << 40];
    let sizes = prop_oneof![0usize..4, FEW - 2..FEW + 2, 2 * FEW - 2..2 * FEW + 2, 0usize..5 * FEW];
    (bits, 0u64..1 << 40, sizes).prop_flat_map(|(bits, same, size)| {
        prop::collection::vec((0u64..1 << 40).prop_map(move |row| row & bits | same & !bits), size)
    })
}

/// The rows with numbers of occurrences.
fn pairs(rows: &[u64], occurrences: impl Iterator<Item = u32>) -> Vec<RowOccurrence> {
    rows.iter().zip(occurrences).map(|(&row, occurrence)| RowOccurrence { row, occurrence }).collect()
}

proptest! {
    #[test]
    fn the_result_is_that_of_a_comparison_sort(batches in prop::collection::vec(rows(), 1..4)) {
        let mut sort = RadixSort::default();
        for rows in batches {
            // Absent ids leave gaps in the numbers of occurrences.
            let mut pairs = pairs(&rows, (0..).step_by(3));
            let mut expected = pairs.clone();
            expected.sort_unstable();
            sort.sort(&mut pairs);
            prop_assert_eq!(pairs, expected);
        }
    }

    #[test]
    fn every_bit_of_a_row_counts(rows in prop::collection::vec(any::<u64>(), 6 * FEW..8 * FEW)) {
        let mut pairs = pairs(&rows, 0..);
        let mut expected = pairs.clone();
        expected.sort_unstable();
        RadixSort::default().sort(&mut pairs);
        prop_assert_eq!(pairs, expected);
    }
}

#[test]
fn a_digit_that_is_equal_in_all_rows_gets_no_pass() {
    let shifts = |rows: &[u64]| differing(&pairs(rows, 0..)).collect::<Vec<_>>();
    assert!(shifts(&[]).is_empty());
    assert!(shifts(&[7 << 30, 7 << 30]).is_empty());
    assert_eq!(shifts(&[7 << 30, 7 << 30 | 5]), [0]);
    assert_eq!(shifts(&[1, 2 | 1 << 22]), [0, 22]);
    assert_eq!(shifts(&[0, u64::MAX]), [0, 11, 22, 33, 44, 55]);
}
