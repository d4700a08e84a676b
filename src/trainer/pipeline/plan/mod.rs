//! Plan: the stage that decides. Which rows of a batch are in the scratchpad, which come in, which leave for them.
//!
//! The other stages carry out what stands in an [`Item`] and ask nothing; and Plan asks nothing of them, because what they
//! will have done is known: an item goes through all of them, in order. Three things could still go wrong (ScratchPipe,
//! section IV-B), and each is ruled out by choosing victims well:
//!
//! - a victim that a batch on its way has still to train (hazard 2) or to bring in (hazard 3): while Train works on one
//!   item, Collect can be at most `past` items further, so what the last `past` items touch is no victim;
//! - a victim that a coming batch fetches from the store before it is written there (hazard 4): while Insert works on one item,
//!   Collect can be at most `future` further, so what the next `future` batches need is no victim.
//!
//! Both windows follow from how many items fit between the stages ([`Windows`]). Hazard 1 (forward
//! before the last update) cannot come up: Train is one stage.
//!
//! **When a window does not fit the scratchpad**, the first of these that helps is done, aloud:
//!
//! 1. fewer batches are planned together, where it was several;
//! 2. Plan waits until so many items have trained that what they hold is free (a *bubble*); at last until all have, and then
//!    also rows of coming batches may leave, since all is written before the next item is planned;
//! 3. the batch is split (`split`).
//!
//! So a window is never shortened while the stages overlap. Decisions depend on the data and the settings alone, never on how
//! fast a stage is: counts of hits and evictions are the same in every run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

mod place;
mod settings;
mod split;

use self::place::{Lists, next_use};
pub use self::settings::PlanStats;
pub(crate) use self::settings::{PlanSettings, Windows};
use self::split::Room;
use super::super::TrainError;
use super::clocks::{Clocks, StageName};
use super::item::{Item, PreparedBatch, Spare, Transfers, Work};
use super::jitter::Jitter;
use super::key::Key;
use super::policy::{Policy, SEEN_AHEAD, Worth};
use super::slot_directory::SlotDirectory;
use super::train_progress::TrainProgress;
use crate::mem::{NumberMap, OutOfHostMemory};
use crate::schema::{Lookup, Schema};
use crate::trainer::pipeline::slots::NO_SLOT;

/// More batches than a window needs that the optimal policy looks at.
const OPTIMAL_AHEAD: usize = 16;

/// The state of Plan, from one run of the pipeline to the next.
pub(crate) struct Planner {
    schema: Arc<Schema>,
    lookups: Arc<[Lookup]>,
    settings: PlanSettings,
    /// Slots of one size each.
    holds: Vec<SlotDirectory>,
    /// Of each table: which of the holds, and words of a record.
    tables: Vec<(usize, usize)>,
    /// The number of the item that was planned last.
    pub(crate) item: u64,
    /// The number of the batch that was planned last.
    batch: u64,
    /// The batches after it.
    seen: VecDeque<PreparedBatch>,
    /// How many of them have all their rows kept that are here.
    kept: usize,
    /// Batches that were planned, each the last of its unit, and their last items: those within the past window.
    planned: VecDeque<(u64, u64)>,
    /// Of each row that the optimal policy sees ahead, a bit for each batch that needs it: that of batch b is b % 64.
    upcoming: NumberMap<Key, u64>,
    lists: Lists,
    stats: PlanStats,
}

/// Plan's ends of the pipeline.
pub(crate) struct PlanEnds<'a> {
    /// Batches that were read.
    pub batches: Receiver<Result<PreparedBatch, TrainError>>,
    /// Items, to Collect.
    pub items: SyncSender<Item>,
    /// What items move rows with.
    pub spare: &'a Spare<(Transfers, Transfers)>,
    /// How far Train is.
    pub headway: &'a TrainProgress,
    /// What Plan's work is timed by.
    pub clocks: &'a Clocks,
    /// Sleeps that tests ask for.
    pub jitter: Jitter,
}

impl PlanEnds<'_> {
    /// Waits until the item has trained.
    fn wait(&self, item: u64) -> Result<(), TrainError> {
        self.clocks.wait(StageName::Plan, || self.headway.wait(item))
    }

    /// Hands the item to Collect.
    fn send(&self, item: Item) -> Result<(), TrainError> {
        let send = || self.items.send(item).map_err(|_| TrainError::Stopped);
        self.clocks.wait(StageName::Plan, send)
    }
}

impl Planner {
    /// With empty slots. `tables` says of each table of the schema which of `counts` its rows' slots are counted by, and words
    /// of a record.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn new(
        (schema, lookups): (Arc<Schema>, Arc<[Lookup]>),
        settings: PlanSettings,
        counts: &[usize],
        tables: Vec<(usize, usize)>,
    ) -> Result<Self, OutOfHostMemory> {
        let PlanSettings { policy, seed, .. } = settings;
        let hold =
            |(&count, size)| SlotDirectory::new(policy, settings.frequencies.clone(), count, seed ^ size);
        let holds = counts.iter().zip(0..).map(hold).collect::<Result<_, _>>()?;
        Ok(Self {
            schema,
            lookups,
            settings,
            holds,
            tables,
            item: 0,
            batch: 0,
            seen: VecDeque::new(),
            kept: 0,
            planned: VecDeque::new(),
            upcoming: NumberMap::default(),
            lists: Lists::default(),
            stats: PlanStats::default(),
        })
    }

    /// What was done so far.
    pub(crate) fn stats(&self) -> PlanStats {
        self.stats
    }

    /// The slots of each size.
    pub(crate) fn holds(&self) -> &[SlotDirectory] {
        &self.holds
    }

    /// Of each table: which of the holds, and words of a record.
    pub(crate) fn tables(&self) -> &[(usize, usize)] {
        &self.tables
    }

    /// Words of records that an item moves in, and out, at most.
    pub(crate) fn item_words(&self) -> usize {
        self.settings.item_words
    }

    /// Plans batch after batch until there are no more.
    ///
    /// # Errors
    /// [`TrainError`] for a batch that cannot be planned, once those before it have been; [`TrainError::Stopped`] when the
    /// pipeline has ended before.
    pub(crate) fn run(&mut self, ends: &mut PlanEnds<'_>) -> Result<(), TrainError> {
        let mut failed = Ok(());
        let mut more = true;
        loop {
            while more && self.seen.len() < self.depth() {
                let batch = ends.batches.recv().ok();
                more = batch.as_ref().is_some_and(Result::is_ok);
                match batch {
                    Some(Ok(cast)) => match ends.clocks.time(StageName::Plan, || self.see(cast)) {
                        Ok(()) => {}
                        Err(error) => (more, failed) = (false, Err(error)),
                    },
                    Some(Err(error)) => failed = Err(error),
                    None => {}
                }
            }
            if self.seen.is_empty() {
                return failed;
            }
            ends.jitter.sleep();
            let clocks = ends.clocks;
            clocks.time(StageName::Plan, || self.plan(ends))?;
        }
    }

    /// Brings in the most frequent rows, as far as there is room, the most frequent last.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn fill(&mut self, hottest: &[Key], ends: &mut PlanEnds<'_>) -> Result<(), TrainError> {
        let mut room = Room::of(&self.holds);
        let mut keys: Vec<Key> =
            hottest.iter().filter(|key| room.take(&self.tables, &[**key])).copied().collect();
        keys.reverse();
        let placed = self.place((&keys, Vec::new()), ends)?;
        // Fills are counted where a batch asked for them.
        self.stats.fills -= placed.fills();
        self.stats.filled_before += placed.fills();
        self.emit(placed, Work::Move, ends)?;
        // All slots may be full now. Once they are, any of these rows may leave, so that the first batches find room.
        ends.wait(self.item)?;
        self.expire(self.item);
        Ok(())
    }

    /// Batches that are looked at, with those that are planned.
    fn depth(&self) -> usize {
        let ahead = self.settings.ahead;
        let window = ahead + ahead * self.settings.windows.future as usize;
        let optimal = if self.settings.policy == Policy::Optimal { OPTIMAL_AHEAD } else { 0 };
        (window + optimal).min(SEEN_AHEAD.max(window))
    }

    /// Looks at a batch for the first time.
    fn see(&mut self, mut cast: PreparedBatch) -> Result<(), TrainError> {
        cast.cast(&self.schema, &self.lookups)?;
        let number = self.batch + 1 + self.seen.len() as u64;
        if self.settings.policy == Policy::Optimal {
            for key in cast.keys() {
                *self.upcoming.entry(key).or_default() |= 1 << (number % 64);
                let hold = &mut self.holds[self.tables[key.table().index()].0];
                if let Some(slot) = hold.find(key) {
                    let next = next_use(&self.upcoming, key, self.batch);
                    hold.judge(slot, self.batch, Worth { frequency: 0, next });
                }
            }
        }
        self.seen.push_back(cast);
        Ok(())
    }

    /// Plans the next batches together, as many as asked for or fit.
    fn plan(&mut self, ends: &mut PlanEnds<'_>) -> Result<(), TrainError> {
        let before = (self.item, self.batch);
        self.plan_unit(ends)?;
        if self.item - before.0 > 1 || self.batch - before.1 < self.settings.ahead as u64 {
            // The past window keeps what came in for the future one only as long as a unit is an item, and the future
            // window of as many units as it has items.
            self.kept = 0;
        }
        if self.settings.overlap { Ok(()) } else { ends.wait(self.item) }
    }

    /// Nothing is in the scratchpad any more.
    pub(crate) fn clear(&mut self) {
        let PlanSettings { policy, seed, .. } = self.settings;
        self.holds.iter_mut().zip(0..).for_each(|(hold, size)| hold.clear(policy, seed ^ size));
        self.planned.clear();
    }

    fn plan_unit(&mut self, ends: &mut PlanEnds<'_>) -> Result<(), TrainError> {
        let most = self.settings.ahead.min(self.seen.len());
        let mut count = most;
        let mut keys = std::mem::take(&mut self.lists.keys);
        self.keys_of(count, &mut keys);
        while count > 1 && !self.fits(&keys) {
            count -= 1;
            self.keys_of(count, &mut keys);
        }
        if count < most {
            self.stats.shrinks += 1;
            if self.stats.shrinks == 1 {
                tracing::warn!(
                    "scratchpad: holds {count} batches at a time, {most} are to be planned together"
                );
            }
        }
        let split = !self.fits(&keys);
        let mut casts: Vec<PreparedBatch> = self.seen.drain(..count).collect();
        self.kept = self.kept.saturating_sub(count);
        let rows: usize = casts.iter().map(|cast| cast.starts.last().copied().unwrap_or(0)).sum();
        self.batch += count as u64;
        self.keep();
        self.forget_seen(&casts);
        if split {
            self.lists.keys = keys;
            self.stats.splits += 1;
            let cast = casts.pop().unwrap_or_default();
            return self.split(cast, ends);
        }
        let found = if let [one] = &mut casts[..] { std::mem::take(&mut one.slots) } else { Vec::new() };
        let mut placed = self.place((&keys, found), ends)?;
        self.stats.hits += placed.hits(rows);
        match &mut casts[..] {
            [one] => one.slots = std::mem::take(&mut placed.slots),
            several => several.iter_mut().for_each(|cast| cast.slots = self.slots_of(cast)),
        }
        let barrier = placed.barrier;
        self.emit(placed, Work::Steps(casts), ends)?;
        self.lists.keys = keys;
        if barrier { ends.wait(self.item) } else { Ok(()) }
    }

    /// The distinct rows of the next `count` batches, by table and ascending.
    fn keys_of(&self, count: usize, keys: &mut Vec<Key>) {
        keys.clear();
        keys.extend(self.seen.iter().take(count).flat_map(PreparedBatch::keys));
        if count > 1 {
            keys.sort_unstable();
            keys.dedup();
        }
    }

    /// Whether the scratchpad has room for all these rows together.
    fn fits(&self, keys: &[Key]) -> bool {
        Room::of(&self.holds).take(&self.tables, keys)
    }

    /// Keeps the rows of the batches that have come into the future window, which is of the batches after the unit that is planned.
    /// What comes in later for one of them need not be kept for it, because the past window, which is no shorter, keeps it; where
    /// that is not so, `kept` is set to none, and all are looked at again.
    fn keep(&mut self) {
        let window = self.settings.ahead * self.settings.windows.future as usize;
        let upto = window.min(self.seen.len());
        for at in self.kept.min(upto)..upto {
            let mut cast = std::mem::take(&mut self.seen[at]);
            let mut slots = std::mem::take(&mut cast.slots);
            self.find(cast.keys(), &mut slots, self.batch + 1 + at as u64);
            cast.slots = slots;
            self.seen[at] = cast;
        }
        self.kept = upto;
    }

    /// These batches are planned: the optimal policy looks past them.
    fn forget_seen(&mut self, casts: &[PreparedBatch]) {
        if self.settings.policy != Policy::Optimal {
            return;
        }
        let first = self.batch + 1 - casts.len() as u64;
        for (cast, number) in casts.iter().zip(first..) {
            for key in cast.keys() {
                if let Some(batches) = self.upcoming.get_mut(&key) {
                    *batches &= !(1 << (number % 64));
                    if *batches == 0 {
                        self.upcoming.remove(&key);
                    }
                }
            }
        }
    }

    /// The slots of a batch whose rows are all placed.
    fn slots_of(&self, cast: &PreparedBatch) -> Vec<u32> {
        let find = |key: Key| self.holds[self.tables[key.table().index()].0].find(key);
        cast.keys().map(|key| find(key).unwrap_or(NO_SLOT)).collect()
    }
}
