//! An access trace in memory: the used rows, in order. `row_accesses` defines what an access is, and the
//! order.
//!
//! Rows are numbered densely, table after table, so that a simulated cache can use arrays instead of hashing.
//! A trace takes 4 bytes for each access and 8 for each distinct row. A map is also needed to build it.

use std::ops::Range;

use super::row_accesses::RowAccesses;
use crate::mem::NumberMap;
use crate::schema::Schema;
use crate::types::{Batch, TableId};

/// Most accesses of a trace: positions and keys are 32-bit numbers.
const MAX_ACCESSES: usize = u32::MAX as usize - 1;

/// A workload has more accesses than a trace can hold.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("trace: more than {limit} accesses; plan on fewer files, or on a sampled trace")]
pub struct TooLong {
    /// The largest number of accesses that a trace can hold.
    pub limit: usize,
}

/// One table of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceTable {
    /// The table's name.
    pub name: String,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// The keys of the used rows of the table.
    pub keys: Range<u32>,
    /// Accesses of all rows of the table.
    pub accesses: u64,
}

/// Accesses in order. A key is the number of a distinct row.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The tables, indexed by [`TableId`].
    pub tables: Vec<TraceTable>,
    /// The key of every access. A table's keys are numbered in the order of their first access.
    pub accesses: Vec<u32>,
    /// By key: the number of the row in its table.
    pub rows: Vec<u64>,
    /// Number of samples in the data; 0 for access traces, which do not store it.
    pub samples: u64,
    /// Number of ids past the end of their table. It also counts ids that read a default row.
    pub absent: u64,
    /// The share of all rows whose accesses are in the trace; below 1 only for sampled access traces.
    pub rate: f64,
}

impl Trace {
    /// Number of distinct rows.
    #[must_use]
    pub fn keys(&self) -> u32 {
        self.rows.len() as u32
    }

    /// By key: the index of its table.
    #[must_use]
    pub fn table_of_keys(&self) -> Vec<u32> {
        let keys = |(t, table): (usize, &TraceTable)| table.keys.clone().map(move |_| t as u32);
        self.tables.iter().enumerate().flat_map(keys).collect()
    }

    /// Mean bytes of a distinct row.
    #[must_use]
    pub(crate) fn mean_row_bytes(&self) -> f64 {
        let bytes: f64 = self.tables.iter().map(|t| t.keys.len() as f64 * t.row_bytes as f64).sum();
        if self.rows.is_empty() { 0.0 } else { bytes / self.rows.len() as f64 }
    }
}

/// Builds a trace.
#[derive(Debug)]
pub struct TraceBuilder {
    schema: Schema,
    row_accesses: RowAccesses,
    tables: Vec<DistinctRows>,
    /// Temporary keys, numbered in the order of first access over all tables. [`TraceBuilder::finish`]
    /// renumbers them table after table.
    accesses: Vec<u32>,
    /// The row of each temporary key.
    keys: Vec<TableRow>,
    samples: u64,
    absent: u64,
}

/// A row, as its table and its index among the distinct rows of the table.
#[derive(Clone, Copy, Debug)]
struct TableRow {
    table: u32,
    number: u32,
}

/// The distinct rows of a table.
#[derive(Debug, Default)]
struct DistinctRows {
    /// The temporary key of each row.
    keys: NumberMap<u64, u32>,
    /// In the order of first access.
    rows: Vec<u64>,
    accesses: u64,
}

impl TraceBuilder {
    /// An empty trace for the tables of a schema.
    #[must_use]
    pub fn new(schema: &Schema) -> Self {
        Self {
            row_accesses: RowAccesses::new(schema),
            tables: schema.tables.iter().map(|_| DistinctRows::default()).collect(),
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
        let row_accesses = std::mem::take(&mut self.row_accesses);
        let absent = row_accesses.for_each(batch, |table, row| self.push(table, row));
        self.row_accesses = row_accesses;
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
        let rows = &mut self.tables[table.index()];
        let next = self.keys.len() as u32;
        let key = *rows.keys.entry(row).or_insert(next);
        if key == next {
            self.keys.push(TableRow { table: table.0, number: rows.rows.len() as u32 });
            rows.rows.push(row);
        }
        rows.accesses += 1;
        self.accesses.push(key);
        Ok(())
    }

    /// The trace, with keys numbered table after table. `rate` as in [`Trace::rate`].
    #[must_use]
    pub fn finish(self, rate: f64) -> Trace {
        let Self { schema, tables: table_rows, mut accesses, keys, samples, absent, .. } = self;
        let mut first = 0;
        let mut tables = Vec::with_capacity(table_rows.len());
        let mut rows = Vec::with_capacity(keys.len());
        for (table, own) in schema.tables.iter().zip(table_rows) {
            let end = first + own.rows.len() as u32;
            tables.push(TraceTable {
                name: table.name.clone(),
                row_bytes: table.row_bytes(),
                keys: first..end,
                accesses: own.accesses,
            });
            rows.extend(own.rows);
            first = end;
        }
        for key in &mut accesses {
            let TableRow { table, number } = keys[*key as usize];
            *key = tables[table as usize].keys.start + number;
        }
        Trace { tables, accesses, rows, samples, absent, rate }
    }
}

#[cfg(test)]
pub(crate) mod tests;
