//! The rows that the deltas of a chain changed, in front of a table's base rows.
//!
//! A delta's rows are read from its mapped file. The overlay only says which delta holds the newest bytes of
//! a row: a hash table from the row's number to the delta and the position in it. It is built once, when the
//! version is opened, so its size is exact: 16 bytes an entry at a load of 0.7, which is 23 bytes a changed
//! row. Linear probing at this load reads one or two lines of the processor's cache.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::bytes::Bytes;
use super::table::State;
use crate::mem::prefetch::{PREFETCH_AHEAD, prefetch_line};
use crate::mem::{Huge, OutOfHostMemory, mix64};
use crate::pace::rested;

/// The changed rows of a table in one delta.
#[derive(Debug)]
pub(crate) struct DeltaRows {
    /// The numbers of the rows, ascending, as u64.
    pub keys: Bytes,
    /// The bytes of the rows, in the order of `keys`.
    pub weight: Bytes,
    /// Their optimizer states, in the same order. Empty if the delta was opened to be served.
    pub states: Vec<State>,
}

impl DeltaRows {
    pub(crate) fn keys(&self) -> &[u64] {
        // `Reader::keys` has checked the length and the alignment.
        bytemuck::try_cast_slice(self.keys.as_slice()).unwrap_or_default()
    }
}

/// Where the newest bytes of a row are.
#[derive(Clone, Copy)]
pub(crate) struct Place<'o> {
    pub delta: &'o DeltaRows,
    /// The position of the row in the delta.
    pub at: usize,
}

/// The newest place of every changed row of a table.
pub(crate) struct Overlay {
    buckets: Huge<Bucket>,
    rows: u64,
    /// Oldest first.
    deltas: Vec<Arc<DeltaRows>>,
}

/// An entry of the hash table; zeros if it is empty.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Bucket {
    /// The number of the row, plus 1.
    row: u64,
    /// The number of the delta in the upper bits, the position in the delta in the lower ones.
    place: u64,
}

/// Bits of a position in a delta.
const POSITION_BITS: u32 = 44;

impl Overlay {
    /// The overlay of these deltas, oldest first, each with ascending rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn new(deltas: Vec<Arc<DeltaRows>>) -> Result<Self, OutOfHostMemory> {
        let rows = newest(&deltas).count();
        // A bucket more than the entries, so that a probe always ends.
        let mut buckets = empty(rows)?;
        rested(newest(&deltas)).for_each(|(row, delta, at)| put(&mut buckets, row, place(delta, at)));
        Ok(Self { buckets, rows: rows as u64, deltas })
    }

    /// This overlay with a newer delta, which has ascending rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn with(&self, newer: Arc<DeltaRows>) -> Result<Self, OutOfHostMemory> {
        let keys = newer.keys();
        let is_new = |(at, &row): (usize, &u64)| {
            keys.get(at + PREFETCH_AHEAD).into_iter().for_each(|&ahead| self.prefetch(ahead));
            self.find(row).is_none()
        };
        let added = rested(keys.iter().enumerate()).filter(|&key| is_new(key)).count();
        let rows = self.rows as usize + added;
        let mut buckets = empty(rows)?;
        // Rows come in about the order of their new buckets, so this writes memory from begin to end.
        let present = self.buckets.iter().filter(|bucket| bucket.row != 0);
        rested(present).for_each(|bucket| put(&mut buckets, bucket.row - 1, bucket.place));
        let delta = self.deltas.len();
        for (at, &row) in rested(keys.iter().enumerate()) {
            keys.get(at + PREFETCH_AHEAD).into_iter().for_each(|&ahead| prefetch_home(&buckets, ahead));
            put(&mut buckets, row, place(delta, at));
        }
        let deltas = self.deltas.iter().cloned().chain([newer]).collect();
        Ok(Self { buckets, rows: rows as u64, deltas })
    }

    /// Where the newest bytes of a row are; `None` if no delta changed it.
    #[inline]
    pub(crate) fn find(&self, row: u64) -> Option<Place<'_>> {
        let mut at = home(row, self.buckets.len());
        loop {
            let bucket = self.buckets[at];
            if bucket.row == 0 {
                return None;
            }
            if bucket.row == row.wrapping_add(1) {
                let position = bucket.place & ((1 << POSITION_BITS) - 1);
                let delta = &self.deltas[(bucket.place >> POSITION_BITS) as usize];
                return Some(Place { delta, at: position as usize });
            }
            at = after(at, self.buckets.len());
        }
    }

    /// Prefetches where [`Self::find`] looks first.
    #[inline]
    pub(crate) fn prefetch(&self, row: u64) {
        prefetch_home(&self.buckets, row);
    }

    /// Number of changed rows.
    #[cfg(test)]
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The changed rows of every delta, oldest first.
    pub(crate) fn deltas(&self) -> &[Arc<DeltaRows>] {
        &self.deltas
    }
}

/// An empty hash table for this many rows. It has a bucket more, so that a probe always ends.
fn empty(rows: usize) -> Result<Huge<Bucket>, OutOfHostMemory> {
    let buckets: Huge<Bucket> = Huge::zeroed(rows * 10 / 7 + 1)?;
    // Memory that is read before it is written is the system's page of zeros until then. To exchange it,
    // the system interrupts all processors, also those that compute requests.
    buckets.prefault();
    Ok(buckets)
}

fn place(delta: usize, at: usize) -> u64 {
    (delta as u64) << POSITION_BITS | at as u64
}

/// Sets the place of a row.
fn put(buckets: &mut Huge<Bucket>, row: u64, place: u64) {
    let mut to = home(row, buckets.len());
    while buckets[to].row != 0 && buckets[to].row != row + 1 {
        to = after(to, buckets.len());
    }
    buckets[to] = Bucket { row: row + 1, place };
}

/// The bucket where the run of a row begins.
#[inline]
fn home(row: u64, buckets: usize) -> usize {
    // The upper half of the product is uniform below `buckets`, without a division.
    ((u128::from(mix64(row)) * buckets as u128) >> 64) as usize
}

/// Prefetches the bucket where the run of a row begins.
#[inline]
fn prefetch_home(buckets: &Huge<Bucket>, row: u64) {
    prefetch_line(&raw const buckets[home(row, buckets.len())]);
}

#[inline]
fn after(at: usize, buckets: usize) -> usize {
    if at + 1 == buckets { 0 } else { at + 1 }
}

/// Every changed row, ascending, with the number of the newest delta that has it and the position there: a
/// merge of the deltas' sorted rows.
fn newest(deltas: &[Arc<DeltaRows>]) -> impl Iterator<Item = (u64, usize, usize)> + '_ {
    // Of equal rows, the newest delta is the least, and comes first.
    let first = |(d, delta): (usize, &Arc<DeltaRows>)| Some(Reverse((*delta.keys().first()?, Reverse(d), 0)));
    let mut heads: BinaryHeap<_> = deltas.iter().enumerate().filter_map(first).collect();
    let mut last = None;
    std::iter::from_fn(move || {
        loop {
            let mut head = heads.peek_mut()?;
            let Reverse((row, Reverse(delta), at)) = *head;
            match deltas[delta].keys().get(at + 1) {
                Some(&next) => *head = Reverse((next, Reverse(delta), at + 1)),
                None => drop(PeekMut::pop(head)),
            }
            if last != Some(row) {
                last = Some(row);
                return Some((row, delta, at));
            }
        }
    })
}

impl fmt::Debug for Overlay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Overlay({} rows of {} deltas)", self.rows, self.deltas.len())
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
