//! A batch in the cache: its pin, its lookup, and where its rows are.

use super::epoch;
use super::error::CacheError;
use super::index::Held;
use super::query::{Miss, Place, Query};
use super::shared::{Insertion, Shared};
use crate::types::Version;

/// A batch's hold on the cache, and its way to it.
///
/// Keep it for one batch: while it lives, slots evicted since it began are not used again.
#[derive(Debug)]
pub struct BatchPin<'c> {
    cache: &'c Shared,
    pin: epoch::Pin<'c>,
    version: Version,
}

impl<'c> BatchPin<'c> {
    pub(crate) fn new(cache: &'c Shared) -> Self {
        let pin = cache.epochs.pin();
        // After the number was taken: whoever switches relies on it.
        let version = cache.current.read().version;
        Self { cache, pin, version }
    }

    /// The version whose rows the batch is to be computed from: what it finds are that version's rows, and
    /// what it inserts must be.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The batch's number; later pins have larger ones.
    #[must_use]
    pub(crate) fn number(&self) -> u64 {
        self.pin.number()
    }

    /// Looks up every id that was pushed to `query`, each distinct row once.
    ///
    /// # Errors
    /// [`CacheError`] for a table or an id that the cache was not made for.
    pub fn lookup<'q>(&'q self, query: &'q mut Query) -> Result<Found<'q>, CacheError> {
        query.deduplicate(&self.cache.keys)?;
        let current = self.cache.current.read();
        query.probe(self.cache, current.overlay(self.version), &self.pin);
        for (counts, tally) in self.cache.counts.tables.iter().zip(query.tallies()) {
            counts.add(tally);
        }
        Ok(Found { cache: self.cache, pin: &self.pin, query })
    }

    /// Offers a row's bytes: copied in first, then found by everyone. Never waits for room.
    ///
    /// # Errors
    /// [`CacheError`] for a table, an id or a length that the cache was not made for.
    pub fn insert(&self, miss: &Miss, row: &[u8]) -> Result<Insertion, CacheError> {
        let current = self.cache.current.read();
        if let Some(overlay) = current.overlay(self.version) {
            let own = self.cache.own_key(miss.table, miss.id, row.len())?;
            // In the index a batch of the version before would find it.
            if overlay.get(own).is_some() {
                return Ok(Insertion::Switching);
            }
        }
        self.cache.insert(self.pin.number(), miss, row)
    }
}

/// What a lookup found. Lives as long as its pin and its query are left alone.
#[derive(Clone, Copy, Debug)]
pub struct Found<'q> {
    cache: &'q Shared,
    pin: &'q epoch::Pin<'q>,
    query: &'q Query,
}

/// Where one distinct row of a batch is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source<'q> {
    /// In the cache: its bytes, as they were inserted.
    Row(&'q [u8]),
    /// In the store's RAM: it is `pointed()[p]`.
    Host(usize),
    /// Nowhere yet: it is `misses()[m]`.
    Miss(usize),
}

impl<'q> Found<'q> {
    /// Of every occurrence, in the order of the pushes: its distinct row, numbered from 0, table by
    /// table in their order, and in each in the order of first occurrences.
    #[must_use]
    pub fn uniques(&self) -> &'q [u32] {
        self.query.uniques()
    }

    /// How many distinct rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.query.rows().len()
    }

    /// The distinct rows that the cache does not hold, in ascending order of `unique`.
    #[must_use]
    pub fn misses(&self) -> &'q [Miss] {
        self.query.misses()
    }

    /// The distinct rows that the unified index knows to be in the store's RAM, in ascending order of
    /// `unique`.
    #[must_use]
    pub fn pointed(&self) -> &'q [Miss] {
        self.query.pointed()
    }

    /// Where a distinct row is; `unique` is below [`Self::rows`].
    #[inline]
    #[must_use]
    pub fn source(&self, unique: u32) -> Source<'q> {
        let row = &self.query.rows()[unique as usize];
        match row.place {
            Place::Miss(m) => Source::Miss(m as usize),
            Place::Host(p) => Source::Host(p as usize),
            Place::Slot(location) => {
                let held = Held::again(location, self.query.batch(), self.pin);
                Source::Row(self.cache.row(row.table, held))
            }
        }
    }
}
