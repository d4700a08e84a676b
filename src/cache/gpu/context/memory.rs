//! What one batch at a time has in pinned and in device memory.
//!
//! All that the host says of a batch (its columns, ids, bags and dense values) lies in one pinned block that the
//! kernels read in place, and all that they say to the host (misses, counts, the pooled matrix) in the same
//! block. So no batch takes a copy or a memset, and since every array has its place for good, the kernels'
//! arguments never change: a graph that was captured once does for every batch.

use std::sync::Arc;

use super::args::{CopyArgs, NarrowColumn, ProbeArgs, ProbeColumn};
use super::overlay::OverlayTable;
use super::shape::{LaneError, LaneShape, check_batch, check_shape, limit};
use super::table::GpuTable;
use crate::compute::pool::{PoolLookup, WARP_LANES};
use crate::device::cuda::Driver;
use crate::device::cuda::memory::{Array, DeviceMemory, PinnedMemory, Plan};
use crate::device::cuda::pool_args::PoolArgs;
use crate::device::cuda::pool_args::{BatchHeader, BatchState};
use crate::types::Batch;

#[derive(Debug)]
struct PinnedArrays {
    header: Array<BatchHeader>,
    columns: Array<ProbeColumn>,
    narrow: Array<NarrowColumn>,
    probe_scan: Array<u32>,
    lookups: Array<PoolLookup>,
    pool_scan: Array<u32>,
    ids: Array<u64>,
    offsets: Array<u32>,
    dense: Array<f32>,
    rows: Array<u64>,
    misses: Array<u32>,
    pointed: Array<u32>,
    report: Array<u32>,
    out: Array<f32>,
}

#[derive(Debug)]
struct DeviceArrays {
    keys: Array<u64>,
    places: Array<u64>,
    owners: Array<u32>,
    counts: Array<u32>,
    state: Array<BatchState>,
    copies: Array<u32>,
}

/// The memory of one batch at a time.
pub(crate) struct Block<D: Driver> {
    pub shape: LaneShape,
    host: PinnedMemory<D>,
    device: DeviceMemory<D>,
    scratch: DeviceMemory<D>,
    pinned: PinnedArrays,
    arrays: DeviceArrays,
    driver: Arc<D>,
    samples: usize,
}

impl<D: Driver> Block<D> {
    pub(crate) fn new(driver: &Arc<D>, shape: LaneShape) -> Result<Self, LaneError> {
        check_shape(&shape)?;
        let lookups = shape.lookups.len();
        let sharing = (0..shape.features).map(|f| shape.lookups.iter().filter(|l| l.feature == f).count());
        let occurrences = shape.max_ids * sharing.max().unwrap_or(0).max(1);
        limit("ids of a batch", u64::from(u32::MAX >> 2), occurrences)?;
        let mut plan = Plan::default();
        let pinned = PinnedArrays {
            header: plan.array(1),
            columns: plan.array(lookups),
            narrow: plan.array(lookups),
            probe_scan: plan.array(lookups + 1),
            lookups: plan.array(lookups),
            pool_scan: plan.array(lookups + 2),
            ids: plan.array(shape.max_ids),
            offsets: plan.array(shape.features * (shape.max_samples + 1)),
            dense: plan.array(shape.max_samples * shape.dense_width),
            rows: plan.array(occurrences),
            misses: plan.array(occurrences),
            pointed: plan.array(occurrences),
            report: plan.array(3 * lookups + 2),
            out: plan.array(shape.max_samples * shape.stride),
        };
        let mut host = PinnedMemory::new(driver, plan.bytes())?;
        for (to, lookup) in host.get_mut(pinned.narrow).iter_mut().zip(&shape.lookups) {
            *to = lookup.narrow.unwrap_or_default();
        }
        let mut plan = Plan::default();
        let arrays = DeviceArrays {
            keys: plan.array(occurrences),
            places: plan.array(occurrences),
            owners: plan.array(occurrences),
            counts: plan.array(3 * lookups),
            state: plan.array(1),
            copies: plan.array(shape.copy_words),
        };
        let device = DeviceMemory::new(driver, plan.bytes())?;
        let scratch = DeviceMemory::new(driver, (2 * occurrences).next_power_of_two() * size_of::<u64>())?;
        Ok(Self { shape, host, device, scratch, pinned, arrays, driver: driver.clone(), samples: 0 })
    }

    /// Bytes of pinned memory of the host, and of the device.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        (self.host.bytes(), self.device.bytes() + self.scratch.bytes())
    }

    /// Writes a batch into the block, with `now` for its stamp and what it asks before the index.
    pub(crate) fn fill(
        &mut self,
        now: u64,
        overlay: Option<&OverlayTable<D>>,
        batch: &Batch,
    ) -> Result<(), LaneError> {
        check_batch(&self.shape, batch)?;
        self.samples = batch.samples;
        let header = &mut self.host.get_mut(self.pinned.header)[0];
        *header = BatchHeader {
            now,
            overlay: overlay.map_or(0, OverlayTable::address),
            overlay_mask: overlay.map_or(0, OverlayTable::mask),
            generation: header.generation.wrapping_add(1),
            samples: batch.samples as u32,
            ..BatchHeader::default()
        };
        if header.generation == 0 {
            // Slots of the first generations would pass for new ones: begin again with fresh memory.
            header.generation = 1;
            self.scratch = DeviceMemory::new(&self.driver, self.scratch.bytes())?;
        }
        self.host.get_mut(self.pinned.dense)[..batch.dense.len()].copy_from_slice(&batch.dense);
        let mut at = 0;
        for (f, feature) in batch.features.iter().enumerate() {
            self.host.get_mut(self.pinned.ids)[at..at + feature.ids.len()].copy_from_slice(&feature.ids);
            let offsets = &mut self.host.get_mut(self.pinned.offsets)[f * (self.shape.max_samples + 1)..];
            offsets[..feature.offsets.len()].copy_from_slice(&feature.offsets);
            at += feature.ids.len();
        }
        self.lay_out(batch);
        Ok(())
    }

    /// The columns, lookups and prefix sums of a batch.
    fn lay_out(&mut self, batch: &Batch) {
        let mut starts = vec![0];
        starts.extend(batch.features.iter().scan(0, |at, feature| {
            *at += feature.ids.len();
            Some(*at)
        }));
        let (mut occurrences, mut probe_warps, mut pool_warps) = (0, 0, 0);
        for (i, lookup) in self.shape.lookups.iter().enumerate() {
            let ids = batch.features[lookup.feature].ids.len() as u32;
            self.host.get_mut(self.pinned.columns)[i] = ProbeColumn {
                base: lookup.base,
                rows: lookup.rows,
                ids_at: starts[lookup.feature] as u32,
                occurrences_at: occurrences,
                ids,
                row_words: lookup.row_words() as u32,
            };
            self.host.get_mut(self.pinned.lookups)[i] = PoolLookup {
                offsets_at: (lookup.feature * (self.shape.max_samples + 1)) as u32,
                occurrences_at: occurrences,
                dim: lookup.dim as u32,
                column: lookup.column as u32,
                pooling: lookup.pooling,
                element: lookup.element.code(),
            };
            occurrences += ids;
            probe_warps += ids.div_ceil(WARP_LANES);
            pool_warps += ((batch.samples * lookup.dim) as u32).div_ceil(WARP_LANES);
            self.host.get_mut(self.pinned.probe_scan)[i + 1] = probe_warps;
            self.host.get_mut(self.pinned.pool_scan)[i + 1] = pool_warps;
        }
        let lookups = self.shape.lookups.len();
        let dense = ((batch.samples * self.shape.dense_width) as u32).div_ceil(WARP_LANES);
        self.host.get_mut(self.pinned.pool_scan)[lookups + 1] = pool_warps + dense;
    }

    /// Warps of the probe, and of the gather.
    pub(crate) fn warps(&self) -> (u32, u32) {
        let last = |scan: Array<u32>| self.host.get(scan).last().copied().unwrap_or(0);
        (last(self.pinned.probe_scan), last(self.pinned.pool_scan))
    }

    /// By lookup: how many occurrences the last probe did not find, how many it found in memory of the host, and of how
    /// many another row has the key.
    pub(crate) fn counts(&self) -> [&[u32]; 3] {
        let lookups = self.shape.lookups.len();
        let counts = &self.host.get(self.pinned.report)[2..];
        [0, 1, 2].map(|kind| &counts[kind * lookups..][..lookups])
    }

    /// By miss: its lookup and its id.
    pub(crate) fn misses(&self) -> impl Iterator<Item = (usize, u64)> {
        self.rows(self.pinned.misses, self.host.get(self.pinned.report)[0])
    }

    /// By distinct row that was found in memory of the host: its lookup and its id.
    pub(crate) fn pointed(&self) -> impl Iterator<Item = (usize, u64)> {
        self.rows(self.pinned.pointed, self.host.get(self.pinned.report)[1])
    }

    /// Lookups and ids of the first `count` occurrences of a list.
    fn rows(&self, list: Array<u32>, count: u32) -> impl Iterator<Item = (usize, u64)> {
        let columns = self.host.get(self.pinned.columns);
        let ids = self.host.get(self.pinned.ids);
        self.host.get(list)[..count as usize].iter().map(move |&occurrence| {
            // The last column that begins there or before; those without ids begin where the next does.
            let lookup = columns.partition_point(|c| c.occurrences_at <= occurrence) - 1;
            let column = columns[lookup];
            (lookup, ids[(column.ids_at + occurrence - column.occurrences_at) as usize])
        })
    }

    /// Says where the misses' rows are.
    pub(crate) fn stage(&mut self, rows: impl Iterator<Item = u64>) {
        let mut staged = 0;
        for (to, row) in self.host.get_mut(self.pinned.rows).iter_mut().zip(rows) {
            *to = row;
            staged += 1;
        }
        self.host.get_mut(self.pinned.header)[0].staged = staged;
    }

    /// The pooled matrix, `samples x stride`.
    pub(crate) fn out(&self) -> &[f32] {
        &self.host.get(self.pinned.out)[..self.samples * self.shape.stride]
    }

    pub(crate) fn probe_args(&self, tier: &GpuTable<D>) -> ProbeArgs {
        ProbeArgs {
            header: self.host.of(self.pinned.header),
            columns: self.host.of(self.pinned.columns),
            scan: self.host.of(self.pinned.probe_scan),
            narrow: if self.shape.narrow() { self.host.of(self.pinned.narrow) } else { 0 },
            ids: self.host.of(self.pinned.ids),
            index: tier.index(),
            pool: tier.pool(),
            scratch: self.scratch.address(),
            keys: self.device.of(self.arrays.keys),
            owners: self.device.of(self.arrays.owners),
            places: self.device.of(self.arrays.places),
            counts: self.device.of(self.arrays.counts),
            state: self.device.of(self.arrays.state),
            misses: self.host.of(self.pinned.misses),
            pointed: self.host.of(self.pinned.pointed),
            report: self.host.of(self.pinned.report),
            buckets: tier.shape().buckets,
            scratch_mask: (self.scratch.bytes() / size_of::<u64>() - 1) as u32,
            column_count: self.shape.lookups.len() as u32,
        }
    }

    pub(crate) fn copy_args(&self, tier: &GpuTable<D>) -> CopyArgs {
        CopyArgs {
            columns: self.host.of(self.pinned.columns),
            scan: self.host.of(self.pinned.probe_scan),
            owners: self.device.of(self.arrays.owners),
            places: self.device.of(self.arrays.places),
            state: self.device.of(self.arrays.state),
            pool: tier.pool(),
            host: tier.host_origin(),
            buffer: self.device.of(self.arrays.copies),
            column_count: self.shape.lookups.len() as u32,
            capacity: self.shape.copy_words as u32,
        }
    }

    pub(crate) fn pool_args(&self, tier: &GpuTable<D>) -> PoolArgs {
        PoolArgs {
            header: self.host.of(self.pinned.header),
            state: self.device.of(self.arrays.state),
            lookups: self.host.of(self.pinned.lookups),
            scan: self.host.of(self.pinned.pool_scan),
            offsets: self.host.of(self.pinned.offsets),
            places: self.device.of(self.arrays.places),
            owners: self.device.of(self.arrays.owners),
            rows: self.host.of(self.pinned.rows),
            pool: tier.pool(),
            host: tier.host_origin(),
            copies: self.device.of(self.arrays.copies),
            dense: self.host.of(self.pinned.dense),
            out: self.host.of(self.pinned.out),
            lookup_count: self.shape.lookups.len() as u32,
            dense_width: self.shape.dense_width as u32,
            stride: self.shape.stride as u32,
            unused: 0,
        }
    }
}
