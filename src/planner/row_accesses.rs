//! The row accesses of a batch, in order.
//!
//! Samples are in batch order. Within a sample, lookups are in the order of `Schema::lookups`: the features,
//! then the wide tables of the features, if the architecture has them. Within a lookup, ids are in batch
//! order. An id past the end of its table accesses the default row of the table, or no row if the default is
//! zeros. The engine makes the same accesses, but removes the duplicates of a batch first.

use crate::schema::{Lookup, Schema, TableSchema};
use crate::types::{Batch, TableId};

/// Lists the row accesses of batches of a schema.
#[derive(Debug, Default)]
pub(crate) struct RowAccesses {
    lookups: Vec<Lookup>,
    tables: Vec<TableSchema>,
}

impl RowAccesses {
    pub(crate) fn new(schema: &Schema) -> Self {
        Self { lookups: schema.lookups(), tables: schema.tables.clone() }
    }

    /// Calls `on_access` for every access of a batch of the schema's shape, in order. Returns the
    /// number of ids past the end of their table. It also counts ids that read a default row.
    ///
    /// # Errors
    /// The first error of `on_access`, which ends the calls.
    pub(crate) fn for_each<E>(
        &self,
        batch: &Batch,
        mut on_access: impl FnMut(TableId, u64) -> Result<(), E>,
    ) -> Result<u64, E> {
        let mut absent = 0;
        for sample in 0..batch.samples {
            for lookup in &self.lookups {
                let table = &self.tables[lookup.table.index()];
                for &id in batch.features[lookup.feature].sample(sample) {
                    absent += u64::from(id >= table.rows);
                    if let Some(row) = table.row_of(id) {
                        on_access(lookup.table, row)?;
                    }
                }
            }
        }
        Ok(absent)
    }
}
