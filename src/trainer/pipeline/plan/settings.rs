//! How Plan plans, its windows, and what it has done.

use std::sync::Arc;

use crate::trainer::pipeline::policy::Policy;
use crate::trainer::pipeline::use_counts::UseCounts;

/// The items whose rows are no victims: how far stages can be apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HazardWindows {
    /// Items before the one in Plan: those that Collect can be ahead of Train.
    pub past_items: u64,
    /// Items after it: those that Collect can be ahead of Insert.
    pub future_items: u64,
}

impl HazardWindows {
    /// The windows with `buffered` items between any two stages. Without any they are three and two, as in
    /// the paper.
    #[must_use]
    pub(crate) fn of(buffered: usize) -> Self {
        // From Collect to Train there are three handovers, from Collect to Insert two. At each handover
        // `buffered` items wait, and one more has left a stage and has not reached the next one.
        let behind = |handovers: u64| handovers * (1 + buffered as u64);
        Self { past_items: behind(3), future_items: behind(2) }
    }
}

/// What Plan has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanStats {
    /// Rows of batches that were in the scratchpad.
    pub hits: u64,
    /// Rows of batches that came in.
    pub fills: u64,
    /// Rows that were evicted.
    pub evictions: u64,
    /// Frequent rows that came in before the first batch.
    pub filled_before: u64,
    /// How often Plan waited for batches to train.
    pub bubbles: u64,
    /// Batches that were split.
    pub splits: u64,
    /// How often fewer batches were planned together than `lookahead`, although more were at hand.
    pub shrinks: u64,
}

/// How Plan plans.
#[derive(Clone, Debug)]
pub(crate) struct PlanSettings {
    pub policy: Policy,
    /// Seed of the random policy.
    pub seed: u64,
    /// Batches that are planned together; at least 1.
    pub lookahead: usize,
    pub windows: HazardWindows,
    /// The most words of records that an item moves in, and out.
    pub item_words: usize,
    /// Whether an item may be planned before the one before it has trained.
    pub overlap: bool,
    /// How often a data set uses each row, for LFU; none if unknown.
    pub frequencies: Option<Arc<UseCounts>>,
}
