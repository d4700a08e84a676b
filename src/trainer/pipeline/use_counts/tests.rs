use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::types::TableId;

proptest! {
    #[test]
    fn a_counted_row_has_its_count_and_any_other_row_0(
        rows in prop::collection::hash_map((0_u32..4, 0_u64..60), any::<u32>(), 0..100),
    ) {
        let id = |&(table, row): &(u32, u64)| RowId::new(TableId(table), row);
        let pairs: Vec<_> = rows.iter().map(|(row, &count)| (id(row), count)).collect();
        let counts = UseCounts::new(pairs.iter().copied()).unwrap();
        let expected: HashMap<RowId, u32> = pairs.into_iter().collect();
        for row in (0..5).flat_map(|table| (0..70).map(move |row| (table, row))) {
            counts.prefetch(id(&row));
            prop_assert_eq!(counts.get(id(&row)), expected.get(&id(&row)).copied().unwrap_or(0));
        }
    }
}
