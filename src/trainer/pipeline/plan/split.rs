//! Splitting a batch whose rows do not all fit the scratchpad together.
//!
//! Only the embedding passes are split. Forward goes by groups of samples: the rows of a group come in and its input rows are
//! written. Then the dense layers run once over the whole batch. Backward goes by groups of rows: they come in once more,
//! and each is updated once, from all its gradients. So every sum is what it would have been, and the bytes are the same.
//!
//! The groups do not overlap: each is planned when the one before has trained, because there is no room for two.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::{PlanEnds, Planner};
use crate::trainer::TrainError;
use crate::trainer::pipeline::item::{PreparedBatch, Work};
use crate::trainer::pipeline::key::Key;
use crate::trainer::pipeline::scratchpad::rows_of_sample;
use crate::trainer::pipeline::slot_directory::SlotDirectory;

impl Planner {
    /// Plans a batch in groups.
    ///
    /// # Errors
    /// [`TrainError::Scratchpad`] where the rows of one sample do not fit; nothing of the batch is trained then.
    pub(crate) fn split(
        &mut self,
        mut whole: PreparedBatch,
        ends: &mut PlanEnds<'_>,
    ) -> Result<(), TrainError> {
        let groups = self.sample_groups(&whole)?;
        if self.stats.splits == 1 {
            let (samples, parts) = (whole.batch.samples, groups.len());
            tracing::warn!(
                "scratchpad: too small for a batch of {samples} samples, which is split in {parts}"
            );
        }
        // Each group finds its own.
        whole.slots.clear();
        let whole = Arc::new(whole);
        for group in groups {
            let mut part = PreparedBatch {
                batch: whole.batch.part(group.clone()),
                labels: whole.labels[group.clone()].to_vec(),
                ..PreparedBatch::default()
            };
            part.cast(&self.schema, &self.lookups)?;
            let keys: Vec<Key> = part.keys().collect();
            let work = |slots| {
                part.slots = slots;
                Work::Gather { part: Box::new(part), at: group.start, whole: whole.clone() }
            };
            self.plan_alone(&keys, work, ends)?;
        }
        let keys: Vec<Key> = whole.keys().collect();
        for rows in self.row_groups(&keys) {
            let work = |slots| Work::Update { whole: whole.clone(), rows: rows.clone(), slots };
            self.plan_alone(&keys[rows.clone()], work, ends)?;
        }
        // The next batch may need what left here.
        ends.wait(self.item)
    }

    /// Plans work on these rows when all before it has trained.
    fn plan_alone(
        &mut self,
        keys: &[Key],
        work: impl FnOnce(Vec<u32>) -> Work,
        ends: &mut PlanEnds<'_>,
    ) -> Result<(), TrainError> {
        ends.wait(self.item)?;
        // Nothing is kept any more for what has trained, nor for the batch, which no part needs all the rows of.
        self.planned.push_back((self.batch, self.item));
        self.expire(self.item);
        let mut placed = self.place((keys, Vec::new()), ends)?;
        let slots = std::mem::take(&mut placed.slots);
        self.stats.hits += placed.hits(keys.len());
        self.emit(placed, work(slots), ends)
    }

    /// Runs of samples whose rows fit together, as long as can be.
    fn sample_groups(&self, whole: &PreparedBatch) -> Result<Vec<Range<usize>>, TrainError> {
        let mut groups: Vec<Range<usize>> = vec![Range::default()];
        let mut room = Room::of(&self.holds);
        let (mut held, mut needed) = (HashSet::<Key>::new(), Vec::new());
        for sample in 0..whole.batch.samples {
            needed.clear();
            needed.extend(rows_of_sample(&self.schema, &self.lookups, &whole.batch, sample));
            needed.sort_unstable();
            needed.dedup();
            let more: Vec<Key> = needed.iter().filter(|key| !held.contains(key)).copied().collect();
            if !room.take(&self.tables, &more) {
                held.clear();
                room = Room::of(&self.holds);
                if !room.take(&self.tables, &needed) {
                    return Err(self.too_small(&needed));
                }
                groups.push(sample..sample);
            }
            held.extend(&needed);
            if let Some(group) = groups.last_mut() {
                group.end = sample + 1;
            }
        }
        groups.retain(|group| !group.is_empty());
        Ok(groups)
    }

    /// What is said of a sample that needs these rows, of whose size of slots there are too few.
    fn too_small(&self, needed: &[Key]) -> TrainError {
        let mut counts = vec![(0, 0); self.holds.len()];
        for key in needed {
            let (size, words) = self.tables[key.table().index()];
            counts[size] = (counts[size].0 + 1, words);
        }
        let short = counts.into_iter().zip(&self.holds).find(|((needed, _), hold)| *needed > hold.count());
        let ((needed, words), slots) = short.map_or(((0, 0), 0), |(of_size, hold)| (of_size, hold.count()));
        TrainError::Scratchpad { words, needed, slots }
    }

    /// Runs of rows that fit together, as long as can be.
    fn row_groups(&self, keys: &[Key]) -> Vec<Range<usize>> {
        let mut groups: Vec<Range<usize>> = Vec::new();
        let mut room = Room::of(&self.holds);
        for at in 0..keys.len() {
            match groups.last_mut() {
                Some(group) if room.take(&self.tables, &keys[at..=at]) => group.end = at + 1,
                _ => {
                    room = Room::of(&self.holds);
                    room.take(&self.tables, &keys[at..=at]);
                    groups.push(at..at + 1);
                }
            }
        }
        groups
    }
}

/// Slots of each size that a group has left.
pub(crate) struct Room(Vec<usize>);

impl Room {
    /// All of them.
    pub(crate) fn of(holds: &[SlotDirectory]) -> Self {
        Self(holds.iter().map(SlotDirectory::count).collect())
    }

    /// Takes a slot for each of the rows, or none where there are not enough.
    pub(crate) fn take(&mut self, tables: &[(usize, usize)], keys: &[Key]) -> bool {
        for (at, key) in keys.iter().enumerate() {
            let left = &mut self.0[tables[key.table().index()].0];
            if *left == 0 {
                keys[..at].iter().for_each(|key| self.0[tables[key.table().index()].0] += 1);
                return false;
            }
            *left -= 1;
        }
        true
    }
}
