//! The bytes of a working file: several files that look like one.
//!
//! A file system lets one thread at a time write to a file, however far apart the places are, and holds the others off even
//! while that one waits for a page from the disk. So bytes are dealt out to files without names, a megabyte to
//! each in turn, and threads that write here and there seldom meet.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use super::StoreError;

/// How many files.
const STRIPES: u64 = 16;
/// Bytes that lie end to end in one of them.
const BLOCK_BYTES: u64 = 1 << 20;

/// Files without names, to read and write at positions.
#[derive(Debug)]
pub(super) struct Stripes(Vec<File>);

impl Stripes {
    /// Makes them in `dir`, for so many bytes, which are holes and take no room.
    pub(super) fn create(dir: &Path, bytes: u64) -> Result<Self, StoreError> {
        let made = Self((0..STRIPES).map(|_| unnamed(dir)).collect::<Result<_, _>>()?);
        let rounds = bytes.div_ceil(BLOCK_BYTES * STRIPES);
        for file in &made.0 {
            file.set_len(rounds * BLOCK_BYTES).map_err(|e| StoreError::at(dir, e))?;
            // Rows from here and there must not bring in their neighbours too. And not even a whole table is read ahead
            // of, for that makes large folios (see `region::WRITE_BYTES`): after such a reading, writing a row took 50
            // us. Only advice, so that a refusal is no matter.
            let _ = fadvise(file, 0, None, Advice::Random);
        }
        Ok(made)
    }

    /// Fills `bytes` with what lies from `offset` on.
    pub(super) fn read(&self, mut bytes: &mut [u8], offset: u64) -> io::Result<()> {
        for (file, at, len) in self.parts(offset..offset + bytes.len() as u64) {
            let part = bytes.split_off_mut(..len).unwrap_or_default();
            file.read_exact_at(part, at)?;
        }
        Ok(())
    }

    /// Writes `bytes` from `offset` on.
    pub(super) fn write(&self, mut bytes: &[u8], offset: u64) -> io::Result<()> {
        for (file, at, len) in self.parts(offset..offset + bytes.len() as u64) {
            let part = bytes.split_off(..len).unwrap_or_default();
            file.write_all_at(part, at)?;
        }
        Ok(())
    }

    /// Where the bytes of a range lie: file by file, where from, and how many.
    fn parts(&self, mut range: Range<u64>) -> impl Iterator<Item = (&File, u64, usize)> {
        std::iter::from_fn(move || {
            if range.is_empty() {
                return None;
            }
            let (block, within) = (range.start / BLOCK_BYTES, range.start % BLOCK_BYTES);
            let len = (BLOCK_BYTES - within).min(range.end - range.start);
            range.start += len;
            let file = &self.0[(block % STRIPES) as usize];
            Some((file, block / STRIPES * BLOCK_BYTES + within, len as usize))
        })
    }

    /// The files.
    #[cfg(test)]
    pub(super) fn files(&self) -> &[File] {
        &self.0
    }
}

/// A new file in `dir`, to read and write, whose name is gone.
fn unnamed(dir: &Path) -> Result<File, StoreError> {
    if !dir.try_exists().map_err(|e| StoreError::at(dir, e))? {
        return Err(StoreError::MissingDirectory { path: dir.to_owned() });
    }
    let mut attempt = 0_u64;
    loop {
        let path = dir.join(format!(".working.{}.{attempt}.tmp", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            // Another's, or that of a process that was killed between this line and the next.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => attempt += 1,
            Err(e) => return Err(StoreError::at(&path, e)),
            Ok(file) => {
                fs::remove_file(&path).map_err(|e| StoreError::at(&path, e))?;
                return Ok(file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_across_files_is_read_back_by_any_cut(
            writes in prop::collection::vec((0_u64..40 << 20, 1_usize..3 << 20), 1..4),
            read in (0_u64..40 << 20, 1_usize..5 << 20),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let stripes = Stripes::create(dir.path(), 48 << 20).unwrap();
            let mut plain = vec![0_u8; 48 << 20];
            for (n, (at, len)) in writes.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + n * 7 + 1) as u8).collect();
                stripes.write(&bytes, at).unwrap();
                plain[at as usize..][..len].copy_from_slice(&bytes);
            }
            let mut got = vec![1; read.1];
            stripes.read(&mut got, read.0).unwrap();
            prop_assert!(got == plain[read.0 as usize..][..read.1]);
        }
    }
}
