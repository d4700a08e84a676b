//! What a batch asks a cache for, access by access.
//!
//! Samples come in the order of the batch; of one sample, every lookup of `Schema::lookups` in turn (the
//! features in the schema's order, then, where the architecture has them, their wide tables in the same
//! order); of one lookup, its ids as they stand. An id that its table does not hold and that reads as
//! zeros asks the cache for nothing; one for which a row stands asks for that row. This is what the
//! engine asks the cache for, before a batch is deduplicated.

use crate::schema::{Lookup, Schema, Table};
use crate::types::{Batch, TableId};

/// Tells the accesses of the batches of a schema.
#[derive(Debug, Default)]
pub(crate) struct RowAccesses {
    lookups: Vec<Lookup>,
    tables: Vec<Table>,
}

impl RowAccesses {
    pub(crate) fn new(schema: &Schema) -> Self {
        Self { lookups: schema.lookups(), tables: schema.tables.clone() }
    }

    /// Tells every access of a batch of the schema's shape, in order, and gives how many ids were past
    /// their table, whether or not a row stands for them.
    ///
    /// # Errors
    /// What `told` returns; no more is told then.
    pub(crate) fn of<E>(
        &self,
        batch: &Batch,
        mut told: impl FnMut(TableId, u64) -> Result<(), E>,
    ) -> Result<u64, E> {
        let mut absent = 0;
        for sample in 0..batch.samples {
            for lookup in &self.lookups {
                let table = &self.tables[lookup.table.index()];
                for &id in batch.features[lookup.feature].sample(sample) {
                    absent += u64::from(id >= table.rows);
                    if let Some(row) = table.row_of(id) {
                        told(lookup.table, row)?;
                    }
                }
            }
        }
        Ok(absent)
    }
}
