//! Counts accesses one by one, in memory that is fixed at the start.
//!
//! The rows of all tables share one [`Summary`], so a table of few rows leaves more room for the others. The
//! key of a row is [`RowId::number`]: the id of its table in the high bits, and 48 bits of row number.

use std::cmp::Reverse;
use std::convert::Infallible;
use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::super::grid::percent;
use super::super::row_accesses::RowAccesses;
use super::summary::{Counted, Summary};
use super::{CountsError, RowCount, file};
use crate::schema::Schema;
use crate::types::{Batch, RowId, TableId};

/// Counts the rows of a schema's tables.
#[derive(Debug)]
pub(crate) struct Counts {
    names: Vec<String>,
    row_accesses: RowAccesses,
    summary: Summary,
    accesses: u64,
    samples: u64,
    absent: u64,
}

impl Counts {
    /// Empty counts with room for as many distinct rows as fit `bytes` at
    /// [`KEY_BYTES`](super::summary::KEY_BYTES) each, at least one. All memory is reserved now and touched as
    /// rows are added.
    ///
    /// # Errors
    /// [`CountsError::Memory`].
    pub(crate) fn within(schema: &Schema, bytes: usize) -> Result<Self, CountsError> {
        let summary = Summary::within(bytes).map_err(|source| CountsError::Memory { bytes, source })?;
        let names = schema.tables.iter().map(|table| table.name.clone()).collect();
        Ok(Self {
            names,
            row_accesses: RowAccesses::new(schema),
            summary,
            accesses: 0,
            samples: 0,
            absent: 0,
        })
    }

    /// Counts the accesses of every sample of a batch of the schema's shape.
    pub(crate) fn append(&mut self, batch: &Batch) {
        let Self { row_accesses, summary, accesses, .. } = self;
        let counted = row_accesses.for_each(batch, |table, row| {
            summary.add(RowId::new(table, row).number());
            *accesses += 1;
            Ok::<(), Infallible>(())
        });
        let Ok(absent) = counted;
        self.absent += absent;
        self.samples += batch.samples as u64;
    }

    /// Counts one access of a row of the schema.
    pub(crate) fn push(&mut self, table: TableId, row: u64) {
        self.summary.add(RowId::new(table, row).number());
        self.accesses += 1;
    }

    #[must_use]
    pub(crate) fn accesses(&self) -> u64 {
        self.accesses
    }

    /// See [`Ranked::floor`](super::Ranked::floor). [`summary`](super::summary) gives its bound.
    #[must_use]
    pub(crate) fn floor(&self) -> u64 {
        self.summary.floor()
    }

    /// The object that `plan --counts-bytes --json` prints: `accesses`, `ids` (the rows that are kept),
    /// `floor` and `exact`.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let (accesses, ids, floor) = (self.accesses, self.summary.keys(), self.floor());
        json!({ "accesses": accesses, "ids": ids, "floor": floor, "exact": floor == 0 })
    }

    /// The report as text. `rate` is the share of all rows whose accesses were counted.
    #[must_use]
    pub(crate) fn text(&self, rate: f64) -> String {
        let (rows, tables, floor) = (self.summary.keys(), self.names.len(), self.floor());
        let mut text = String::new();
        if self.samples > 0 {
            let _ = write!(text, "{} samples, ", self.samples);
        }
        let _ = match floor {
            0 => writeln!(text, "{} accesses of {rows} rows of {tables} tables", self.accesses),
            _ => writeln!(
                text,
                "{} accesses of more rows than fit: {rows} rows of {tables} tables are kept, with counts \
                 that are at most {floor} too high; no other row has more than {floor} accesses",
                self.accesses
            ),
        };
        if self.absent > 0 {
            let _ = writeln!(text, "{} ids are past the end of their table", self.absent);
        }
        if rate < 1.0 {
            let _ = writeln!(text, "a sample of {} % of the rows", percent(rate));
        }
        text
    }

    /// Writes the file, or replaces it, without copying the counts. For exact counts, the bytes are those
    /// that [`Ranked::write`](super::Ranked::write) writes.
    ///
    /// # Errors
    /// [`CountsError::Io`].
    pub(crate) fn write(self, path: &Path) -> Result<(), CountsError> {
        let floor = self.floor();
        let mut counted = self.summary.into_counted();
        counted.sort_unstable_by_key(|c| (table_of(c), Reverse(c.count), c.key));
        let mut rest = counted.as_slice();
        let mut tables = Vec::with_capacity(self.names.len());
        for (table, name) in self.names.iter().enumerate() {
            let (rows, after) = rest.split_at(rest.partition_point(|c| table_of(c).index() == table));
            tables.push((name.as_str(), rows.iter().map(row_count)));
            rest = after;
        }
        file::write(path, floor, &tables)
    }
}

fn table_of(counted: &Counted) -> TableId {
    RowId::from_number(counted.key).table()
}

fn row_count(counted: &Counted) -> RowCount {
    RowCount { row: RowId::from_number(counted.key).row(), count: counted.count }
}

#[cfg(test)]
mod tests;
