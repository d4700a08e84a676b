//! [`Driver`] for a real GPU, through libcuda.
//!
//! Memory comes from `cuMemAlloc`, not from the stream-ordered allocator. The cache allocates one block at
//! start and keeps it, so allocation speed does not matter. A failure is reported at once, with the amount of
//! free memory. Pinned memory is mapped and portable between contexts.
//!
//! Streams are non-blocking. Events do not record time. Graphs are captured from a stream in thread-local
//! mode, so that other threads may call the driver meanwhile.
//!
//! [`OperationCounts`] has neither the memset that zeroes new memory nor operations that are captured,
//! because those are not executed yet. A copy of 0 bytes does nothing and is not counted.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::context::{DeviceInfo, usable};
use super::driver::{Address, Driver, DriverError, LaunchShape, OperationCounts, Pinned};
use super::errors::{CudaError, OUT_OF_MEMORY, failed};
use super::modules::Modules;
use super::primary::{MemoryBytes, Primary};
use super::sources::{KERNELS, KernelFile};
use super::stream::{self, Event, Graph, Stream};
use crate::mem::available::{available_bytes, memory_bytes};
use crate::sync::EvenPoisoned;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSORS: c_int = 16;
/// Alignment of pinned memory.
const PAGE_BYTES: usize = 4096;

/// An opened device. Displays as one line for the log.
///
/// Streams, events and graphs may outlive it: they hold the context. Memory that was not freed is released
/// with the context.
pub struct Nvidia {
    info: DeviceInfo,
    multiprocessors: u32,
    launches: AtomicU64,
    copies: AtomicU64,
    graph_nodes: AtomicU64,
    /// Zeroes new memory.
    zeroing: Stream,
    /// From the aligned address of each block of pinned memory to the address that the driver returned.
    pinned: Mutex<HashMap<usize, usize>>,
    modules: Arc<Modules>,
    primary: Arc<Primary>,
}

/// Opens a device: retains its primary context and loads the program's kernels. `kernel_cache` is the folder
/// of compiled kernels on disk ([`super::kernel_cache`]). `None` turns the disk cache off.
///
/// # Errors
/// [`CudaError`] with what is missing, too old or full, and what to do about it.
pub fn open(ordinal: usize, kernel_cache: Option<&Path>) -> Result<Nvidia, CudaError> {
    open_with(KERNELS, ordinal, kernel_cache)
}

/// [`open`] with these kernels instead of the program's.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_with(
    kernels: &[KernelFile],
    ordinal: usize,
    kernel_cache: Option<&Path>,
) -> Result<Nvidia, CudaError> {
    let info = usable(ordinal)?;
    let primary = Primary::retain(&info)?;
    let modules = Arc::new(Modules::open(&primary, kernels, info.compute, kernel_cache)?);
    Ok(Nvidia {
        multiprocessors: primary.attribute(MULTIPROCESSORS)?.max(1) as u32,
        launches: AtomicU64::new(0),
        copies: AtomicU64::new(0),
        graph_nodes: AtomicU64::new(0),
        zeroing: Stream::new(&primary, &modules)?,
        pinned: Mutex::default(),
        info,
        modules,
        primary,
    })
}

impl fmt::Display for Nvidia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA {}, kernels by {}", self.info, self.modules.origin)
    }
}

impl fmt::Debug for Nvidia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvidia({self})")
    }
}

impl Nvidia {
    /// Name, capability and memory size of the device.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Free and total bytes of device memory; zeros when the driver does not report them.
    #[must_use]
    pub(crate) fn memory(&self) -> MemoryBytes {
        self.primary.memory()
    }

    fn make_zero(&self, memory: u64, bytes: usize) -> Result<(), DriverError> {
        let stream = self.zeroing.handle;
        // SAFETY: the memory is allocated, `bytes` long, and not shared yet.
        self.primary.call("cuMemsetD8Async", |api| unsafe { (api.set_bytes)(memory, 0, bytes, stream) })?;
        // SAFETY: the stream is alive.
        self.primary.call_or_end("cuStreamSynchronize", |api| unsafe { (api.finish)(stream) })
    }

    /// Adds the free and total bytes to the error of an allocation that found too little memory.
    fn refusal(&self, error: DriverError, what: &'static str, bytes: usize) -> DriverError {
        let DriverError::Failed { code: OUT_OF_MEMORY, .. } = error else { return error };
        let MemoryBytes { free, total } = if what == DEVICE_MEMORY { self.memory() } else { host_memory() };
        DriverError::OutOfMemory { what, bytes, free, total }
    }

    fn count(&self, stream: &Stream, counter: &AtomicU64, more: u64) {
        if !stream.is_captured() {
            counter.fetch_add(more, Ordering::Relaxed);
        }
    }
}

const DEVICE_MEMORY: &str = "device memory";
const PINNED_MEMORY: &str = "pinned memory";

/// Free and total bytes of host memory; zeros when the system does not report them.
fn host_memory() -> MemoryBytes {
    MemoryBytes { free: available_bytes().unwrap_or(0), total: memory_bytes().unwrap_or(0) }
}

// SAFETY: libcuda allocates and executes as cuda.h says. All errors of `record` and `wait` are final
// (`Primary::call_or_end`), and after a final error `Primary` does not call libcuda any more, neither to
// enqueue nor to wait nor to free.
unsafe impl Driver for Nvidia {
    type Stream = Stream;
    type Event = Event;
    type Graph = Graph;

    fn allocate(&self, bytes: usize) -> Result<Address, DriverError> {
        // The driver refuses to allocate 0 bytes.
        let bytes = bytes.max(1);
        let mut memory = 0;
        // SAFETY: one address is written.
        let allocated =
            self.primary.call("cuMemAlloc_v2", |api| unsafe { (api.allocate)(&raw mut memory, bytes) });
        allocated.map_err(|error| self.refusal(error, DEVICE_MEMORY, bytes))?;
        let address = Address(memory);
        if let Err(error) = self.make_zero(memory, bytes) {
            // SAFETY: the memory was allocated above and is not shared yet. The memset was refused, or the
            // wait for it has failed.
            unsafe { self.free(address) };
            return Err(error);
        }
        Ok(address)
    }

    unsafe fn free(&self, memory: Address) {
        // SAFETY: the caller guarantees that the memory came from `allocate`, and that its operations have
        // ended or a wait for them has failed. In the second case, `release` does not call the driver.
        self.primary.release(|api| unsafe { (api.free)(memory.0) });
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError> {
        // The driver may cut small blocks out of larger ones, so a block may begin inside a page.
        let whole = bytes.max(1).saturating_add(PAGE_BYTES);
        let mut given = 0;
        // SAFETY: one address is written.
        let allocated = self.primary.call("cuMemHostAlloc", |api| unsafe {
            (api.allocate_host)(&raw mut given, whole, PORTABLE_AND_MAPPED)
        });
        allocated.map_err(|error| self.refusal(error, PINNED_MEMORY, bytes))?;
        let at = given.next_multiple_of(PAGE_BYTES);
        let mut device = 0;
        // SAFETY: the memory was allocated above as mapped, and one address is written.
        let mapped = self.primary.call("cuMemHostGetDevicePointer_v2", |api| unsafe {
            (api.seen_by_device)(&raw mut device, given, 0)
        });
        let host = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(at));
        let (Ok(()), Some(host)) = (&mapped, host) else {
            // SAFETY: the memory was allocated above and is not shared yet.
            self.primary.release(|api| unsafe { (api.free_host)(given) });
            return Err(mapped.err().unwrap_or_else(|| failed("cuMemHostAlloc", OUT_OF_MEMORY)));
        };
        // SAFETY: `at` is less than a page after `given`, so `bytes` bytes from `at` lie within the
        // `bytes + PAGE_BYTES` that were allocated. They are not shared yet.
        unsafe { host.write_bytes(0, bytes) };
        self.pinned.lock().even_poisoned().insert(at, given);
        Ok(Pinned { host, device: Address(device).at(at - given), bytes })
    }

    unsafe fn free_pinned(&self, memory: Pinned) {
        let at = memory.host.as_ptr().addr();
        let given = self.pinned.lock().even_poisoned().remove(&at);
        if let Some(given) = given {
            // SAFETY: as in `free`. The map entry is removed, so the memory is freed once.
            self.primary.release(|api| unsafe { (api.free_host)(given) });
        }
    }

    fn stream(&self) -> Result<Stream, DriverError> {
        Stream::new(&self.primary, &self.modules)
    }

    unsafe fn copy(
        &self,
        stream: &Stream,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        self.primary.call("cuMemcpyAsync", |api| {
            // SAFETY: the caller guarantees that both ranges stay allocated and that no access races with the
            // copy. Host and device share one address space, so the driver can tell them apart.
            unsafe { (api.copy)(to.0, from.0, bytes, stream.handle) }
        })?;
        self.count(stream, &self.copies, 1);
        Ok(())
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: &'static str,
        shape: LaunchShape,
        args: &[u8],
    ) -> Result<(), DriverError> {
        let function = self.modules.function(kernel)?;
        if args.len() != function.parameter_bytes {
            let expected = function.parameter_bytes;
            let reason = format!("{kernel}: expected a parameter of {expected} bytes, got {}", args.len());
            return Err(DriverError::Kernels { reason });
        }
        let LaunchShape { blocks, threads, shared_bytes } = shape;
        let mut parameters: [*mut c_void; 1] = [args.as_ptr().cast_mut().cast()];
        // SAFETY: the function is loaded and has one parameter of the size of `args`, which the driver copies
        // before it returns. The caller guarantees that the memory at its addresses stays allocated and that
        // no access races with the kernel.
        self.primary.call("cuLaunchKernel", |api| unsafe {
            (api.launch)(
                function.handle,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream.handle,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })?;
        self.count(stream, &self.launches, 1);
        Ok(())
    }

    fn record(&self, stream: &Stream) -> Result<Event, DriverError> {
        Event::record(stream)
    }

    fn follow(&self, stream: &Stream, event: &Event) -> Result<(), DriverError> {
        self.primary.call("cuStreamWaitEvent", |api| {
            // SAFETY: stream and event are alive.
            unsafe { (api.follow)(stream.handle, event.handle, 0) }
        })
    }

    fn fired(&self, event: &Event) -> Result<bool, DriverError> {
        stream::fired(event)
    }

    fn wait(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: the event is alive.
        self.primary.call_or_end("cuEventSynchronize", |api| unsafe { (api.wait)(event.handle) })
    }

    fn alive(&self) -> Result<(), DriverError> {
        self.primary.alive()
    }

    fn capture(
        &self,
        stream: &Stream,
        fill: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        Graph::capture(stream, fill)
    }

    unsafe fn launch_graph(&self, stream: &Stream, graph: &Graph) -> Result<(), DriverError> {
        self.primary.call("cuGraphLaunch", |api| {
            // SAFETY: stream and graph are alive. The caller guarantees the conditions of each operation.
            unsafe { (api.launch_graph)(graph.handle, stream.handle) }
        })?;
        self.count(stream, &self.graph_nodes, graph.nodes);
        Ok(())
    }

    fn work(&self) -> OperationCounts {
        OperationCounts {
            launches: self.launches.load(Ordering::Relaxed),
            copies: self.copies.load(Ordering::Relaxed),
            graph_nodes: self.graph_nodes.load(Ordering::Relaxed),
        }
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}
