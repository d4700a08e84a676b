//! Insert: writes the rows that come in to the scratchpad, and those that leave to the store.

use std::ops::Range;

use rayon::prelude::*;

use super::super::TrainError;
use super::collect::RowMover;
use super::item::Item;
use super::scratchpad::ScratchpadMemory;
use crate::types::TableId;

impl RowMover<'_> {
    /// Writes what Collect has read.
    ///
    /// # Errors
    /// [`TrainError::Store`], [`TrainError::Device`], and [`TrainError::Hazard`] where a slot is
    /// another stage's at the time.
    pub(crate) fn insert(&self, item: &mut Item) -> Result<(), TrainError> {
        let Item { fills, evictions, berth, .. } = item;
        match self.pad {
            ScratchpadMemory::Host(slots) => {
                self.each_run(slots, fills, |slots, list, records| {
                    slots.claim(list)?.write(records);
                    Ok(())
                })?;
                self.write_store(&evictions.runs, &evictions.rows, &mut evictions.records[..evictions.words])
            }
            ScratchpadMemory::Device(scratch) => {
                // An item that moves nothing has none. Dropped, it is another item's.
                let Some(mut berth) = berth.take() else { return Ok(()) };
                self.with_runs(&**scratch, fills, |runs| berth.put(runs))?;
                self.write_store(&evictions.runs, &evictions.rows, berth.outgoing())
            }
        }
    }

    /// Writes the records of these rows to the store.
    fn write_store(
        &self,
        runs: &[(TableId, Range<usize>)],
        rows: &[u64],
        records: &mut [f32],
    ) -> Result<(), TrainError> {
        let jobs = self.pieces(runs, rows, records);
        Ok(self.threads.install(|| {
            jobs.into_par_iter().try_for_each(|(table, rows, records)| self.store.write(table, rows, records))
        })?)
    }
}
