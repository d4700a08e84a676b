//! The simulator as a [`Driver`], with streams that are as unordered as CUDA allows.
//!
//! Enqueuing an operation only stores it. The device's thread (`device.rs`) executes operations in steps, and
//! only while a caller waits for an event or polls it. So a host that reads memory without waiting finds that
//! the kernel has not run. Each step advances a random stream among those whose next operation may run. A
//! step of a kernel is a few memory accesses, so kernels of different streams interleave access by access.
//! Sometimes a stream is paused for many steps. A seed determines the schedule if only one thread uses the
//! driver.
//!
//! Device and pinned memory are plain host memory. Freed memory is overwritten, and stays allocated until the
//! driver is dropped, so that a use after free reads wrong values. After a failed wait nothing is freed.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;

use super::Argument;
use super::device::{Command, Device, Operation, Reply, stopped};
use crate::device::cuda::driver::OperationCounts;
use crate::device::cuda::{Address, Driver, DriverError, LaunchShape, Pinned};
use crate::sync::EvenPoisoned;

/// The value that overwrites each byte of freed memory.
const FREED: u8 = 0xA5;
/// Allocations are aligned to a page, as pinned memory is.
const ALIGNMENT: usize = 4096;

/// A driver whose device is the CPU.
#[derive(Debug)]
pub struct SimDriver {
    commands: mpsc::Sender<Command>,
    device: Option<JoinHandle<()>>,
    work: Mutex<OperationCounts>,
    names: AtomicU64,
    memory: Mutex<Memory>,
    /// The first error of a wait.
    end: OnceLock<DriverError>,
}

/// A stream of a [`SimDriver`].
#[derive(Debug)]
pub struct SimStream {
    name: u64,
    /// During a capture: the operations captured so far.
    recording: Mutex<Option<Vec<Operation>>>,
}

/// An event of a [`SimDriver`].
#[derive(Debug)]
pub struct SimEvent(u64);

/// A graph of a [`SimDriver`].
#[derive(Debug)]
pub struct SimGraph(Vec<Operation>);

#[derive(Debug, Default)]
struct Memory {
    live: HashMap<u64, Layout>,
    freed: Vec<(u64, Layout)>,
    used: u64,
    total: u64,
}

impl SimDriver {
    /// A device of `total` bytes. With seed 0, each step executes a whole operation of the first stream that
    /// can advance.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub fn new(seed: u64, total: u64) -> std::io::Result<Self> {
        let (commands, received) = mpsc::channel();
        let device = std::thread::Builder::new().name("cusim".into()).spawn(move || {
            Device::new(seed).serve(&received);
        })?;
        Ok(Self {
            commands,
            device: Some(device),
            work: Mutex::default(),
            names: AtomicU64::new(1),
            memory: Mutex::new(Memory { total, ..Memory::default() }),
            end: OnceLock::new(),
        })
    }

    /// Allocated bytes of device and pinned memory.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> u64 {
        self.memory.lock().even_poisoned().used
    }

    fn name(&self) -> u64 {
        self.names.fetch_add(1, Ordering::Relaxed)
    }

    /// Queues an operation. Returns true if it was captured instead.
    fn enqueue(&self, stream: &SimStream, operation: Operation) -> bool {
        if let Some(recording) = &mut *stream.recording.lock().even_poisoned() {
            recording.push(operation);
            return true;
        }
        // If the thread has panicked, the next wait returns an error.
        let _ = self.commands.send(Command::Enqueue { stream: stream.name, operation });
        false
    }

    fn request(&self, command: impl FnOnce(Reply) -> Command) -> Result<bool, DriverError> {
        let (reply, answer) = mpsc::channel();
        let gone = || stopped("device", "the simulator's thread has ended");
        self.commands.send(command(reply)).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }

    fn reserve(&self, what: &'static str, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        let mut memory = self.memory.lock().even_poisoned();
        let free = memory.total - memory.used;
        let refused = DriverError::OutOfMemory { what, bytes, free, total: memory.total };
        let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGNMENT) else { return Err(refused) };
        if layout.size() as u64 > free {
            return Err(refused);
        }
        // SAFETY: the size is above 0.
        let Some(at) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { return Err(refused) };
        memory.used += layout.size() as u64;
        memory.live.insert(at.as_ptr() as u64, layout);
        Ok(at)
    }

    fn release(&self, at: u64) {
        if self.end.get().is_some() {
            return;
        }
        let mut memory = self.memory.lock().even_poisoned();
        let Some(layout) = memory.live.remove(&at) else { return };
        memory.used -= layout.size() as u64;
        memory.freed.push((at, layout));
        // SAFETY: allocated by `reserve` with this layout. The caller of `free` guarantees that its
        // operations have ended, since no wait has failed.
        unsafe { (at as *mut u8).write_bytes(FREED, layout.size()) };
    }
}

impl Drop for SimDriver {
    fn drop(&mut self) {
        // Closing the channel ends the thread.
        self.commands = mpsc::channel().0;
        if let Some(device) = self.device.take()
            && device.join().is_err()
        {
            tracing::error!("the simulator's thread panicked");
        }
        let memory = std::mem::take(&mut *self.memory.lock().even_poisoned());
        for (at, layout) in memory.live.into_iter().chain(memory.freed) {
            // SAFETY: allocated by `reserve` with this layout, and freed once. The device's thread has ended,
            // so no operation is running.
            unsafe { dealloc(at as *mut u8, layout) };
        }
    }
}

// SAFETY: allocations are zeroed blocks of the system's allocator, aligned to a page. The device's thread
// executes a stream's operations in order, and reports an event as fired after all operations before it. The
// first error is stored there, and from then on the thread executes nothing and answers with that error.
// `release` keeps the memory after an error of `wait`; `record` does not fail.
unsafe impl Driver for SimDriver {
    type Stream = SimStream;
    type Event = SimEvent;
    type Graph = SimGraph;

    fn allocate(&self, bytes: usize) -> Result<Address, DriverError> {
        Ok(Address(self.reserve("device memory", bytes)?.as_ptr() as u64))
    }

    unsafe fn free(&self, memory: Address) {
        self.release(memory.0);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError> {
        let host = self.reserve("pinned memory", bytes)?;
        Ok(Pinned { host, device: Address(host.as_ptr() as u64), bytes })
    }

    unsafe fn free_pinned(&self, memory: Pinned) {
        self.release(memory.device.0);
    }

    fn stream(&self) -> Result<SimStream, DriverError> {
        Ok(SimStream { name: self.name(), recording: Mutex::default() })
    }

    unsafe fn copy(
        &self,
        stream: &SimStream,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), DriverError> {
        if !self.enqueue(stream, Operation::Copy { from: from.0, to: to.0, bytes }) {
            self.work.lock().even_poisoned().copies += 1;
        }
        Ok(())
    }

    unsafe fn launch(
        &self,
        stream: &SimStream,
        name: &'static str,
        shape: LaunchShape,
        args: &[u8],
    ) -> Result<(), DriverError> {
        let argument = Arc::new(Argument::bytes(args));
        if !self.enqueue(stream, Operation::Kernel { name, shape, argument }) {
            self.work.lock().even_poisoned().launches += 1;
        }
        Ok(())
    }

    fn record(&self, stream: &SimStream) -> Result<SimEvent, DriverError> {
        let event = self.name();
        self.enqueue(stream, Operation::Record(event));
        Ok(SimEvent(event))
    }

    fn follow(&self, stream: &SimStream, event: &SimEvent) -> Result<(), DriverError> {
        self.enqueue(stream, Operation::Follow(event.0));
        Ok(())
    }

    fn fired(&self, event: &SimEvent) -> Result<bool, DriverError> {
        self.request(|reply| Command::Fired(event.0, reply))
    }

    fn wait(&self, event: &SimEvent) -> Result<(), DriverError> {
        let waited = self.request(|reply| Command::Wait(event.0, reply));
        waited.map(|_| ()).map_err(|error| self.end.get_or_init(|| error).clone())
    }

    fn alive(&self) -> Result<(), DriverError> {
        self.end.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn capture(
        &self,
        stream: &SimStream,
        fill: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<SimGraph, DriverError> {
        *stream.recording.lock().even_poisoned() = Some(Vec::new());
        let filled = fill();
        let recorded = stream.recording.lock().even_poisoned().take().unwrap_or_default();
        filled.map(|()| SimGraph(recorded))
    }

    unsafe fn launch_graph(&self, stream: &SimStream, graph: &SimGraph) -> Result<(), DriverError> {
        for operation in &graph.0 {
            self.enqueue(stream, operation.clone());
        }
        self.work.lock().even_poisoned().graph_nodes += graph.0.len() as u64;
        Ok(())
    }

    fn work(&self) -> OperationCounts {
        *self.work.lock().even_poisoned()
    }

    fn multiprocessors(&self) -> u32 {
        2
    }
}
