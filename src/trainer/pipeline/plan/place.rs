//! Plan's decisions about slots: which rows are there, which come in, what leaves for them, and how long to wait where there
//! is no room (`plan` says why).

use std::collections::HashSet;
use std::mem::take;

use super::{PlanEnds, Planner};
use crate::mem::NumberMap;
use crate::trainer::TrainError;
use crate::trainer::pipeline::item::{Item, Work};
use crate::trainer::pipeline::key::Key;
use crate::trainer::pipeline::slot_directory::{SlotDirectory, TOGETHER};
use crate::trainer::pipeline::slots::NO_SLOT;
use crate::types::TableId;

/// Where the rows of a part of the work are.
pub(crate) struct Placed {
    /// Of each row.
    pub slots: Vec<u32>,
    /// (what comes in, its slot, what leaves).
    moves: Vec<(Key, u32, Option<Key>)>,
    /// How many of them each item makes.
    cuts: Vec<usize>,
    /// Whether all must have trained before anything more is planned.
    pub barrier: bool,
}

/// Lists that each batch has, in memory that the last one had.
#[derive(Default)]
pub(crate) struct Lists {
    /// The rows of the batches that are planned.
    pub keys: Vec<Key>,
    /// Rows to look up, and where each stands among those that were asked for.
    unknown: (Vec<Key>, Vec<u32>),
    missing: Vec<Key>,
    moves: Vec<(Key, u32, Option<Key>)>,
    /// Rows and slots of an item.
    rows: Vec<(Key, u32)>,
}

impl Placed {
    /// How many of the `rows` that were placed were there already.
    pub(crate) fn hits(&self, rows: usize) -> u64 {
        rows as u64 - self.fills()
    }

    /// How many come in.
    pub(crate) fn fills(&self) -> u64 {
        self.moves.len() as u64
    }
}

impl Planner {
    /// Finds or makes a slot for each of these rows, which are distinct and fit: rows of the batches that were planned last.
    /// With them come the slots that were found and kept before, as in [`Self::find`].
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when the pipeline has ended.
    pub(crate) fn place(
        &mut self,
        (keys, mut slots): (&[Key], Vec<u32>),
        ends: &PlanEnds<'_>,
    ) -> Result<Placed, TrainError> {
        self.find(keys.iter().copied(), &mut slots, self.batch);
        let lacking = slots.iter().zip(keys).filter(|(slot, _)| **slot == NO_SLOT);
        let mut missing = take(&mut self.lists.missing);
        missing.clear();
        missing.extend(lacking.map(|(_, key)| *key));
        self.expire((self.item + 1).saturating_sub(1 + self.settings.windows.past));
        let barrier = self.make_room(&missing, (keys, &slots), ends)?;
        let cuts = self.cut(&missing);
        let mut moves = take(&mut self.lists.moves);
        moves.clear();
        for (size, keys) in by_size(&self.tables, &missing) {
            self.holds[size].take_all(keys, self.batch, |key, slot, old| moves.push((key, slot, old)));
        }
        // There is room: `make_room` has made it, or all rows together would not fit.
        if moves.len() < missing.len() {
            return Err(TrainError::Stopped);
        }
        self.planned.push_back((self.batch, self.item + cuts.len() as u64));
        let lacking = slots.iter_mut().filter(|slot| **slot == NO_SLOT);
        lacking.zip(&moves).for_each(|(slot, &(_, taken, _))| *slot = taken);
        self.stats.evictions += moves.iter().filter(|(_, _, victim)| victim.is_some()).count() as u64;
        self.stats.fills += moves.len() as u64;
        self.lists.missing = missing;
        Ok(Placed { slots, moves, cuts, barrier })
    }

    /// The slots of these rows, [`NO_SLOT`] where there is none, which are kept for batch `batch`. Slots that
    /// were found and kept for it before are not looked up again; `slots` is empty where none were.
    pub(crate) fn find(&mut self, keys: impl Iterator<Item = Key>, slots: &mut Vec<u32>, batch: u64) {
        let (mut unknown, mut places) = take(&mut self.lists.unknown);
        unknown.clear();
        places.clear();
        for (at, key) in keys.enumerate() {
            if slots.get(at).is_none_or(|slot| *slot == NO_SLOT) {
                unknown.push(key);
                places.push(at as u32);
            }
        }
        if slots.is_empty() {
            slots.resize(unknown.len(), NO_SLOT);
        }
        let (mut found, mut each_place) = ([0; TOGETHER], places.iter());
        for (size, keys) in by_size(&self.tables, &unknown) {
            let hold = &mut self.holds[size];
            let found = hold.find_all(keys, &mut found);
            hold.keep(found, batch);
            found.iter().zip(&mut each_place).for_each(|(&slot, &at)| slots[at as usize] = slot);
        }
        self.lists.unknown = (unknown, places);
    }

    /// Cuts rows that come in into items, at least one. A row and the victim in its slot go with one item: the one is
    /// written when the other has been read.
    fn cut(&self, rows: &[Key]) -> Vec<usize> {
        let (mut cuts, mut words) = (vec![0], 0);
        for key in rows {
            let width = self.tables[key.table().index()].1;
            words += width;
            match cuts.last_mut() {
                Some(count) if *count == 0 || words <= self.settings.item_words => *count += 1,
                _ => (words, _) = (width, cuts.push(1)),
            }
        }
        cuts
    }

    /// Items up to `item` have left the past window.
    pub(crate) fn expire(&mut self, item: u64) {
        let Self { holds, upcoming, planned, batch, .. } = self;
        let left = planned.partition_point(|(_, last)| *last <= item);
        let Some((past, _)) = planned.drain(..left).next_back() else { return };
        let batch = *batch;
        let next = |key: Key| if upcoming.is_empty() { 0 } else { next_use(upcoming, key, batch) };
        holds.iter_mut().for_each(|hold| hold.expire(past, batch, next));
    }

    /// Makes sure that the missing rows can have slots, by a bubble if need be. `placed` are the rows that are placed, and their
    /// slots so far. Gives whether rows that coming batches need must go.
    fn make_room(
        &mut self,
        missing: &[Key],
        placed: (&[Key], &[u32]),
        ends: &PlanEnds<'_>,
    ) -> Result<bool, TrainError> {
        let mut lacks = vec![0; self.holds.len()];
        missing.iter().for_each(|key| lacks[self.tables[key.table().index()].0] += 1);
        let lacking =
            |holds: &[SlotDirectory]| holds.iter().zip(&lacks).any(|(hold, &n)| hold.available() < n);
        if !lacking(&self.holds) {
            return Ok(false);
        }
        self.stats.bubbles += 1;
        if self.stats.bubbles == 1 {
            tracing::warn!("scratchpad: the window does not fit; Plan waits for batches to train");
        }
        // From here on the past window does not keep what came in for the future one.
        self.kept = 0;
        self.keep();
        let mut expired = 0;
        while lacking(&self.holds)
            && let Some(&(_, last)) = self.planned.front()
        {
            expired = last;
            self.expire(expired);
        }
        let barrier = lacking(&self.holds);
        if barrier {
            self.release(&lacks, placed);
        }
        ends.wait(expired)?;
        Ok(barrier)
    }

    /// Rows that coming batches need leave, so that so many slots of each size can be had; but none that is `placed`.
    fn release(&mut self, lacks: &[usize], (keys, slots): (&[Key], &[u32])) {
        for (size, (hold, &count)) in self.holds.iter_mut().zip(lacks).enumerate() {
            let mine = |key: &Key| self.tables[key.table().index()].0 == size;
            let mine = keys.iter().zip(slots).filter(|(key, _)| mine(key));
            let placed: HashSet<u32> = mine.map(|(_, slot)| *slot).collect();
            hold.release(count.saturating_sub(hold.available()), self.batch, &placed);
        }
        self.seen.iter_mut().for_each(|cast| cast.slots.clear());
        self.kept = 0;
    }

    /// Sends these rows on their way, the last item with the work.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when the pipeline has ended.
    pub(crate) fn emit(
        &mut self,
        placed: Placed,
        work: Work,
        ends: &mut PlanEnds<'_>,
    ) -> Result<(), TrainError> {
        let (mut rest, mut work, mut rows) = (&placed.moves[..], Some(work), take(&mut self.lists.rows));
        for (at, &count) in placed.cuts.iter().enumerate() {
            let width = |table: TableId| self.tables[table.index()].1;
            let (now, later) = rest.split_at(count);
            rest = later;
            let (mut fills, mut evictions) = ends.spare.take();
            rows.clear();
            rows.extend(now.iter().map(|&(key, slot, _)| (key, slot)));
            fills.set(&mut rows, width);
            rows.clear();
            rows.extend(now.iter().filter_map(|&(_, slot, old)| Some((old?, slot))));
            evictions.set(&mut rows, width);
            let work = if at + 1 == placed.cuts.len() { work.take() } else { None };
            self.item += 1;
            let item =
                Item { number: self.item, fills, evictions, berth: None, work: work.unwrap_or(Work::Move) };
            ends.send(item)?;
        }
        (self.lists.rows, self.lists.moves) = (rows, placed.moves);
        Ok(())
    }
}

/// Rows in the same order, some at a time, with which size of slots they need.
pub(crate) fn by_size<'k>(
    tables: &'k [(usize, usize)],
    keys: &'k [Key],
) -> impl Iterator<Item = (usize, &'k [Key])> + use<'k> {
    let size = |key: &Key| tables[key.table().index()].0;
    let of_table = keys.chunk_by(|a, b| a.table() == b.table());
    of_table.flat_map(move |keys| keys.chunks(TOGETHER).map(move |keys| (size(&keys[0]), keys)))
}

/// How many batches after `batch` the row is needed next, as far as is seen; 0 where it is not.
pub(crate) fn next_use(upcoming: &NumberMap<Key, u64>, key: Key, batch: u64) -> u64 {
    let batches = upcoming.get(&key).copied().unwrap_or(0);
    match batches.rotate_right(((batch + 1) % 64) as u32) {
        0 => 0,
        ahead => u64::from(ahead.trailing_zeros()) + 1,
    }
}
