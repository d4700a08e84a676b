//! What Plan calls a row.

use bytemuck::{Pod, Zeroable};

use super::hit_map::Tag;
use crate::mem::mix64;
use crate::types::TableId;

/// A table and one of its rows, in one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Key(u64);

/// Bits of a key that are the row's.
const ROW_BITS: u32 = 40;

impl Key {
    /// Tables and rows of which there may be keys.
    pub(crate) const LIMITS: (usize, u64) = (1 << (u64::BITS - ROW_BITS), 1 << ROW_BITS);

    /// Of a row; both within [`Self::LIMITS`].
    #[inline]
    pub(crate) fn new(table: TableId, row: u64) -> Self {
        debug_assert!(row < Self::LIMITS.1 && table.index() < Self::LIMITS.0);
        Self(u64::from(table.0) << ROW_BITS | row)
    }

    /// The table.
    #[inline]
    pub(crate) fn table(self) -> TableId {
        TableId((self.0 >> ROW_BITS) as u32)
    }

    /// The row.
    #[inline]
    pub(crate) fn row(self) -> u64 {
        self.0 & (Self::LIMITS.1 - 1)
    }

    /// It as a number.
    #[inline(always)]
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// What the Hit-Map keeps of it.
    #[inline(always)]
    pub(crate) fn tag(self) -> Tag {
        Tag::of(mix64(self.0))
    }
}
