//! The scratchpad's memory: its slots, and the number of slots of each size.
//!
//! A record is a row with its optimizer state. Tables whose records have the same number of words share the
//! slots of that size. A batch uses every table, so each size gets slots for the same share of its tables'
//! rows. If the scratchpad is large enough, each size gets at least the slots that one sample may need:
//! otherwise a small share of a small table could be no row at all.

use std::error::Error;
use std::sync::Arc;

use super::super::TrainError;
use super::super::optim::OptimizerKind;
use super::slot_directory::SlotDirectory;
use crate::dataset::Reader;
use crate::device::cuda::{Driver, DriverError};
use crate::schema::{Arity, Lookup, Schema};
use crate::store::PlainMemory;
use crate::trainer::pipeline::gpu::scratchpad::CudaScratch;
use crate::trainer::pipeline::gpu::{Scratch, ScratchError, SlotRun, SlotSize, Stepper};
use crate::trainer::pipeline::slots::Slots;
use crate::types::{Batch, RawBatch, RowId};

/// How large a scratchpad is.
#[derive(Clone, Debug, PartialEq)]
pub enum ScratchpadSize {
    /// Bytes of memory, for records and their bookkeeping.
    Bytes(u64),
    /// Room for this share of the rows of all tables, 0 to 1.
    Fraction(f64),
    /// Slots of each size, in the order of [`Sizes::sizes`].
    Slots(Vec<usize>),
}

/// Which slots the rows of a table use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotLayout {
    /// Index of the slot size.
    pub size: usize,
    /// Words (f32) of a record.
    pub words: usize,
}

impl SlotLayout {
    /// The slot layout of a row. `tables` has that of each table.
    #[inline]
    pub(crate) fn of(tables: &[Self], row: RowId) -> Self {
        tables[row.table().index()]
    }
}

/// The tables that share a slot size, because their records have the same number of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SizeClass {
    /// Words (f32) of a record.
    pub words: usize,
    /// Rows of all these tables.
    pub rows: u64,
    /// The most rows of these tables that one sample may need.
    pub sample_rows: u64,
}

/// The slot sizes of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// The slot layout of each table.
    pub tables: Vec<SlotLayout>,
    /// The tables of each slot size.
    pub sizes: Vec<SizeClass>,
}

impl Sizes {
    /// The slot sizes of a schema's records, which include the state of the optimizer.
    pub(crate) fn of(schema: &Schema, kind: OptimizerKind) -> Self {
        let mut sizes: Vec<SizeClass> = Vec::new();
        let mut tables: Vec<SlotLayout> = Vec::new();
        for table in &schema.tables {
            let words = kind.record_layout(table.dim).width();
            let size = sizes.iter().position(|class| class.words == words).unwrap_or_else(|| {
                sizes.push(SizeClass { words, rows: 0, sample_rows: 0 });
                sizes.len() - 1
            });
            sizes[size].rows += table.stored_rows();
            tables.push(SlotLayout { size, words });
        }
        for lookup in schema.lookups() {
            sizes[tables[lookup.table.index()].size].sample_rows +=
                match schema.features[lookup.feature].arity {
                    Arity::OneHot => 1,
                    Arity::MultiHot { max } => u64::from(max),
                };
        }
        sizes.iter_mut().for_each(|class| class.sample_rows = class.sample_rows.min(class.rows));
        Self { tables, sizes }
    }

    /// The number of slots of each size, at most the rows of that size and [`Slots::MOST`]. A fraction gives
    /// each size at least the slots that one sample may need. So does a number of bytes, if there are enough
    /// bytes.
    #[must_use]
    pub(crate) fn counts(&self, size: &ScratchpadSize) -> Vec<usize> {
        let counts: Vec<u64> = match size {
            ScratchpadSize::Slots(slots) => slots.iter().map(|&slots| slots as u64).collect(),
            ScratchpadSize::Fraction(fraction) => {
                let share = |class: &SizeClass| (class.rows as f64 * fraction) as u64;
                self.sizes.iter().map(|class| class.sample_rows.max(share(class))).collect()
            }
            ScratchpadSize::Bytes(bytes) => self.counts_in(*bytes),
        };
        let most = self.sizes.iter().map(|class| class.rows.min(Slots::MOST));
        counts.into_iter().zip(most).map(|(count, most)| count.min(most) as usize).collect()
    }

    /// The number of slots of each size that fit in `bytes` bytes.
    fn counts_in(&self, bytes: u64) -> Vec<u64> {
        // In 128 bits, because a schema may declare more rows than any disk holds.
        let bytes_of = |count_of: &dyn Fn(&SizeClass) -> u64| -> u128 {
            let of_class = |class| u128::from(count_of(class)) * u128::from(slot_bytes(class.words));
            self.sizes.iter().map(of_class).sum()
        };
        let samples = bytes_of(&|class| class.sample_rows);
        let bytes = u128::from(bytes);
        let enough = samples <= bytes;
        let least = |class: &SizeClass| if enough { class.sample_rows } else { 0 };
        let more = |class: &SizeClass| class.rows - least(class);
        let left = if enough { bytes - samples } else { bytes };
        let share = (left as f64 / bytes_of(&more).max(1) as f64).min(1.0);
        self.sizes.iter().map(|class| least(class) + (more(class) as f64 * share) as u64).collect()
    }

    /// Whether these slots hold every row.
    #[must_use]
    pub(crate) fn hold_all(&self, counts: &[usize]) -> bool {
        self.sizes.iter().zip(counts).all(|(class, &count)| count as u64 >= class.rows)
    }

    /// Bytes of `counts` slots of each size, with their bookkeeping.
    #[must_use]
    pub(crate) fn bytes(&self, counts: &[usize]) -> u64 {
        self.sizes.iter().zip(counts).map(|(class, &count)| count as u64 * slot_bytes(class.words)).sum()
    }

    /// `counts` slots of each size, in host memory.
    ///
    /// # Errors
    /// [`TrainError::ScratchpadMemory`] when an allocation fails.
    pub(crate) fn slots(&self, counts: &[usize]) -> Result<Vec<Slots>, TrainError> {
        let slots = self.sizes.iter().zip(counts);
        let slots = slots.map(|(class, &count)| Slots::new(&PlainMemory, count, class.words));
        slots.collect::<Result<_, _>>().map_err(|source| self.refused(counts, source.into()))
    }

    /// The error for `counts` slots of each size that do not fit memory.
    fn refused(&self, counts: &[usize], source: Box<dyn Error + Send + Sync>) -> TrainError {
        let slots = self.sizes.iter().zip(counts);
        let slots = slots.map(|(class, count)| format!("{count} of {} f32, state counted", class.words));
        let slots = slots.collect::<Vec<_>>().join("; ");
        TrainError::ScratchpadMemory { slots, total: self.bytes(counts), source }
    }

    /// `counts` slots of each size, in device memory, and staging for items of `item_words` words in each
    /// direction.
    ///
    /// # Errors
    /// [`TrainError::ScratchpadMemory`] when the slots do not fit, and [`TrainError::Device`].
    pub(crate) fn on_device<D: Driver>(
        &self,
        driver: &Arc<D>,
        counts: &[usize],
        item_words: usize,
    ) -> Result<ScratchpadMemory, TrainError> {
        let slots = self.sizes.iter().zip(counts);
        let sizes: Vec<_> =
            slots.map(|(&SizeClass { words, .. }, &count)| SlotSize { words, count }).collect();
        let scratch = CudaScratch::new(driver, &sizes, item_words).map_err(|error| match error {
            ScratchError::Driver(e @ DriverError::OutOfMemory { .. }) => self.refused(counts, e.into()),
            error => error.into(),
        })?;
        Ok(ScratchpadMemory::Device(Box::new(scratch)))
    }
}

/// The slots, on the host or on a device.
pub(crate) enum ScratchpadMemory {
    /// The slots of each size.
    Host(Vec<Slots>),
    Device(Box<dyn Scratch>),
}

impl ScratchpadMemory {
    /// The number of slots of each size.
    pub(crate) fn counts(&self) -> Vec<usize> {
        match self {
            Self::Host(slots) => slots.iter().map(Slots::count).collect(),
            Self::Device(scratch) => scratch.sizes().iter().map(|size| size.count).collect(),
        }
    }

    /// The stepper for Train on a device's slots; `None` on the host.
    ///
    /// # Errors
    /// [`TrainError::Device`].
    pub(crate) fn stepper(&self) -> Result<Option<Box<dyn Stepper>>, TrainError> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Device(scratch) => Ok(Some(scratch.stepper()?)),
        }
    }

    /// The records of these slots of one size, end to end.
    ///
    /// # Errors
    /// [`TrainError::Hazard`] when another stage has claimed a slot, and [`TrainError::Device`].
    pub(crate) fn read(&self, size: usize, list: &[u32]) -> Result<Vec<f32>, TrainError> {
        let scratch = match self {
            Self::Host(slots) => {
                let mut records = vec![0.0; list.len() * slots[size].width()];
                slots[size].claim(list)?.read(&mut records);
                return Ok(records);
            }
            Self::Device(scratch) => scratch,
        };
        let mut records = Vec::new();
        let mut staging = scratch.staging_buffer()?;
        let staged = scratch.staging_words() / scratch.sizes()[size].words.max(1);
        for list in list.chunks(staged.max(1)) {
            staging.take(&[SlotRun { size, held: &scratch.flags(size).claim(list)? }])?;
            staging.exchange()?;
            records.extend_from_slice(staging.outgoing()?);
        }
        Ok(records)
    }
}

/// For each slot size, the most distinct rows that any of the first `limit` samples needs.
///
/// # Errors
/// [`TrainError`] for data that cannot be read.
pub(crate) fn largest_sample(
    schema: &Schema,
    sizes: &Sizes,
    reader: &mut dyn Reader,
    limit: u64,
) -> Result<Vec<usize>, TrainError> {
    let lookups = schema.lookups();
    let (mut raw, mut batch) = (RawBatch::default(), Batch::empty(schema.features.len()));
    let mut largest = vec![0; sizes.sizes.len()];
    let (mut left, mut keys) = (limit, Vec::new());
    while left > 0 {
        let samples = reader.read(left.min(READ_SAMPLES) as usize, &mut raw)?;
        if samples == 0 {
            break;
        }
        left -= samples as u64;
        schema.encode(&raw, &mut batch)?;
        for sample in 0..samples {
            keys.clear();
            keys.extend(rows_of_sample(schema, &lookups, &batch, sample));
            keys.sort_unstable();
            keys.dedup();
            let mut counts = vec![0; largest.len()];
            keys.iter().for_each(|&row| counts[SlotLayout::of(&sizes.tables, row).size] += 1);
            largest.iter_mut().zip(counts).for_each(|(most, count)| *most = count.max(*most));
        }
    }
    Ok(largest)
}

/// Samples that [`largest_sample`] reads at a time.
const READ_SAMPLES: u64 = 4096;

/// Every row that a sample needs, with repeats.
pub(crate) fn rows_of_sample<'a>(
    schema: &'a Schema,
    lookups: &'a [Lookup],
    batch: &'a Batch,
    sample: usize,
) -> impl Iterator<Item = RowId> + 'a {
    lookups.iter().flat_map(move |lookup| {
        let shape = &schema.tables[lookup.table.index()];
        let ids = batch.features[lookup.feature].sample(sample);
        ids.iter().filter_map(|&id| shape.row_of(id)).map(|row| RowId::new(lookup.table, row))
    })
}

/// Bytes of a slot of `words` words, including its claim flag and Plan's bookkeeping.
fn slot_bytes(words: usize) -> u64 {
    (words * size_of::<f32>() + 1 + SlotDirectory::bytes_per_slot()) as u64
}

#[cfg(test)]
mod tests;
