//! Batches with row numbers as ids, for a cache on a device, which looks up each id as it is.
//!
//! Ids are not row numbers if a table has lossy bits or a default row. Then each lookup gets a feature of its
//! own, because several lookups of a feature may read different rows.

use crate::schema::{AbsentDefault, Arity, Lookup, Schema, TableSchema};
use crate::types::{Batch, Jagged};

/// An id that no table holds, so it reads zeros.
const NO_ROW: u64 = u64::MAX;

/// The lookups of a schema, each with its table.
pub(crate) struct RowNumbers(Vec<(Lookup, TableSchema)>);

impl RowNumbers {
    /// `None` if all ids are row numbers.
    pub(crate) fn needed(schema: &Schema) -> Option<Self> {
        let is_plain =
            |t: &TableSchema| t.lossy_bits.is_none() && !matches!(t.default, AbsentDefault::Row(_));
        if schema.tables.iter().all(is_plain) {
            return None;
        }
        let with_table = |lookup: Lookup| (lookup, schema.tables[lookup.table.index()].clone());
        Some(Self(schema.lookups().into_iter().map(with_table).collect()))
    }

    /// The number of features, one for each lookup.
    pub(crate) fn features(&self) -> usize {
        self.0.len()
    }

    /// The lookups, each with its own feature.
    pub(crate) fn lookups(&self) -> Vec<Lookup> {
        let lookups = self.0.iter().enumerate();
        lookups.map(|(feature, (lookup, _))| Lookup { feature, ..*lookup }).collect()
    }

    /// Most ids of a sample.
    pub(crate) fn max_ids(&self, schema: &Schema) -> usize {
        self.0.iter().map(|(lookup, _)| max_ids(schema, lookup.feature)).sum()
    }

    /// The batch with row numbers as ids.
    pub(crate) fn of(&self, batch: &Batch) -> Batch {
        let column = |(lookup, table): &(Lookup, TableSchema)| {
            let Jagged { offsets, ids } = &batch.features[lookup.feature];
            let rows = ids.iter().map(|&id| table.row_of(id).unwrap_or(NO_ROW)).collect();
            Jagged { offsets: offsets.clone(), ids: rows }
        };
        Batch { features: self.0.iter().map(column).collect(), dense: batch.dense.clone(), ..*batch }
    }
}

/// Most ids of a feature in a sample.
pub(crate) fn max_ids(schema: &Schema, feature: usize) -> usize {
    match schema.features[feature].arity {
        Arity::OneHot => 1,
        Arity::MultiHot { max } => max as usize,
    }
}
