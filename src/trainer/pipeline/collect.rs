//! Collect: reads the rows to fetch from the working file, and the victims from the scratchpad.
//!
//! Both are read into the item's staging memory: plain memory on the host, a staging buffer on a device.
//! Plan has bounded their size. Reading the file is slow, so a pool of threads reads pieces of it at the
//! same time.

use rayon::prelude::*;

use super::super::TrainError;
use super::item::{Item, TableRun, Transfers};
use super::scratchpad::{ScratchpadMemory, SlotLayout};
use crate::pace::give_way;
use crate::rowlog::WorkingFile;
use crate::trainer::pipeline::gpu::{Scratch, ScratchError, SlotRun};
use crate::trainer::pipeline::slot_flags::ClaimError;
use crate::trainer::pipeline::slots::Slots;
use crate::types::TableId;

/// Rows that one thread moves at a time.
const PIECE_ROWS: usize = 256;

/// Moves rows between working file, staging memory and scratchpad, for Collect and Insert.
#[derive(Clone, Copy)]
pub(crate) struct RowMover<'a> {
    pub store: &'a WorkingFile,
    pub scratchpad: &'a ScratchpadMemory,
    /// The slot layout of each table.
    pub tables: &'a [SlotLayout],
    /// The threads that read and write the working file.
    pub threads: &'a rayon::ThreadPool,
}

/// Rows of one table, and their records.
type Piece<'t> = (TableId, &'t [u64], &'t mut [f32]);

impl RowMover<'_> {
    /// Reads the rows that the item moves into its staging memory.
    ///
    /// # Errors
    /// [`TrainError::Store`], [`TrainError::Device`], and [`TrainError::Hazard`] when another stage has
    /// claimed a slot.
    pub(crate) fn collect(&self, item: &mut Item) -> Result<(), TrainError> {
        let Item { fills, evictions, staging, .. } = item;
        match self.scratchpad {
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
                let staging = staging.insert(scratch.staging_buffer()?);
                self.with_runs(&**scratch, evictions, |runs| staging.take(runs))?;
                self.read_store(&fills.runs, &fills.rows, staging.incoming(fills.words)?)
            }
        }
    }

    /// Reads the records of these rows from the working file.
    fn read_store(&self, runs: &[TableRun], rows: &[u64], records: &mut [f32]) -> Result<(), TrainError> {
        let read = |(table, rows, records): Piece<'_>| {
            give_way();
            self.store.read(table, rows, records)
        };
        Ok(self.threads.install(|| self.pieces(runs, rows, records).into_par_iter().try_for_each(read))?)
    }

    /// Calls `each` for every table in `transfers`, with the slots of its size, the list of the slots that
    /// move, and their records.
    pub(crate) fn each_run(
        &self,
        slots: &[Slots],
        transfers: &mut Transfers,
        each: impl Fn(&Slots, &[u32], &mut [f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let mut records = &mut transfers.records[..];
        for TableRun { table, range } in &transfers.runs {
            give_way();
            let SlotLayout { size, words } = self.tables[table.index()];
            let of_run = records.split_off_mut(..range.len() * words).unwrap_or_default();
            each(&slots[size], &transfers.slots[range.clone()], of_run)?;
        }
        Ok(())
    }

    /// On a device: claims the slots of `transfers` and calls `then` with the claimed slots of each table.
    pub(crate) fn with_runs(
        &self,
        scratch: &dyn Scratch,
        transfers: &Transfers,
        then: impl FnOnce(&[SlotRun<'_>]) -> Result<(), ScratchError>,
    ) -> Result<(), TrainError> {
        let claim = |TableRun { table, range }: &TableRun| {
            let size = self.tables[table.index()].size;
            Ok((size, scratch.flags(size).claim(&transfers.slots[range.clone()])?))
        };
        let held = transfers.runs.iter().map(claim).collect::<Result<Vec<_>, ClaimError>>()?;
        let runs: Vec<SlotRun<'_>> = held.iter().map(|(size, held)| SlotRun { size: *size, held }).collect();
        Ok(then(&runs)?)
    }

    /// Divides rows and their records into pieces. A piece is of one table and is moved by one thread.
    pub(crate) fn pieces<'t>(
        &self,
        runs: &[TableRun],
        rows: &'t [u64],
        mut records: &'t mut [f32],
    ) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
        for TableRun { table, range } in runs {
            let words = self.tables[table.index()].words;
            for rows in rows[range.clone()].chunks(PIECE_ROWS) {
                let of_piece = records.split_off_mut(..rows.len() * words).unwrap_or_default();
                pieces.push((*table, rows, of_piece));
            }
        }
        pieces
    }
}
