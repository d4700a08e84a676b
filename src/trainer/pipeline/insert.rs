//! Insert: writes fetched rows to the scratchpad, and evicted rows to the working file.

use rayon::prelude::*;

use super::super::TrainError;
use super::collect::RowMover;
use super::item::{Item, TableRun};
use super::scratchpad::ScratchpadMemory;
use crate::pace::give_way;

impl RowMover<'_> {
    /// Writes the rows that Collect has read.
    ///
    /// # Errors
    /// [`TrainError::Store`], [`TrainError::Device`], and [`TrainError::Hazard`] when another stage has
    /// claimed a slot.
    pub(crate) fn insert(&self, item: &mut Item) -> Result<(), TrainError> {
        let Item { fills, evictions, staging, .. } = item;
        match self.scratchpad {
            ScratchpadMemory::Host(slots) => {
                self.each_run(slots, fills, |slots, list, records| {
                    slots.claim(list)?.write(records);
                    Ok(())
                })?;
                self.write_store(&evictions.runs, &evictions.rows, &mut evictions.records[..evictions.words])
            }
            ScratchpadMemory::Device(scratch) => {
                // An item that moves nothing has no staging buffer. When the buffer is dropped below,
                // another item can reuse it.
                let Some(mut staging) = staging.take() else { return Ok(()) };
                self.with_runs(&**scratch, fills, |runs| staging.put(runs))?;
                self.write_store(&evictions.runs, &evictions.rows, staging.outgoing()?)
            }
        }
    }

    /// Writes the records of these rows to the working file.
    fn write_store(&self, runs: &[TableRun], rows: &[u64], records: &mut [f32]) -> Result<(), TrainError> {
        let jobs = self.pieces(runs, rows, records);
        Ok(self.threads.install(|| {
            jobs.into_par_iter().try_for_each(|(table, rows, records)| {
                give_way();
                self.store.write(table, rows, records)
            })
        })?)
    }
}
