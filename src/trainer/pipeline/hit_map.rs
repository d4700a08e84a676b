//! In which slot a row is: the table behind ScratchPipe's Hit-Map (section IV-D).
//!
//! Plan asks for all rows of a batch, and each answer lies in a line of memory that no processor keeps near. So a bucket
//! is one word, a lookup touches one line of the table, and that line is asked for some turns before (`SlotDirectory::find_all`): the
//! memory then works on many at once.
//!
//! The table is open addressing with linear probing. A bucket has half of its row's hash, the *tag*, and the slot. The tag
//! also says where its run begins, so that taking a bucket out moves those behind it up and leaves no mark behind
//! (Knuth, volume 3, section 6.4, algorithm R). Equal tags do not mean equal rows: whoever asks compares the row.

use crate::mem::prefetch::prefetch_line;
use crate::mem::{Huge, OutOfHostMemory};

/// Slots by rows.
#[derive(Debug)]
pub(crate) struct HitMap {
    /// Tag (high 32 bits) and slot + 1; 0 where there is none.
    buckets: Huge<u64>,
}

/// Half of a row's hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag(u32);

impl Tag {
    /// Of a hash, all bits of which are as good as any.
    #[inline(always)]
    pub(crate) fn of(hash: u64) -> Self {
        Self((hash >> 32) as u32)
    }
}

/// A bucket's word.
#[derive(Clone, Copy)]
struct Bucket(u64);

impl Bucket {
    #[inline(always)]
    fn slot(self) -> Option<u32> {
        (self.0 as u32).checked_sub(1)
    }

    #[inline(always)]
    fn tag(self) -> Tag {
        Tag::of(self.0)
    }
}

impl HitMap {
    /// For up to `count` slots, below 2^32 - 1.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn new(count: usize) -> Result<Self, OutOfHostMemory> {
        // Half of them stay empty: a run then has two or three buckets.
        Ok(Self { buckets: Huge::zeroed(2 * count + 1)? })
    }

    /// Bytes for each slot.
    pub(crate) const fn bytes_per_slot() -> usize {
        2 * size_of::<u64>()
    }

    /// No row is anywhere.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(0);
    }

    /// Asks memory for the bucket in which the run of the tag begins.
    #[inline(always)]
    pub(crate) fn prefetch(&self, tag: Tag) {
        prefetch_line(&raw const self.buckets[self.home(tag)]);
    }

    /// The slot of a row with this tag of which `is` says that it is the one.
    #[inline]
    pub(crate) fn find(&self, tag: Tag, is: impl Fn(u32) -> bool) -> Option<u32> {
        self.place(tag, is).and_then(|at| Bucket(self.buckets[at]).slot())
    }

    /// The row of this tag is in the slot from now on. There is room for as many rows as slots.
    #[inline]
    pub(crate) fn insert(&mut self, tag: Tag, slot: u32) {
        let mut at = self.home(tag);
        while self.buckets[at] != 0 {
            at = self.after(at);
        }
        self.buckets[at] = u64::from(tag.0) << 32 | u64::from(slot + 1);
    }

    /// The row of this tag is in the slot no more.
    #[inline]
    pub(crate) fn remove(&mut self, tag: Tag, slot: u32) {
        let Some(mut hole) = self.place(tag, |found| found == slot) else { return };
        let mut at = self.after(hole);
        while self.buckets[at] != 0 {
            let home = self.home(Bucket(self.buckets[at]).tag());
            // It may move up as far as where its run begins.
            if self.distance(home, at) >= self.distance(hole, at) {
                self.buckets[hole] = self.buckets[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.buckets[hole] = 0;
    }

    /// Where the bucket is.
    #[inline]
    fn place(&self, tag: Tag, is: impl Fn(u32) -> bool) -> Option<usize> {
        let mut at = self.home(tag);
        loop {
            let bucket = Bucket(self.buckets[at]);
            let slot = bucket.slot()?;
            if bucket.tag() == tag && is(slot) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    #[inline(always)]
    fn home(&self, tag: Tag) -> usize {
        ((u64::from(tag.0) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline(always)]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// From one place to another, forward.
    #[inline(always)]
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }
}

#[cfg(test)]
mod tests;
