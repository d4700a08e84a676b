use super::super::super::trace::tests::{accesses, trace};
use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn the_counts_of_a_trace_are_exact_and_in_order(wanted in accesses(300)) {
        let ranked = Ranked::of(&trace(&wanted));
        prop_assert_eq!(ranked.floor, 0);
        for (t, table) in ranked.tables.iter().enumerate() {
            for (&row, &count) in table.rows.iter().zip(&table.counts) {
                let wanted = wanted.iter().filter(|a| **a == (t as u32, row)).count();
                prop_assert_eq!(count, wanted as u64);
            }
            let ranks = table.rows.iter().zip(&table.counts);
            prop_assert!(ranks.map(|(&r, &c)| (std::cmp::Reverse(c), r)).is_sorted());
        }
        let hottest = ranked.hottest();
        prop_assert!(hottest.is_sorted_by_key(|r| (std::cmp::Reverse(r.count), r.table, r.row)));
        prop_assert_eq!(hottest.iter().map(|r| r.count).sum::<u64>(), wanted.len() as u64);
    }
}
