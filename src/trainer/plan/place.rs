//! Plan's decisions about slots: which rows are there, which come in, what leaves for them, and how long to wait where there
//! is no room (`plan` says why).

use super::{PlanEnds, Planner};
use crate::device::host::slots::NO_SLOT;
use crate::trainer::TrainError;
use crate::trainer::headway::Headway;
use crate::trainer::hold::{Hold, Key, KeyMap, TOGETHER};
use crate::trainer::item::{Item, Work};
use crate::types::TableId;

/// Where the rows of a part of the work are.
pub(super) struct Placed {
    /// Of each row.
    pub slots: Vec<u32>,
    /// (what comes in, its slot, what leaves).
    moves: Vec<(Key, u32, Option<Key>)>,
    /// How many of them each item makes.
    cuts: Vec<usize>,
    /// Whether all must have trained before anything more is planned.
    pub barrier: bool,
}

impl Placed {
    /// How many of the `rows` that were placed were there already.
    pub fn hits(&self, rows: usize) -> u64 {
        rows as u64 - self.fills()
    }

    /// How many come in.
    pub fn fills(&self) -> u64 {
        self.moves.len() as u64
    }
}

impl Planner {
    /// Finds or makes a slot for each of these rows, which are distinct and fit: rows of the batches that were planned last.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when the pipeline has ended.
    pub(super) fn place(&mut self, keys: &[Key], headway: &Headway) -> Result<Placed, TrainError> {
        let item = self.item + 1;
        let (mut slots, mut missing) = (Vec::with_capacity(keys.len()), Vec::new());
        let mut lacks = vec![0; self.holds.len()];
        for (size, keys) in by_size(&self.tables, keys) {
            let hold = &mut self.holds[size];
            for &slot in hold.find_all(keys, &mut [0; TOGETHER]) {
                if slot != NO_SLOT {
                    hold.touch(slot, item);
                }
                slots.push(slot);
            }
            let before = missing.len();
            let found = slots[slots.len() - keys.len()..].iter();
            missing.extend(found.zip(keys).filter(|(slot, _)| **slot == NO_SLOT).map(|(_, key)| *key));
            lacks[size] += missing.len() - before;
        }
        self.expire(item.saturating_sub(1 + self.settings.windows.past));
        let barrier = self.make_room(&lacks, item, headway)?;
        let cuts = self.cut(&missing);
        let last = self.item + cuts.len() as u64;
        self.holds.iter_mut().for_each(|hold| hold.defer(item, last));
        let mut moves = Vec::with_capacity(missing.len());
        for (size, keys) in by_size(&self.tables, &missing) {
            self.holds[size]
                .take_all(keys, (last, self.batch), |key, slot, old| moves.push((key, slot, old)));
        }
        // There is room: `make_room` has made it, or all rows together would not fit.
        if moves.len() < missing.len() {
            return Err(TrainError::Stopped);
        }
        let lacking = slots.iter_mut().filter(|slot| **slot == NO_SLOT);
        lacking.zip(&moves).for_each(|(slot, &(_, taken, _))| *slot = taken);
        self.stats.evictions += moves.iter().filter(|(_, _, victim)| victim.is_some()).count() as u64;
        self.stats.fills += moves.len() as u64;
        Ok(Placed { slots, moves, cuts, barrier })
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

    pub(super) fn expire(&mut self, item: u64) {
        let Self { holds, upcoming, batch, .. } = self;
        let batch = *batch;
        let next = |key: Key| if upcoming.is_empty() { 0 } else { next_use(upcoming, key, batch) };
        holds.iter_mut().for_each(|hold| hold.expire(item, batch, next));
    }

    /// Makes sure that so many slots of each size can be had, by a bubble if need be. Gives whether rows that coming batches
    /// need must go.
    fn make_room(&mut self, missing: &[usize], item: u64, headway: &Headway) -> Result<bool, TrainError> {
        let lacking = |holds: &[Hold]| holds.iter().zip(missing).any(|(hold, &n)| hold.available() < n);
        let mut expired = item.saturating_sub(1 + self.settings.windows.past);
        if !lacking(&self.holds) {
            return Ok(false);
        }
        self.stats.bubbles += 1;
        if self.stats.bubbles == 1 {
            tracing::warn!("scratchpad: the window does not fit; Plan waits for batches to train");
        }
        // From here on the past window does not keep what came in for the future one.
        self.marked = 0;
        self.mark();
        while lacking(&self.holds) && expired + 1 < item {
            expired += 1;
            self.expire(expired);
        }
        let barrier = lacking(&self.holds);
        for (hold, &count) in self.holds.iter_mut().zip(missing) {
            let lacks = count.saturating_sub(hold.available());
            hold.release(lacks, item, self.batch);
        }
        headway.wait(expired)?;
        Ok(barrier)
    }

    /// Sends these rows on their way, the last item with the work.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] when the pipeline has ended.
    pub(super) fn emit(
        &mut self,
        placed: &Placed,
        work: Work,
        ends: &mut PlanEnds<'_>,
    ) -> Result<(), TrainError> {
        let (mut rest, mut work) = (&placed.moves[..], Some(work));
        for (at, &count) in placed.cuts.iter().enumerate() {
            let width = |table: TableId| self.tables[table.index()].1;
            let (now, later) = rest.split_at(count);
            rest = later;
            let (mut fills, mut evictions) = ends.used.try_recv().unwrap_or_default();
            let mut rows: Vec<_> = now.iter().map(|&(key, slot, _)| (key, slot)).collect();
            fills.set(&mut rows, width);
            let mut rows: Vec<_> = now.iter().filter_map(|&(_, slot, old)| Some((old?, slot))).collect();
            evictions.set(&mut rows, width);
            let work = if at + 1 == placed.cuts.len() { work.take() } else { None };
            self.item += 1;
            let item =
                Item { number: self.item, fills, evictions, berth: None, work: work.unwrap_or(Work::Move) };
            ends.items.send(item).map_err(|_| TrainError::Stopped)?;
        }
        Ok(())
    }
}

/// Rows in the same order, some at a time, with which size of slots they need.
pub(super) fn by_size<'k>(
    tables: &'k [(usize, usize)],
    keys: &'k [Key],
) -> impl Iterator<Item = (usize, &'k [Key])> + use<'k> {
    let size = |key: &Key| tables[key.table().index()].0;
    let of_table = keys.chunk_by(|a, b| a.table() == b.table());
    of_table.flat_map(move |keys| keys.chunks(TOGETHER).map(move |keys| (size(&keys[0]), keys)))
}

/// How many batches after `batch` the row is needed next, as far as is seen; 0 where it is not.
pub(super) fn next_use(upcoming: &KeyMap<u64>, key: Key, batch: u64) -> u64 {
    let batches = upcoming.get(&key).copied().unwrap_or(0);
    match batches.rotate_right(((batch + 1) % 64) as u32) {
        0 => 0,
        ahead => u64::from(ahead.trailing_zeros()) + 1,
    }
}
