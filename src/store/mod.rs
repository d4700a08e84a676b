//! The embedding store: the versions of a model on disk, and access to the rows of one version.
//!
//! A version is an immutable directory. [`write()`] fills it under a temporary name, syncs it and renames it.
//! [`open`] checks every file that it reads against the manifest, and then serves rows from memory or from
//! the mapped files. So a crash at any instant leaves the existing versions intact. A damaged version is
//! refused, and [`open_highest`] opens the next lower good one.
//!
//! - [`mod@format`]: encodes and decodes the files of a version in memory.
//! - [`table`] and `bytes`: the rows of one table, in memory or mapped; `table_location`: which of the two.
//! - `contents` and `write`: the input of the writer, and the writer; `new_file` and `new_tensor`: a file of
//!   a version, and the tensors of table files.
//! - `snapshot`: checking and opening a version; `chain`: with those that it builds on; `link` and
//!   `table_reader`: the files of one of them; `finite`: whether their rows are finite; `overlay`: the rows
//!   that deltas changed; `last_delta`: those of the last one, in order.
//! - `error`: why a version cannot be read or written.
//! - `version_files`: the names of versions and of their files; `highest_version`: the highest number that a
//!   version has had.
//! - `record`: a row as it is served, and with its optimizer states, as it is trained.
//! - [`listing`]: what is known of each version on disk.
//! - [`retention`]: what stays on disk, and compaction of a chain.
//! - [`hot_rows`]: the rows that a cache held, and [`labels`]: the labels that clients have set, kept for the
//!   next start.
//! - `disk` and `atomic_write`: the file system calls behind a trait, so that tests can make each of them
//!   fail.
//!
//! The store does not depend on the trainer's working file (`rowlog`), which implements [`RowSource`].

use std::fs::File;
use std::sync::Arc;

use rayon::prelude::*;

use crate::config::TableMemory;
use crate::mem::prefetch::prefetch;
use crate::mem::{HostMemory, OutOfHostMemory};
use crate::pace;
use crate::schema::Schema;
use crate::types::{RowId, TableId, Version};

pub(crate) mod atomic_write;
pub(crate) mod bytes;
mod chain;
mod contents;
#[cfg(test)]
pub(crate) mod crash;
pub(crate) mod disk;
mod error;
mod finite;
pub(crate) mod format;
mod highest_version;
pub(crate) mod hot_rows;
pub(crate) mod labels;
mod last_delta;
mod link;
pub(crate) mod listing;
mod new_file;
mod new_tensor;
mod overlay;
mod record;
pub(crate) mod retention;
pub(crate) mod snapshot;
#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod stuck;
pub(crate) mod table;
mod table_location;
mod table_reader;
mod version_files;
mod write;

pub use bytes::PlainMemory;
pub(crate) use contents::{Checkpoint, DenseTensor, RowSource, SourceShape, TableRows, TakeChunk};
pub use contents::{Contents, Numbering};
pub use error::{Refusal, StoreError};
pub(crate) use finite::all_finite;
pub(crate) use format::{Base, TrainingTotals};
pub(crate) use last_delta::LastDeltaRows;
pub(crate) use link::RunNotes;
pub use record::{RecordLayout, StateShape};
pub(crate) use retention::{base_of, check_base};
#[cfg(test)]
pub(crate) use snapshot::open_latest;
pub(crate) use snapshot::{Candidates, Dense, Latest, Opened, open_beside, open_highest, open_to_continue};
pub use snapshot::{Purpose, open};
pub(crate) use table::{BadRow, State};
pub use table::{Table, rows_of};
pub(crate) use version_files::{models, version_dir, versions};
pub use write::write;
pub(crate) use write::{Written, check_writable, highest, make_dirs, publish};

use link::LinkHold;

/// All rows of one version of a model.
#[derive(Debug)]
pub struct EmbeddingStore {
    version: Version,
    tables: Vec<Table>,
    /// The versions whose files the rows are read from, the full one first. They keep their directories.
    links: Vec<Arc<LinkHold>>,
    /// How many of them, from the first, are in the tables' own rows. The deltas in front of those rows are
    /// of the others.
    merged: usize,
    /// The schema of all of them.
    schema: Arc<Schema>,
    /// Whether reading a row may wait for the disk.
    on_disk: bool,
    /// Where the rows of later versions are to be.
    memory: TableMemory,
}

/// Bytes of rows by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowBytes {
    /// In memory of the process.
    pub ram: u64,
    /// In mapped files.
    pub mapped: u64,
}

impl EmbeddingStore {
    /// The version of the model that the rows belong to.
    #[must_use]
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Whether the rows are those of one full version, without deltas.
    #[must_use]
    pub(crate) fn is_full(&self) -> bool {
        self.links.len() <= 1
    }

    /// The rows that deltas changed since an earlier version of the same chain. A row may occur several
    /// times. `None` if that is not known: this version does not build on the other one, or a copy has merged
    /// the deltas of one of them.
    #[must_use]
    pub(crate) fn changed_since(&self, earlier: &Self) -> Option<Vec<RowId>> {
        if !self.builds_on(earlier) || self.merged != earlier.merged {
            return None;
        }
        let newer = |(table, earlier): (&Table, &Table)| {
            let earlier = earlier.deltas().len();
            table.deltas().get(earlier..).unwrap_or_default().to_vec()
        };
        let newer: Vec<_> = self.tables.iter().zip(&earlier.tables).map(newer).collect();
        let rows = newer.iter().flatten().map(|delta| delta.keys().len()).sum();
        let mut changed = Vec::with_capacity(rows);
        for (t, deltas) in newer.iter().enumerate() {
            let rows = deltas.iter().flat_map(|delta| delta.keys());
            changed.extend(pace::rested(rows).map(|&row| RowId::new(TableId(t as u32), row)));
        }
        Some(changed)
    }

    /// Whether this version is an earlier one of the same chain with further deltas.
    #[must_use]
    fn builds_on(&self, earlier: &Self) -> bool {
        let links = self.links.iter().map(|link| link.base);
        let earlier = earlier.links.iter().map(|link| link.base);
        earlier.len() > 0 && links.take(earlier.len()).eq(earlier)
    }

    /// An earlier version of the same chain, which shares the rows. `None` if this version does not build on
    /// it, or a copy has merged later deltas.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the rows that deltas changed cannot be listed anew.
    fn up_to(&self, earlier: Base) -> Result<Option<Self>, OutOfHostMemory> {
        let Some(last) = self.links.iter().position(|link| link.base == earlier) else { return Ok(None) };
        let (version, links) = (earlier.version, self.links[..=last].to_vec());
        if links.len() < self.merged {
            return Ok(None);
        }
        let tables = self.tables.par_iter().map(|table| table.up_to(version));
        let tables = tables.collect::<Result<_, _>>()?;
        let Self { merged, on_disk, memory, .. } = *self;
        Ok(Some(Self { version, tables, links, merged, schema: self.schema.clone(), on_disk, memory }))
    }

    /// Whether the rows below the deltas of both versions are the same ones in memory.
    #[must_use]
    pub(crate) fn shares_base_rows(&self, other: &Self) -> bool {
        self.tables.iter().zip(&other.tables).all(|(table, other)| table.shares_base(other))
    }

    /// Says to other processes that the version is served, while the file is open. `None` without files or
    /// locks.
    #[must_use]
    pub(crate) fn mark_served(&self) -> Option<File> {
        self.links.last()?.mark_served()
    }

    /// What a delta of this version names as its base; `None` for rows that are not of a version on disk.
    #[must_use]
    pub(crate) fn base(&self) -> Option<Base> {
        self.links.last().map(|link| link.base)
    }

    /// The tables, in the order of the schema.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// `None` when the table does not exist.
    #[must_use]
    pub fn table(&self, table: TableId) -> Option<&Table> {
        self.tables.get(table.index())
    }

    /// The bytes of one row; `None` when the table does not exist or the row is past its end.
    #[must_use]
    pub fn row(&self, table: TableId, id: u64) -> Option<&[u8]> {
        self.table(table)?.row(id)
    }

    /// Prefetches rows that are in memory into the processor's cache. A few thousand fit.
    pub(crate) fn prefetch(&self, rows: &[RowId]) {
        for row in rows {
            self.table(row.table()).into_iter().for_each(|table| table.prefetch_overlay(row.row()));
        }
        rows.iter().filter_map(|row| self.row(row.table(), row.row())).for_each(prefetch);
    }

    /// Size of all rows without optimizer state, in bytes.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.weight_bytes()).sum()
    }

    /// The bytes of the rows of all tables and of the deltas in front of them, by where they are.
    #[must_use]
    pub(crate) fn row_memory(&self) -> RowBytes {
        let mut sum = RowBytes::default();
        for bytes in self.tables.iter().flat_map(Table::row_parts) {
            let place = if bytes.is_mapped() { &mut sum.mapped } else { &mut sum.ram };
            *place += bytes.as_slice().len() as u64;
        }
        sum
    }

    /// Prepares for random reads of mapped files that are not in memory: turns off the system's read-ahead
    /// and enables [`Self::fetch`]. Has no effect on rows in memory.
    pub fn expect_disk(&mut self) {
        self.on_disk = self.row_memory().mapped > 0;
        self.tables.iter().for_each(Table::expect_random_reads);
    }

    /// Starts reading all these rows from disk at once and does not wait. A later reader then waits for the
    /// slowest row, and not for one row after the other. Has no effect before [`Self::expect_disk`].
    pub fn fetch(&self, rows: impl IntoIterator<Item = RowId>) {
        if self.on_disk {
            for row in rows {
                self.table(row.table()).into_iter().for_each(|table| table.fetch(row.row()));
            }
        }
    }

    /// Reads every page of every mapped row once, so that no request waits for the disk.
    pub(crate) fn prefault(&self) {
        self.tables.iter().for_each(Table::prefault);
    }

    /// A copy of the rows in `memory`, without optimizer state, which a server does not need.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn rows_copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let tables = self.tables.iter().map(|table| table.rows_copied(memory)).collect::<Result<_, _>>()?;
        Ok(self.with_tables(tables))
    }

    /// The same version with copies of its tables, which have no deltas in front of them.
    fn with_tables(&self, tables: Vec<Table>) -> Self {
        let Self { version, memory, .. } = *self;
        let (links, merged, schema) = (self.links.clone(), self.links.len(), self.schema.clone());
        Self { version, tables, links, merged, schema, on_disk: false, memory }
    }

    /// The tables, in the order of the schema. Their versions stay in use until the last of them is dropped.
    #[must_use]
    pub(crate) fn into_tables(self) -> Vec<Table> {
        let Self { tables, links, .. } = self;
        tables.into_iter().map(|table| table.holding(&links)).collect()
    }
}

/// Most bytes of a name that is one of a file or directory.
const MAX_NAME_BYTES: usize = 128;

/// Checks that `name` can be the name of a file or directory and cannot refer to another directory.
///
/// # Errors
/// [`StoreError::Name`].
pub(crate) fn check_name(what: &'static str, name: &str) -> Result<(), StoreError> {
    let reason = match name {
        "" => "is empty",
        _ if name.len() > MAX_NAME_BYTES => "is longer than 128 bytes",
        _ if name.starts_with('.') => "starts with a dot",
        _ if name.contains(['/', '\\']) => "has a path separator",
        _ if name.chars().any(char::is_control) => "has a control character",
        _ => return Ok(()),
    };
    Err(StoreError::Name { what, name: name.to_owned(), reason })
}

#[cfg(test)]
impl EmbeddingStore {
    /// Size of all rows and optimizer state, in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        self.tables.iter().map(Table::bytes).sum()
    }

    /// A copy of the rows and the optimizer state in `memory`.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when an allocation fails.
    pub(crate) fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let tables = self.tables.iter().map(|table| table.copied(memory)).collect::<Result<_, _>>()?;
        Ok(self.with_tables(tables))
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests;
