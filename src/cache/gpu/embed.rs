//! A batch, from its ids to the model's input.

use std::sync::Arc;

use super::super::CacheError;
use super::super::key::RowKeys;
use super::super::query::Tally;
use super::super::slots::UNIT;
use super::replace::{Offer, Order};
use super::version::Hold;
use super::{DeviceCacheError, Shared};
use crate::cache::gpu::args::{JobKind, NarrowColumn};
use crate::cache::gpu::lane::{Lane, LaneLookup, LaneMiss, LaneShape};
use crate::cache::gpu::table::JobRow;
use crate::compute::pool::pooling_code;
use crate::device::cuda::Driver;
use crate::schema::Lookup;
use crate::types::{Batch, TableId, Version};

/// What a worker takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerShape {
    /// Features of a batch.
    pub features: usize,
    /// The pooled vectors of the input row; their columns do not overlap.
    pub lookups: Vec<Lookup>,
    /// Dense values a sample, at the input row's beginning.
    pub dense_width: usize,
    /// Values of an input row.
    pub stride: usize,
    /// Most samples of a batch.
    pub max_samples: usize,
    /// Most ids of a batch, all features together.
    pub max_ids: usize,
    /// Bytes for the rows of a batch's misses: `cache.staging_bytes`. `None`: enough for the largest batch.
    pub staging_bytes: Option<usize>,
    /// Bytes of the device for copies of a batch's hits; what finds no room is read in the pool.
    pub copy_bytes: usize,
}

/// Takes one batch after the other through the cache.
pub struct DeviceWorker<D: Driver> {
    shared: Arc<Shared<D>>,
    lane: Lane<D>,
    lookups: Vec<Lookup>,
    /// Of the last batch.
    version: Version,
}

/// The rows that a batch wants and the cache does not hold, each once, to be written.
pub struct Missing<'w> {
    lookups: &'w [Lookup],
    misses: &'w [LaneMiss],
    row_bytes: &'w dyn Fn(usize) -> usize,
    version: Version,
    bytes: &'w mut [u8],
}

impl Missing<'_> {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.misses.len()
    }

    /// Whether there are none; never so when one is asked to write them.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.misses.is_empty()
    }

    /// The batch's version, whose rows are wanted.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Which row the `m`-th is.
    #[must_use]
    pub fn row(&self, m: usize) -> (TableId, u64) {
        (self.lookups[self.misses[m].lookup].table, self.misses[m].id)
    }

    /// The `m`-th row's bytes, to be written: they hold anything.
    pub fn bytes_mut(&mut self, m: usize) -> &mut [u8] {
        let miss = self.misses[m];
        let from = miss.word * UNIT;
        &mut self.bytes[from..from + (self.row_bytes)(miss.lookup)]
    }
}

impl<D: Driver> DeviceWorker<D> {
    pub(crate) fn new(shared: &Arc<Shared<D>>, shape: &WorkerShape) -> Result<Self, DeviceCacheError> {
        let lookups: Vec<LaneLookup> =
            shape.lookups.iter().map(|lookup| lane_lookup(shared, lookup)).collect::<Result<_, _>>()?;
        // The largest batch: all ids of the feature whose lookups read most, and none found.
        let words = |feature| {
            let of_feature = lookups.iter().filter(|l| l.feature == feature);
            of_feature.map(|l| l.row_words()).sum::<usize>()
        };
        let largest = shape.max_ids * (0..shape.features).map(words).max().unwrap_or(0);
        let lane = LaneShape {
            features: shape.features,
            lookups,
            dense_width: shape.dense_width,
            stride: shape.stride,
            max_samples: shape.max_samples,
            max_ids: shape.max_ids,
            staging_words: shape.staging_bytes.map_or(largest, |bytes| bytes / UNIT),
            copy_words: shape.copy_bytes / UNIT,
        };
        let lane = Lane::new(&shared.tier, lane)?;
        let version = shared.current.read().version;
        Ok(Self { shared: shared.clone(), lane, lookups: shape.lookups.clone(), version })
    }

    /// The version whose rows the last batch was computed from.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// What it has of pinned memory of the host, and of the device's, in bytes: beside `cache.bytes`.
    #[must_use]
    pub(crate) fn bytes(&self) -> (usize, usize) {
        self.lane.bytes()
    }

    /// The model's input for a batch, `samples x stride`: dense values, then each lookup's pooled vector at
    /// its column. An id past its table reads as zeros, and is neither hit nor miss.
    ///
    /// The batch is of the version that is current when it begins, which [`Self::version`] names afterwards. Where
    /// rows are missing, `fetch` is called once, while the device copies the batch's hits; the rows that it
    /// writes, which are to be that version's, are offered to the cache afterwards.
    ///
    /// # Errors
    /// [`DeviceCacheError`] for a batch that the worker was not made for, or more missing rows than the staging
    /// memory holds, or what the driver says; or what `fetch` says.
    pub fn embed<E: From<DeviceCacheError>>(
        &mut self,
        batch: &Batch,
        fetch: impl FnOnce(&mut Missing) -> Result<(), E>,
    ) -> Result<&[f32], E> {
        let hold = self.shared.begin();
        self.version = hold.version;
        let result = self.run(&hold, batch, fetch);
        match result {
            // The last event has fired.
            Ok(()) => drop(hold),
            Err(_) => self.shared.finish_later(hold, self.lane.record()),
        }
        result.map(|()| self.lane.out())
    }

    fn run<E: From<DeviceCacheError>>(
        &mut self,
        hold: &Hold<D>,
        batch: &Batch,
        fetch: impl FnOnce(&mut Missing) -> Result<(), E>,
    ) -> Result<(), E> {
        let device = |error| E::from(DeviceCacheError::Lane(error));
        let driver = |error| E::from(DeviceCacheError::from(error));
        let misses = self.lane.probe(hold.pin.number(), hold.overlay.as_ref(), batch).map_err(device)?;
        self.count(batch);
        if misses > 0 {
            self.lane.copy_hits().map_err(driver)?;
            self.fetch(fetch)?;
            self.lane.pool().map_err(driver)?;
        }
        self.offer(hold).map_err(E::from)?;
        self.lane.settle().map_err(driver)
    }

    fn fetch<E: From<DeviceCacheError>>(
        &mut self,
        fetch: impl FnOnce(&mut Missing) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self { lane, lookups, shared, version } = self;
        let row_bytes = |lookup: usize| shared.tables[lookups[lookup].table.index()].row_bytes;
        let (misses, words) = lane.staged_mut().map_err(|error| E::from(DeviceCacheError::from(error)))?;
        let bytes = bytemuck::cast_slice_mut(words);
        fetch(&mut Missing { lookups, misses, row_bytes: &row_bytes, version: *version, bytes })
    }

    /// Offers the missed rows to the cache, and those that were found in memory of the host. A batch that has
    /// neither takes no lock.
    fn offer(&mut self, hold: &Hold<D>) -> Result<(), DeviceCacheError> {
        let Self { lane, lookups, shared, .. } = self;
        let (misses, pointed, staging) = lane.replacement();
        let missed = misses.iter().map(|miss| Offer {
            table: lookups[miss.lookup].table,
            id: miss.id,
            row: JobRow::Staged(miss.word),
        });
        let pointed = pointed.filter_map(|(lookup, id)| {
            let table = lookups[lookup].table;
            let row = JobRow::Host(shared.pointing.location(table, id)?);
            Some(Offer { table, id, row })
        });
        let may_come_in = |offer: &Offer| !hold.keeps_out(shared.keys.own(offer.table, offer.id));
        let mut offers = missed.chain(pointed).filter(may_come_in).peekable();
        if offers.peek().is_none() {
            return Ok(());
        }
        let order = Order { batch: hold.pin.number(), kind: JobKind::Keep, admission: true };
        shared.replace(order, staging, offers).map(|_| ())
    }

    fn count(&self, batch: &Batch) {
        let lane = &self.lane;
        let found = lane.missed().iter().zip(lane.pointed()).zip(lane.collided());
        for (lookup, ((&missed, &pointed), &collided)) in self.lookups.iter().zip(found) {
            let rows = self.shared.tables[lookup.table.index()].rows;
            let ids = batch.features[lookup.feature].ids.iter().filter(|id| **id < rows).count() as u64;
            let counts = &self.shared.counts.tables[lookup.table.index()];
            let [misses, pointed, collisions] = [missed, pointed, collided].map(u64::from);
            counts.add(&Tally { hits: ids.saturating_sub(misses + pointed), pointed, misses, collisions });
        }
    }
}

fn lane_lookup<D: Driver>(shared: &Shared<D>, lookup: &Lookup) -> Result<LaneLookup, CacheError> {
    let table = lookup.table.index();
    let Some(code) = shared.keys.own_keys().code(lookup.table) else {
        return Err(CacheError::Table { got: table, tables: shared.tables.len() });
    };
    let (got, expected) = (lookup.element.row_bytes(lookup.dim), shared.tables[table].row_bytes);
    if got != expected {
        return Err(CacheError::RowBytes { table, got, expected });
    }
    Ok(LaneLookup {
        feature: lookup.feature,
        base: code.base().0,
        narrow: narrow(&shared.keys, lookup.table),
        rows: code.rows(),
        dim: lookup.dim,
        element: lookup.element,
        column: lookup.column,
        pooling: pooling_code(lookup.pooling),
    })
}

/// How ids of a table become keys of the index, where that has not the rows' own keys.
fn narrow(keys: &RowKeys, table: TableId) -> Option<NarrowColumn> {
    let code = keys.index_keys().code(table).filter(|_| keys.narrow())?;
    Some(NarrowColumn { base: code.base().0, bits: code.bits(), tagged: keys.tagged(table).into() })
}
