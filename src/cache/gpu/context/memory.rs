//! The pinned memory and the device memory of a lookup context.
//!
//! The host writes a batch's layout (columns, prefix sums, offsets) into a block that one copy moves to the
//! device. Kernels read it many times, and before anything else; read in pinned memory, it took three
//! quarters of their time (H200, 2026-11-26). Ids and dense values are read once, and in parallel, so they
//! are read in pinned memory in place. The kernels write their results (misses, counts, the output) into
//! pinned memory too. So a batch needs one copy and no memset. Every array has a fixed address, so the
//! kernels' arguments stay the same, and a captured graph serves every batch with the same block counts.
//! (Only the scratch table is allocated again, once in 2^32 batches.)

#![allow(unsafe_code)]

use std::sync::Arc;

use super::shape::{ContextShape, LookupError, LookupKeys, check_batch, check_shape, limit};
use super::{ContextBytes, LookupRow, PerKernel};
use crate::cache::gpu::args::{CopyArgs, NarrowColumn, ProbeArgs, ProbeColumn};
use crate::cache::gpu::overlay::OverlayTable;
use crate::cache::gpu::table::GpuTable;
use crate::compute::pool::{KernelLookup, WARP_LANES, pooling_code};
use crate::device::cuda::memory::{Array, DeviceMemory, MemoryPlan, Mirrored, PinnedMemory};
use crate::device::cuda::pool_args::{BatchHeader, BatchState, PoolArgs};
use crate::device::cuda::{Driver, DriverError};
use crate::types::Batch;

/// The arrays of a batch's layout, which is copied to the device.
#[derive(Debug)]
struct LayoutArrays {
    header: Array<BatchHeader>,
    columns: Array<ProbeColumn>,
    narrow: Array<NarrowColumn>,
    probe_scan: Array<u32>,
    lookups: Array<KernelLookup>,
    pool_scan: Array<u32>,
    /// For each feature one more than the batch's samples. The last array, so that only these are copied.
    offsets: Array<u32>,
}

/// The arrays in pinned memory, by which the host and the kernels exchange values.
#[derive(Debug)]
struct PinnedArrays {
    ids: Array<u64>,
    dense: Array<f32>,
    rows: Array<u64>,
    misses: Array<u32>,
    pointed: Array<u32>,
    /// The lengths of `misses` and `pointed`, then the counts of [`Counted`] by lookup.
    report: Array<u32>,
    out: Array<f32>,
}

/// The arrays that only kernels use.
#[derive(Debug)]
struct DeviceArrays {
    keys: Array<u64>,
    places: Array<u64>,
    owners: Array<u32>,
    counts: Array<u32>,
    state: Array<BatchState>,
    copies: Array<u32>,
}

// Indexes into the report of a probe (`report` in probe.cu).
const MISSES_AT: usize = 0;
const POINTED_AT: usize = 1;
const COUNTS_AT: usize = 2;

/// What the probe counts for each lookup: occurrences. The numbers are the order of the counts in the report.
#[derive(Clone, Copy)]
pub(super) enum Counted {
    /// Not found.
    #[cfg(all(test, feature = "cusim"))]
    Missed = 0,
    /// Found in host memory, by a pointer.
    Pointed = 1,
    /// Not found, because the index key is linked to another row. Counted as missed, too.
    Collided = 2,
}

impl Counted {
    /// How many counts each lookup has.
    const KINDS: usize = 3;
}

impl LayoutArrays {
    fn plan(plan: &mut MemoryPlan, shape: &ContextShape) -> Self {
        let lookups = shape.lookups.len();
        Self {
            header: plan.array(1),
            columns: plan.array(lookups),
            narrow: plan.array(lookups),
            probe_scan: plan.array(lookups + 1),
            lookups: plan.array(lookups),
            pool_scan: plan.array(lookups + 2),
            offsets: plan.array(shape.features * (shape.max_samples + 1)),
        }
    }
}

impl PinnedArrays {
    fn plan(plan: &mut MemoryPlan, shape: &ContextShape, occurrences: usize) -> Self {
        Self {
            ids: plan.array(shape.max_ids),
            dense: plan.array(shape.max_samples * shape.dense_width),
            rows: plan.array(occurrences),
            misses: plan.array(occurrences),
            pointed: plan.array(occurrences),
            report: plan.array(COUNTS_AT + Counted::KINDS * shape.lookups.len()),
            out: plan.array(shape.max_samples * shape.stride),
        }
    }
}

impl DeviceArrays {
    fn plan(plan: &mut MemoryPlan, shape: &ContextShape, occurrences: usize) -> Self {
        Self {
            keys: plan.array(occurrences),
            places: plan.array(occurrences),
            owners: plan.array(occurrences),
            counts: plan.array(Counted::KINDS * shape.lookups.len()),
            state: plan.array(1),
            copies: plan.array(shape.copy_words()),
        }
    }
}

/// The most occurrences of a batch: a feature's ids occur once in each lookup that reads it.
fn max_occurrences(shape: &ContextShape) -> Result<usize, LookupError> {
    let sharing = (0..shape.features).map(|f| shape.lookups.iter().filter(|l| l.feature == f).count());
    let occurrences = shape.max_ids * sharing.max().unwrap_or(0).max(1);
    limit("ids of a batch", u64::from(u32::MAX >> 2), occurrences)?;
    Ok(occurrences)
}

/// The memory of one batch at a time.
pub(super) struct BatchMemory<D: Driver> {
    pub shape: ContextShape,
    keys: Vec<LookupKeys>,
    layout: Mirrored<D>,
    layout_arrays: LayoutArrays,
    pinned: PinnedMemory<D>,
    pinned_arrays: PinnedArrays,
    device: DeviceMemory<D>,
    device_arrays: DeviceArrays,
    scratch: DeviceMemory<D>,
    driver: Arc<D>,
    samples: usize,
}

impl<D: Driver> BatchMemory<D> {
    pub(super) fn new(
        driver: &Arc<D>,
        shape: &ContextShape,
        keys: &[LookupKeys],
    ) -> Result<Self, LookupError> {
        check_shape(shape, keys)?;
        let occurrences = max_occurrences(shape)?;
        let mut plan = MemoryPlan::default();
        let layout_arrays = LayoutArrays::plan(&mut plan, shape);
        let mut layout = Mirrored::new(driver, plan.bytes())?;
        for (to, lookup) in layout.host.get_mut(layout_arrays.narrow).iter_mut().zip(keys) {
            *to = lookup.narrow.unwrap_or_default();
        }
        let mut plan = MemoryPlan::default();
        let pinned_arrays = PinnedArrays::plan(&mut plan, shape, occurrences);
        let pinned = PinnedMemory::new(driver, plan.bytes())?;
        let mut plan = MemoryPlan::default();
        let device_arrays = DeviceArrays::plan(&mut plan, shape, occurrences);
        let device = DeviceMemory::new(driver, plan.bytes())?;
        let scratch = DeviceMemory::new(driver, (2 * occurrences).next_power_of_two() * size_of::<u64>())?;
        Ok(Self {
            shape: shape.clone(),
            keys: keys.to_vec(),
            layout,
            layout_arrays,
            pinned,
            pinned_arrays,
            device,
            device_arrays,
            scratch,
            driver: driver.clone(),
            samples: 0,
        })
    }

    pub(super) fn bytes(&self) -> ContextBytes {
        let Mirrored { host, device } = &self.layout;
        ContextBytes {
            pinned: host.bytes() + self.pinned.bytes(),
            device: device.bytes() + self.device.bytes() + self.scratch.bytes(),
        }
    }

    /// Checks a batch and writes it. Rows that the probe finds are stamped with `now`.
    pub(super) fn fill(
        &mut self,
        now: u64,
        overlay: Option<&OverlayTable<D>>,
        batch: &Batch,
    ) -> Result<(), LookupError> {
        check_batch(&self.shape, batch)?;
        self.samples = batch.samples;
        let header = &mut self.layout.host.get_mut(self.layout_arrays.header)[0];
        let generation = match header.generation.checked_add(1) {
            Some(generation) => generation,
            // Slots of the first batches would look new. Start again with zeroed memory.
            None => {
                self.scratch = DeviceMemory::new(&self.driver, self.scratch.bytes())?;
                1
            }
        };
        *header = BatchHeader {
            now,
            overlay: overlay.map_or(0, OverlayTable::address),
            overlay_mask: overlay.map_or(0, OverlayTable::mask),
            generation,
            samples: batch.samples as u32,
        };
        self.pinned.get_mut(self.pinned_arrays.dense)[..batch.dense.len()].copy_from_slice(&batch.dense);
        let mut at = 0;
        for (f, feature) in batch.features.iter().enumerate() {
            self.pinned.get_mut(self.pinned_arrays.ids)[at..at + feature.ids.len()]
                .copy_from_slice(&feature.ids);
            let offsets =
                &mut self.layout.host.get_mut(self.layout_arrays.offsets)[f * (batch.samples + 1)..];
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
        for (i, (lookup, keys)) in self.shape.lookups.iter().zip(&self.keys).enumerate() {
            let ids = batch.features[lookup.feature].ids.len() as u32;
            self.layout.host.get_mut(self.layout_arrays.columns)[i] = ProbeColumn {
                base: keys.base,
                rows: keys.rows,
                ids_at: starts[lookup.feature] as u32,
                occurrences_at: occurrences,
                ids,
                row_words: self.shape.row_words(i) as u32,
            };
            self.layout.host.get_mut(self.layout_arrays.lookups)[i] = KernelLookup {
                offsets_at: (lookup.feature * (batch.samples + 1)) as u32,
                occurrences_at: occurrences,
                dim: lookup.dim as u32,
                column: lookup.column as u32,
                pooling: pooling_code(lookup.pooling),
                element: lookup.element.code(),
            };
            occurrences += ids;
            probe_warps += ids.div_ceil(WARP_LANES);
            pool_warps += ((batch.samples * lookup.dim) as u32).div_ceil(WARP_LANES);
            self.layout.host.get_mut(self.layout_arrays.probe_scan)[i + 1] = probe_warps;
            self.layout.host.get_mut(self.layout_arrays.pool_scan)[i + 1] = pool_warps;
        }
        let lookups = self.shape.lookups.len();
        let dense = ((batch.samples * self.shape.dense_width) as u32).div_ceil(WARP_LANES);
        self.layout.host.get_mut(self.layout_arrays.pool_scan)[lookups + 1] = pool_warps + dense;
    }

    /// Copies the layout of the batch to the device. Does not wait.
    ///
    /// # Safety
    /// Kernels that read the batch follow on this stream. Until they have ended, the memory is neither
    /// written nor freed.
    pub(super) unsafe fn upload(&self, stream: &D::Stream) -> Result<(), DriverError> {
        let offsets = self.shape.features * (self.samples + 1);
        // SAFETY: the kernels that read the copy follow on this stream, and until they have ended, the caller
        // neither writes nor frees the memory.
        unsafe { self.layout.upload(stream, self.layout_arrays.offsets.bytes_to(offsets)) }
    }

    /// The warps that the batch needs.
    pub(super) fn warps(&self) -> PerKernel {
        let last = |scan: Array<u32>| self.layout.host.get(scan).last().copied().unwrap_or(0);
        PerKernel { probe: last(self.layout_arrays.probe_scan), gather: last(self.layout_arrays.pool_scan) }
    }

    /// By lookup: what the probe counted.
    pub(super) fn counted(&self, what: Counted) -> &[u32] {
        let lookups = self.shape.lookups.len();
        &self.pinned.get(self.pinned_arrays.report)[COUNTS_AT + what as usize * lookups..][..lookups]
    }

    /// The distinct rows that were not found.
    pub(super) fn misses(&self) -> impl Iterator<Item = LookupRow> {
        self.rows(self.pinned_arrays.misses, self.pinned.get(self.pinned_arrays.report)[MISSES_AT])
    }

    /// The distinct rows that were found in host memory.
    pub(super) fn pointed(&self) -> impl Iterator<Item = LookupRow> {
        self.rows(self.pinned_arrays.pointed, self.pinned.get(self.pinned_arrays.report)[POINTED_AT])
    }

    /// The rows of the first `count` occurrences of a list.
    fn rows(&self, list: Array<u32>, count: u32) -> impl Iterator<Item = LookupRow> {
        let columns = self.layout.host.get(self.layout_arrays.columns);
        let ids = self.pinned.get(self.pinned_arrays.ids);
        self.pinned.get(list)[..count as usize].iter().map(move |&occurrence| {
            // The column of an occurrence is the last one that begins at it or before it. An earlier column
            // that begins at the same occurrence has no ids.
            let lookup = columns.partition_point(|c| c.occurrences_at <= occurrence) - 1;
            let column = columns[lookup];
            LookupRow { lookup, id: ids[(column.ids_at + occurrence - column.occurrences_at) as usize] }
        })
    }

    /// Writes the addresses of the missing rows, for a gather that is launched with their number.
    pub(super) fn stage(&mut self, rows: impl Iterator<Item = u64>) {
        self.pinned.get_mut(self.pinned_arrays.rows).iter_mut().zip(rows).for_each(|(to, row)| *to = row);
    }

    /// The output, `samples x stride`.
    pub(super) fn out(&self) -> &[f32] {
        &self.pinned.get(self.pinned_arrays.out)[..self.samples * self.shape.stride]
    }

    pub(super) fn probe_args(&self, table: &GpuTable<D>) -> ProbeArgs {
        ProbeArgs {
            header: self.layout.device.of(self.layout_arrays.header),
            columns: self.layout.device.of(self.layout_arrays.columns),
            scan: self.layout.device.of(self.layout_arrays.probe_scan),
            narrow: if self.keys.iter().any(|keys| keys.narrow.is_some()) {
                self.layout.device.of(self.layout_arrays.narrow)
            } else {
                0
            },
            ids: self.pinned.of(self.pinned_arrays.ids),
            index: table.index(),
            pool: table.pool(),
            scratch: self.scratch.address(),
            keys: self.device.of(self.device_arrays.keys),
            owners: self.device.of(self.device_arrays.owners),
            places: self.device.of(self.device_arrays.places),
            counts: self.device.of(self.device_arrays.counts),
            state: self.device.of(self.device_arrays.state),
            misses: self.pinned.of(self.pinned_arrays.misses),
            pointed: self.pinned.of(self.pinned_arrays.pointed),
            report: self.pinned.of(self.pinned_arrays.report),
            buckets: table.shape().buckets,
            scratch_mask: (self.scratch.bytes() / size_of::<u64>() - 1) as u32,
            column_count: self.shape.lookups.len() as u32,
        }
    }

    pub(super) fn copy_args(&self, table: &GpuTable<D>) -> CopyArgs {
        CopyArgs {
            columns: self.layout.device.of(self.layout_arrays.columns),
            scan: self.layout.device.of(self.layout_arrays.probe_scan),
            owners: self.device.of(self.device_arrays.owners),
            places: self.device.of(self.device_arrays.places),
            state: self.device.of(self.device_arrays.state),
            pool: table.pool(),
            host: table.host_origin(),
            buffer: self.device.of(self.device_arrays.copies),
            column_count: self.shape.lookups.len() as u32,
            capacity: self.shape.copy_words() as u32,
        }
    }

    /// The arguments of a gather after the host has staged this many missing rows.
    pub(super) fn pool_args(&self, table: &GpuTable<D>, staged: usize) -> PoolArgs {
        PoolArgs {
            header: self.layout.device.of(self.layout_arrays.header),
            state: self.device.of(self.device_arrays.state),
            lookups: self.layout.device.of(self.layout_arrays.lookups),
            scan: self.layout.device.of(self.layout_arrays.pool_scan),
            offsets: self.layout.device.of(self.layout_arrays.offsets),
            places: self.device.of(self.device_arrays.places),
            owners: self.device.of(self.device_arrays.owners),
            rows: self.pinned.of(self.pinned_arrays.rows),
            pool: table.pool(),
            host: table.host_origin(),
            copies: self.device.of(self.device_arrays.copies),
            dense: self.pinned.of(self.pinned_arrays.dense),
            out: self.pinned.of(self.pinned_arrays.out),
            lookup_count: self.shape.lookups.len() as u32,
            dense_width: self.shape.dense_width as u32,
            stride: self.shape.stride as u32,
            staged: staged as u32,
        }
    }
}
