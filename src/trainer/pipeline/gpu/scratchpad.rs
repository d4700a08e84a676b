//! A trainer's scratchpad in device memory: its slots and staging buffers (`scratchpad/staging.rs`).
//!
//! All slots are in one allocation, and slots of the same size are contiguous. A launch needs claimed slots
//! (`HeldSlots`), and a claim fails for a slot that does not exist or that another claim has. So even if
//! Plan makes a mistake, a kernel stays within the allocation, and no two kernels use a slot at the same
//! time.
//!
//! Taking, copying out, copying in and putting each have a stream, and so do Train's steps (`stepper`). So
//! calls of different stages run at the same time. A call returns only when the work that it has launched is
//! done. So streams need no events between them: a stage's work is over before the next stage gets the item.
//! After a failed wait, the driver has ended (`Driver`): it executes nothing that could race with the work. A
//! call that writes or reads pinned memory on the host checks this first.

mod staging;

use std::sync::{Arc, Mutex};

use super::args::RecordRun;
use super::stepper::CudaStepper;
use crate::compute::pool::MAX_LOOKUPS;
use crate::device::cuda::memory::{Array, DeviceMemory, MemoryPlan, PinnedMemory};
use crate::device::cuda::{Driver, DriverError};
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;
use crate::trainer::pipeline::gpu::{Scratch, ScratchError, SlotRun, SlotSize, StagingBuffer, Stepper};
use crate::trainer::pipeline::slot_flags::{NO_SLOT, SlotFlags};
use staging::{CudaStagingBuffer, StagingMemory};

/// Words of a cache line of the device. The slots of each size begin at a line.
const LINE_WORDS: usize = 32;

/// A scratchpad on a device.
pub(crate) struct CudaScratch<D: Driver>(Arc<SharedScratchpad<D>>);

/// The data that a scratchpad shares with its staging buffers and steppers.
pub(crate) struct SharedScratchpad<D: Driver> {
    pub driver: Arc<D>,
    pub sizes: Vec<SlotSize>,
    /// Word at which the slots of each size begin.
    starts: Vec<u64>,
    flags: Vec<SlotFlags>,
    slots: DeviceMemory<D>,
    streams: Streams<D>,
    arrays: Arrays,
    spare: Mutex<Vec<StagingMemory<D>>>,
}

struct Streams<D: Driver> {
    take: D::Stream,
    copy_out: D::Stream,
    copy_in: D::Stream,
    put: D::Stream,
}

/// The layout of a staging buffer's memory. The incoming and outgoing buffers have the same offsets on the
/// host and on the device. The kernels' arguments follow, only on the host.
#[derive(Clone, Copy)]
struct Arrays {
    incoming: Array<f32>,
    outgoing: Array<f32>,
    runs: Array<RecordRun>,
    scan: Array<u32>,
    list: Array<u32>,
    device_bytes: usize,
    host_bytes: usize,
}

impl<D: Driver> CudaScratch<D> {
    /// Zeroed slots of these sizes. Staging buffers hold `staging_words` words of records in each direction.
    ///
    /// # Errors
    /// [`ScratchError`] when an allocation fails, or a number is too large for the kernels.
    pub(crate) fn new(
        driver: &Arc<D>,
        sizes: &[SlotSize],
        staging_words: usize,
    ) -> Result<Self, ScratchError> {
        let mut starts = Vec::new();
        let mut words = 0usize;
        for &SlotSize { words: width, count } in sizes {
            limit("slots of a size", u64::from(NO_SLOT) - 1, count)?;
            limit("words of a record", 1 << 30, width)?;
            starts.push(words as u64);
            let more =
                width.max(1).checked_mul(count).and_then(|more| more.checked_next_multiple_of(LINE_WORDS));
            let all = more.and_then(|more| words.checked_add(more));
            words = all
                .filter(|&all| all <= isize::MAX as usize / WORD_BYTES)
                .ok_or(too_large(isize::MAX as usize))?;
        }
        let widest = sizes.iter().map(|size| size.words).max().unwrap_or(1);
        let narrowest = sizes.iter().map(|size| size.words).min().unwrap_or(1).max(1);
        // So any record fits in a staging buffer.
        let staging_words = staging_words.max(widest);
        limit("words of staging", u64::from(u32::MAX >> 1), staging_words)?;
        let mut plan = MemoryPlan::default();
        let (incoming, outgoing) = (plan.array(staging_words), plan.array(staging_words));
        let buffers = plan.bytes();
        let runs = plan.array(MAX_LOOKUPS.min(staging_words));
        let (scan, list) = (plan.array(runs.len() + 1), plan.array(staging_words / narrowest));
        let (device_bytes, host_bytes) = (buffers, plan.bytes());
        let arrays = Arrays { incoming, outgoing, runs, scan, list, device_bytes, host_bytes };
        Ok(Self(Arc::new(SharedScratchpad {
            sizes: sizes.to_vec(),
            starts,
            flags: sizes.iter().map(|size| SlotFlags::new(size.count)).collect(),
            slots: DeviceMemory::new(driver, (words * WORD_BYTES).max(WORD_BYTES))?,
            streams: Streams {
                take: driver.stream()?,
                copy_out: driver.stream()?,
                copy_in: driver.stream()?,
                put: driver.stream()?,
            },
            arrays,
            spare: Mutex::default(),
            driver: driver.clone(),
        })))
    }
}

impl<D: Driver> Scratch for CudaScratch<D> {
    fn sizes(&self) -> &[SlotSize] {
        &self.0.sizes
    }

    fn flags(&self, size: usize) -> &SlotFlags {
        &self.0.flags[size]
    }

    fn staging_buffer(&self) -> Result<Box<dyn StagingBuffer>, ScratchError> {
        let shared = &self.0;
        let spare = shared.spare.lock().even_poisoned().pop();
        let memory = match spare {
            Some(memory) => memory,
            None => StagingMemory {
                host: PinnedMemory::new(&shared.driver, shared.arrays.host_bytes)?,
                device: DeviceMemory::new(&shared.driver, shared.arrays.device_bytes)?,
            },
        };
        let (words_in, words_out) = (0, 0);
        Ok(Box::new(CudaStagingBuffer { shared: shared.clone(), memory: Some(memory), words_in, words_out }))
    }

    fn staging_words(&self) -> usize {
        self.0.arrays.incoming.len()
    }

    fn stepper(&self) -> Result<Box<dyn Stepper>, ScratchError> {
        Ok(Box::new(CudaStepper::new(&self.0)?))
    }
}

impl<D: Driver> SharedScratchpad<D> {
    /// The device address of the first slot.
    pub(crate) fn address(&self) -> u64 {
        self.slots.address()
    }

    /// The slots of a run's size.
    ///
    /// # Errors
    /// [`ScratchError::Shape`] if the run's slots were not claimed from this scratchpad and size.
    pub(crate) fn slot_array(&self, run: &SlotRun<'_>) -> Result<SlotArray, ScratchError> {
        match (self.flags.get(run.size), self.sizes.get(run.size), self.starts.get(run.size)) {
            (Some(flags), Some(size), Some(&start)) if run.held.is_of(flags) => {
                Ok(SlotArray { start, words: size.words as u32 })
            }
            _ => Err(shape("slots' size", self.sizes.len(), run.size)),
        }
    }

    /// Waits for all work on the stream. Returns the error of `launched` if it has one, else the error of
    /// the wait.
    pub(crate) fn settle(
        &self,
        stream: &D::Stream,
        launched: Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let settled = self.driver.finish(stream);
        launched.and(settled)
    }
}

/// The slots of one size on the device.
#[derive(Clone, Copy)]
pub(crate) struct SlotArray {
    /// Word of the scratchpad at which slot 0 begins.
    pub start: u64,
    /// Words of a record.
    pub words: u32,
}

/// Fails if a slot is [`NO_SLOT`].
pub(crate) fn check_slots(list: &[u32]) -> Result<(), ScratchError> {
    match list.iter().position(|&slot| slot == NO_SLOT) {
        None => Ok(()),
        Some(at) => Err(shape("rows with a slot", list.len(), at)),
    }
}

pub(crate) fn limit(field: &'static str, limit: u64, got: usize) -> Result<(), ScratchError> {
    let got = got as u64;
    if got > limit { Err(ScratchError::Limit { field, limit, got }) } else { Ok(()) }
}

pub(crate) fn shape(field: &'static str, expected: usize, got: usize) -> ScratchError {
    ScratchError::Shape { field, expected: expected as u64, got: got as u64 }
}

fn too_large(bytes: usize) -> ScratchError {
    ScratchError::Limit { field: "bytes", limit: bytes as u64, got: u64::MAX }
}
