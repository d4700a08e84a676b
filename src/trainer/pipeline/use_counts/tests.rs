use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::types::TableId;

proptest! {
    #[test]
    fn it_says_of_each_row_what_was_counted_and_0_of_others(
        rows in prop::collection::hash_map((0_u32..4, 0_u64..60), any::<u32>(), 0..100),
    ) {
        let of = |&(table, row): &(u32, u64)| Key::new(TableId(table), row);
        let pairs: Vec<_> = rows.iter().map(|(row, &count)| (of(row), count)).collect();
        let counts = UseCounts::new(pairs.iter().copied()).unwrap();
        let plain: HashMap<Key, u32> = pairs.into_iter().collect();
        for row in (0..5).flat_map(|table| (0..70).map(move |row| (table, row))) {
            counts.prefetch(of(&row));
            prop_assert_eq!(counts.get(of(&row)), plain.get(&of(&row)).copied().unwrap_or(0));
        }
    }
}
