//! Reading: the records of one segment, and the file that says how far they are durable.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::format::{self, HEAD_BYTES, HEADER_BYTES, Head, HeaderError, UnreadBytes};
use super::{Checksum, LogError, name_of};
use crate::store::disk::is_at;
use crate::types::RawBatch;

/// The file that says how far the log is durable.
const DURABLE: &str = "durable";

/// How far a log is durable: all segments before this one, and this many bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Durable {
    pub segment: u64,
    pub bytes: u64,
}

/// How often the file is read before it counts as damaged.
const READS: usize = 3;

impl Durable {
    /// Opens the file of a log for [`Self::write`].
    pub(crate) fn create(dir: &Path) -> Result<File, LogError> {
        let path = dir.join(DURABLE);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        file.map_err(|e| LogError::io(&path, e))
    }

    pub(crate) fn write(self, file: &File) -> io::Result<()> {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.segment.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        let sum = xxh3_64(&bytes[..16]);
        bytes[16..].copy_from_slice(&sum.to_le_bytes());
        file.write_all_at(&bytes, 0)
    }

    /// `None` if nothing is known: there is no file, or it is damaged.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, LogError> {
        let path = dir.join(DURABLE);
        // The writer overwrites it in place, so a read may find half of two states.
        for _ in 0..READS {
            let bytes = match fs::read(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                bytes => bytes.map_err(|e| LogError::io(&path, e))?,
            };
            let mut parts = UnreadBytes(&bytes);
            let found = parts.u64().zip(parts.u64()).map(|(segment, bytes)| Self { segment, bytes });
            if bytes.len() == 24 && parts.u64() == Some(xxh3_64(&bytes[..16])) {
                return Ok(found);
            }
        }
        Ok(None)
    }
}

/// A segment that is read from its beginning.
#[derive(Debug)]
pub(crate) struct Segment {
    pub number: u64,
    pub path: PathBuf,
    file: File,
    /// The schema of its samples.
    pub schema: Checksum,
    /// The end of the last record.
    pub at: u64,
    payload: Vec<u8>,
}

impl Segment {
    /// # Errors
    /// [`LogError`], also for a header that is not whole.
    pub(crate) fn open(dir: &Path, number: u64) -> Result<Self, LogError> {
        let path = dir.join(name_of(number));
        let file = File::open(&path).map_err(|e| LogError::io(&path, e))?;
        let mut header = [0; HEADER_BYTES];
        match file.read_exact_at(&mut header, 0) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(LogError::Damaged { path, at: 0, reason: "the header is not whole" });
            }
            read => read.map_err(|e| LogError::io(&path, e))?,
        }
        let schema = match format::read_header(&header) {
            Ok(schema) => schema,
            Err(HeaderError::Foreign) => return Err(LogError::Foreign { path }),
            Err(HeaderError::Damaged) => {
                return Err(LogError::Damaged {
                    path,
                    at: 0,
                    reason: "the header's checksum does not match",
                });
            }
            Err(HeaderError::Version(got)) => {
                return Err(LogError::Version { path, expected: format::VERSION, got });
            }
        };
        Ok(Self { number, path, file, schema, at: HEADER_BYTES as u64, payload: Vec::new() })
    }

    /// Bytes of the file now.
    ///
    /// # Errors
    /// When the system does not say.
    pub(crate) fn bytes(&self) -> Result<u64, LogError> {
        Ok(self.file.metadata().map_err(|e| LogError::io(&self.path, e))?.len())
    }

    /// Whether the file is still at its path.
    ///
    /// # Errors
    /// When the system does not say.
    pub(crate) fn is_at_path(&self) -> Result<bool, LogError> {
        is_at(&self.file, &self.path).map_err(|e| LogError::io(&self.path, e))
    }

    /// The samples of the next record; `None` at the byte `end`, where a record ends.
    ///
    /// # Errors
    /// [`LogError::Damaged`] for a record that is not whole.
    pub(crate) fn next(&mut self, end: u64) -> Result<Option<RawBatch>, LogError> {
        let at = self.at;
        let Some(head) = self.next_record(end)? else { return Ok(None) };
        let samples = format::decode(head.samples, &self.payload);
        samples.map(Some).ok_or_else(|| self.damaged(at, "the samples are malformed"))
    }

    /// Checks the next record, and moves to its end. `None` at the byte `end`.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub(crate) fn next_record(&mut self, end: u64) -> Result<Option<Head>, LogError> {
        if self.at == end {
            return Ok(None);
        }
        let (head, next) = self.record_at(self.at, end)?;
        self.at = next;
        Ok(Some(head))
    }

    /// Whether a record after a byte was written when that byte was durable.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn was_durable(&mut self, at: u64, end: u64) -> Result<bool, LogError> {
        let mut tail = vec![0; end.saturating_sub(at) as usize];
        self.file.read_exact_at(&mut tail, at).map_err(|e| LogError::io(&self.path, e))?;
        for from in 1..tail.len().saturating_sub(HEAD_BYTES) {
            let Some(head) = Head::read(&tail[from..]) else { continue };
            let payload = tail[from + HEAD_BYTES..].get(..head.bytes as usize);
            let later = head.durable > at && head.durable <= at + from as u64;
            if later && payload.is_some_and(|payload| head.fits(at + from as u64, payload)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads the record at a byte into `self.payload`. Returns its head and its end.
    fn record_at(&mut self, at: u64, end: u64) -> Result<(Head, u64), LogError> {
        let room = end.saturating_sub(at);
        let Some(room) = room.checked_sub(HEAD_BYTES as u64) else {
            return Err(self.damaged(at, "the record is not whole"));
        };
        let mut head = [0; HEAD_BYTES];
        self.file.read_exact_at(&mut head, at).map_err(|e| LogError::io(&self.path, e))?;
        let Some(head) = Head::read(&head) else {
            return Err(self.damaged(at, "not a record"));
        };
        if u64::from(head.bytes) > room {
            return Err(self.damaged(at, "the record is not whole"));
        }
        let payload_at = at + HEAD_BYTES as u64;
        self.payload.resize(head.bytes as usize, 0);
        self.file.read_exact_at(&mut self.payload, payload_at).map_err(|e| LogError::io(&self.path, e))?;
        if !head.fits(at, &self.payload) {
            return Err(self.damaged(at, "the record's checksum does not match"));
        }
        Ok((head, payload_at + u64::from(head.bytes)))
    }

    fn damaged(&self, at: u64, reason: &'static str) -> LogError {
        LogError::Damaged { path: self.path.clone(), at, reason }
    }
}
