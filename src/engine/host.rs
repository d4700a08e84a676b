//! Rows on the host: read from the store, or through a cache in RAM.
//!
//! With a cache, a batch pins the cache, so that no row changes meanwhile. The pin's version decides which
//! store and weights the batch uses. The batch probes the cache for all distinct rows, reads the misses from
//! the store and offers them to the cache. Rows are pooled in place, in the cache or in the store.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::versions::LoadedVersion;
use super::{Engine, Spent, spend};
use crate::cache::{CacheError, FlatCache, Miss, Query, Source};
use crate::model::InputRows;
use crate::predict::PredictError;
use crate::store::rows_of;
use crate::types::{Batch, Scores, Version};

/// Stands for the place of an id that reads zeros.
const ZEROS: u32 = u32::MAX;

/// The buffers of one batch, reused by later ones.
#[derive(Default)]
pub(crate) struct LookupScratch {
    query: Query,
    /// For each lookup and each of its ids: the id's place in the query, or [`ZEROS`].
    places: Vec<Vec<u32>>,
}

impl Engine {
    /// Scores a batch from the store of the current version alone.
    pub(crate) fn score_from_store(&self, batch: &Batch, spent: &Spent) -> Scores {
        let version = self.versions.current();
        let inputs = self.inputs(batch);
        let rows = |l: usize| rows_of(version.store.tables(), &self.schema, &self.lookups[l], batch);
        let write = |first, tape: &mut _| inputs.write(first, tape, rows);
        self.run_chunks(&version, batch, spent, write)
    }

    /// Scores a batch through a cache in RAM.
    pub(crate) fn score_from_cache(
        &self,
        cache: &FlatCache,
        batch: &Batch,
        spent: &Spent,
    ) -> Result<Scores, PredictError> {
        let mut scratch = self.scratches.take().unwrap_or_default();
        let scores = self.score_with(&mut scratch, cache, batch, spent);
        self.scratches.put(scratch);
        scores
    }

    fn score_with(
        &self,
        LookupScratch { query, places }: &mut LookupScratch,
        cache: &FlatCache,
        batch: &Batch,
        spent: &Spent,
    ) -> Result<Scores, PredictError> {
        let started = Instant::now();
        self.push_ids(batch, query, places);
        let pin = cache.pin();
        let number = pin.version();
        let version = self.versions.of(number).ok_or_else(|| not_in_use(number))?;
        let LoadedVersion { store, .. } = &*version;
        let found = pin.lookup(query).map_err(cache_error)?;
        store.fetch(found.misses().iter().map(Miss::row));
        for miss in found.misses().iter().chain(found.pointed()) {
            let row = store.row(miss.table, miss.id);
            let row = row.ok_or_else(|| PredictError::Store(format!("no row {miss:?}")))?;
            pin.insert(miss, row).map_err(cache_error)?;
        }
        spend(&spent.lookup, started);
        let (inputs, uniques, places) = (self.inputs(batch), found.uniques(), &*places);
        let stored = |miss: &Miss| store.row(miss.table, miss.id);
        let rows = |l: usize| {
            let (places, found, stored) = (&places[l], &found, &stored);
            move |i: usize| {
                let place = (places[i] != ZEROS).then_some(places[i])?;
                match found.source(uniques[place as usize]) {
                    Source::Row(row) => Some(row),
                    Source::Pointer(p) => stored(&found.pointed()[p]),
                    Source::Miss(m) => stored(&found.misses()[m]),
                }
            }
        };
        let write = |first, tape: &mut _| inputs.write(first, tape, rows);
        let scores = self.run_chunks(&version, batch, spent, write);
        if !self.host_rows.is_empty() {
            let nanos = spent.lookup.load(Ordering::Relaxed);
            cache.observe(uniques.len() as u64, Duration::from_nanos(nanos));
        }
        Ok(scores)
    }

    fn inputs<'a>(&'a self, batch: &'a Batch) -> InputRows<'a> {
        InputRows { dense_width: self.schema.dense_width(), lookups: &self.lookups, batch }
    }

    /// Adds every id that has a row, its own or a default row, to the query, and records its place.
    fn push_ids(&self, batch: &Batch, query: &mut Query, places: &mut Vec<Vec<u32>>) {
        query.clear();
        places.resize_with(self.lookups.len(), Vec::new);
        for (lookup, places) in self.lookups.iter().zip(places) {
            let table = &self.schema.tables[lookup.table.index()];
            let ids = &batch.features[lookup.feature].ids;
            let mut next =
                query.push(lookup.table, ids.iter().filter_map(|&id| table.row_of(id))).start as u32;
            places.clear();
            places.extend(ids.iter().map(|&id| {
                if table.row_of(id).is_none() {
                    return ZEROS;
                }
                next += 1;
                next - 1
            }));
        }
    }
}

/// The version of a pin is in use (`versions`), so this is a failure of the server.
fn not_in_use(version: Version) -> PredictError {
    PredictError::Store(format!("version {version} is no longer in use"))
}

fn cache_error(error: CacheError) -> PredictError {
    PredictError::Store(error.to_string())
}
