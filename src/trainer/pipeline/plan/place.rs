//! Plan's decisions about slots: which rows already have slots, which rows are fetched, which are evicted,
//! and how long to wait for room.

use std::collections::HashSet;
use std::mem::take;

use super::{PlanChannels, PlannedUnit, Planner};
use crate::mem::NumberMap;
use crate::pace::give_way;
use crate::trainer::TrainError;
use crate::trainer::pipeline::item::{Item, ItemTransfers, RowSlot, Work};
use crate::trainer::pipeline::scratchpad::SlotLayout;
use crate::trainer::pipeline::slot_directory::{LOOKUP_ROWS, SlotDirectory, TakenSlot};
use crate::trainer::pipeline::slots::NO_SLOT;
use crate::types::RowId;

/// The slots of the rows of one unit of work, and the rows to fetch for it.
pub(crate) struct Placement {
    /// The slot of each row.
    pub slots: Vec<u32>,
    /// The rows to fetch, with their slots and victims.
    moves: Vec<TakenSlot>,
    /// How many of `moves` are in each item.
    cuts: Vec<usize>,
    /// Whether these items must have trained before more is planned.
    pub barrier: bool,
}

/// Temporary lists, kept to reuse their memory.
#[derive(Default)]
pub(crate) struct PlanLists {
    /// The rows of the unit that is being planned.
    pub rows: Vec<RowId>,
    /// Rows that [`Planner::find`] must look up, and the index of each in the list of all rows.
    unknown: (Vec<RowId>, Vec<u32>),
    missing: Vec<RowId>,
    moves: Vec<TakenSlot>,
    /// Rows and slots of an item.
    row_slots: Vec<RowSlot>,
}

/// Rows that are being placed, and their slots so far.
#[derive(Clone, Copy)]
struct PlacedRows<'a> {
    rows: &'a [RowId],
    slots: &'a [u32],
}

impl Placement {
    /// How many of the `rows` placed rows already had a slot.
    pub(crate) fn hits(&self, rows: usize) -> u64 {
        rows as u64 - self.fills()
    }

    /// How many rows are fetched.
    pub(crate) fn fills(&self) -> u64 {
        self.moves.len() as u64
    }
}

impl Planner {
    /// Finds or takes a slot for each of these rows, for the unit that ends with batch `self.batch`. The
    /// rows are distinct, and the scratchpad has room for all of them. `slots` has the slots that
    /// [`Self::find`] found before, or is empty.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when the pipeline has ended.
    pub(crate) fn place(
        &mut self,
        rows: &[RowId],
        mut slots: Vec<u32>,
        channels: &PlanChannels<'_>,
    ) -> Result<Placement, TrainError> {
        self.find(rows.iter().copied(), &mut slots, self.batch);
        let lacking = slots.iter().zip(rows).filter(|(slot, _)| **slot == NO_SLOT);
        let mut missing = take(&mut self.lists.missing);
        missing.clear();
        missing.extend(lacking.map(|(_, row)| *row));
        self.expire((self.item + 1).saturating_sub(1 + self.settings.windows.past_items));
        let barrier = self.make_room(&missing, PlacedRows { rows, slots: &slots }, channels)?;
        let cuts = self.cut(&missing);
        let mut moves = take(&mut self.lists.moves);
        moves.clear();
        for (size, rows) in by_size(&self.tables, &missing) {
            give_way();
            self.directories[size].take_all(rows, self.batch, |taken| moves.push(taken));
        }
        // Unreachable: callers pass only rows that fit together, and `make_room` has made room for them.
        if moves.len() < missing.len() {
            return Err(TrainError::Stopped);
        }
        let last_item = self.item + cuts.len() as u64;
        self.planned.push_back(PlannedUnit { last_batch: self.batch, last_item });
        let lacking = slots.iter_mut().filter(|slot| **slot == NO_SLOT);
        lacking.zip(&moves).for_each(|(slot, taken)| *slot = taken.slot);
        self.stats.evictions += moves.iter().filter(|taken| taken.victim.is_some()).count() as u64;
        self.stats.fills += moves.len() as u64;
        self.lists.missing = missing;
        Ok(Placement { slots, moves, cuts, barrier })
    }

    /// Finds the slot of each of these rows, or [`NO_SLOT`], and protects the slots that it finds for batch
    /// `batch`. `slots` has the result of an earlier call for the same rows and batch, or is empty. Slots
    /// that were found then are not looked up again.
    pub(crate) fn find(&mut self, rows: impl Iterator<Item = RowId>, slots: &mut Vec<u32>, batch: u64) {
        let (mut unknown, mut indices) = take(&mut self.lists.unknown);
        unknown.clear();
        indices.clear();
        for (at, row) in rows.enumerate() {
            if slots.get(at).is_none_or(|slot| *slot == NO_SLOT) {
                unknown.push(row);
                indices.push(at as u32);
            }
        }
        if slots.is_empty() {
            slots.resize(unknown.len(), NO_SLOT);
        }
        let (mut found, mut next_index) = ([0; LOOKUP_ROWS], indices.iter());
        for (size, rows) in by_size(&self.tables, &unknown) {
            give_way();
            let directory = &mut self.directories[size];
            let found = directory.find_all(rows, &mut found);
            directory.keep(found, batch);
            found.iter().zip(&mut next_index).for_each(|(&slot, &at)| slots[at as usize] = slot);
        }
        self.lists.unknown = (unknown, indices);
    }

    /// Divides rows to fetch into one or more items, and returns the number of rows of each item. A row and
    /// the victim in its slot are in the same item, so the victim is read before the row is written.
    fn cut(&self, rows: &[RowId]) -> Vec<usize> {
        let (mut cuts, mut words) = (vec![0], 0);
        for row in rows {
            let record = SlotLayout::of(&self.tables, *row).words;
            words += record;
            match cuts.last_mut() {
                Some(count) if *count == 0 || words <= self.settings.item_words => *count += 1,
                _ => (words, _) = (record, cuts.push(1)),
            }
        }
        cuts
    }

    /// Removes items up to `item` from the past window, so that rows that no later batch needs become
    /// candidates.
    pub(crate) fn expire(&mut self, item: u64) {
        let Self { directories, upcoming, planned, batch, .. } = self;
        let left = planned.partition_point(|unit| unit.last_item <= item);
        let Some(PlannedUnit { last_batch, .. }) = planned.drain(..left).next_back() else { return };
        let batch = *batch;
        let next = |row: RowId| if upcoming.is_empty() { 0 } else { next_use(upcoming, row, batch) };
        directories.iter_mut().for_each(|directory| directory.expire(last_batch, batch, next));
    }

    /// Makes sure that slots for the missing rows are available, if necessary by waiting (a bubble). Returns
    /// whether rows of coming batches must be evicted.
    fn make_room(
        &mut self,
        missing: &[RowId],
        placed: PlacedRows<'_>,
        channels: &PlanChannels<'_>,
    ) -> Result<bool, TrainError> {
        let mut needed = vec![0; self.directories.len()];
        missing.iter().for_each(|&row| needed[SlotLayout::of(&self.tables, row).size] += 1);
        let lacking = |directories: &[SlotDirectory]| {
            directories.iter().zip(&needed).any(|(directory, &n)| directory.available() < n)
        };
        if !lacking(&self.directories) {
            return Ok(false);
        }
        self.stats.bubbles += 1;
        if self.stats.bubbles == 1 {
            tracing::warn!("scratchpad: the window does not fit; Plan waits for batches to train");
        }
        // The past window ends early now, so the rule of `keep` does not hold: look up all batches again.
        self.kept = 0;
        self.keep();
        let mut expired = 0;
        while lacking(&self.directories)
            && let Some(unit) = self.planned.front()
        {
            expired = unit.last_item;
            self.expire(expired);
        }
        let barrier = lacking(&self.directories);
        if barrier {
            self.release(&needed, placed);
        }
        channels.wait(expired)?;
        Ok(barrier)
    }

    /// Makes rows of coming batches candidates until `needed` slots of each size are available. It spares
    /// the rows that are being placed.
    fn release(&mut self, needed: &[usize], PlacedRows { rows, slots }: PlacedRows<'_>) {
        for (size, (directory, &count)) in self.directories.iter_mut().zip(needed).enumerate() {
            let of_size = |row: &RowId| SlotLayout::of(&self.tables, *row).size == size;
            let of_size = rows.iter().zip(slots).filter(|(row, _)| of_size(row));
            let placed: HashSet<u32> = of_size.map(|(_, slot)| *slot).collect();
            directory.release(count.saturating_sub(directory.available()), self.batch, &placed);
        }
        self.seen.iter_mut().for_each(|prepared| prepared.slots.clear());
        self.kept = 0;
    }

    /// Sends the items that move these rows. The last item has the work.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when the pipeline has ended.
    pub(crate) fn emit(
        &mut self,
        placed: Placement,
        work: Work,
        channels: &mut PlanChannels<'_>,
    ) -> Result<(), TrainError> {
        let (mut rest, mut work, mut rows) = (&placed.moves[..], Some(work), take(&mut self.lists.row_slots));
        for (at, &count) in placed.cuts.iter().enumerate() {
            let (now, later) = rest.split_at(count);
            rest = later;
            let ItemTransfers { mut fills, mut evictions } = channels.transfers.take();
            rows.clear();
            rows.extend(now.iter().map(|&TakenSlot { row, slot, .. }| RowSlot { row, slot }));
            fills.set(&mut rows, &self.tables);
            rows.clear();
            let victims =
                now.iter().filter_map(|taken| Some(RowSlot { row: taken.victim?, slot: taken.slot }));
            rows.extend(victims);
            evictions.set(&mut rows, &self.tables);
            let work = if at + 1 == placed.cuts.len() { work.take() } else { None };
            self.item += 1;
            let work = work.unwrap_or(Work::Move);
            channels.send(Item { number: self.item, fills, evictions, staging: None, work })?;
        }
        (self.lists.row_slots, self.lists.moves) = (rows, placed.moves);
        Ok(())
    }
}

/// Splits rows, in order, into parts of one table and at most [`LOOKUP_ROWS`] rows. Each part comes with the
/// index of its slot size.
pub(crate) fn by_size<'r>(
    tables: &'r [SlotLayout],
    rows: &'r [RowId],
) -> impl Iterator<Item = (usize, &'r [RowId])> + use<'r> {
    let size = |row: RowId| SlotLayout::of(tables, row).size;
    let of_table = rows.chunk_by(|a, b| a.table() == b.table());
    of_table.flat_map(move |rows| rows.chunks(LOOKUP_ROWS).map(move |rows| (size(rows[0]), rows)))
}

/// How many batches after `batch` the row is needed next; 0 if no seen batch needs it.
pub(crate) fn next_use(upcoming: &NumberMap<RowId, u64>, row: RowId, batch: u64) -> u64 {
    let users = upcoming.get(&row).copied().unwrap_or(0);
    match users.rotate_right(((batch + 1) % 64) as u32) {
        0 => 0,
        ahead => u64::from(ahead.trailing_zeros()) + 1,
    }
}
