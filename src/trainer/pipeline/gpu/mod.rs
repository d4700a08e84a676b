//! What a trainer's scratchpad on a device does: the contract, whose one other side is
//! [`super::gpu::scratchpad`].
//!
//! A scratchpad is slots of several sizes, each slot a record of f32: a row's weights, then its optimizer's
//! state. Its stages are threads of their own (ScratchPipe, section IV-C) and so are its parts:
//!
//! - a [`StagingBuffer`] is where the records of one item are staged on their way, both ways: Collect takes what
//!   leaves out of the slots, Exchange brings it to the host and sends what comes in, Insert puts that into
//!   the slots;
//! - the [`Stepper`] is Train's: it pools a batch's input rows, for the dense layers on the host, and updates
//!   rows from the gradients that these give.
//!
//! Every call waits for what it has launched before it returns, also where it fails, so an item that is
//! handed over is done, as on the host; different stages' calls run at the same time on streams of their own.
//! Whose a slot is at the moment is a matter of [`Held`]: no call takes a slot without.
//!
//! On the host nothing is staged or launched: rows are used where they lie (`device::host::slots`), and the
//! trainer does with them what these calls do. Both have the same bits (`crate::compute::pool` for the sums of
//! pooling, [`Rule`] for updates).

pub mod args;
mod kernels;
pub mod scratchpad;
mod stepper;
pub(crate) mod train;

use super::slot_flags::{Held, SlotFlags};
use crate::device::cuda::DriverError;

/// Where a part of a row's gradient comes from. Kernels read it as it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Source {
    /// The sample of the batch.
    pub sample: u32,
    /// The first column of its vector in the input row.
    pub column: u32,
    /// What the gradient is divided by: the bag's size under mean pooling, else 1.
    pub divisor: f32,
}

/// An optimizer with the factors of one step. The operations are those of the trainer's optimizers, in their
/// order; `m` and `v` are a row's first and second state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `w -= lr * g`.
    Sgd {
        /// Learning rate.
        lr: f32,
    },
    /// `m += g * g; w -= lr * g / (sqrt(m) + eps)`.
    Adagrad {
        /// Learning rate.
        lr: f32,
        /// Added to denominators.
        eps: f32,
    },
    /// `m`, one a row, `+= sum(g * g) / dim`, the sum from +0 on in the order of elements; `w -= lr /
    /// (sqrt(m) + eps) * g`.
    RowwiseAdagrad {
        /// Learning rate.
        lr: f32,
        /// Added to denominators.
        eps: f32,
    },
    /// `m += (g - m) * shares.0; v += (g * g - v) * shares.1; w -= size * m / (sqrt(v) + eps)`.
    Adam {
        /// Learning rate with the corrections of both moments.
        size: f32,
        /// Added to denominators.
        eps: f32,
        /// What of the difference each moment takes on.
        shares: (f32, f32),
    },
}

impl Rule {
    /// Words of a record under this rule.
    #[must_use]
    pub fn record_words(self, dim: usize) -> usize {
        match self {
            Self::Sgd { .. } => dim,
            Self::RowwiseAdagrad { .. } => dim + 1,
            Self::Adagrad { .. } => 2 * dim,
            Self::Adam { .. } => 3 * dim,
        }
    }
}

/// Slots of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSize {
    /// Words of a record, at least 1.
    pub words: usize,
    /// How many slots.
    pub count: usize,
}

/// Slots of one size, whose records go one way.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Which size.
    pub size: usize,
    /// The slots.
    pub held: &'a Held<'a>,
}

/// The rows of one table.
#[derive(Clone, Copy, Debug)]
pub struct TableSlots<'a> {
    /// Their slots.
    pub run: Run<'a>,
    /// Elements of a row: the first words of its record.
    pub dim: usize,
}

/// One lookup to be pooled.
#[derive(Clone, Copy, Debug)]
pub struct GatherLookup<'a> {
    /// Which of the tables.
    pub table: usize,
    /// Divide the sum by the count.
    pub mean: bool,
    /// `samples + 1` bounds of bags.
    pub offsets: &'a [u32],
    /// Of each occurrence, its row's place among those of the table; past their end for one that reads as
    /// zeros.
    pub places: &'a [u32],
}

/// A batch's input rows: the pooled vectors of the lookups beside one another, in order.
#[derive(Clone, Copy, Debug)]
pub struct Gather<'a> {
    /// How many samples.
    pub samples: usize,
    /// The rows.
    pub tables: &'a [TableSlots<'a>],
    /// The lookups.
    pub lookups: &'a [GatherLookup<'a>],
}

/// Rows of one table and where their gradients come from.
#[derive(Clone, Copy, Debug)]
pub struct UpdateRows<'a> {
    /// The rows.
    pub rows: TableSlots<'a>,
    /// The sources of all of them, row by row, each row's in the order in which they are added.
    pub sources: &'a [Source],
    /// Of each row, where its sources end, counted from `first`. Every row has some.
    pub ends: &'a [u32],
    /// What the first row's sources begin at.
    pub first: u32,
}

/// An update of rows.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// How many samples gradients are of.
    pub samples: usize,
    /// Gradients a sample: columns of the input row from `first_column` on.
    pub stride: usize,
    /// Columns before them.
    pub first_column: usize,
    /// The rows.
    pub tables: &'a [UpdateRows<'a>],
    /// What is done with a row and its gradient.
    pub rule: Rule,
}

/// Why a scratchpad did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The device, or its driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// More than can be.
    #[error("scratchpad {field}: limit {limit}, got {got}")]
    Limit {
        /// Of what.
        field: &'static str,
        /// The most.
        limit: u64,
        /// What came.
        got: u64,
    },
    /// Something that does not go with the rest.
    #[error("scratchpad {field}: expected {expected}, got {got}")]
    Shape {
        /// What.
        field: &'static str,
        /// What the rest asks for.
        expected: u64,
        /// What came.
        got: u64,
    },
}

/// A trainer's scratchpad in the memory of a device.
pub trait Scratch: Send + Sync {
    /// The sizes of its slots.
    fn sizes(&self) -> &[SlotSize];

    /// Whose the slots of a size are.
    ///
    /// # Panics
    /// Where there is no such size.
    fn flags(&self, size: usize) -> &SlotFlags;

    /// A place to stage records at: one that was dropped, or a new one.
    ///
    /// # Errors
    /// [`ScratchError::Driver`] where there is no memory.
    fn berth(&self) -> Result<Box<dyn StagingBuffer>, ScratchError>;

    /// Words of records that a berth holds each way.
    fn berth_words(&self) -> usize;

    /// What Train works with.
    ///
    /// # Errors
    /// [`ScratchError::Driver`].
    fn stepper(&self) -> Result<Box<dyn Stepper>, ScratchError>;
}

/// Where records lie on their way, end to end, run after run: a buffer a way on the device, and one on the
/// host.
pub trait StagingBuffer: Send {
    /// Takes records out of slots, to leave.
    ///
    /// # Errors
    /// [`ScratchError`], where there are too many or one has no slot, or the driver's.
    fn take(&mut self, runs: &[Run<'_>]) -> Result<(), ScratchError>;

    /// Room on the host for records of so many words that are to come in.
    ///
    /// # Errors
    /// [`ScratchError::Limit`].
    fn incoming(&mut self, words: usize) -> Result<&mut [f32], ScratchError>;

    /// Sends what is to come in to the device, and brings what was taken to the host, both at once.
    ///
    /// # Errors
    /// [`ScratchError::Driver`].
    fn exchange(&mut self) -> Result<(), ScratchError>;

    /// The records that were taken and brought.
    fn outgoing(&mut self) -> &mut [f32];

    /// Puts the records that were sent into slots.
    ///
    /// # Errors
    /// As [`Self::take`]; [`ScratchError::Shape`] where the slots' records have another number of words.
    fn put(&mut self, runs: &[Run<'_>]) -> Result<(), ScratchError>;
}

/// The steps of a training on a device's scratchpad, one after the other.
pub trait Stepper: Send {
    /// Pools input rows. Gives `samples` rows, each of the lookups' vectors beside one another.
    ///
    /// # Errors
    /// [`ScratchError`].
    fn gather(&mut self, gather: &Gather<'_>) -> Result<&[f32], ScratchError>;

    /// Updates rows. `grads` writes the gradients, `samples x stride`.
    ///
    /// # Errors
    /// [`ScratchError`].
    fn update(&mut self, update: &Update<'_>, grads: &mut dyn FnMut(&mut [f32])) -> Result<(), ScratchError>;
}
