//! Collect: reads the rows that come in from the store, and those that leave from the scratchpad.
//!
//! Both go to the item's staging, whose size Plan has bounded. Reading the store is the slow part, so it is cut into pieces that
//! a pool of threads reads at the same time: while one waits for the disk, others do.

use rayon::prelude::*;

use super::TrainError;
use super::plan::{Item, Transfers};
use crate::device::host::slots::Slots;
use crate::store::WorkingFile;
use crate::types::TableId;

/// Rows that one thread moves at a time.
const PIECE_ROWS: usize = 256;

/// What Collect and Insert move rows between.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// The rows that are not in the scratchpad.
    pub store: &'a WorkingFile,
    /// The scratchpad's slots, by size.
    pub slots: &'a [Slots],
    /// Of each table: which size, and words of a record.
    pub tables: &'a [(usize, usize)],
    /// The threads that move them.
    pub threads: &'a rayon::ThreadPool,
}

impl Places<'_> {
    /// Reads what the item moves.
    ///
    /// # Errors
    /// [`TrainError::Store`], and [`TrainError::Hazard`] where a slot is another stage's at the time.
    pub fn collect(&self, item: &mut Item) -> Result<(), TrainError> {
        self.each_run(&mut item.evictions, |slots, list, records| {
            slots.claim(list)?.read(records);
            Ok(())
        })?;
        let jobs = self.pieces(&mut item.fills);
        self.threads.install(|| {
            jobs.into_par_iter().try_for_each(|(table, rows, records)| self.store.read(table, rows, records))
        })?;
        Ok(())
    }

    /// Calls `each` with the slots, their list and the records of each table's rows.
    pub(super) fn each_run(
        &self,
        transfers: &mut Transfers,
        each: impl Fn(&Slots, &[u32], &mut [f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let mut records = &mut transfers.records[..];
        for (table, run) in &transfers.runs {
            let (class, width) = self.tables[table.index()];
            let mine = records.split_off_mut(..run.len() * width).unwrap_or_default();
            each(&self.slots[class], &transfers.slots[run.clone()], mine)?;
        }
        Ok(())
    }

    /// The rows of each table with their records, some at a time.
    pub(super) fn pieces<'t>(
        &self,
        transfers: &'t mut Transfers,
    ) -> Vec<(TableId, &'t [u64], &'t mut [f32])> {
        let Transfers { runs, rows, records, .. } = transfers;
        let (mut records, mut pieces) = (&mut records[..], Vec::new());
        for (table, run) in runs {
            let width = self.tables[table.index()].1;
            for rows in rows[run.clone()].chunks(PIECE_ROWS) {
                let mine = records.split_off_mut(..rows.len() * width).unwrap_or_default();
                pieces.push((*table, rows, mine));
            }
        }
        pieces
    }
}
