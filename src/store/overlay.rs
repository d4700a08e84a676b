//! The rows that the deltas of a chain changed, in front of a table's base rows.
//!
//! A delta's rows are read where the delta was opened: in memory, or in its mapped file (`table_location`).
//! The overlay only says which delta holds the newest bytes of a row: a hash table from the row's number to
//! its place, which counts through all deltas, oldest first. It is built once, when the version is opened, so
//! its size is exact: 8 bytes an entry at a load of 0.7, which is 12 bytes a changed row, or twice that if a
//! number does not fit in 32 bits. Linear probing at this load reads one or two lines of the processor's
//! cache.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::bytes::Bytes;
use super::table::State;
use crate::mem::OutOfHostMemory;
use crate::mem::prefetch::PREFETCH_AHEAD;
use crate::mem::probe_table::{Bucket, ProbeTable, Tag};
use crate::pace::rested;
use crate::types::Version;

/// The changed rows of a table in one delta.
#[derive(Debug)]
pub(crate) struct DeltaRows {
    /// The version that changed them.
    pub version: Version,
    /// The numbers of the rows, ascending, as u64.
    pub keys: Bytes,
    /// The bytes of the rows, in the order of `keys`.
    pub weight: Bytes,
    /// Their optimizer states, in the same order. Empty if the delta was opened to be served.
    pub states: Vec<State>,
}

impl DeltaRows {
    pub(crate) fn keys(&self) -> &[u64] {
        // `TableReader::read_keys` has checked the length and the alignment.
        bytemuck::try_cast_slice(self.keys.as_slice()).unwrap_or_default()
    }
}

/// Where the newest bytes of a row are.
#[derive(Clone, Copy)]
pub(crate) struct OverlayRow<'o> {
    pub delta: &'o DeltaRows,
    /// The position of the row in the delta.
    pub at: usize,
}

/// The newest place of every changed row of a table.
pub(crate) struct Overlay {
    places: PlaceTable,
    rows: u64,
    /// Oldest first.
    deltas: Vec<Arc<DeltaRows>>,
    /// The place of the first row of each delta.
    starts: Vec<u64>,
}

/// A hash table from changed rows to their places.
enum PlaceTable {
    /// If all rows and places are below `u32::MAX`.
    Narrow(ProbeTable<Entry<u32>>),
    Wide(ProbeTable<Entry<u64>>),
}

/// The number of a row, plus 1, and its place. Zeros in an empty bucket.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
struct Entry<N>([N; 2]);

/// A number of an [`Entry`].
trait Number: Pod + Into<u64> {
    /// This number, which fits.
    fn of(number: u64) -> Self;
}

impl Number for u32 {
    fn of(number: u64) -> Self {
        number as Self
    }
}

impl Number for u64 {
    fn of(number: u64) -> Self {
        number
    }
}

impl<N: Number> Entry<N> {
    fn new(row: u64, place: u64) -> Self {
        Self([N::of(row + 1), N::of(place)])
    }

    #[inline(always)]
    fn row(self) -> u64 {
        self.0[0].into().wrapping_sub(1)
    }

    #[inline(always)]
    fn place(self) -> u64 {
        self.0[1].into()
    }
}

impl<N: Number> Bucket for Entry<N> {
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.0[0].into() == 0
    }

    #[inline(always)]
    fn tag(&self) -> Tag {
        Tag::of(self.row())
    }
}

impl Overlay {
    /// The overlay of these deltas, oldest first, each with ascending rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn new(deltas: Vec<Arc<DeltaRows>>) -> Result<Self, OutOfHostMemory> {
        let rows = newest(&deltas).count();
        let starts = starts(&deltas);
        let newest = rested(newest(&deltas));
        let places = match are_narrow(&deltas) {
            true => PlaceTable::Narrow(filled(rows, newest, &starts)?),
            false => PlaceTable::Wide(filled(rows, newest, &starts)?),
        };
        Ok(Self { places, rows: rows as u64, deltas, starts })
    }

    /// This overlay with a newer delta, which has ascending rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the allocation fails.
    pub(crate) fn with(&self, newer: Arc<DeltaRows>) -> Result<Self, OutOfHostMemory> {
        let deltas: Vec<_> = self.deltas.iter().cloned().chain([newer.clone()]).collect();
        let keys = newer.keys();
        let rows = self.rows as usize + self.count_unchanged(keys);
        let starts = starts(&deltas);
        let first = starts.last().copied().unwrap_or_default();
        let places = match (&self.places, are_narrow(&deltas)) {
            (PlaceTable::Narrow(older), true) => PlaceTable::Narrow(grown(older, rows, keys, first)?),
            (PlaceTable::Wide(older), false) => PlaceTable::Wide(grown(older, rows, keys, first)?),
            _ => return Self::new(deltas),
        };
        Ok(Self { places, rows: rows as u64, deltas, starts })
    }

    /// How many of these rows no delta changed.
    fn count_unchanged(&self, keys: &[u64]) -> usize {
        let is_unchanged = |(at, &row): (usize, &u64)| {
            keys.get(at + PREFETCH_AHEAD).into_iter().for_each(|&ahead| self.prefetch(ahead));
            self.find(row).is_none()
        };
        rested(keys.iter().enumerate()).filter(|&key| is_unchanged(key)).count()
    }

    /// Where the newest bytes of a row are; `None` if no delta changed it.
    #[inline]
    pub(crate) fn find(&self, row: u64) -> Option<OverlayRow<'_>> {
        let place = match &self.places {
            PlaceTable::Narrow(places) => place_of(places, row)?,
            PlaceTable::Wide(places) => place_of(places, row)?,
        };
        let delta = self.starts.partition_point(|&start| start <= place) - 1;
        Some(OverlayRow { delta: &self.deltas[delta], at: (place - self.starts[delta]) as usize })
    }

    /// Prefetches where [`Self::find`] looks first.
    #[inline]
    pub(crate) fn prefetch(&self, row: u64) {
        match &self.places {
            PlaceTable::Narrow(places) => places.prefetch(Tag::of(row)),
            PlaceTable::Wide(places) => places.prefetch(Tag::of(row)),
        }
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

#[inline]
fn place_of<N: Number>(places: &ProbeTable<Entry<N>>, row: u64) -> Option<u64> {
    places.find(Tag::of(row), |entry| entry.row() == row).map(|entry| entry.place())
}

/// The place of the first row of each delta.
fn starts(deltas: &[Arc<DeltaRows>]) -> Vec<u64> {
    let mut end = 0;
    let start = |delta: &Arc<DeltaRows>| {
        let start = end;
        end += delta.keys().len() as u64;
        start
    };
    deltas.iter().map(start).collect()
}

/// Whether all rows and places are below `u32::MAX`.
fn are_narrow(deltas: &[Arc<DeltaRows>]) -> bool {
    let rows: u64 = deltas.iter().map(|delta| delta.keys().len() as u64).sum();
    let last = deltas.iter().filter_map(|delta| delta.keys().last().copied()).max().unwrap_or_default();
    rows.max(last) < u64::from(u32::MAX)
}

/// An empty hash table for this many rows.
fn empty<N: Number>(rows: usize) -> Result<ProbeTable<Entry<N>>, OutOfHostMemory> {
    let places = ProbeTable::with_buckets(rows * 10 / 7 + 1)?;
    // Memory that is read before it is written is the system's page of zeros until then. To exchange it,
    // the system interrupts all processors, also those that compute requests.
    places.prefault();
    Ok(places)
}

/// A hash table of these rows, which differ, and their places. `starts` has the place of the first row of
/// each delta.
fn filled<N: Number>(
    rows: usize,
    newest: impl Iterator<Item = NewestRow>,
    starts: &[u64],
) -> Result<ProbeTable<Entry<N>>, OutOfHostMemory> {
    let mut places = empty(rows)?;
    newest.for_each(|NewestRow { row, delta, at }| places.insert(Entry::new(row, starts[delta] + at as u64)));
    Ok(places)
}

/// A hash table of `rows` rows: those of an older one, and those of a newer delta from this place on.
fn grown<N: Number>(
    older: &ProbeTable<Entry<N>>,
    rows: usize,
    keys: &[u64],
    first: u64,
) -> Result<ProbeTable<Entry<N>>, OutOfHostMemory> {
    let mut places = empty(rows)?;
    // Entries come in about the order of their new buckets, so this writes memory from begin to end.
    rested(older.entries()).for_each(|entry| places.insert(*entry));
    for (at, &row) in rested(keys.iter().enumerate()) {
        keys.get(at + PREFETCH_AHEAD).into_iter().for_each(|&ahead| places.prefetch(Tag::of(ahead)));
        places.replace(Entry::new(row, first + at as u64), |entry| entry.row() == row);
    }
    Ok(places)
}

/// A changed row, and where its newest bytes are.
struct NewestRow {
    row: u64,
    /// The number of the newest delta that has the row.
    delta: usize,
    /// The position of the row there.
    at: usize,
}

/// Every changed row, ascending: a merge of the deltas' sorted rows.
fn newest(deltas: &[Arc<DeltaRows>]) -> impl Iterator<Item = NewestRow> + '_ {
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
                return Some(NewestRow { row, delta, at });
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
