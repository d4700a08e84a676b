//! The staging buffers of a scratchpad: records are copied between them and slots, and between the host and
//! the device.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::{SharedScratchpad, SlotArray, check_slots, limit, shape};
use crate::compute::pool::WARP_LANES;
use crate::device::cuda::memory::{DeviceMemory, PinnedMemory};
use crate::device::cuda::{Address, Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;
use crate::trainer::pipeline::gpu::args::{RecordArgs, RecordRun};
use crate::trainer::pipeline::gpu::kernels;
use crate::trainer::pipeline::gpu::{ScratchError, SlotRun, StagingBuffer};

/// The memory of a staging buffer.
pub(super) struct StagingMemory<D: Driver> {
    pub(super) host: PinnedMemory<D>,
    pub(super) device: DeviceMemory<D>,
}

/// A staging buffer. It has exclusive use of its memory until it is dropped.
pub(super) struct CudaStagingBuffer<D: Driver> {
    pub(super) shared: Arc<SharedScratchpad<D>>,
    /// `None` only while the staging buffer is being dropped.
    pub(super) memory: Option<StagingMemory<D>>,
    /// Words of the fetched records.
    pub(super) words_in: usize,
    /// Words of the records that were taken out of slots.
    pub(super) words_out: usize,
}

/// The direction in which records are copied between slots and a staging buffer.
#[derive(Clone, Copy)]
enum CopyDirection {
    FromSlots,
    ToSlots,
}

/// How much is copied for the runs that [`StagingMemory::list_runs`] has listed.
#[derive(Clone, Copy)]
struct ListedRuns {
    count: usize,
    /// Words of all records.
    words: usize,
    /// Warps that the copy needs.
    warps: u32,
}

impl<D: Driver> StagingMemory<D> {
    /// Writes the runs, their slots and the prefix sum of their warps for the kernels. No kernel may be
    /// running.
    fn list_runs(
        &mut self,
        shared: &SharedScratchpad<D>,
        runs: &[SlotRun<'_>],
    ) -> Result<ListedRuns, ScratchError> {
        let (host, arrays) = (&mut self.host, shared.arrays);
        let (mut words, mut rows, mut warps) = (0, 0, 0);
        limit("runs", arrays.runs.len() as u64, runs.len())?;
        for (i, run) in runs.iter().enumerate() {
            let SlotArray { start, words: width } = shared.slot_array(run)?;
            let list = run.held.list();
            check_slots(list)?;
            let (first, from) = (rows, words);
            (rows, words) = (rows + list.len(), words + list.len() * width as usize);
            limit("words of staging", arrays.incoming.len() as u64, words)?;
            host.get_mut(arrays.list)[first..rows].copy_from_slice(list);
            host.get_mut(arrays.runs)[i] = RecordRun {
                slots_at: start,
                staged_at: from as u64,
                list_at: first as u32,
                rows: list.len() as u32,
                words: width,
                unused: 0,
            };
            warps += ((words - from) as u32).div_ceil(WARP_LANES);
            host.get_mut(arrays.scan)[i + 1] = warps;
        }
        Ok(ListedRuns { count: runs.len(), words, warps })
    }

    /// Launches the copy of the listed runs.
    ///
    /// # Safety
    /// [`Self::list_runs`] has listed the runs of this scratchpad, and no others since. Until the copy has
    /// ended, the caller holds their slots, and nothing else uses this memory.
    unsafe fn launch(
        &self,
        shared: &SharedScratchpad<D>,
        listed: ListedRuns,
        direction: CopyDirection,
    ) -> Result<(), DriverError> {
        let Self { host, device } = self;
        let (driver, streams, arrays) = (&*shared.driver, &shared.streams, shared.arrays);
        let buffer = match direction {
            CopyDirection::FromSlots => arrays.outgoing,
            CopyDirection::ToSlots => arrays.incoming,
        };
        let args = RecordArgs {
            runs: host.of(arrays.runs),
            scan: host.of(arrays.scan),
            list: host.of(arrays.list),
            scratch: shared.address(),
            staged: device.of(buffer),
            run_count: listed.count as u32,
            unused: 0,
        };
        // SAFETY: the slots are of this scratchpad (`slot_array`, `HeldSlots`), the records fit the buffer,
        // and the scan is the prefix sum of the runs' warps. The kernel uses only this staging buffer and
        // slots that the caller holds.
        unsafe {
            match direction {
                CopyDirection::FromSlots => kernels::take_records(driver, &streams.take, listed.warps, &args),
                CopyDirection::ToSlots => kernels::put_records(driver, &streams.put, listed.warps, &args),
            }
        }
    }
}

impl<D: Driver> CudaStagingBuffer<D> {
    /// Copies records between slots and the device's buffer. Returns the number of words.
    fn copy_records(
        &mut self,
        runs: &[SlotRun<'_>],
        direction: CopyDirection,
    ) -> Result<usize, ScratchError> {
        let Self { shared, memory: Some(memory), .. } = self else { return Ok(0) };
        shared.driver.alive()?;
        let listed = memory.list_runs(shared, runs)?;
        if listed.words == 0 {
            return Ok(0);
        }
        let stream = match direction {
            CopyDirection::FromSlots => &shared.streams.take,
            CopyDirection::ToSlots => &shared.streams.put,
        };
        // SAFETY: these runs were just listed. The kernel has ended when `settle` succeeds, and until then
        // the runs hold their slots and `self` is borrowed. If the wait fails, the driver has ended: it
        // executes nothing else, it keeps the memory, and `alive` keeps the host from writing it.
        let launched = unsafe { memory.launch(shared, listed, direction) };
        shared.settle(stream, launched)?;
        Ok(listed.words)
    }
}

impl<D: Driver> StagingBuffer for CudaStagingBuffer<D> {
    fn take(&mut self, runs: &[SlotRun<'_>]) -> Result<(), ScratchError> {
        self.words_out = self.copy_records(runs, CopyDirection::FromSlots)?;
        Ok(())
    }

    fn incoming(&mut self, words: usize) -> Result<&mut [f32], ScratchError> {
        let array = self.shared.arrays.incoming;
        limit("words of staging", array.len() as u64, words)?;
        self.shared.driver.alive()?;
        self.words_in = words;
        Ok(self.memory.as_mut().map_or(&mut [][..], |memory| &mut memory.host.get_mut(array)[..words]))
    }

    fn exchange(&mut self) -> Result<(), ScratchError> {
        let Self { shared, memory: Some(StagingMemory { host, device }), words_in, words_out } = self else {
            return Ok(());
        };
        let SharedScratchpad { driver, streams, arrays, .. } = &**shared;
        let copy = |stream, from: u64, to: u64, words: usize| match words {
            0 => Ok(()),
            // SAFETY: both buffers belong to this staging buffer and have room for the words (`incoming`,
            // `list_runs`). `self` is borrowed mutably until `settle` has waited for both copies. If a wait
            // fails, see `copy_records`.
            _ => unsafe { driver.copy(stream, Address(from), Address(to), words * WORD_BYTES) },
        };
        let (to_host, to_device) = (&streams.copy_out, &streams.copy_in);
        let sent = copy(to_device, host.of(arrays.incoming), device.of(arrays.incoming), *words_in);
        let fetched = copy(to_host, device.of(arrays.outgoing), host.of(arrays.outgoing), *words_out);
        let sent = if *words_in > 0 { shared.settle(to_device, sent) } else { sent };
        let fetched = if *words_out > 0 { shared.settle(to_host, fetched) } else { fetched };
        Ok(sent.and(fetched)?)
    }

    fn outgoing(&mut self) -> Result<&mut [f32], ScratchError> {
        self.shared.driver.alive()?;
        let (array, words) = (self.shared.arrays.outgoing, self.words_out);
        Ok(self.memory.as_mut().map_or(&mut [][..], |memory| &mut memory.host.get_mut(array)[..words]))
    }

    fn put(&mut self, runs: &[SlotRun<'_>]) -> Result<(), ScratchError> {
        let width = |run: &SlotRun<'_>| self.shared.sizes.get(run.size).map_or(0, |size| size.words);
        let words = runs.iter().map(|run| run.held.list().len() * width(run)).sum();
        if words != self.words_in {
            return Err(shape("words to put", self.words_in, words));
        }
        self.copy_records(runs, CopyDirection::ToSlots).map(|_| ())
    }
}

impl<D: Driver> Drop for CudaStagingBuffer<D> {
    fn drop(&mut self) {
        // Every call has waited. If no wait has failed, the device does not use the memory. Otherwise the
        // memory is dropped, and the driver keeps it.
        if self.shared.driver.alive().is_ok() {
            self.shared.spare.lock().even_poisoned().extend(self.memory.take());
        }
    }
}
