//! Splitting a batch whose rows do not all fit in the scratchpad at the same time.
//!
//! Only the embedding passes are split. The forward pass works on groups of samples: the rows of a group are
//! fetched and its input rows are written. Then the dense layers run once over the whole batch. The backward
//! pass works on groups of rows: they are fetched again, and each row is updated once, from all its
//! gradients. So every sum is the same as without a split, and so are the bytes.
//!
//! Groups do not overlap: a group is planned after the previous group has trained, because there is no room
//! for both.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::{PlanChannels, PlannedUnit, Planner};
use crate::trainer::TrainError;
use crate::trainer::pipeline::item::{PreparedBatch, Work};
use crate::trainer::pipeline::scratchpad::{SlotLayout, rows_of_sample};
use crate::trainer::pipeline::slot_directory::SlotDirectory;
use crate::types::RowId;

impl Planner {
    /// Plans a batch in groups.
    ///
    /// # Errors
    /// [`TrainError::Scratchpad`] if the rows of one sample do not fit. Nothing of the batch is trained
    /// then.
    pub(crate) fn split(
        &mut self,
        mut whole: PreparedBatch,
        channels: &mut PlanChannels<'_>,
    ) -> Result<(), TrainError> {
        let groups = self.sample_groups(&whole)?;
        if self.stats.splits == 1 {
            let (samples, parts) = (whole.batch.samples, groups.len());
            tracing::warn!(
                "scratchpad: too small for a batch of {samples} samples, which is split in {parts}"
            );
        }
        // Each group finds its own slots.
        whole.slots.clear();
        let whole = Arc::new(whole);
        for group in groups {
            let mut part = PreparedBatch {
                batch: whole.batch.part(group.clone()),
                labels: whole.labels[group.clone()].to_vec(),
                ..PreparedBatch::default()
            };
            part.prepare(&self.schema, &self.lookups)?;
            let rows: Vec<RowId> = part.rows().collect();
            let work = |slots| {
                part.slots = slots;
                Work::Gather { part: Box::new(part), at: group.start, whole: whole.clone() }
            };
            self.plan_alone(&rows, work, channels)?;
        }
        let all: Vec<RowId> = whole.rows().collect();
        for rows in self.row_groups(&all) {
            let work = |slots| Work::Update { whole: whole.clone(), rows: rows.clone(), slots };
            self.plan_alone(&all[rows.clone()], work, channels)?;
        }
        // The next batch may need rows that were evicted here.
        channels.wait(self.item)
    }

    /// Plans work on these rows, after all earlier items have trained.
    fn plan_alone(
        &mut self,
        rows: &[RowId],
        work: impl FnOnce(Vec<u32>) -> Work,
        channels: &mut PlanChannels<'_>,
    ) -> Result<(), TrainError> {
        channels.wait(self.item)?;
        // All items have trained, so none of them needs its rows. No group of this batch needs the rows of
        // another group.
        self.planned.push_back(PlannedUnit { last_batch: self.batch, last_item: self.item });
        self.expire(self.item);
        let mut placed = self.place(rows, Vec::new(), channels)?;
        let slots = std::mem::take(&mut placed.slots);
        self.stats.hits += placed.hits(rows.len());
        self.emit(placed, work(slots), channels)
    }

    /// Divides the samples into the longest runs that the scratchpad has room for.
    fn sample_groups(&self, whole: &PreparedBatch) -> Result<Vec<Range<usize>>, TrainError> {
        let mut groups: Vec<Range<usize>> = vec![Range::default()];
        let mut budget = SlotBudget::of(&self.directories);
        let (mut of_group, mut needed) = (HashSet::<RowId>::new(), Vec::new());
        for sample in 0..whole.batch.samples {
            needed.clear();
            needed.extend(rows_of_sample(&self.schema, &self.lookups, &whole.batch, sample));
            needed.sort_unstable();
            needed.dedup();
            let more: Vec<RowId> = needed.iter().filter(|row| !of_group.contains(row)).copied().collect();
            if !budget.take(&self.tables, &more) {
                of_group.clear();
                budget = SlotBudget::of(&self.directories);
                if !budget.take(&self.tables, &needed) {
                    return Err(self.too_small(&needed));
                }
                groups.push(sample..sample);
            }
            of_group.extend(&needed);
            if let Some(group) = groups.last_mut() {
                group.end = sample + 1;
            }
        }
        groups.retain(|group| !group.is_empty());
        Ok(groups)
    }

    /// The error for a sample that needs these rows. It is about the first slot size with too few slots.
    fn too_small(&self, needed: &[RowId]) -> TrainError {
        let mut counts = vec![0; self.directories.len()];
        needed.iter().for_each(|&row| counts[SlotLayout::of(&self.tables, row).size] += 1);
        let slots = self.directories.iter().map(SlotDirectory::count);
        let short = counts.into_iter().zip(slots).enumerate().find(|(_, (needed, slots))| needed > slots);
        let (size, (needed, slots)) = short.unwrap_or_default();
        let words = self.tables.iter().find(|layout| layout.size == size).map_or(0, |layout| layout.words);
        TrainError::Scratchpad { words, needed, slots }
    }

    /// Divides the rows into the longest runs that the scratchpad has room for.
    fn row_groups(&self, rows: &[RowId]) -> Vec<Range<usize>> {
        let mut groups: Vec<Range<usize>> = Vec::new();
        let mut budget = SlotBudget::of(&self.directories);
        for at in 0..rows.len() {
            match groups.last_mut() {
                Some(group) if budget.take(&self.tables, &rows[at..=at]) => group.end = at + 1,
                _ => {
                    budget = SlotBudget::of(&self.directories);
                    budget.take(&self.tables, &rows[at..=at]);
                    groups.push(at..at + 1);
                }
            }
        }
        groups
    }
}

/// The number of slots of each size that a group has left.
pub(crate) struct SlotBudget(Vec<usize>);

impl SlotBudget {
    /// A budget of all slots.
    pub(crate) fn of(directories: &[SlotDirectory]) -> Self {
        Self(directories.iter().map(SlotDirectory::count).collect())
    }

    /// Takes a slot for each of the rows. If there are too few, it takes none and returns false.
    pub(crate) fn take(&mut self, tables: &[SlotLayout], rows: &[RowId]) -> bool {
        let size = |row: &RowId| SlotLayout::of(tables, *row).size;
        for (at, row) in rows.iter().enumerate() {
            let left = &mut self.0[size(row)];
            if *left == 0 {
                rows[..at].iter().for_each(|row| self.0[size(row)] += 1);
                return false;
            }
            *left -= 1;
        }
        true
    }
}
