//! A file of a version while it is written.

use std::fs::File;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::StoreError;
use super::disk::Disk;
use super::format::{Checksum, FileEntry};
use super::new_tensor::Columns;
use super::table::Table;
use crate::pace::give_way;
use crate::types::Element;

/// Bytes of rows encoded at a time, by all threads together.
const ENCODED_BYTES: usize = 16 << 20;

/// Bytes hashed and written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A file that is being written. Each chunk is hashed and then written while it is in the processor's cache.
pub(super) struct NewFile<'a> {
    disk: &'a dyn Disk,
    path: &'a Path,
    /// Path in the version.
    name: &'a str,
    file: File,
    hash: Xxh3,
    bytes: u64,
}

impl<'a> NewFile<'a> {
    /// A file at this path on disk, which is `name` in its version.
    pub(super) fn create(disk: &'a dyn Disk, path: &'a Path, name: &'a str) -> Result<Self, StoreError> {
        let file = disk.create(path).map_err(|e| StoreError::at(path, e))?;
        Ok(Self { disk, path, name, file, hash: Xxh3::new(), bytes: 0 })
    }

    /// Syncs the file. Returns its entry of the manifest.
    pub(super) fn finish(self) -> Result<FileEntry, StoreError> {
        self.disk.sync(&self.file, self.path).map_err(|e| StoreError::at(self.path, e))?;
        Ok(FileEntry { bytes: self.bytes, xxh3_128: Checksum(self.hash.digest128()) })
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        bytes.chunks(CHUNK_BYTES).try_for_each(|chunk| {
            give_way();
            self.hash.update(chunk);
            self.bytes += chunk.len() as u64;
            self.disk.append(&mut self.file, self.path, chunk).map_err(|e| StoreError::at(self.path, e))
        })
    }

    /// Appends the rows of a table, encoded, a few megabytes at a time.
    pub(super) fn append_rows(&mut self, table: &Table, element: Element) -> Result<(), StoreError> {
        let row_bytes = element.row_bytes(table.dim()).max(1);
        let rows = (ENCODED_BYTES / row_bytes).max(1) as u64;
        let mut chunk = Vec::new();
        for first in (0..table.rows()).step_by(rows as usize) {
            chunk.resize((table.rows() - first).min(rows) as usize * row_bytes, 0);
            let encoded = table.encode_rows(element, first, &mut chunk);
            let path = PathBuf::from(self.name);
            encoded.map_err(|source| StoreError::Row { path, source })?;
            self.append(&chunk)?;
        }
        Ok(())
    }

    /// Appends a state of all rows of a table, a few megabytes at a time.
    pub(super) fn append_states(&mut self, table: &Table, state: usize) -> Result<(), StoreError> {
        let width = table.states()[state].width();
        let rows = (ENCODED_BYTES / (width * size_of::<f32>()).max(1)).max(1) as u64;
        let mut chunk = Vec::new();
        for first in (0..table.rows()).step_by(rows as usize) {
            chunk.resize((table.rows() - first).min(rows) as usize * width, 0.0);
            table.copy_states(state, first, &mut chunk);
            self.append(bytemuck::cast_slice(&chunk))?;
        }
        Ok(())
    }

    /// Appends columns of a source's table, a chunk at a time.
    pub(super) fn append_columns(&mut self, columns: &Columns) -> Result<(), StoreError> {
        let mut bytes = Vec::new();
        columns.source.for_each_chunk(columns.table, &mut |first, records| {
            let path = PathBuf::from(self.name);
            columns.encode(first, records, &mut bytes).map_err(|source| StoreError::Row { path, source })?;
            self.append(&bytes)
        })
    }
}
