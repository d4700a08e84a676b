//! The contract of a trainer's scratchpad on a device. [`scratchpad`] implements it for any driver.
//!
//! A scratchpad has slots of several sizes. A slot holds a record of f32: a row's weights, then its
//! optimizer's state. The pipeline's stages are threads (ScratchPipe, section IV-C), and each part serves
//! some of them:
//!
//! - A [`StagingBuffer`] stages the records of one item: Collect takes victims out of the slots. Exchange
//!   copies victims to the host and fetched records to the device. Insert puts fetched records into the
//!   slots.
//! - The [`Stepper`] serves Train: it pools a batch's input rows for the dense layers on the host, and
//!   updates rows from the gradients of the input rows.
//!
//! Every call waits for all work that it has launched before it returns, also when it fails. So a stage has
//! finished with an item when it passes the item on, as on the host. If the wait itself fails, every later
//! call fails too. Calls of different stages run at the same time, on their own streams. Every call needs a
//! claim on its slots ([`HeldSlots`]).
//!
//! With a scratchpad on the host nothing is staged or launched: the trainer uses rows in place
//! ([`super::slots`]). Host and device compute the same bits: `crate::compute::pool` defines the order of
//! the sums of pooling, and [`Rule`] defines the operations of updates.

pub(crate) mod args;
mod kernels;
pub(crate) mod scratchpad;
mod stepper;
pub(crate) mod train;

use super::slot_flags::{HeldSlots, SlotFlags};
use crate::device::cuda::DriverError;
use crate::schema::Pooling;
use crate::trainer::casting::GradientSource;
use crate::trainer::optim::Moments;

/// An optimizer with the factors of one step: the operations of the trainer's optimizers, in the same order.
/// `m` and `v` are a row's first and second state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
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
    /// `m += sum(g * g) / dim; w -= lr / (sqrt(m) + eps) * g`, with one `m` per row. The sum starts from +0
    /// and is in the order of elements.
    RowwiseAdagrad {
        /// Learning rate.
        lr: f32,
        /// Added to denominators.
        eps: f32,
    },
    /// `m += (g - m) * shares.first; v += (g * g - v) * shares.second; w -= size * m / (sqrt(v) + eps)`.
    Adam {
        /// Learning rate with the bias corrections of both moments.
        size: f32,
        /// Added to denominators.
        eps: f32,
        /// The share of the difference that is added to each moment.
        shares: Moments<f32>,
    },
}

impl Rule {
    /// Words of a record under this optimizer.
    #[must_use]
    pub(crate) fn record_words(self, dim: usize) -> usize {
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
pub(crate) struct SlotSize {
    /// Words of a record, at least 1.
    pub words: usize,
    /// The number of slots.
    pub count: usize,
}

/// Slots of one size whose records move together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotRun<'a> {
    /// Index of the slot size.
    pub size: usize,
    /// The claimed slots.
    pub held: &'a HeldSlots<'a>,
}

/// The slots of one table's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableSlots<'a> {
    /// The claimed slots of the rows.
    pub run: SlotRun<'a>,
    /// Elements of a row, which are the first words of its record.
    pub dim: usize,
}

/// One lookup to pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherLookup<'a> {
    /// Index of the table.
    pub table: usize,
    pub pooling: Pooling,
    /// Bounds of the samples' bags among the occurrences; `samples + 1` numbers.
    pub offsets: &'a [u32],
    /// For each occurrence, the index of its row's slot in the table's [`TableSlots`]. An index past the end
    /// reads as zeros.
    pub places: &'a [u32],
}

/// A batch's input rows: the pooled vectors of the lookups side by side, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather<'a> {
    /// Samples of the batch.
    pub samples: usize,
    /// The tables that lookups read.
    pub tables: &'a [TableSlots<'a>],
    /// The lookups, in the order of columns.
    pub lookups: &'a [GatherLookup<'a>],
}

/// Rows of one table, and the sources of their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateRows<'a> {
    /// The rows' slots.
    pub rows: TableSlots<'a>,
    /// The sources of all rows, row by row. The sources of a row are in the order of addition.
    pub sources: &'a [GradientSource],
    /// For each row, the end of its sources: an index into `sources`, plus `first`. Every row has at least
    /// one source.
    pub ends: &'a [u32],
    /// The start of the first row's sources, on the scale of `ends`.
    pub first: u32,
}

/// An update of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    /// The number of samples that have gradients.
    pub samples: usize,
    /// Gradients per sample: one for each column of the input row from `first_column` on.
    pub stride: usize,
    /// The first column that has a gradient.
    pub first_column: usize,
    /// The rows of each table.
    pub tables: &'a [UpdateRows<'a>],
    /// The optimizer's step.
    pub rule: Rule,
}

/// Why a scratchpad refused a call or failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name the fields
pub enum ScratchError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("scratchpad {field}: limit {limit}, got {got}")]
    Limit { field: &'static str, limit: u64, got: u64 },
    #[error("scratchpad {field}: expected {expected}, got {got}")]
    Shape { field: &'static str, expected: u64, got: u64 },
}

/// A trainer's scratchpad in device memory.
pub(crate) trait Scratch: Send + Sync {
    /// The sizes of its slots.
    fn sizes(&self) -> &[SlotSize];

    /// The claim flags of the slots of a size.
    ///
    /// # Panics
    /// If `size` is not the index of a slot size.
    fn flags(&self, size: usize) -> &SlotFlags;

    /// A staging buffer. It reuses the memory of a dropped one, if there is any.
    ///
    /// # Errors
    /// [`ScratchError::Driver`] when an allocation fails.
    fn staging_buffer(&self) -> Result<Box<dyn StagingBuffer>, ScratchError>;

    /// Words of records that a staging buffer holds in each direction.
    fn staging_words(&self) -> usize;

    /// A new stepper for Train.
    ///
    /// # Errors
    /// [`ScratchError::Driver`].
    fn stepper(&self) -> Result<Box<dyn Stepper>, ScratchError>;
}

/// Holds records in transit, contiguous and in the order of their runs. The host and the device each have an
/// incoming buffer, for fetched records, and an outgoing buffer, for victims.
pub(crate) trait StagingBuffer: Send {
    /// Copies records out of slots into the device's outgoing buffer.
    ///
    /// # Errors
    /// [`ScratchError`] if there are too many records, a record has no slot, or the driver fails.
    fn take(&mut self, runs: &[SlotRun<'_>]) -> Result<(), ScratchError>;

    /// The host's incoming buffer, for records of `words` words in total.
    ///
    /// # Errors
    /// [`ScratchError::Limit`]; [`ScratchError::Driver`] after a failed wait.
    fn incoming(&mut self, words: usize) -> Result<&mut [f32], ScratchError>;

    /// Copies the incoming buffer to the device and the outgoing buffer to the host, at the same time.
    ///
    /// # Errors
    /// [`ScratchError::Driver`].
    fn exchange(&mut self) -> Result<(), ScratchError>;

    /// The host's outgoing buffer: the records that [`Self::take`] and [`Self::exchange`] have copied.
    ///
    /// # Errors
    /// [`ScratchError::Driver`] after a failed wait.
    fn outgoing(&mut self) -> Result<&mut [f32], ScratchError>;

    /// Copies the records of the device's incoming buffer into slots.
    ///
    /// # Errors
    /// As [`Self::take`]; [`ScratchError::Shape`] if these slots need another number of words than
    /// [`Self::incoming`] got.
    fn put(&mut self, runs: &[SlotRun<'_>]) -> Result<(), ScratchError>;
}

/// The steps of one training run on a device's scratchpad.
pub(crate) trait Stepper: Send {
    /// Pools input rows. Returns `samples` rows, each with the lookups' vectors side by side.
    ///
    /// # Errors
    /// [`ScratchError`].
    fn gather(&mut self, gather: &Gather<'_>) -> Result<&[f32], ScratchError>;

    /// Updates rows. It calls `grads` to write the gradients, `samples` x `stride`, into the given buffer.
    ///
    /// # Errors
    /// [`ScratchError`].
    fn update(&mut self, update: &Update<'_>, grads: &mut dyn FnMut(&mut [f32])) -> Result<(), ScratchError>;
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
