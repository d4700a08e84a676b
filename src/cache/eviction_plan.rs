//! Decides what an eviction does next, for caches on the host and on a device.
//!
//! An eviction has one of two reasons. If the pool or the index is above its high watermark, the coldest
//! entries are evicted until both are at the low one. If a row size finds no slot although there is free
//! space in slabs of other sizes, the slabs with most free space are emptied, so that they can change their
//! row size.

use std::sync::atomic::Ordering;

use super::common::Common;
use super::policy::Fill;
use super::slabs::{Class, SlotAllocator};

/// Of every 64 slabs, one is emptied at a time, so that it can change its row size.
const SLABS_PER_DRAIN: usize = 64;

/// The goal of the next eviction steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Goal {
    #[default]
    Idle,
    /// Evict the coldest entries down to the low watermark.
    EvictCold,
    /// Evict the rows of draining slabs, in this many more buckets.
    DrainSlabs(u64),
}

/// The current goal, and what the next choice depends on.
#[derive(Debug, Default)]
pub(crate) struct EvictionPlan {
    pub goal: Goal,
    /// The epoch tag (`epoch.rs`) of the first step that found a row size without slots. The slots that were
    /// retired before are free once all batches up to the tag have finished.
    starved_at: Option<u64>,
}

impl EvictionPlan {
    /// Keeps the current goal, or chooses a new one. `waiting` retired slots wait for batches to finish.
    pub(crate) fn choose(&mut self, cache: &Common, fill: &Fill, slots: &SlotAllocator, waiting: usize) {
        let Common { starved, epochs, .. } = cache;
        if self.goal == Goal::EvictCold && fill.excess() == 0.0 {
            self.goal = Goal::Idle;
        }
        if self.goal != Goal::Idle {
            return;
        }
        if fill.crosses() {
            self.goal = Goal::EvictCold;
            return;
        }
        let class = starved.load(Ordering::Relaxed);
        if class == 0 || slots.has_room(Class((class - 1) as u16)) {
            starved.store(0, Ordering::Relaxed);
            self.starved_at = None;
            return;
        }
        // The waiting slots may be enough: check again when their batches have finished.
        let since = *self.starved_at.get_or_insert_with(|| epochs.tag());
        if waiting > 0 && epochs.oldest() <= since {
            return;
        }
        starved.store(0, Ordering::Relaxed);
        self.starved_at = None;
        self.goal = match slots.drain((slots.shape().slabs / SLABS_PER_DRAIN).max(1)) {
            true => Goal::DrainSlabs(cache.layout.buckets as u64),
            false => Goal::EvictCold,
        };
    }
}
