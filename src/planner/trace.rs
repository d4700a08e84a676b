//! An access trace in memory: which row of which table is asked for, in order.
//!
//! What an access is, and in which order they come, is on the page of `asked`.
//!
//! Rows are numbered densely, table after table, so that a simulated cache keeps what it knows in plain
//! arrays and needs no hashing: 4 bytes an access, 8 a distinct row and, while it is built, a map.

use std::ops::Range;

use super::row_accesses::RowAccesses;
use crate::mem::NumberMap;
use crate::schema::Schema;
use crate::types::{Batch, TableId};

/// The most accesses, and the most distinct rows, of a trace: positions and keys are 32-bit numbers.
pub(crate) const MAX_ACCESSES: usize = u32::MAX as usize - 1;

/// A trace that cannot be kept.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("trace: more than {limit} accesses; plan on fewer files, or on a sampled trace")]
pub struct TooLong {
    /// How many can be kept.
    pub limit: usize,
}

/// One table of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceTable {
    /// Its name.
    pub name: String,
    /// Bytes of one of its rows.
    pub row_bytes: usize,
    /// The keys of its rows: as many as distinct rows were asked for.
    pub keys: Range<u32>,
    /// How often any of them was.
    pub accesses: u64,
}

/// Accesses in order, and what their keys stand for.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// By [`TableId`].
    pub tables: Vec<TraceTable>,
    /// The key of every access. A table's keys are numbered in the order of their first access.
    pub accesses: Vec<u32>,
    /// By key: its row in its table.
    pub rows: Vec<u64>,
    /// Samples that the accesses are of, where that is known.
    pub samples: u64,
    /// Ids that their table does not hold, whether or not a row stands for them.
    pub absent: u64,
    /// The share of the rows whose accesses are here: 1 unless it is a recording that was sampled.
    pub rate: f64,
}

impl Trace {
    /// How many distinct rows were asked for.
    #[must_use]
    pub fn keys(&self) -> u32 {
        self.rows.len() as u32
    }

    /// By key: its table.
    #[must_use]
    pub fn table_of_keys(&self) -> Vec<u32> {
        let keys = |(t, table): (usize, &TraceTable)| table.keys.clone().map(move |_| t as u32);
        self.tables.iter().enumerate().flat_map(keys).collect()
    }

    /// Bytes of a row, the mean over the distinct rows.
    #[must_use]
    pub(crate) fn mean_row_bytes(&self) -> f64 {
        let bytes: f64 = self.tables.iter().map(|t| t.keys.len() as f64 * t.row_bytes as f64).sum();
        if self.rows.is_empty() { 0.0 } else { bytes / self.rows.len() as f64 }
    }
}

/// Collects a trace.
#[derive(Debug)]
pub struct TraceBuilder {
    schema: Schema,
    asked: RowAccesses,
    tables: Vec<Numbers>,
    /// Keys by first access over all tables, until [`TraceBuilder::finish`] puts them in order.
    accesses: Vec<u32>,
    /// By such a key: table and number within it.
    keys: Vec<(u32, u32)>,
    samples: u64,
    absent: u64,
}

/// One table's rows: the key of each, and all in the order of their first access.
#[derive(Debug, Default)]
struct Numbers {
    keys: NumberMap<u64, u32>,
    rows: Vec<u64>,
    accesses: u64,
}

impl TraceBuilder {
    /// A trace of the tables of a schema.
    #[must_use]
    pub fn new(schema: &Schema) -> Self {
        Self {
            asked: RowAccesses::new(schema),
            tables: schema.tables.iter().map(|_| Numbers::default()).collect(),
            schema: schema.clone(),
            accesses: Vec::new(),
            keys: Vec::new(),
            samples: 0,
            absent: 0,
        }
    }

    /// Appends the accesses of every sample of a batch of the schema's shape.
    ///
    /// # Errors
    /// [`TooLong`].
    pub fn append(&mut self, batch: &Batch) -> Result<(), TooLong> {
        let asked = std::mem::take(&mut self.asked);
        let absent = asked.of(batch, |table, row| self.push(table, row));
        self.asked = asked;
        self.samples += batch.samples as u64;
        self.absent += absent?;
        Ok(())
    }

    /// Appends one access.
    ///
    /// # Errors
    /// [`TooLong`].
    pub fn push(&mut self, table: TableId, row: u64) -> Result<(), TooLong> {
        if self.accesses.len() >= MAX_ACCESSES {
            return Err(TooLong { limit: MAX_ACCESSES });
        }
        let numbers = &mut self.tables[table.index()];
        let next = self.keys.len() as u32;
        let key = *numbers.keys.entry(row).or_insert(next);
        if key == next {
            self.keys.push((table.0, numbers.rows.len() as u32));
            numbers.rows.push(row);
        }
        numbers.accesses += 1;
        self.accesses.push(key);
        Ok(())
    }

    /// The trace, its keys numbered table after table. `rate` as in [`Trace::rate`].
    #[must_use]
    pub fn finish(self, rate: f64) -> Trace {
        let Self { schema, tables: numbers, mut accesses, keys, samples, absent, .. } = self;
        let mut first = 0;
        let mut tables = Vec::with_capacity(numbers.len());
        let mut rows = Vec::with_capacity(keys.len());
        for (table, numbers) in schema.tables.iter().zip(numbers) {
            let end = first + numbers.rows.len() as u32;
            tables.push(TraceTable {
                name: table.name.clone(),
                row_bytes: table.row_bytes(),
                keys: first..end,
                accesses: numbers.accesses,
            });
            rows.extend(numbers.rows);
            first = end;
        }
        for key in &mut accesses {
            let (table, number) = keys[*key as usize];
            *key = tables[table as usize].keys.start + number;
        }
        Trace { tables, accesses, rows, samples, absent, rate }
    }
}

#[cfg(test)]
pub(crate) mod tests;
