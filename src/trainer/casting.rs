//! Which gradients each row of a table gets: the casted index of Tensor Casting, section IV.
//!
//! A batch looks rows up sample by sample, so gradients arrive in sample order and a row's are
//! scattered. Sorting (row, occurrence) pairs brings those of a row together, and the backward pass
//! of the table is one gather-reduce: for each row in ascending order, the sum of the gradients of
//! its occurrences in the order in which the batch has them. That order, and so every bit of the
//! sum, is the batch's alone.

use crate::schema::{Lookup, Pooling, Schema};
use crate::types::{Batch, TableId};

/// Where the gradient of one occurrence comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// The sample of the batch.
    pub sample: u32,
    /// The first column of its vector in the input row.
    pub column: u32,
    /// What the gradient is divided by: the bag's size under mean pooling, else 1.
    pub divisor: f32,
}

/// The rows of one table that a batch touches, and each one's gradients.
#[derive(Clone, Debug, Default)]
pub struct Casted {
    /// (row, place in `sources`), sorted.
    pairs: Vec<(u64, u32)>,
    sources: Vec<Source>,
}

impl Casted {
    /// Collects the rows of `table` that `lookups` of the batch touch. An absent id counts for the
    /// row that stands for it, or for none.
    pub fn fill(&mut self, schema: &Schema, lookups: &[Lookup], table: TableId, batch: &Batch) {
        self.pairs.clear();
        self.sources.clear();
        let shape = &schema.tables[table.index()];
        for lookup in lookups.iter().filter(|l| l.table == table) {
            let ids = &batch.features[lookup.feature];
            let bags = ids.offsets.windows(2).enumerate();
            for (sample, bag) in bags {
                let bag = &ids.ids[bag[0] as usize..bag[1] as usize];
                let divisor = if lookup.pooling == Pooling::Mean { bag.len() as f32 } else { 1.0 };
                let source = Source { sample: sample as u32, column: lookup.column as u32, divisor };
                for row in bag.iter().filter_map(|&id| shape.row_of(id)) {
                    self.pairs.push((row, self.sources.len() as u32));
                    self.sources.push(source);
                }
            }
        }
        self.pairs.sort_unstable();
    }

    /// Every touched row, ascending, with the sources of its gradient in batch order.
    pub fn rows(&self) -> impl Iterator<Item = (u64, impl Iterator<Item = Source> + '_)> + '_ {
        self.pairs
            .chunk_by(|a, b| a.0 == b.0)
            .map(|run| (run[0].0, run.iter().map(|&(_, source)| self.sources[source as usize])))
    }
}

#[cfg(test)]
mod tests {
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
                let mut casted = Casted::default();
                casted.fill(&schema, &lookups, table, &batch);
                let mut expected: BTreeMap<u64, Vec<Source>> = BTreeMap::new();
                for lookup in lookups.iter().filter(|l| l.table == table) {
                    let column: &Jagged = &batch.features[lookup.feature];
                    for s in 0..batch.samples {
                        let bag = column.sample(s);
                        let divisor = if lookup.feature == 0 { bag.len() as f32 } else { 1.0 };
                        for row in bag.iter().filter_map(|&id| if id < 5 { Some(id) } else { stands_in }) {
                            let source = Source { sample: s as u32, column: lookup.column as u32, divisor };
                            expected.entry(row).or_default().push(source);
                        }
                    }
                }
                let got: Vec<_> = casted.rows().map(|(row, sources)| (row, sources.collect())).collect();
                prop_assert_eq!(got, expected.into_iter().collect::<Vec<(u64, Vec<Source>)>>());
            }
        }
    }
}
