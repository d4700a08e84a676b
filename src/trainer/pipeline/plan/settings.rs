//! How Plan plans, how far it may, and what it has done.

use std::sync::Arc;

use crate::trainer::pipeline::policy::Policy;
use crate::trainer::pipeline::use_counts::UseCounts;

/// How far the stages can be apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Items before the one in Plan whose rows may not leave: those that Collect can be ahead of Train.
    pub past: u64,
    /// Batches after it whose rows may not leave: those that Collect can be ahead of Insert.
    pub future: u64,
}

impl Windows {
    /// Of stages between any two of which `buffered` items wait. With none, three and two, as in the paper.
    #[must_use]
    pub(crate) fn of(buffered: usize) -> Self {
        // From Collect to Train there are three handovers and from Collect to Insert two. At each, besides
        // those that wait there, one item has left a stage and has not been taken by the next one.
        let behind = |handovers: u64| handovers * (1 + buffered as u64);
        Self { past: behind(3), future: behind(2) }
    }
}

/// What Plan has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanStats {
    /// Rows of batches that were in the scratchpad.
    pub hits: u64,
    /// Rows that came in.
    pub fills: u64,
    /// Rows that left.
    pub evictions: u64,
    /// Rows that came in before the first batch, because they are frequent.
    pub filled_before: u64,
    /// How often Plan waited for batches to train.
    pub bubbles: u64,
    /// Batches that were split.
    pub splits: u64,
    /// How often fewer batches were planned together than asked for, with more at hand.
    pub shrinks: u64,
}

/// How Plan plans.
#[derive(Clone, Debug)]
pub(crate) struct PlanSettings {
    /// Who leaves first.
    pub policy: Policy,
    /// What the random policy draws from.
    pub seed: u64,
    /// Batches that are planned together; at least 1.
    pub ahead: usize,
    /// The windows.
    pub windows: Windows,
    /// Words of records that an item moves in, and out, at most.
    pub item_words: usize,
    /// Whether an item may be planned before the one before has trained.
    pub overlap: bool,
    /// How often each row is used, where that is known and the policy asks for it.
    pub frequencies: Option<Arc<UseCounts>>,
}
