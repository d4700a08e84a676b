//! The row accesses of a batch, in order.
//!
//! The order is by sample; within a sample by lookup, in the order of `Schema::lookups` (the features, then
//! the wide tables of the features, if the architecture has them); within a lookup by id. An id past its
//! table is an access of the row that the schema names as default, and no access if the default is zeros.
//! These are the accesses of the engine before it removes a batch's duplicates.

use crate::schema::{Lookup, Schema, Table};
use crate::types::{Batch, TableId};

/// Lists the row accesses of batches of a schema.
#[derive(Debug, Default)]
pub(crate) struct RowAccesses {
    lookups: Vec<Lookup>,
    tables: Vec<Table>,
}

impl RowAccesses {
    pub(crate) fn new(schema: &Schema) -> Self {
        Self { lookups: schema.lookups(), tables: schema.tables.clone() }
    }

    /// Calls `on_access` for every access of a batch of the schema's shape, in order. Returns how many ids
    /// were past their table, with or without a default row.
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
