//! ScratchPipe's Hit-Map (section IV-D): the slot that holds a row.
//!
//! A bucket is one u64: the row's tag and the slot. Equal tags do not mean equal rows, so callers compare
//! the row itself, which is in the slot's bookkeeping (`slot_directory`).

use bytemuck::{Pod, Zeroable};

use crate::mem::probe_table::{Bucket, ProbeTable, Tag};

pub(crate) type HitMap = ProbeTable<SlotBucket>;

/// The tag in the high 32 bits, slot + 1 in the low 32 bits; 0 if empty.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct SlotBucket(u64);

impl SlotBucket {
    /// `slot` is below 2^32 - 1.
    #[inline(always)]
    pub(crate) fn new(tag: Tag, slot: u32) -> Self {
        Self(u64::from(tag.0) << 32 | u64::from(slot + 1))
    }

    /// The slot of a bucket that is not empty.
    #[inline(always)]
    pub(crate) fn slot(self) -> u32 {
        (self.0 as u32).wrapping_sub(1)
    }
}

impl Bucket for SlotBucket {
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.0 == 0
    }

    #[inline(always)]
    fn tag(&self) -> Tag {
        Tag((self.0 >> 32) as u32)
    }
}
