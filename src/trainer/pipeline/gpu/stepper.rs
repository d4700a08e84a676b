//! A trainer's steps on a device's scratchpad: pooling a batch's input rows from slots, and updating rows.
//!
//! The host writes all data of a batch for the device into one block of pinned memory. One copy moves it to
//! the device, because kernels read much of it more than once. So the forward half of a step is a copy, a
//! launch and a copy back, and the backward half is a copy and a launch, for any number of tables. The
//! memory grows when a batch needs more.
//!
//! The forward half is the serving cache's gather-pool (`kernels/gather_pool.cu`). There a probe writes the
//! locations of rows; here the host writes them.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::args::{UpdateArgs, UpdateTable, lanes_of};
use super::kernels;
use super::scratchpad::{SharedScratchpad, SlotArray, check_slots, limit, shape};
use crate::compute::pool::{KernelLookup, MAX_LOOKUPS, WARP_LANES, pooling_code};
use crate::device::cuda::launch::{blocks, gather_pool};
use crate::device::cuda::memory::{Array, MemoryPlan, Mirrored};
use crate::device::cuda::pool_args::PoolArgs;
use crate::device::cuda::pool_args::{AT_NOTHING, BatchHeader, BatchState};
use crate::device::cuda::{Address, Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::trainer::casting::GradientSource;
use crate::trainer::pipeline::gpu::{
    Gather, GatherLookup, ScratchError, Stepper, TableSlots, Update, UpdateRows,
};
use crate::trainer::pipeline::slot_flags::NO_SLOT;
use crate::types::Element;

/// The limit for numbers of threads, warps and elements, so that kernels can count them in 32 bits.
const MAX_NUMBER: u64 = (u32::MAX >> 2) as u64;

/// Steps on one stream.
pub(crate) struct CudaStepper<D: Driver> {
    shared: Arc<SharedScratchpad<D>>,
    stream: D::Stream,
    memory: Mirrored<D>,
}

struct GatherArrays {
    header: Array<BatchHeader>,
    state: Array<BatchState>,
    lookups: Array<KernelLookup>,
    scan: Array<u32>,
    offsets: Array<u32>,
    places: Array<u64>,
    /// Bytes of all arrays above, which the host writes.
    host_bytes: usize,
    out: Array<f32>,
}

struct UpdateArrays {
    tables: Array<UpdateTable>,
    scan: Array<u32>,
    list: Array<u32>,
    starts: Array<u32>,
    sources: Array<GradientSource>,
    grads: Array<f32>,
}

impl<D: Driver> CudaStepper<D> {
    pub(crate) fn new(shared: &Arc<SharedScratchpad<D>>) -> Result<Self, ScratchError> {
        let stream = shared.driver.stream()?;
        let memory = Mirrored::new(&shared.driver, 1 << 16)?;
        Ok(Self { shared: shared.clone(), stream, memory })
    }

    /// Grows the memory to at least `bytes` bytes, for the host to write. Fails if the device may be using
    /// it: every call waits for what it has enqueued, so that is after a failed wait.
    fn make_room(&mut self, bytes: usize) -> Result<(), DriverError> {
        self.shared.driver.alive()?;
        if self.memory.host.bytes() < bytes {
            self.memory = Mirrored::new(&self.shared.driver, bytes.next_power_of_two())?;
        }
        Ok(())
    }

    /// Writes the kernel's input for a gather, except `PoolArgs`. Returns the number of warps.
    fn write_gather(&mut self, gather: &Gather<'_>, arrays: &GatherArrays) -> Result<u32, ScratchError> {
        let Self { shared, memory: Mirrored { host, .. }, .. } = self;
        let header = BatchHeader { samples: gather.samples as u32, ..BatchHeader::default() };
        host.get_mut(arrays.header)[0] = header;
        // The default state says that no row is missing. Otherwise the kernel would skip the batch.
        host.get_mut(arrays.state)[0] = BatchState::default();
        host.get_mut(arrays.scan)[0] = 0;
        let (mut column, mut occurrences, mut warps) = (0, 0, 0);
        for (i, lookup) in gather.lookups.iter().enumerate() {
            let table = table_of(gather, lookup)?;
            let SlotArray { start, words } = shared.slot_array(&table.run)?;
            limit("elements of a record", words.into(), table.dim)?;
            let offsets_at = i * (gather.samples + 1);
            host.get_mut(arrays.offsets)[offsets_at..][..lookup.offsets.len()]
                .copy_from_slice(lookup.offsets);
            host.get_mut(arrays.lookups)[i] = KernelLookup {
                offsets_at: offsets_at as u32,
                occurrences_at: occurrences as u32,
                dim: table.dim as u32,
                column,
                pooling: pooling_code(lookup.pooling),
                element: Element::F32.code(),
            };
            let list = table.run.held.list();
            let place = |&place: &u32| match list.get(place as usize) {
                Some(&slot) if slot != NO_SLOT => (start + u64::from(slot) * u64::from(words)) << 1,
                _ => AT_NOTHING,
            };
            let found = &lookup.places[..occurrences_of(lookup)];
            let to = &mut host.get_mut(arrays.places)[occurrences..][..found.len()];
            to.iter_mut().zip(found).for_each(|(to, found)| *to = place(found));
            occurrences += found.len();
            column += table.dim as u32;
            warps += ((gather.samples * table.dim) as u32).div_ceil(WARP_LANES);
            host.get_mut(arrays.scan)[i + 1] = warps;
        }
        // The last segment is for dense values, which this gather does not have.
        host.get_mut(arrays.scan)[gather.lookups.len() + 1] = warps;
        Ok(warps)
    }

    fn launch_gather(&self, args: &PoolArgs, warps: u32, arrays: &GatherArrays) -> Result<(), DriverError> {
        let Self { shared, stream, memory } = self;
        let driver = &*shared.driver;
        // SAFETY: host and device memory hold all arrays, and only the operations of this stream use them
        // until `settle` has waited. If the wait fails, the driver has ended: it executes nothing else, it
        // keeps the memory, and `make_room` keeps the host from writing it. `check_gather` has shown that
        // bags are within the places, rows within the matrix and vectors within records. `write_gather` has
        // shown that every place is a slot of this scratchpad that the caller holds.
        unsafe {
            memory.upload(stream, arrays.host_bytes)?;
            gather_pool(driver, stream, blocks(driver, warps), args)?;
            let (from, to) = (memory.device.of(arrays.out), memory.host.of(arrays.out));
            driver.copy(stream, Address(from), Address(to), arrays.out.len() * WORD_BYTES)
        }
    }

    /// Writes the kernel's input for an update, except the gradients. Returns the number of warps.
    fn write_update(&mut self, update: &Update<'_>, arrays: &UpdateArrays) -> Result<u32, ScratchError> {
        let Self { shared, memory: Mirrored { host, .. }, .. } = self;
        host.get_mut(arrays.scan)[0] = 0;
        let (mut rows, mut sources, mut warps) = (0, 0, 0);
        for (i, table) in update.tables.iter().enumerate() {
            let SlotArray { start, words } = shared.slot_array(&table.rows.run)?;
            check_rows(update, table, words as usize)?;
            let list = table.rows.run.held.list();
            host.get_mut(arrays.list)[rows..][..list.len()].copy_from_slice(list);
            let starts = &mut host.get_mut(arrays.starts)[rows..][..=list.len()];
            starts[0] = sources as u32;
            let ends = table.ends.iter().map(|end| sources as u32 + (end - table.first));
            starts[1..].iter_mut().zip(ends).for_each(|(to, end)| *to = end);
            host.get_mut(arrays.sources)[sources..][..table.sources.len()].copy_from_slice(table.sources);
            let dim = table.rows.dim as u32;
            let lanes = lanes_of(dim);
            host.get_mut(arrays.tables)[i] = UpdateTable {
                slots_at: start,
                rows_at: rows as u32,
                rows: list.len() as u32,
                dim,
                words,
                lanes,
                unused: 0,
            };
            rows += list.len();
            sources += table.sources.len();
            warps += (list.len() as u32 * lanes).div_ceil(WARP_LANES);
            host.get_mut(arrays.scan)[i + 1] = warps;
        }
        Ok(warps)
    }

    fn launch_update(&self, args: &UpdateArgs, warps: u32, bytes: usize) -> Result<(), DriverError> {
        let Self { shared, stream, memory } = self;
        let driver = &*shared.driver;
        // SAFETY: as in `launch_gather`. `check_rows` has shown that sources are within samples and columns,
        // and that records have the optimizer's states. The caller holds the slots.
        unsafe {
            memory.upload(stream, bytes)?;
            kernels::update_rows(driver, stream, warps, args)
        }
    }
}

impl<D: Driver> Stepper for CudaStepper<D> {
    fn gather(&mut self, gather: &Gather<'_>) -> Result<&[f32], ScratchError> {
        let stride = check_gather(gather)?;
        let occurrences = gather.lookups.iter().map(occurrences_of).sum();
        let lookups = gather.lookups.len();
        let mut plan = MemoryPlan::default();
        let arrays = GatherArrays {
            header: plan.array(1),
            state: plan.array(1),
            lookups: plan.array(lookups),
            scan: plan.array(lookups + 2),
            offsets: plan.array(lookups * (gather.samples + 1)),
            places: plan.array(occurrences),
            host_bytes: plan.bytes(),
            out: plan.array(gather.samples * stride),
        };
        self.make_room(plan.bytes())?;
        let warps = self.write_gather(gather, &arrays)?;
        if warps > 0 {
            let device = &self.memory.device;
            let args = PoolArgs {
                header: device.of(arrays.header),
                state: device.of(arrays.state),
                lookups: device.of(arrays.lookups),
                scan: device.of(arrays.scan),
                offsets: device.of(arrays.offsets),
                places: device.of(arrays.places),
                owners: 0,
                rows: 0,
                pool: self.shared.address(),
                host: 0,
                copies: 0,
                dense: 0,
                out: device.of(arrays.out),
                lookup_count: lookups as u32,
                dense_width: 0,
                stride: stride as u32,
                staged: 0,
            };
            let launched = self.launch_gather(&args, warps, &arrays);
            self.shared.settle(&self.stream, launched)?;
        }
        Ok(self.memory.host.get(arrays.out))
    }

    fn update(&mut self, update: &Update<'_>, grads: &mut dyn FnMut(&mut [f32])) -> Result<(), ScratchError> {
        let rows: usize = update.tables.iter().map(|table| table.rows.run.held.list().len()).sum();
        let sources: usize = update.tables.iter().map(|table| table.sources.len()).sum();
        limit("tables", MAX_LOOKUPS as u64, update.tables.len())?;
        limit("rows of a batch", MAX_NUMBER / u64::from(WARP_LANES), rows)?;
        limit("sources of a batch", MAX_NUMBER, sources)?;
        limit("gradients of a sample", MAX_NUMBER, update.stride)?;
        let mut plan = MemoryPlan::default();
        let arrays = UpdateArrays {
            tables: plan.array(update.tables.len()),
            scan: plan.array(update.tables.len() + 1),
            list: plan.array(rows),
            starts: plan.array(rows + 1),
            sources: plan.array(sources),
            grads: plan.array(update.samples * update.stride),
        };
        self.make_room(plan.bytes())?;
        let warps = self.write_update(update, &arrays)?;
        if warps == 0 {
            return Ok(());
        }
        grads(self.memory.host.get_mut(arrays.grads));
        let device = &self.memory.device;
        let args = UpdateArgs {
            tables: device.of(arrays.tables),
            scan: device.of(arrays.scan),
            list: device.of(arrays.list),
            starts: device.of(arrays.starts),
            sources: device.of(arrays.sources),
            grads: device.of(arrays.grads),
            scratch: self.shared.address(),
            table_count: update.tables.len() as u32,
            stride: update.stride as u32,
            first_column: update.first_column as u32,
            ..UpdateArgs::default()
        };
        let launched = self.launch_update(&args.with_rule(update.rule), warps, plan.bytes());
        Ok(self.shared.settle(&self.stream, launched)?)
    }
}

fn table_of<'g>(gather: &Gather<'g>, lookup: &GatherLookup<'_>) -> Result<TableSlots<'g>, ScratchError> {
    let table = gather.tables.get(lookup.table).copied();
    table.ok_or_else(|| shape("tables", gather.tables.len(), lookup.table))
}

/// The number of occurrences of a lookup that has passed `check_gather`.
fn occurrences_of(lookup: &GatherLookup<'_>) -> usize {
    lookup.offsets.last().copied().unwrap_or(0) as usize
}

/// Checks the kernel's requirements, except for slots. Returns the number of columns of the output.
fn check_gather(gather: &Gather<'_>) -> Result<usize, ScratchError> {
    limit("lookups", MAX_LOOKUPS as u64, gather.lookups.len())?;
    let (mut stride, mut occurrences) = (0, 0usize);
    for lookup in gather.lookups {
        let offsets = lookup.offsets;
        if offsets.len() != gather.samples + 1 {
            return Err(shape("offsets of a lookup", gather.samples + 1, offsets.len()));
        }
        if let Some(pair) = offsets.windows(2).find(|pair| pair[0] > pair[1]) {
            return Err(shape("offset (ascending)", pair[0] as usize, pair[1] as usize));
        }
        if lookup.places.len() < occurrences_of(lookup) {
            return Err(shape("places of a lookup", occurrences_of(lookup), lookup.places.len()));
        }
        stride += table_of(gather, lookup)?.dim;
        occurrences += occurrences_of(lookup);
    }
    limit("ids of a batch", MAX_NUMBER, occurrences)?;
    limit("offsets of a batch", MAX_NUMBER, gather.lookups.len().saturating_mul(gather.samples + 1))?;
    limit("elements of a batch", MAX_NUMBER, gather.samples.saturating_mul(stride))?;
    Ok(stride)
}

/// Checks the kernel's requirements on a table's rows.
fn check_rows(update: &Update<'_>, table: &UpdateRows<'_>, words: usize) -> Result<(), ScratchError> {
    let TableSlots { run, dim } = table.rows;
    check_slots(run.held.list())?;
    if dim == 0 || update.rule.record_words(dim) != words {
        return Err(shape("words of a record", update.rule.record_words(dim), words));
    }
    if table.ends.len() != run.held.list().len() {
        return Err(shape("ends of sources", run.held.list().len(), table.ends.len()));
    }
    let bounds = std::iter::once(&table.first).chain(table.ends);
    if let Some((from, to)) = bounds.zip(table.ends).find(|(from, to)| from > to) {
        return Err(shape("end (ascending)", *from as usize, *to as usize));
    }
    let last = table.ends.last().map_or(0, |end| (end - table.first) as usize);
    if last != table.sources.len() {
        return Err(shape("sources of a table", last, table.sources.len()));
    }
    let end = update.first_column + update.stride;
    let outside = |source: &&GradientSource| {
        let column = source.column as usize;
        source.sample as usize >= update.samples || column < update.first_column || column + dim > end
    };
    match table.sources.iter().find(outside) {
        None => Ok(()),
        Some(source) => Err(shape("sources within the gradients", update.samples, source.sample as usize)),
    }
}
