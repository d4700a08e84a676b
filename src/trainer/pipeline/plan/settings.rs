//! The settings of Plan, its hazard windows, and its counts.

use std::sync::Arc;

use crate::trainer::pipeline::policy::ScratchpadPolicy;
use crate::trainer::pipeline::use_counts::UseCounts;

/// The items around the planned item whose rows must not be victims: how far stages can be apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HazardWindows {
    /// How many items before the planned one protect their rows from eviction. It is the most items that
    /// Collect can be ahead of Train.
    pub past_items: u64,
    /// How many items after the planned one protect their rows from eviction. It is the most items that
    /// Collect can be ahead of Insert.
    pub future_items: u64,
}

impl HazardWindows {
    /// The windows when up to `buffered` items wait between any two stages. For 0 they are three and two
    /// items, as in ScratchPipe.
    #[must_use]
    pub(crate) fn of(buffered: usize) -> Self {
        // There are three handovers from Collect to Train, and two from Collect to Insert. At each handover
        // `buffered` items may wait, and the earlier stage may hold one more that it cannot send yet.
        let behind = |handovers: u64| handovers * (1 + buffered as u64);
        Self { past_items: behind(3), future_items: behind(2) }
    }
}

/// Counts of what Plan has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanStats {
    /// Rows of batches that already were in the scratchpad.
    pub hits: u64,
    /// Rows that were fetched for batches.
    pub fills: u64,
    /// Rows that were evicted.
    pub evictions: u64,
    /// Frequent rows that were fetched before the first batch.
    pub filled_before: u64,
    /// How often Plan waited for batches to train.
    pub bubbles: u64,
    /// Batches that were split.
    pub splits: u64,
    /// How often fewer batches were planned together than `lookahead` because more did not fit.
    pub shrinks: u64,
}

/// The settings of Plan.
#[derive(Clone, Debug)]
pub(crate) struct PlanSettings {
    pub policy: ScratchpadPolicy,
    /// Seed of the random policy.
    pub seed: u64,
    /// Batches that are planned together; at least 1.
    pub lookahead: usize,
    pub windows: HazardWindows,
    /// The most words of records that an item may move in each direction.
    pub item_words: usize,
    /// Whether an item may be planned before the previous item has trained.
    pub overlap: bool,
    /// How often a data set uses each row, for LFU; `None` if unknown.
    pub frequencies: Option<Arc<UseCounts>>,
}
