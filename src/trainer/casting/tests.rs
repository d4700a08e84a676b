use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::types::Jagged;

const TOML: &str = r#"
        [architecture]
        kind = "wide_deep"
        deep = [2]
        [[features]]
        name = "a"
        table = "t"
        wide_table = "w"
        arity = { multi_hot = { max = 9 } }
        pooling = "mean"
        [[features]]
        name = "b"
        table = "t"
        wide_table = "w"
        [[tables]]
        name = "t"
        rows = 5
        dim = 2
        default = { row = 1 }
        [[tables]]
        name = "w"
        rows = 5
        dim = 1
    "#;

proptest! {
    #[test]
    fn each_row_gets_every_one_of_its_occurrences_in_batch_order(
        bags in prop::collection::vec((prop::collection::vec(0u64..7, 0..4), 0u64..7), 1..20)
    ) {
        let schema: Schema = toml::from_str(TOML).unwrap();
        let mut batch = Batch::empty(2);
        for (a, b) in &bags {
            batch.samples += 1;
            batch.features[0].push(a);
            batch.features[1].push(&[*b]);
        }
        let lookups = schema.lookups();
        for (table, stands_in) in [(TableId(0), Some(1)), (TableId(1), None)] {
            let mut casted = CastedIndex::default();
            casted.fill(&schema, &lookups, table, &batch);
            let mut expected: BTreeMap<u64, Vec<GradientSource>> = BTreeMap::new();
            for lookup in lookups.iter().filter(|l| l.table == table) {
                let column: &Jagged = &batch.features[lookup.feature];
                for s in 0..batch.samples {
                    let bag = column.sample(s);
                    let divisor = if lookup.feature == 0 { bag.len() as f32 } else { 1.0 };
                    for row in bag.iter().filter_map(|&id| if id < 5 { Some(id) } else { stands_in }) {
                        let (sample, column) = (s as u32, lookup.column as u32);
                        let source = GradientSource { sample, column, divisor };
                        expected.entry(row).or_default().push(source);
                    }
                }
            }
            let mut places = casted.places().iter();
            for lookup in lookups.iter().filter(|l| l.table == table) {
                for &id in &batch.features[lookup.feature].ids {
                    let row = if id < 5 { Some(id) } else { stands_in };
                    let &place = places.next().unwrap();
                    prop_assert_eq!(casted.rows().get(place as usize).copied(), row);
                    prop_assert_eq!(place == ABSENT, row.is_none());
                }
            }
            let rows = casted.rows().iter().enumerate();
            let got: Vec<_> = rows.map(|(k, &row)| (row, casted.sources(k).to_vec())).collect();
            prop_assert_eq!(got, expected.into_iter().collect::<Vec<(u64, Vec<GradientSource>)>>());
        }
    }
}
