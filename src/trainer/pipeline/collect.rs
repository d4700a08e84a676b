//! Collect: reads the rows that come in from the store, and those that leave from the scratchpad.
//!
//! Both go to the item's staging, whose size Plan has bounded: plain memory on the host, a berth on a device.
//! Reading the store is the slow part, so it is cut into pieces that a pool of threads reads at the same
//! time: while one waits for the disk, others do.

use std::ops::Range;

use rayon::prelude::*;

use super::super::TrainError;
use super::item::{Item, Transfers};
use super::scratchpad::ScratchpadMemory;
use crate::rowlog::WorkingFile;
use crate::trainer::pipeline::gpu::{Run, Scratch, ScratchError};
use crate::trainer::pipeline::slot_flags::NotClaimed;
use crate::trainer::pipeline::slots::Slots;
use crate::types::TableId;

/// Rows that one thread moves at a time.
const PIECE_ROWS: usize = 256;

/// What Collect and Insert move rows between.
#[derive(Clone, Copy)]
pub(crate) struct RowMover<'a> {
    /// The rows that are not in the scratchpad.
    pub store: &'a WorkingFile,
    /// The scratchpad.
    pub pad: &'a ScratchpadMemory,
    /// Of each table: which size of slots, and words of a record.
    pub tables: &'a [(usize, usize)],
    /// The threads that move them.
    pub threads: &'a rayon::ThreadPool,
}

/// Rows of a table, and their records.
type Piece<'t> = (TableId, &'t [u64], &'t mut [f32]);

impl RowMover<'_> {
    /// Reads what the item moves.
    ///
    /// # Errors
    /// [`TrainError::Store`], [`TrainError::Device`], and [`TrainError::Hazard`] where a slot is
    /// another stage's at the time.
    pub(crate) fn collect(&self, item: &mut Item) -> Result<(), TrainError> {
        let Item { fills, evictions, berth, .. } = item;
        match self.pad {
            ScratchpadMemory::Host(slots) => {
                evictions.make_room();
                fills.make_room();
                self.each_run(slots, evictions, |slots, list, records| {
                    slots.claim(list)?.read(records);
                    Ok(())
                })?;
                self.read_store(&fills.runs, &fills.rows, &mut fills.records[..fills.words])
            }
            ScratchpadMemory::Device(_) if fills.words == 0 && evictions.words == 0 => Ok(()),
            ScratchpadMemory::Device(scratch) => {
                let berth = berth.insert(scratch.berth()?);
                self.with_runs(&**scratch, evictions, |runs| berth.take(runs))?;
                self.read_store(&fills.runs, &fills.rows, berth.incoming(fills.words)?)
            }
        }
    }

    /// Reads the records of these rows from the store.
    fn read_store(
        &self,
        runs: &[(TableId, Range<usize>)],
        rows: &[u64],
        records: &mut [f32],
    ) -> Result<(), TrainError> {
        let read = |(table, rows, records): Piece<'_>| self.store.read(table, rows, records);
        Ok(self.threads.install(|| self.pieces(runs, rows, records).into_par_iter().try_for_each(read))?)
    }

    /// Calls `each` with the slots, their list and the records of each table's rows.
    pub(crate) fn each_run(
        &self,
        slots: &[Slots],
        transfers: &mut Transfers,
        each: impl Fn(&Slots, &[u32], &mut [f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let mut records = &mut transfers.records[..];
        for (table, run) in &transfers.runs {
            let (class, width) = self.tables[table.index()];
            let mine = records.split_off_mut(..run.len() * width).unwrap_or_default();
            each(&slots[class], &transfers.slots[run.clone()], mine)?;
        }
        Ok(())
    }

    /// Calls `then` with the slots of each table's rows, claimed on a device.
    pub(crate) fn with_runs(
        &self,
        scratch: &dyn Scratch,
        transfers: &Transfers,
        then: impl FnOnce(&[Run<'_>]) -> Result<(), ScratchError>,
    ) -> Result<(), TrainError> {
        let claim = |(table, run): &(TableId, Range<usize>)| {
            let size = self.tables[table.index()].0;
            Ok((size, scratch.flags(size).claim(&transfers.slots[run.clone()])?))
        };
        let held = transfers.runs.iter().map(claim).collect::<Result<Vec<_>, NotClaimed>>()?;
        let runs: Vec<Run<'_>> = held.iter().map(|(size, held)| Run { size: *size, held }).collect();
        Ok(then(&runs)?)
    }

    /// The rows of each table with their records, some at a time.
    pub(crate) fn pieces<'t>(
        &self,
        runs: &[(TableId, Range<usize>)],
        rows: &'t [u64],
        mut records: &'t mut [f32],
    ) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
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
