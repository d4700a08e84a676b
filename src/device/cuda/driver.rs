//! What a CUDA driver does for us: memory, streams, events, launches, graphs.
//!
//! Two types implement [`Driver`]: the machine's own driver through cudarc, and the simulator of
//! `kernels/cusim`, which runs the same kernel sources on the CPU. Everything above this trait (the
//! kernels' arguments and checks, the cache's device tier) is one program on both, and so is tested
//! on machines with no GPU.
//!
//! Every operation that a stream carries is counted ([`Driver::work`]), so that a test can assert how
//! many a batch takes.

#![allow(unsafe_code)]

use std::ops::AddAssign;

/// Where something lies in the memory that kernels see. 0 is nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The address `bytes` further on.
    #[must_use]
    pub fn at(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Memory of the host that kernels read and write in place: page-locked and mapped.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    /// Where the host sees it. Aligned to a page.
    pub host: std::ptr::NonNull<u8>,
    /// Where kernels see it.
    pub device: Address,
    /// How long it is.
    pub bytes: usize,
}

// SAFETY: an address and a length; whoever reads or writes through them answers for it.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block: whole warps, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory, at most 48 KiB.
    pub shared_bytes: u32,
}

/// Operations that streams were given since the driver was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Kernels launched one by one.
    pub launches: u64,
    /// Copies, in any direction.
    pub copies: u64,
    /// Memsets.
    pub memsets: u64,
    /// Nodes of the graphs that were launched, each time they were.
    pub graph_nodes: u64,
}

impl Work {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.launches + self.copies + self.memsets + self.graph_nodes
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, more: Self) {
        self.launches += more.launches;
        self.copies += more.copies;
        self.memsets += more.memsets;
        self.graph_nodes += more.graph_nodes;
    }
}

/// Why a driver did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The device, or the host's pinned memory, is full.
    #[error("{what}: {bytes} bytes refused, {free} of {total} bytes are free")]
    OutOfMemory {
        /// Which memory: `device memory` or `pinned memory`.
        what: &'static str,
        /// What was asked for.
        bytes: usize,
        /// What there was.
        free: u64,
        /// What there is in all.
        total: u64,
    },
    /// A kernel went wrong in a way that no later call survives: the process must start again.
    #[error("cuda {call}: error {code} ({name}) is final: the device takes no more work from this process")]
    Sticky {
        /// The call that reported it, which need not be the one that caused it.
        call: &'static str,
        /// CUresult.
        code: i32,
        /// The error's name in cuda.h.
        name: &'static str,
    },
    /// A call failed.
    #[error("cuda {call}: error {code} ({name})")]
    Failed {
        /// Which.
        call: &'static str,
        /// CUresult.
        code: i32,
        /// The error's name in cuda.h, or `unknown`.
        name: &'static str,
    },
    /// The kernels could not be compiled, or there is no compiler.
    #[error("cuda kernels: {reason}")]
    Kernels {
        /// What the compiler says, or what is missing.
        reason: String,
    },
    /// The simulator stopped a kernel.
    #[error("cusim {kernel}: {reason}")]
    Stopped {
        /// The kernel's name.
        kernel: String,
        /// What it did, and which block and lane did it.
        reason: String,
    },
}

/// A CUDA driver and its device. All calls may be made from any thread.
pub trait Driver: Send + Sync + 'static {
    /// An order in which operations are carried out.
    type Stream: Send + Sync;
    /// A point in a stream.
    type Event: Send + Sync;
    /// Operations recorded once and launched as one.
    type Graph: Send + Sync;

    /// Memory of the device, zeroed, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`], or what the driver says.
    fn allocate(&self, bytes: usize) -> Result<Address, DriverError>;

    /// Gives memory back.
    ///
    /// # Safety
    /// It came from [`Self::allocate`], and nothing uses it any more.
    unsafe fn free(&self, memory: Address);

    /// Pinned memory of the host, zeroed, which kernels read and write in place.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`], or what the driver says.
    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError>;

    /// Gives pinned memory back.
    ///
    /// # Safety
    /// It came from [`Self::allocate_pinned`], and neither host nor device uses it any more.
    unsafe fn free_pinned(&self, memory: Pinned);

    /// A new stream. Streams are unordered among each other but for events.
    ///
    /// # Errors
    /// What the driver says.
    fn stream(&self) -> Result<Self::Stream, DriverError>;

    /// Copies `bytes` between any two places that the device sees, in the stream's order.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// Both ranges are allocated, on either side; until an event after this copy has fired, nobody
    /// writes the source, nor touches the target.
    unsafe fn copy(
        &self,
        stream: &Self::Stream,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), DriverError>;

    /// Launches a kernel by its name, in the stream's order. `args` is its one parameter, passed by value.
    ///
    /// # Errors
    /// What the driver says; what the kernel does wrong may be said by a later call.
    ///
    /// # Safety
    /// `args` has the layout of the kernel's parameter, and every address in it stays good, and is used
    /// by nobody else in a way that races with the kernel, until an event after this launch has fired.
    unsafe fn launch(
        &self,
        stream: &Self::Stream,
        kernel: &'static str,
        shape: LaunchShape,
        args: &[u8],
    ) -> Result<(), DriverError>;

    /// A point after all that the stream was given so far.
    ///
    /// # Errors
    /// What the driver says.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, DriverError>;

    /// Makes what the stream is given from now on come after the event.
    ///
    /// # Errors
    /// What the driver says.
    fn follow(&self, stream: &Self::Stream, event: &Self::Event) -> Result<(), DriverError>;

    /// Whether the event has fired.
    ///
    /// # Errors
    /// What the driver says, also about operations before the event.
    fn fired(&self, event: &Self::Event) -> Result<bool, DriverError>;

    /// Waits until the event has fired.
    ///
    /// # Errors
    /// What the driver says, also about operations before the event.
    fn wait(&self, event: &Self::Event) -> Result<(), DriverError>;

    /// Records what `fill` gives the stream as a graph, instead of carrying it out.
    ///
    /// # Errors
    /// What the driver says, or `fill`.
    fn capture(
        &self,
        stream: &Self::Stream,
        fill: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<Self::Graph, DriverError>;

    /// Launches a graph in the stream's order.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// What [`Self::launch`] and [`Self::copy`] ask for holds again for each operation of the graph.
    unsafe fn launch_graph(&self, stream: &Self::Stream, graph: &Self::Graph) -> Result<(), DriverError>;

    /// What streams were given since the driver was opened.
    fn work(&self) -> Work;

    /// Multiprocessors of the device: how many blocks keep it busy is a multiple of this.
    fn multiprocessors(&self) -> u32;
}
