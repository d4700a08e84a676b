//! The scratchpad's memory: how many slots a size comes to, and the slots.
//!
//! Rows with their optimizer state are records, and tables whose records have the same number of words share the slots of that
//! size. Each size has the same share of its tables' rows: a batch asks every table, so tables of short rows
//! must not crowd out those of long ones, nor the other way round. But none has fewer than a sample may ask for: of a huge
//! model's rows any scratchpad is a small share, and so small a share of a small table would be no row at all.

use std::sync::Arc;

use super::super::TrainError;
use super::super::checkpoint::row_states;
use super::super::optim::Kind;
use super::key::Key;
use super::slot_directory::SlotDirectory;
use crate::dataset::Reader;
use crate::device::cuda::Driver;
use crate::schema::{Arity, Lookup, Schema};
use crate::store::PlainMemory;
use crate::trainer::pipeline::gpu::scratchpad::CudaScratch;
use crate::trainer::pipeline::gpu::{Run, Scratch, SlotSize, Stepper};
use crate::trainer::pipeline::slots::Slots;
use crate::types::{Batch, RawBatch};

/// How large a scratchpad is.
#[derive(Clone, Debug, PartialEq)]
pub enum ScratchpadSize {
    /// So many bytes of memory: records and what is kept of each.
    Bytes(u64),
    /// Room for that share of the rows of all tables, 0 to 1.
    Fraction(f64),
    /// So many slots of each size, in the order of [`Sizes::counts`].
    Slots(Vec<usize>),
}

/// The sizes of a model's records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Of each table: which size, and words of a record.
    pub tables: Vec<(usize, usize)>,
    /// Of each size: words of a record, and rows of all its tables.
    pub sizes: Vec<(usize, u64)>,
    /// Of each size: the most rows that one sample may ask for.
    pub sample: Vec<u64>,
}

impl Sizes {
    /// Of the tables of a schema under an optimizer.
    ///
    /// # Errors
    /// [`TrainError::TooManyTables`] and [`TrainError::TooManyRows`] where a scratchpad cannot name the rows.
    pub(crate) fn of(schema: &Schema, kind: Kind) -> Result<Self, TrainError> {
        let (limit, rows) = Key::LIMITS;
        if schema.tables.len() > limit {
            return Err(TrainError::TooManyTables { got: schema.tables.len(), limit });
        }
        let mut sizes: Vec<(usize, u64)> = Vec::new();
        let mut tables = Vec::new();
        for table in &schema.tables {
            if table.stored_rows() > rows {
                let (table, got) = (table.name.clone(), table.stored_rows());
                return Err(TrainError::TooManyRows { table, got, limit: rows });
            }
            let words = table.dim + row_states(kind, table.dim).iter().map(|(_, width)| width).sum::<usize>();
            let size = sizes.iter().position(|(w, _)| *w == words).unwrap_or_else(|| {
                sizes.push((words, 0));
                sizes.len() - 1
            });
            sizes[size].1 += table.stored_rows();
            tables.push((size, words));
        }
        let mut sample = vec![0; sizes.len()];
        for lookup in schema.lookups() {
            let (size, _): (usize, usize) = tables[lookup.table.index()];
            sample[size] += match schema.features[lookup.feature].arity {
                Arity::OneHot => 1,
                Arity::MultiHot { max } => u64::from(max),
            };
        }
        sample.iter_mut().zip(&sizes).for_each(|(ids, (_, rows))| *ids = (*ids).min(*rows));
        Ok(Self { tables, sizes, sample })
    }

    /// Slots of each size. None of a size is more than its rows, or than can be numbered; and where a share or bytes are given,
    /// none is less than a sample may ask for, as long as the bytes are enough for that.
    #[must_use]
    pub(crate) fn counts(&self, size: &ScratchpadSize) -> Vec<usize> {
        let counts: Vec<u64> = match size {
            ScratchpadSize::Slots(slots) => slots.iter().map(|&slots| slots as u64).collect(),
            ScratchpadSize::Fraction(fraction) => {
                let sizes = self.sizes.iter().zip(&self.sample);
                sizes.map(|((_, rows), &sample)| sample.max((*rows as f64 * fraction) as u64)).collect()
            }
            ScratchpadSize::Bytes(bytes) => self.counts_in(*bytes),
        };
        let most = self.sizes.iter().map(|(_, rows)| *rows.min(&Slots::MOST));
        counts.into_iter().zip(most).map(|(count, most)| count.min(most) as usize).collect()
    }

    /// Slots of each size that so many bytes are enough for.
    fn counts_in(&self, bytes: u64) -> Vec<u64> {
        let bytes_of = |count_of: &dyn Fn(usize) -> u64| -> u64 {
            self.sizes.iter().enumerate().map(|(at, &(words, _))| count_of(at) * slot_bytes(words)).sum()
        };
        let samples = bytes_of(&|at| self.sample[at]);
        let enough = samples <= bytes;
        let least = |at: usize| if enough { self.sample[at] } else { 0 };
        let more = |at: usize| self.sizes[at].1 - least(at);
        let left = if enough { bytes - samples } else { bytes };
        let share = (left as f64 / bytes_of(&more).max(1) as f64).min(1.0);
        (0..self.sizes.len()).map(|at| least(at) + (more(at) as f64 * share) as u64).collect()
    }

    /// Whether these slots hold every row.
    #[must_use]
    pub(crate) fn hold_all(&self, counts: &[usize]) -> bool {
        self.sizes.iter().zip(counts).all(|((_, rows), &count)| count as u64 >= *rows)
    }

    /// Bytes of so many slots of each size, with all that is kept of them.
    #[must_use]
    pub(crate) fn bytes(&self, counts: &[usize]) -> u64 {
        self.sizes.iter().zip(counts).map(|(&(words, _), &count)| count as u64 * slot_bytes(words)).sum()
    }

    /// So many slots of each size, in memory of the host.
    ///
    /// # Errors
    /// [`TrainError::Memory`] when it is not to be had.
    pub(crate) fn slots(&self, counts: &[usize]) -> Result<Vec<Slots>, TrainError> {
        let slots = self.sizes.iter().zip(counts);
        Ok(slots
            .map(|(&(words, _), &count)| Slots::new(&PlainMemory, count, words))
            .collect::<Result<_, _>>()?)
    }

    /// So many slots of each size, in memory of a device, and staging for items of so many words each way.
    ///
    /// # Errors
    /// [`TrainError::Device`] when it is not to be had.
    pub(crate) fn on_device<D: Driver>(
        &self,
        driver: &Arc<D>,
        counts: &[usize],
        item_words: usize,
    ) -> Result<ScratchpadMemory, TrainError> {
        let slots = self.sizes.iter().zip(counts);
        let sizes: Vec<_> = slots.map(|(&(words, _), &count)| SlotSize { words, count }).collect();
        Ok(ScratchpadMemory::Device(Box::new(CudaScratch::new(driver, &sizes, item_words)?)))
    }
}

/// The slots, wherever they are.
pub(crate) enum ScratchpadMemory {
    /// In memory of the host, by size.
    Host(Vec<Slots>),
    /// In memory of a device.
    Device(Box<dyn Scratch>),
}

impl ScratchpadMemory {
    /// Slots of each size.
    pub(crate) fn counts(&self) -> Vec<usize> {
        match self {
            Self::Host(slots) => slots.iter().map(Slots::count).collect(),
            Self::Device(scratch) => scratch.sizes().iter().map(|size| size.count).collect(),
        }
    }

    /// What Train works with where the slots are a device's.
    ///
    /// # Errors
    /// [`TrainError::Device`].
    pub(crate) fn stepper(&self) -> Result<Option<Box<dyn Stepper>>, TrainError> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Device(scratch) => Ok(Some(scratch.stepper()?)),
        }
    }

    /// The records of slots of one size, end to end.
    ///
    /// # Errors
    /// [`TrainError::Hazard`] where a slot is a stage's at the time, and [`TrainError::Device`].
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
        let mut berth = scratch.berth()?;
        let staged = scratch.berth_words() / scratch.sizes()[size].words.max(1);
        for list in list.chunks(staged.max(1)) {
            berth.take(&[Run { size, held: &scratch.flags(size).claim(list)? }])?;
            berth.exchange()?;
            records.extend_from_slice(berth.outgoing());
        }
        Ok(records)
    }
}

/// The most distinct rows of each size that one of the samples asks for, of at most `limit` samples.
///
/// # Errors
/// [`TrainError`] for data that cannot be read.
pub fn largest_sample(
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
        let samples = reader.read(left.min(READ) as usize, &mut raw)?;
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
            keys.iter().for_each(|key: &Key| counts[sizes.tables[key.table().index()].0] += 1);
            largest.iter_mut().zip(counts).for_each(|(most, count)| *most = count.max(*most));
        }
    }
    Ok(largest)
}

/// Samples read at a time.
const READ: u64 = 4096;

/// Every row that a sample asks for.
pub(crate) fn rows_of_sample<'a>(
    schema: &'a Schema,
    lookups: &'a [Lookup],
    batch: &'a Batch,
    sample: usize,
) -> impl Iterator<Item = Key> + 'a {
    lookups.iter().flat_map(move |lookup| {
        let shape = &schema.tables[lookup.table.index()];
        let ids = batch.features[lookup.feature].sample(sample);
        ids.iter().filter_map(|&id| shape.row_of(id)).map(|row| Key::new(lookup.table, row))
    })
}

/// Bytes of a slot of so many words, with the flag of who claims it and what Plan keeps of it.
fn slot_bytes(words: usize) -> u64 {
    (words * size_of::<f32>() + 1 + SlotDirectory::bytes_per_slot()) as u64
}

#[cfg(test)]
mod tests;
