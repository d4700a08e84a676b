use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

proptest! {
    #[test]
    fn marked_rows_are_found_one_by_one_and_by_range(
        rows in 1_u64..300,
        marks in proptest::collection::vec(any::<proptest::sample::Index>(), 0..40),
        ends in any::<[proptest::sample::Index; 2]>(),
    ) {
        let bitmap = Bitmap::new(rows).unwrap();
        let marks: BTreeSet<u64> = marks.iter().map(|at| at.index(rows as usize) as u64).collect();
        marks.iter().for_each(|&row| bitmap.mark(row));
        prop_assert!((0..rows + 100).all(|row| bitmap.has(row) == marks.contains(&row)));
        let mut ends = ends.map(|at| at.index(rows as usize + 1) as u64);
        ends.sort();
        let expected: Vec<u64> = marks.range(ends[0]..ends[1]).copied().collect();
        prop_assert_eq!(bitmap.within(ends[0]..ends[1]).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_bitmap_that_does_not_fit_memory_is_refused() {
    assert!(Bitmap::new(u64::MAX).is_err());
    assert_eq!(Bitmap::new(0).unwrap().within(0..0).count(), 0);
}
