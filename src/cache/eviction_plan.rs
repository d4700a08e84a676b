//! What an eviction is to do next, decided alike for every device.
//!
//! Two things start one: the pool or the index is past its high watermark, and then the coldest entries go
//! until both are at the low one; or a row size found no slot although there is space, because it lies in slabs
//! of other sizes, and then the slabs with most of it are emptied, so that they can change their size.

use std::sync::atomic::{AtomicU64, Ordering};

use super::epoch::Epochs;
use super::policy::{Fill, Watermarks};
use super::slots::{Class, Slots};

/// The share of the slabs that are emptied at once for another size.
const EMPTIED: usize = 64;

/// What is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Goal {
    #[default]
    Rest,
    /// Put out the coldest entries down to the low watermark.
    Lower,
    /// Put out what lies in draining slabs, in so many more buckets.
    Empty(u64),
}

/// What is being done.
#[derive(Debug, Default)]
pub(crate) struct EvictionPlan {
    pub goal: Goal,
    /// When a row size was first seen to be starved while slots were waiting for their readers.
    starved_at: Option<u64>,
}

/// What a cache stands under.
pub(crate) struct Pressure<'a> {
    pub fill: Fill,
    pub watermarks: &'a Watermarks,
    /// Slots that wait for batches to finish.
    pub waiting: usize,
    /// A class that found no slot, plus one.
    pub starved: &'a AtomicU64,
    pub slots: &'a Slots,
    pub epochs: &'a Epochs,
    /// Buckets of the index.
    pub buckets: u64,
}

impl EvictionPlan {
    /// Goes on with what was begun, or chooses what to do.
    pub(crate) fn choose(&mut self, strain: &Pressure<'_>) {
        let Pressure { fill, watermarks, waiting, starved, slots, epochs, buckets } = *strain;
        if self.goal == Goal::Lower && fill.excess(watermarks) == 0.0 {
            self.goal = Goal::Rest;
        }
        if self.goal != Goal::Rest {
            return;
        }
        if fill.crosses(watermarks) {
            self.goal = Goal::Lower;
            return;
        }
        let class = starved.load(Ordering::Relaxed);
        if class == 0 || slots.has_room(Class((class - 1) as u16)) {
            starved.store(0, Ordering::Relaxed);
            self.starved_at = None;
            return;
        }
        // What waits may be all that is missing: see first whether it is, when it is free.
        let since = *self.starved_at.get_or_insert_with(|| epochs.tag());
        if waiting > 0 && epochs.oldest() <= since {
            return;
        }
        starved.store(0, Ordering::Relaxed);
        self.starved_at = None;
        self.goal = match slots.drain((slots.shape().slabs / EMPTIED).max(1)) {
            true => Goal::Empty(buckets),
            false => Goal::Lower,
        };
    }
}
