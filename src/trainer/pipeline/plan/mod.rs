//! Plan: the stage that decides which rows to fetch into the scratchpad for a batch, and which rows to
//! evict.
//!
//! The other stages only carry out the decisions in an [`Item`]. Plan needs no answer from them: every item
//! passes through all stages in order, so Plan knows what the scratchpad will hold. Three hazards remain
//! (ScratchPipe, section IV-B). The choice of victims prevents each:
//!
//! - Collect reads a victim from its slot before an earlier item has trained the row (hazard 2), or before
//!   Insert has written the row to the slot (hazard 3). While Train works on an item, Collect is at most
//!   `past_items` items ahead. So rows of the last `past_items` items (the past window) are never victims.
//! - Collect fetches a row from the working file before Insert has written the row back there, after its
//!   eviction by an earlier item (hazard 4). While Insert works on an item, Collect is at most
//!   `future_items` items ahead. So rows of the next `future_items` items (the future window) are never
//!   victims.
//!
//! Both windows follow from the number of items that fit between the stages ([`HazardWindows`]). Hazard 1 (a
//! batch reads a row before an earlier batch has updated it) cannot happen, because Train takes
//! whole steps in order.
//!
//! **If a window does not fit in the scratchpad**, Plan takes the first of these measures that helps, and
//! logs a warning:
//!
//! 1. It plans fewer batches together.
//! 2. It waits until enough items have trained and their rows may be evicted (a *bubble*). At worst it waits
//!    for all items. Rows of coming batches may then be evicted too, because they are written back before
//!    the next item is planned.
//! 3. It splits the batch (`split`).
//!
//! So the protection of a window is never shortened while stages overlap. Decisions depend only on the data
//! and the settings, not on the speed of a stage: hits and evictions are equal in every run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

mod place;
mod settings;
mod split;

use self::place::{PlanLists, next_use};
pub use self::settings::PlanStats;
pub(crate) use self::settings::{HazardWindows, PlanSettings};
use self::split::SlotBudget;
use super::super::TrainError;
use super::super::read_ahead::BatchGroup;
use super::super::train_state::TrainState;
use super::clocks::{Clocks, StageName};
use super::item::{BufferPool, Item, ItemTransfers, PreparedBatch, Work};
use super::jitter::Jitter;
use super::policy::{RowUse, SEEN_AHEAD, ScratchpadPolicy};
use super::scratchpad::SlotLayout;
use super::slot_directory::SlotDirectory;
use super::train_progress::TrainProgress;
use crate::mem::{NumberMap, OutOfHostMemory};
use crate::schema::{Lookup, Schema};
use crate::trainer::pipeline::slots::NO_SLOT;
use crate::types::RowId;

/// Batches after the future window that the optimal policy looks at.
const OPTIMAL_AHEAD: usize = 16;

/// The state of Plan, which is kept from one run of the pipeline to the next.
pub(crate) struct Planner {
    schema: Arc<Schema>,
    lookups: Arc<[Lookup]>,
    settings: PlanSettings,
    /// One directory per slot size.
    directories: Vec<SlotDirectory>,
    /// The slot layout of each table.
    tables: Vec<SlotLayout>,
    /// Number of the item that was planned last.
    pub(crate) item: u64,
    /// Number of the batch that was planned last.
    batch: u64,
    /// Later batches that have been read.
    seen: VecDeque<PreparedBatch>,
    /// How many batches at the front of `seen` already protect their rows in the scratchpad
    /// ([`Self::keep`]).
    kept: usize,
    /// The units in the past window, oldest first.
    planned: VecDeque<PlannedUnit>,
    /// For the optimal policy: the batches of `seen` that need a row, as a bit set. Batch b has bit b % 64.
    upcoming: NumberMap<RowId, u64>,
    lists: PlanLists,
    stats: PlanStats,
}

/// Batches that were planned together.
struct PlannedUnit {
    last_batch: u64,
    last_item: u64,
}

/// The channels and buffers of Plan.
pub(crate) struct PlanChannels<'a> {
    /// Batches from Load.
    pub batches: Receiver<BatchGroup>,
    /// Items, to Collect.
    pub items: SyncSender<Item>,
    pub transfers: &'a BufferPool<ItemTransfers>,
    /// The progress of Train.
    pub progress: &'a TrainProgress,
    pub clocks: &'a Clocks,
    pub jitter: Jitter,
}

impl PlanChannels<'_> {
    /// Waits until item number `item` has trained.
    fn wait(&self, item: u64) -> Result<(), TrainError> {
        self.clocks.wait(StageName::Plan, || self.progress.wait(item))
    }

    /// Passes the item to Collect.
    fn send(&self, item: Item) -> Result<(), TrainError> {
        let send = || self.items.send(item).map_err(|_| TrainError::Stopped);
        self.clocks.wait(StageName::Plan, send)
    }
}

impl Planner {
    /// A planner with `counts` empty slots of each size. `tables` has the slot layout of each table.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn new(
        train_state: &TrainState,
        settings: PlanSettings,
        counts: &[usize],
        tables: Vec<SlotLayout>,
    ) -> Result<Self, OutOfHostMemory> {
        let PlanSettings { policy, seed, .. } = settings;
        let directory =
            |(&count, size)| SlotDirectory::new(policy, settings.frequencies.clone(), count, seed ^ size);
        let directories = counts.iter().zip(0..).map(directory).collect::<Result<_, _>>()?;
        Ok(Self {
            schema: train_state.schema.clone(),
            lookups: train_state.lookups.clone(),
            settings,
            directories,
            tables,
            item: 0,
            batch: 0,
            seen: VecDeque::new(),
            kept: 0,
            planned: VecDeque::new(),
            upcoming: NumberMap::default(),
            lists: PlanLists::default(),
            stats: PlanStats::default(),
        })
    }

    pub(crate) fn stats(&self) -> PlanStats {
        self.stats
    }

    /// The slot directory of each size.
    pub(crate) fn directories(&self) -> &[SlotDirectory] {
        &self.directories
    }

    /// The slot layout of each table.
    pub(crate) fn tables(&self) -> &[SlotLayout] {
        &self.tables
    }

    /// The most words of records that an item may move in each direction.
    pub(crate) fn item_words(&self) -> usize {
        self.settings.item_words
    }

    /// Plans batch after batch until there are no more.
    ///
    /// # Errors
    /// [`TrainError`] for a batch that cannot be read or planned, after all earlier batches were planned;
    /// [`TrainError::Stopped`] when another stage has ended the pipeline.
    pub(crate) fn run(&mut self, channels: &mut PlanChannels<'_>) -> Result<(), TrainError> {
        let mut failed = Ok(());
        let mut more = true;
        loop {
            while more && self.seen.len() < self.depth() {
                let Ok(group) = channels.batches.recv() else {
                    more = false;
                    break;
                };
                let see = || group?.into_iter().try_for_each(|batch| self.see(batch));
                if let Err(error) = channels.clocks.time(StageName::Plan, see) {
                    (more, failed) = (false, Err(error));
                }
            }
            if self.seen.is_empty() {
                return failed;
            }
            channels.jitter.sleep();
            let clocks = channels.clocks;
            clocks.time(StageName::Plan, || self.plan(channels))?;
        }
    }

    /// Fetches the most frequent rows, as many as fit. The most frequent are placed last, so that LRU evicts
    /// them last.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn fill(
        &mut self,
        hottest: &[RowId],
        channels: &mut PlanChannels<'_>,
    ) -> Result<(), TrainError> {
        let mut budget = SlotBudget::of(&self.directories);
        let mut rows: Vec<RowId> =
            hottest.iter().filter(|row| budget.take(&self.tables, &[**row])).copied().collect();
        rows.reverse();
        let placed = self.place(&rows, Vec::new(), channels)?;
        // `fills` counts only the rows of batches.
        self.stats.fills -= placed.fills();
        self.stats.filled_before += placed.fills();
        self.emit(placed, Work::Move, channels)?;
        // All slots may be full now. After the wait, any of these rows may be a victim, so the first batches
        // find room.
        channels.wait(self.item)?;
        self.expire(self.item);
        Ok(())
    }

    /// How many batches to read ahead, including the batches of the next unit.
    fn depth(&self) -> usize {
        let lookahead = self.settings.lookahead;
        let window = lookahead + self.future_batches();
        let optimal = if self.settings.policy == ScratchpadPolicy::Optimal { OPTIMAL_AHEAD } else { 0 };
        (window + optimal).min(SEEN_AHEAD.max(window))
    }

    /// Batches in the future window: `lookahead` for each of its items.
    fn future_batches(&self) -> usize {
        self.settings.lookahead * self.settings.windows.future_items as usize
    }

    /// Casts a batch and adds it to `seen`. For the optimal policy, records which rows the batch needs.
    fn see(&mut self, mut prepared: PreparedBatch) -> Result<(), TrainError> {
        prepared.prepare(&self.schema, &self.lookups)?;
        let number = self.batch + 1 + self.seen.len() as u64;
        if self.settings.policy == ScratchpadPolicy::Optimal {
            for row in prepared.rows() {
                *self.upcoming.entry(row).or_default() |= 1 << (number % 64);
                let directory = &mut self.directories[SlotLayout::of(&self.tables, row).size];
                if let Some(slot) = directory.find(row) {
                    let next = next_use(&self.upcoming, row, self.batch);
                    directory.update_candidate(slot, self.batch, RowUse { frequency: 0, next });
                }
            }
        }
        self.seen.push_back(prepared);
        Ok(())
    }

    /// Plans the next unit: `lookahead` batches together, or as many as fit.
    fn plan(&mut self, channels: &mut PlanChannels<'_>) -> Result<(), TrainError> {
        let (item, batch) = (self.item, self.batch);
        self.plan_unit(channels)?;
        if self.item - item > 1 || self.batch - batch < self.settings.lookahead as u64 {
            // The rule of `keep` does not hold: the past window is long enough only if every unit is one
            // item and has `lookahead` batches.
            self.kept = 0;
        }
        if self.settings.overlap { Ok(()) } else { channels.wait(self.item) }
    }

    /// Empties the scratchpad.
    pub(crate) fn clear(&mut self) {
        let PlanSettings { policy, seed, .. } = self.settings;
        self.directories
            .iter_mut()
            .zip(0..)
            .for_each(|(directory, size)| directory.clear(policy, seed ^ size));
        self.planned.clear();
    }

    fn plan_unit(&mut self, channels: &mut PlanChannels<'_>) -> Result<(), TrainError> {
        let mut rows = std::mem::take(&mut self.lists.rows);
        let count = self.unit_batches(&mut rows);
        let split = !self.fits(&rows);
        let mut batches: Vec<PreparedBatch> = self.seen.drain(..count).collect();
        self.kept = self.kept.saturating_sub(count);
        let row_count: usize = batches.iter().map(PreparedBatch::row_count).sum();
        self.batch += count as u64;
        self.keep();
        self.forget_seen(&batches);
        if split {
            self.lists.rows = rows;
            self.stats.splits += 1;
            let whole = batches.pop().unwrap_or_default();
            return self.split(whole, channels);
        }
        let found = if let [one] = &mut batches[..] { std::mem::take(&mut one.slots) } else { Vec::new() };
        let mut placed = self.place(&rows, found, channels)?;
        self.stats.hits += placed.hits(row_count);
        match &mut batches[..] {
            [one] => one.slots = std::mem::take(&mut placed.slots),
            several => several.iter_mut().for_each(|batch| batch.slots = self.slots_of(batch)),
        }
        let barrier = placed.barrier;
        self.emit(placed, Work::Steps(batches), channels)?;
        self.lists.rows = rows;
        if barrier { channels.wait(self.item) } else { Ok(()) }
    }

    /// How many batches are planned together now: `lookahead`, or as many as fit, but at least one. Writes
    /// their rows to `rows`.
    fn unit_batches(&mut self, rows: &mut Vec<RowId>) -> usize {
        let most = self.settings.lookahead.min(self.seen.len());
        let mut count = most;
        self.rows_of(count, rows);
        while count > 1 && !self.fits(rows) {
            count -= 1;
            self.rows_of(count, rows);
        }
        if count < most {
            self.stats.shrinks += 1;
            if self.stats.shrinks == 1 {
                tracing::warn!(
                    "scratchpad: has room for only {count} of the {most} batches of a look-ahead window"
                );
            }
        }
        count
    }

    /// Writes the distinct rows of the next `count` batches, ascending.
    fn rows_of(&self, count: usize, rows: &mut Vec<RowId>) {
        rows.clear();
        rows.extend(self.seen.iter().take(count).flat_map(PreparedBatch::rows));
        if count > 1 {
            rows.sort_unstable();
            rows.dedup();
        }
    }

    /// Whether the scratchpad has room for all these rows together.
    fn fits(&self, rows: &[RowId]) -> bool {
        SlotBudget::of(&self.directories).take(&self.tables, rows)
    }

    /// Protects rows for the batches that have entered the future window, which begins after the unit that
    /// is being planned. Each batch is looked up only once, when it enters. A row that an item fetches later
    /// needs no second lookup: the past window, which is no shorter, protects it until the batch is planned.
    /// When that does not hold, `kept` is set to 0, and all batches of the window are looked up again.
    fn keep(&mut self) {
        let upto = self.future_batches().min(self.seen.len());
        for at in self.kept.min(upto)..upto {
            let mut prepared = std::mem::take(&mut self.seen[at]);
            let mut slots = std::mem::take(&mut prepared.slots);
            self.find(prepared.rows(), &mut slots, self.batch + 1 + at as u64);
            prepared.slots = slots;
            self.seen[at] = prepared;
        }
        self.kept = upto;
    }

    /// Removes planned batches from `upcoming`.
    fn forget_seen(&mut self, batches: &[PreparedBatch]) {
        if self.settings.policy != ScratchpadPolicy::Optimal {
            return;
        }
        let first = self.batch + 1 - batches.len() as u64;
        for (prepared, number) in batches.iter().zip(first..) {
            for row in prepared.rows() {
                if let Some(users) = self.upcoming.get_mut(&row) {
                    *users &= !(1 << (number % 64));
                    if *users == 0 {
                        self.upcoming.remove(&row);
                    }
                }
            }
        }
    }

    /// The slots of a batch. All its rows have slots.
    fn slots_of(&self, prepared: &PreparedBatch) -> Vec<u32> {
        let find = |row: RowId| self.directories[SlotLayout::of(&self.tables, row).size].find(row);
        prepared.rows().map(|row| find(row).unwrap_or(NO_SLOT)).collect()
    }
}
