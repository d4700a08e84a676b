//! A hash table for lookups that wait for memory: open addressing with linear probing, in huge pages, with a
//! prefetch of the line that a lookup reads first.
//!
//! A batch looks up tens of thousands of rows, and few of their buckets are in a processor's cache. A caller
//! prefetches the bucket of a later row while it works on an earlier one, so that memory serves many lookups
//! at once. The standard library's map cannot prefetch. A third of the buckets or more stay empty, so a probe
//! reads two or three neighbours, mostly of one line. A removal moves later buckets of the run back into the
//! gap, so it leaves no tombstone (Knuth, The Art of Computer Programming 3, section 6.4, algorithm R).

use bytemuck::Pod;

use super::prefetch::prefetch_line;
use super::{Huge, OutOfHostMemory, mix64};

/// High half of a key's hash. It decides where the key's run of buckets begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(pub u32);

impl Tag {
    /// The tag of a key.
    #[inline(always)]
    pub(crate) fn of(key: u64) -> Self {
        Self((mix64(key) >> 32) as u32)
    }
}

/// A bucket of a [`ProbeTable`]. A bucket of zeros is empty.
pub(crate) trait Bucket: Pod {
    fn is_empty(&self) -> bool;

    /// The tag of the bucket's key. Not called on an empty bucket.
    fn tag(&self) -> Tag;
}

/// Buckets by tag. Several buckets may have the same tag, so callers compare keys.
#[derive(Debug)]
pub(crate) struct ProbeTable<B> {
    buckets: Huge<B>,
}

impl<B: Bucket> ProbeTable<B> {
    /// Bytes of memory per entry of the capacity.
    pub(crate) const BYTES_PER_ENTRY: usize = 2 * size_of::<B>();

    /// An empty table for up to `capacity` entries.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn new(capacity: usize) -> Result<Self, OutOfHostMemory> {
        Self::with_buckets(2 * capacity + 1)
    }

    /// An empty table for fewer entries than it has buckets: a probe ends at an empty one.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn with_buckets(buckets: usize) -> Result<Self, OutOfHostMemory> {
        Ok(Self { buckets: Huge::zeroed(buckets)? })
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// Gets the memory from the system now.
    pub(crate) fn prefault(&self) {
        self.buckets.prefault();
    }

    /// Removes all entries.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(B::zeroed());
    }

    /// Prefetches the first bucket that [`Self::find`] reads.
    #[inline(always)]
    pub(crate) fn prefetch(&self, tag: Tag) {
        prefetch_line(&raw const self.buckets[self.home(tag)]);
    }

    /// The first bucket of the tag's run for which `matches` is true.
    #[inline]
    pub(crate) fn find(&self, tag: Tag, matches: impl Fn(&B) -> bool) -> Option<&B> {
        self.position(tag, matches).map(|at| &self.buckets[at])
    }

    /// Adds an entry. Before, the table must have fewer entries than its capacity.
    #[inline]
    pub(crate) fn insert(&mut self, bucket: B) {
        self.replace(bucket, |_| false);
    }

    /// Writes an entry over the first one of its tag's run for which `matches` is true, or adds it.
    #[inline]
    pub(crate) fn replace(&mut self, bucket: B, matches: impl Fn(&B) -> bool) {
        let mut at = self.home(bucket.tag());
        while !self.buckets[at].is_empty() && !matches(&self.buckets[at]) {
            at = self.after(at);
        }
        self.buckets[at] = bucket;
    }

    /// All entries, by about the order of their tags.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &B> {
        self.buckets.iter().filter(|bucket| !bucket.is_empty())
    }

    /// Removes the entry that [`Self::find`] returns, if there is one.
    #[inline]
    pub(crate) fn remove(&mut self, tag: Tag, matches: impl Fn(&B) -> bool) {
        let Some(mut hole) = self.position(tag, matches) else { return };
        let mut at = self.after(hole);
        while !self.buckets[at].is_empty() {
            let home = self.home(self.buckets[at].tag());
            // A bucket may move back, but not before its home.
            if self.distance(home, at) >= self.distance(hole, at) {
                self.buckets[hole] = self.buckets[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.buckets[hole] = B::zeroed();
    }

    #[inline]
    fn position(&self, tag: Tag, matches: impl Fn(&B) -> bool) -> Option<usize> {
        let mut at = self.home(tag);
        loop {
            let bucket = &self.buckets[at];
            if bucket.is_empty() {
                return None;
            }
            if matches(bucket) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    /// The first bucket of the tag's run.
    #[inline(always)]
    fn home(&self, tag: Tag) -> usize {
        home(tag, self.buckets.len())
    }

    #[inline(always)]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// Steps forward from one bucket to another.
    #[inline(always)]
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }
}

/// The bucket at the tag's share of this many, of which there may be more than there are tags.
#[inline(always)]
fn home(tag: Tag, buckets: usize) -> usize {
    ((u128::from(tag.0) * buckets as u128) >> 32) as usize
}

#[cfg(test)]
mod tests;
