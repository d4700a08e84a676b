//! A batch's interface to the cache: its pin, its lookup, and the sources of its rows.

#![allow(unsafe_code)]

use super::epoch;
use super::error::CacheError;
use super::index::PinnedLocation;
use super::query::{FoundAt, Miss, Query};
use super::shared::{Insertion, Shared};
use crate::types::Version;

/// A batch's access to the cache.
///
/// Keep it for one batch only: while it lives, slots evicted since it began are not reused.
#[derive(Debug)]
pub struct BatchPin<'c> {
    cache: &'c Shared,
    pin: epoch::Pin<'c>,
    version: Version,
}

impl<'c> BatchPin<'c> {
    pub(crate) fn new(cache: &'c Shared) -> Self {
        let pin = cache.epochs.pin();
        // Read after the pin has taken its number: a version switch relies on this order (`version.rs`).
        let version = cache.current.read().version;
        Self { cache, pin, version }
    }

    /// The version of the batch. The rows that it finds are of this version. The rows that it inserts must be
    /// of this version, too.
    #[must_use]
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Looks up every id that was pushed to `query`, each distinct row once.
    ///
    /// # Errors
    /// When a table or an id does not exist.
    pub fn lookup<'q>(&'q self, query: &'q mut Query) -> Result<Found<'q>, CacheError> {
        query.deduplicate(&self.cache.keys)?;
        let current = self.cache.current.read();
        query.probe(self.cache, current.overlay(self.version), &self.pin);
        for (counts, tally) in self.cache.counts.tables.iter().zip(query.tallies()) {
            counts.add(tally);
        }
        Ok(Found { cache: self.cache, pin: &self.pin, query })
    }

    /// Offers the bytes of a missed row to the cache. Never waits for room. Call it once for each missed row
    /// of the batch, since the admission policy counts the calls.
    ///
    /// # Errors
    /// When the table or the id does not exist, or the length is not that of the table's rows.
    pub fn insert(&self, miss: &Miss, row: &[u8]) -> Result<Insertion, CacheError> {
        self.cache.insert(self.pin.number(), miss, row)
    }
}

/// The result of a lookup. It borrows the pin and the query.
#[derive(Clone, Copy, Debug)]
pub struct Found<'q> {
    cache: &'q Shared,
    pin: &'q epoch::Pin<'q>,
    query: &'q Query,
}

/// Where a distinct row of a batch is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source<'q> {
    /// In the cache: the row's bytes.
    Row(&'q [u8]),
    /// In the store's memory: the row is `pointed()[p]`.
    Pointer(usize),
    /// Not cached: the row is `misses()[m]`.
    Miss(usize),
}

impl<'q> Found<'q> {
    /// For every occurrence, in the order of the pushes: the number of its distinct row. Distinct rows are
    /// numbered from 0, by ascending table, and within a table by first occurrence.
    #[must_use]
    pub fn uniques(&self) -> &'q [u32] {
        self.query.uniques()
    }

    /// The number of distinct rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.query.rows().len()
    }

    /// The distinct rows that are not cached, in ascending order of [`Miss::unique`].
    #[must_use]
    pub fn misses(&self) -> &'q [Miss] {
        self.query.misses()
    }

    /// The distinct rows that the unified index points at in the store's memory, in ascending order of
    /// [`Miss::unique`].
    #[must_use]
    pub fn pointed(&self) -> &'q [Miss] {
        self.query.pointed()
    }

    /// Where distinct row `unique` is. `unique` is below [`Self::rows`].
    #[inline]
    #[must_use]
    pub fn source(&self, unique: u32) -> Source<'q> {
        let row = &self.query.rows()[unique as usize];
        match row.found {
            FoundAt::Miss(m) => Source::Miss(m as usize),
            FoundAt::Pointer(p) => Source::Pointer(p as usize),
            FoundAt::Slot(location) => {
                // SAFETY: only `Query::probe` sets `found`, to a location from the index or from the overlay
                // of the batch's version. `BatchPin::lookup` has called it with this pin, and the query is
                // borrowed since then.
                let pinned = unsafe { PinnedLocation::again(location, self.query.batch(), self.pin) };
                Source::Row(self.cache.row(row.table, pinned))
            }
        }
    }
}
