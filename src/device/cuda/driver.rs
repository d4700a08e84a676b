//! The interface of a CUDA driver: memory, streams, events, launches, graphs.
//!
//! Two types implement [`Driver`]: `nvidia::Nvidia` calls the machine's CUDA driver, and `cusim` runs the
//! same kernel sources on the CPU. All code above this trait (the cache's device half, the trainer's
//! scratchpad) is the same for both, so it is tested on machines without a GPU.
//!
//! Launches, copies and graph nodes are counted ([`Driver::work`]), so that a test can assert how many a
//! batch needs.

#![allow(unsafe_code)]

use std::ops::AddAssign;

/// An address in the memory that kernels see. 0 is null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The address `bytes` after this one.
    #[must_use]
    pub(crate) fn at(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Page-locked host memory, mapped so that kernels read and write it in place.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    /// The host's address, aligned to a page.
    pub host: std::ptr::NonNull<u8>,
    /// The address for kernels.
    pub device: Address,
    /// Length in bytes.
    pub bytes: usize,
}

// SAFETY: this is only an address and a length. Code that reads or writes through them has its own safety
// argument.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

/// The grid of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block: whole warps, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory, at most 48 KiB.
    pub shared_bytes: u32,
}

/// Operations enqueued on streams since the driver was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCounts {
    /// Kernels launched outside graphs.
    pub launches: u64,
    /// Copies, in any direction.
    pub copies: u64,
    /// Nodes of launched graphs, counted at each launch.
    pub graph_nodes: u64,
}

impl OperationCounts {
    /// The sum of all counters.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn total(&self) -> u64 {
        self.launches + self.copies + self.graph_nodes
    }
}

impl AddAssign for OperationCounts {
    fn add_assign(&mut self, more: Self) {
        self.launches += more.launches;
        self.copies += more.copies;
        self.graph_nodes += more.graph_nodes;
    }
}

/// Why a driver call failed. A `name` is the error's name in cuda.h, or `unknown`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document variants and fields")]
pub enum DriverError {
    #[error("{what}: {bytes} bytes refused, {free} of {total} bytes are free")]
    OutOfMemory { what: &'static str, bytes: usize, free: u64, total: u64 },
    /// Every later call fails too: the process must be restarted. The failed operation may be an earlier one
    /// than `call`, because launches are asynchronous.
    #[error("cuda {call}: error {code} ({name}) is final: the device accepts no more work from this process")]
    Sticky { call: &'static str, code: i32, name: &'static str },
    #[error("cuda {call}: error {code} ({name})")]
    Failed { call: &'static str, code: i32, name: &'static str },
    #[error("cuda kernels: {reason}")]
    Kernels { reason: String },
    /// The simulator stopped. If a kernel broke a rule, `reason` names the block and the lane.
    #[error("cusim {kernel}: {reason}")]
    Stopped { kernel: String, reason: String },
}

/// A CUDA driver with one device. Every method may be called from any thread.
///
/// **When an operation has ended.** Until then it may use the memory of its addresses. It has ended if
/// [`Self::wait`] or [`Self::finish`] returned `Ok`, or [`Self::fired`] returned `Ok(true)`, for an event or
/// a stream behind it. An error proves nothing: the operation may be running, for as long as the driver
/// lives. An operation whose own call failed is not executed.
///
/// **When the driver has ended.** The first error of [`Self::record`], [`Self::wait`] or [`Self::finish`]
/// ends the driver. From then on:
/// - operations that are enqueued are not executed, so none can race with those that may be running;
/// - no wait succeeds, so memory that is used again only after a successful wait is not used again;
/// - [`Self::free`] and [`Self::free_pinned`] keep the memory allocated, so an owner of memory must wait
///   before it drops the memory, but need not look at the result.
///
/// # Safety
/// An implementation keeps these rules. Allocated memory is as [`Self::allocate`] and
/// [`Self::allocate_pinned`] say, and no two allocations overlap. Operations of a stream are executed in
/// order, and access only the memory that their caller names.
pub unsafe trait Driver: Send + Sync + 'static {
    /// A queue of operations, executed in order.
    type Stream: Send + Sync;
    /// A point in a stream.
    type Event: Send + Sync;
    /// Operations that are recorded once and launched together.
    type Graph: Send + Sync;

    /// Allocates zeroed device memory, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`], or the driver's error.
    fn allocate(&self, bytes: usize) -> Result<Address, DriverError>;

    /// Frees device memory, unless the driver has ended.
    ///
    /// # Safety
    /// `memory` came from [`Self::allocate`] and is freed once. Every operation that uses it has ended, or a
    /// wait for it has failed.
    unsafe fn free(&self, memory: Address);

    /// Allocates zeroed pinned host memory, which kernels can read and write.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`], or the driver's error.
    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError>;

    /// Frees pinned memory, unless the driver has ended.
    ///
    /// # Safety
    /// `memory` came from [`Self::allocate_pinned`] and is freed once. The host does not use it any more.
    /// Every operation that uses it has ended, or a wait for it has failed.
    unsafe fn free_pinned(&self, memory: Pinned);

    /// Creates a stream. Operations of different streams are ordered only by events.
    ///
    /// # Errors
    /// The driver's error.
    fn stream(&self) -> Result<Self::Stream, DriverError>;

    /// Enqueues a copy of `bytes` bytes. Each address may be on the device or in pinned memory.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// Until the copy has ended, both ranges stay allocated and no other access races with it.
    unsafe fn copy(
        &self,
        stream: &Self::Stream,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), DriverError>;

    /// Enqueues a kernel. `args` is its only parameter, passed by value.
    ///
    /// # Errors
    /// The driver's error. A later call may report an error of the kernel itself.
    ///
    /// # Safety
    /// `args` has the layout of the kernel's parameter. Until the kernel has ended, the memory at every
    /// address in it stays allocated and no other access races with the kernel.
    unsafe fn launch(
        &self,
        stream: &Self::Stream,
        kernel: &'static str,
        shape: LaunchShape,
        args: &[u8],
    ) -> Result<(), DriverError>;

    /// Records an event. It fires after all operations that were enqueued on the stream before.
    ///
    /// # Errors
    /// The error that has ended the driver, now or before.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, DriverError>;

    /// Makes all operations that are enqueued on the stream from now on wait for the event.
    ///
    /// # Errors
    /// The driver's error.
    fn follow(&self, stream: &Self::Stream, event: &Self::Event) -> Result<(), DriverError>;

    /// Whether the event has fired.
    ///
    /// # Errors
    /// The driver's error, including that of an operation before the event.
    fn fired(&self, event: &Self::Event) -> Result<bool, DriverError>;

    /// Waits until the event has fired.
    ///
    /// # Errors
    /// The error that has ended the driver, now or before. It may be that of an operation before the event.
    fn wait(&self, event: &Self::Event) -> Result<(), DriverError>;

    /// Waits for all operations that were enqueued on the stream before.
    ///
    /// # Errors
    /// As [`Self::wait`].
    fn finish(&self, stream: &Self::Stream) -> Result<(), DriverError> {
        self.wait(&self.record(stream)?)
    }

    /// Fails if the driver has ended. A caller whose earlier calls have waited checks here that the waits
    /// succeeded, before it uses the memory again.
    ///
    /// # Errors
    /// The error that has ended the driver.
    fn alive(&self) -> Result<(), DriverError>;

    /// Makes a graph of the operations that `fill` enqueues on the stream. They are not executed.
    ///
    /// # Errors
    /// The driver's error, or that of `fill`.
    fn capture(
        &self,
        stream: &Self::Stream,
        fill: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<Self::Graph, DriverError>;

    /// Enqueues all operations of a graph.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// The conditions of [`Self::launch`] and [`Self::copy`] hold for each operation of the graph.
    unsafe fn launch_graph(&self, stream: &Self::Stream, graph: &Self::Graph) -> Result<(), DriverError>;

    /// Operations enqueued since the driver was opened.
    fn work(&self) -> OperationCounts;

    /// Multiprocessors of the device. A grid that fills the device has a multiple of this number of blocks.
    fn multiprocessors(&self) -> u32;
}
