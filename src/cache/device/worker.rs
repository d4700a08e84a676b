//! A batch, from its ids to the model's input.

use std::sync::Arc;

use super::super::CacheError;
use super::super::epoch::OwnedPin;
use super::super::key::RowKeys;
use super::super::query::Tally;
use super::super::slots::UNIT;
use super::replace::{Offer, Order};
use super::{DeviceCacheError, Shared};
use crate::device::cuda::Driver;
use crate::device::cuda::args::{JobKind, NarrowColumn};
use crate::device::cuda::lane::{Lane, LaneLookup, LaneMiss, LaneShape};
use crate::device::pool::pooling_code;
use crate::schema::Lookup;
use crate::types::{Batch, TableId};

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
    /// The pin of the batch that is under way.
    pin: Option<OwnedPin>,
}

/// The rows that a batch wants and the cache does not hold, each once, to be written.
pub struct Missing<'w> {
    lookups: &'w [Lookup],
    misses: &'w [LaneMiss],
    row_bytes: &'w dyn Fn(usize) -> usize,
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
    pub fn is_empty(&self) -> bool {
        self.misses.is_empty()
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
    pub(super) fn new(shared: &Arc<Shared<D>>, shape: &WorkerShape) -> Result<Self, DeviceCacheError> {
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
        Ok(Self { shared: shared.clone(), lane, lookups: shape.lookups.clone(), pin: None })
    }

    /// What it has of pinned memory of the host, and of the device's, in bytes: beside `cache.bytes`.
    #[must_use]
    pub fn bytes(&self) -> (usize, usize) {
        self.lane.bytes()
    }

    /// The model's input for a batch, `samples x stride`: dense values, then each lookup's pooled vector at
    /// its column. An id past its table reads as zeros, and is neither hit nor miss.
    ///
    /// Where rows are missing, `fetch` is called once, while the device copies the batch's hits; the rows
    /// that it writes are offered to the cache afterwards.
    ///
    /// # Errors
    /// [`DeviceCacheError`] for a batch that the worker was not made for, or more missing rows than the staging
    /// memory holds, or what the driver says; or what `fetch` says.
    pub fn embed<E: From<DeviceCacheError>>(
        &mut self,
        batch: &Batch,
        fetch: impl FnOnce(&mut Missing) -> Result<(), E>,
    ) -> Result<&[f32], E> {
        let result = self.run(batch, fetch);
        if let Some(pin) = self.pin.take() {
            match result {
                // The last event has fired.
                Ok(()) => drop(pin),
                Err(_) => self.shared.finish_later(pin, self.lane.record()),
            }
        }
        result.map(|()| self.lane.out())
    }

    fn run<E: From<DeviceCacheError>>(
        &mut self,
        batch: &Batch,
        fetch: impl FnOnce(&mut Missing) -> Result<(), E>,
    ) -> Result<(), E> {
        let device = |error| E::from(DeviceCacheError::Lane(error));
        let driver = |error| E::from(DeviceCacheError::from(error));
        let number = self.pin.insert(self.shared.epochs.pin_owned()).number();
        let misses = self.lane.probe(number, batch).map_err(device)?;
        self.count(batch);
        if misses == 0 {
            return Ok(());
        }
        self.lane.copy_hits().map_err(driver)?;
        self.fetch(fetch)?;
        self.lane.pool().map_err(driver)?;
        self.offer(number).map_err(E::from)?;
        self.lane.settle().map_err(driver)
    }

    fn fetch<E: From<DeviceCacheError>>(
        &mut self,
        fetch: impl FnOnce(&mut Missing) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self { lane, lookups, shared, .. } = self;
        let row_bytes = |lookup: usize| shared.tables[lookups[lookup].table.index()].row_bytes;
        let (misses, words) = lane.staged_mut().map_err(|error| E::from(DeviceCacheError::from(error)))?;
        let bytes = bytemuck::cast_slice_mut(words);
        fetch(&mut Missing { lookups, misses, row_bytes: &row_bytes, bytes })
    }

    /// Offers the missed rows to the cache.
    fn offer(&mut self, batch: u64) -> Result<(), DeviceCacheError> {
        let Self { lane, lookups, shared, .. } = self;
        let (misses, staging) = lane.staging_mut();
        let offer = |m: &LaneMiss| Offer { table: lookups[m.lookup].table, id: m.id, word: m.word };
        let order = Order { batch, kind: JobKind::Keep, admission: true };
        shared.replace(order, staging, misses.iter().map(offer)).map(|_| ())
    }

    fn count(&self, batch: &Batch) {
        let missed = self.lane.missed().iter().zip(self.lane.collided());
        for (lookup, (&missed, &collided)) in self.lookups.iter().zip(missed) {
            let rows = self.shared.tables[lookup.table.index()].rows;
            let ids = batch.features[lookup.feature].ids.iter().filter(|id| **id < rows).count() as u64;
            let counts = &self.shared.counts.tables[lookup.table.index()];
            let (misses, collisions) = (u64::from(missed), u64::from(collided));
            counts.add(&Tally { hits: ids - misses, pointed: 0, misses, collisions });
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
