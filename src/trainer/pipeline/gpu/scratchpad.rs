//! A trainer's scratchpad in device memory: its slots, and the berths at which records are staged.
//!
//! All slots are one allocation, those of a size beside each other. What is done with them is launched here,
//! after every slot has been shown to be there and the caller's (`Held`), so whatever the trainer's plan
//! does wrong, a kernel stays within the allocation and two kernels apart.
//!
//! Each stage has a stream: taking, bringing, sending and putting of different items, and Train's steps
//! (`stepper`), run beside each other. A call returns when what it has launched is done, and hands nothing
//! over before. So there are no events between streams: what one stage did is over before the next one knows
//! of the item.

#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use super::args::{RecordArgs, RecordRun};
use super::kernels;
use super::stepper::CudaStepper;
use crate::compute::pool::{MAX_LOOKUPS, WARP_LANES};
use crate::device::cuda::memory::{Array, DeviceMemory, PinnedMemory, Plan};
use crate::device::cuda::{Address, Driver, DriverError};
use crate::trainer::pipeline::gpu::{Run, Scratch, ScratchError, SlotSize, StagingBuffer, Stepper};
use crate::trainer::pipeline::slot_flags::{NO_SLOT, SlotFlags};

const WORD: usize = size_of::<f32>();
/// Words that begin a line: slots of each size do.
const LINE_WORDS: usize = 32;

/// A scratchpad on a device.
pub struct CudaScratch<D: Driver>(Arc<Shared<D>>);

/// What its berths and steppers share.
pub(crate) struct Shared<D: Driver> {
    pub driver: Arc<D>,
    pub sizes: Vec<SlotSize>,
    /// The word at which the slots of each size begin.
    starts: Vec<u64>,
    flags: Vec<SlotFlags>,
    slots: DeviceMemory<D>,
    streams: Streams<D>,
    arrays: Arrays,
    spare: Mutex<Vec<Room<D>>>,
}

struct Streams<D: Driver> {
    take: D::Stream,
    bring: D::Stream,
    send: D::Stream,
    put: D::Stream,
}

/// Where things lie in a berth's memory: the buffers at the same places on the host and on the device, and
/// then, on the host alone, what a kernel is told of records.
#[derive(Clone, Copy)]
struct Arrays {
    incoming: Array<f32>,
    outgoing: Array<f32>,
    runs: Array<RecordRun>,
    scan: Array<u32>,
    list: Array<u32>,
    /// Bytes of the buffers, and of all.
    bytes: (usize, usize),
}

/// The memory of a berth.
struct Room<D: Driver> {
    host: PinnedMemory<D>,
    device: DeviceMemory<D>,
}

impl<D: Driver> CudaScratch<D> {
    /// Zeroed slots of these sizes, and berths for `berth_words` words of records each way.
    ///
    /// # Errors
    /// [`ScratchError`] where the device has not the memory, or a number is past what kernels can count.
    pub fn new(driver: &Arc<D>, sizes: &[SlotSize], berth_words: usize) -> Result<Self, ScratchError> {
        let mut starts = Vec::new();
        let mut words = 0usize;
        for &SlotSize { words: width, count } in sizes {
            limit("slots of a size", u64::from(NO_SLOT) - 1, count)?;
            limit("words of a record", 1 << 30, width)?;
            starts.push(words as u64);
            let more =
                width.max(1).checked_mul(count).and_then(|more| more.checked_next_multiple_of(LINE_WORDS));
            let all = more.and_then(|more| words.checked_add(more));
            words =
                all.filter(|&all| all <= isize::MAX as usize / WORD).ok_or(too_large(isize::MAX as usize))?;
        }
        let widest = sizes.iter().map(|size| size.words).max().unwrap_or(1);
        let narrowest = sizes.iter().map(|size| size.words).min().unwrap_or(1).max(1);
        // Any record has room in any berth.
        let berth_words = berth_words.max(widest);
        limit("words of staging", u64::from(u32::MAX >> 1), berth_words)?;
        let mut plan = Plan::default();
        let (incoming, outgoing) = (plan.array(berth_words), plan.array(berth_words));
        let buffers = plan.bytes();
        let runs = plan.array(MAX_LOOKUPS.min(berth_words));
        let (scan, list) = (plan.array(runs.len() + 1), plan.array(berth_words / narrowest));
        let arrays = Arrays { incoming, outgoing, runs, scan, list, bytes: (buffers, plan.bytes()) };
        Ok(Self(Arc::new(Shared {
            sizes: sizes.to_vec(),
            starts,
            flags: sizes.iter().map(|size| SlotFlags::new(size.count)).collect(),
            slots: DeviceMemory::new(driver, (words * WORD).max(WORD))?,
            streams: Streams {
                take: driver.stream()?,
                bring: driver.stream()?,
                send: driver.stream()?,
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

    fn berth(&self) -> Result<Box<dyn StagingBuffer>, ScratchError> {
        let shared = &self.0;
        let spare = shared.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let room = match spare {
            Some(room) => room,
            None => Room {
                host: PinnedMemory::new(&shared.driver, shared.arrays.bytes.1)?,
                device: DeviceMemory::new(&shared.driver, shared.arrays.bytes.0)?,
            },
        };
        Ok(Box::new(CudaBerth { shared: shared.clone(), room: Some(room), words: (0, 0) }))
    }

    fn berth_words(&self) -> usize {
        self.0.arrays.incoming.len()
    }

    fn stepper(&self) -> Result<Box<dyn Stepper>, ScratchError> {
        Ok(Box::new(CudaStepper::new(&self.0)?))
    }
}

impl<D: Driver> Shared<D> {
    /// Where kernels see the first slot's first word.
    pub(crate) fn address(&self) -> u64 {
        self.slots.address()
    }

    /// The word at which the slots of a run's size begin, and words of a record.
    ///
    /// # Errors
    /// [`ScratchError::Shape`] where the run's slots are not of this scratchpad and size.
    pub(crate) fn place(&self, run: &Run<'_>) -> Result<(u64, u32), ScratchError> {
        match (self.flags.get(run.size), self.sizes.get(run.size), self.starts.get(run.size)) {
            (Some(flags), Some(size), Some(&start)) if run.held.is_of(flags) => {
                Ok((start, size.words as u32))
            }
            _ => Err(shape("slots' size", self.sizes.len(), run.size)),
        }
    }

    /// Waits for all that the stream was given. What was given may have failed; then that is what is said.
    pub(crate) fn settle(
        &self,
        stream: &D::Stream,
        given: Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let settled = self.driver.record(stream).and_then(|last| self.driver.wait(&last));
        given.and(settled)
    }
}

/// Fails with the first place that has no slot.
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

/// A berth: while it lives, its memory is its own.
struct CudaBerth<D: Driver> {
    shared: Arc<Shared<D>>,
    /// Taken out when this is dropped.
    room: Option<Room<D>>,
    /// Words of records that come in, and that leave.
    words: (usize, usize),
}

/// Which way records go.
#[derive(Clone, Copy)]
enum Way {
    Out,
    In,
}

impl<D: Driver> CudaBerth<D> {
    /// Moves records between slots and the device's buffer. Gives their words.
    fn records(&mut self, runs: &[Run<'_>], way: Way) -> Result<usize, ScratchError> {
        let Self { shared, room, .. } = self;
        let (Some(Room { host, device }), arrays) = (room, shared.arrays) else { return Ok(0) };
        let (mut words, mut rows, mut warps) = (0, 0, 0);
        limit("runs", arrays.runs.len() as u64, runs.len())?;
        for (i, run) in runs.iter().enumerate() {
            let (slots_at, width) = shared.place(run)?;
            let list = run.held.list();
            check_slots(list)?;
            let (first, from) = (rows, words);
            (rows, words) = (rows + list.len(), words + list.len() * width as usize);
            limit("words of staging", arrays.incoming.len() as u64, words)?;
            host.get_mut(arrays.list)[first..rows].copy_from_slice(list);
            host.get_mut(arrays.runs)[i] = RecordRun {
                slots_at,
                staged_at: from as u64,
                list_at: first as u32,
                rows: list.len() as u32,
                words: width,
                unused: 0,
            };
            warps += ((words - from) as u32).div_ceil(WARP_LANES);
            host.get_mut(arrays.scan)[i + 1] = warps;
        }
        if words == 0 {
            return Ok(0);
        }
        let (buffer, stream) = match way {
            Way::Out => (arrays.outgoing, &shared.streams.take),
            Way::In => (arrays.incoming, &shared.streams.put),
        };
        let args = RecordArgs {
            runs: host.of(arrays.runs),
            scan: host.of(arrays.scan),
            list: host.of(arrays.list),
            scratch: shared.address(),
            staged: device.of(buffer),
            run_count: runs.len() as u32,
            unused: 0,
        };
        let driver = &*shared.driver;
        // SAFETY: the slots are the caller's and of this scratchpad (`place`, `Held`), the records fit the
        // buffer, and the scan is the runs'; all that the kernel reads or writes is this berth's, the
        // scratchpad's, or held by the caller, until `settle` has waited for it.
        let given = unsafe {
            match way {
                Way::Out => kernels::take_records(driver, stream, warps, &args),
                Way::In => kernels::put_records(driver, stream, warps, &args),
            }
        };
        shared.settle(stream, given)?;
        Ok(words)
    }
}

impl<D: Driver> StagingBuffer for CudaBerth<D> {
    fn take(&mut self, runs: &[Run<'_>]) -> Result<(), ScratchError> {
        self.words.1 = self.records(runs, Way::Out)?;
        Ok(())
    }

    fn incoming(&mut self, words: usize) -> Result<&mut [f32], ScratchError> {
        let array = self.shared.arrays.incoming;
        limit("words of staging", array.len() as u64, words)?;
        self.words.0 = words;
        Ok(self.room.as_mut().map_or(&mut [][..], |room| &mut room.host.get_mut(array)[..words]))
    }

    fn exchange(&mut self) -> Result<(), ScratchError> {
        let Self { shared, room: Some(Room { host, device }), words } = self else { return Ok(()) };
        let Shared { driver, streams, arrays, .. } = &**shared;
        let copy = |stream, from: u64, to: u64, words: usize| match words {
            0 => Ok(()),
            // SAFETY: both are this berth's, and hold the words (`incoming`, `records`); it is borrowed
            // mutably, so nobody else has them, until `settle` has waited.
            _ => unsafe { driver.copy(stream, Address(from), Address(to), words * WORD) },
        };
        let sent = copy(&streams.send, host.of(arrays.incoming), device.of(arrays.incoming), words.0);
        let brought = copy(&streams.bring, device.of(arrays.outgoing), host.of(arrays.outgoing), words.1);
        let sent = if words.0 > 0 { shared.settle(&streams.send, sent) } else { sent };
        let brought = if words.1 > 0 { shared.settle(&streams.bring, brought) } else { brought };
        Ok(sent.and(brought)?)
    }

    fn outgoing(&mut self) -> &mut [f32] {
        let (array, words) = (self.shared.arrays.outgoing, self.words.1);
        self.room.as_mut().map_or(&mut [][..], |room| &mut room.host.get_mut(array)[..words])
    }

    fn put(&mut self, runs: &[Run<'_>]) -> Result<(), ScratchError> {
        let width = |run: &Run<'_>| self.shared.sizes.get(run.size).map_or(0, |size| size.words);
        let words = runs.iter().map(|run| run.held.list().len() * width(run)).sum();
        if words != self.words.0 {
            return Err(shape("words to put", self.words.0, words));
        }
        self.records(runs, Way::In).map(|_| ())
    }
}

impl<D: Driver> Drop for CudaBerth<D> {
    fn drop(&mut self) {
        // Every call has waited: nothing uses it.
        self.shared.spare.lock().unwrap_or_else(PoisonError::into_inner).extend(self.room.take());
    }
}
