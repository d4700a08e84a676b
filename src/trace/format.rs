//! Encodes and decodes the files of an access trace. `docs/file-formats.md` (Access traces) draws them.
//!
//! A file may end anywhere, if its writer was killed or the disk was full. The reader reads its whole blocks,
//! and [`FileEnd`] gives the number of bytes after them. Any other fault is an error with an offset. Lengths
//! are checked before memory is allocated for them.

use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::schema::Schema;
use crate::types::TableId;

const MAGIC: &[u8; 8] = b"FLTRACE1";
/// The longest header: room for the names of ten thousand tables.
const MAX_HEADER_BYTES: usize = 16 << 20;
/// The longest payload.
const MAX_PAYLOAD_BYTES: usize = 1 << 20;
/// Bytes of a block before its payload.
pub(crate) const BLOCK_HEAD_BYTES: usize = 16;

/// The model and the rate of a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    /// The share of all rows that is recorded: above 0, at most 1.
    pub rate: f64,
    /// The model's tables, indexed by table id.
    pub tables: Vec<HeaderTable>,
}

/// One table of a recorded model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeaderTable {
    /// The table's name.
    pub name: String,
    /// The table's declared rows.
    pub rows: u64,
}

/// Where a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileEnd {
    /// After a whole block, or after the header.
    Whole,
    /// Inside the header or a block.
    Truncated {
        /// Bytes of the header and all whole blocks.
        read: u64,
        /// Bytes after the last whole block.
        rest: u64,
    },
}

/// The result of opening a file.
pub(crate) enum OpenedTrace<R> {
    Whole(TraceReader<R>),
    /// The file ends inside its header, after this many bytes, so it has no accesses.
    Truncated {
        bytes: u64,
    },
}

/// A recording that cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceFormatError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("at byte {offset}: {reason}")]
    Form { offset: u64, reason: String },
}

impl Header {
    /// The header for a model.
    #[must_use]
    pub(crate) fn of(schema: &Schema, rate: f64) -> Self {
        let table = |t: &crate::schema::TableSchema| HeaderTable { name: t.name.clone(), rows: t.rows };
        Self { rate, tables: schema.tables.iter().map(table).collect() }
    }

    /// The first bytes of a file.
    #[must_use]
    pub(crate) fn bytes(&self) -> Vec<u8> {
        // Encoding numbers and strings does not fail. An infinite rate becomes `null`, which `open` refuses.
        let json = serde_json::to_vec(self).unwrap_or_default();
        let length = (json.len() as u32).to_le_bytes();
        [MAGIC, &length[..], &json, &xxh3_64(&json).to_le_bytes()].concat()
    }
}

/// Appends one access to a payload.
#[inline]
pub(crate) fn push_access(payload: &mut Vec<u8>, table: TableId, row: u64) {
    push_number(payload, u64::from(table.0));
    push_number(payload, row);
}

fn push_number(payload: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        payload.push(number as u8 | 0x80);
        number >>= 7;
    }
    payload.push(number as u8);
}

/// The bytes before a payload of 1 to [`MAX_PAYLOAD_BYTES`] bytes.
#[must_use]
pub(crate) fn block_head(payload: &[u8], accesses: u32) -> [u8; BLOCK_HEAD_BYTES] {
    debug_assert!((1..=MAX_PAYLOAD_BYTES).contains(&payload.len()));
    let mut head = [0; BLOCK_HEAD_BYTES];
    head[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    head[4..8].copy_from_slice(&accesses.to_le_bytes());
    head[8..].copy_from_slice(&xxh3_64(payload).to_le_bytes());
    head
}

/// Reads a recording, a block at a time.
pub(crate) struct TraceReader<R> {
    source: R,
    header: Header,
    offset: u64,
    payload: Vec<u8>,
}

impl<R: Read> TraceReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`TraceFormatError`] when the header is invalid. A cut header gives [`OpenedTrace::Truncated`].
    pub(crate) fn open(mut source: R) -> Result<OpenedTrace<R>, TraceFormatError> {
        let form = |offset, reason: String| TraceFormatError::Form { offset, reason };
        let mut head = [0; 12];
        let got = fill(&mut source, &mut head)?;
        if !head[..got].starts_with(&MAGIC[..got.min(MAGIC.len())]) {
            return Err(form(
                0,
                format!("expected an access trace, got {:?}", head[..got].escape_ascii().to_string()),
            ));
        }
        if got < head.len() {
            return Ok(OpenedTrace::Truncated { bytes: got as u64 });
        }
        let length = number(&head[8..]) as usize;
        if length > MAX_HEADER_BYTES {
            return Err(form(8, format!("header: at most {MAX_HEADER_BYTES} bytes, got {length}")));
        }
        let mut json = vec![0; length + 8];
        let got = fill(&mut source, &mut json)?;
        if got < json.len() {
            return Ok(OpenedTrace::Truncated { bytes: (head.len() + got) as u64 });
        }
        let (json, checksum) = json.split_at(length);
        if xxh3_64(json) != number(checksum) {
            return Err(form(12, "header: the checksum does not match".into()));
        }
        let header: Header =
            serde_json::from_slice(json).map_err(|error| form(12, format!("header: {error}")))?;
        if !(header.rate > 0.0 && header.rate <= 1.0) {
            let reason = format!("header: rate: expected a number above 0, at most 1, got {}", header.rate);
            return Err(form(12, reason));
        }
        let offset = (12 + length + 8) as u64;
        Ok(OpenedTrace::Whole(Self { source, header, offset, payload: Vec::new() }))
    }

    #[must_use]
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Calls `on_access` for every access of every whole block, in order. Checks each block before its first
    /// access.
    ///
    /// # Errors
    /// [`TraceFormatError`] at the first block that is damaged, and errors of `on_access`.
    pub(crate) fn read<E: From<TraceFormatError>>(
        mut self,
        mut on_access: impl FnMut(TableId, u64) -> Result<(), E>,
    ) -> Result<FileEnd, E> {
        let mut accesses = Vec::new();
        loop {
            let mut head = [0; BLOCK_HEAD_BYTES];
            let got = fill(&mut self.source, &mut head).map_err(TraceFormatError::from)?;
            if got < head.len() {
                return Ok(if got == 0 { FileEnd::Whole } else { self.cut(got) });
            }
            let length = number(&head[..4]) as usize;
            if !(1..=MAX_PAYLOAD_BYTES).contains(&length) {
                let reason = format!("block: expected 1 to {MAX_PAYLOAD_BYTES} bytes, got {length}");
                return Err(self.form(reason).into());
            }
            self.payload.resize(length, 0);
            let got = fill(&mut self.source, &mut self.payload).map_err(TraceFormatError::from)?;
            if got < length {
                return Ok(self.cut(head.len() + got));
            }
            self.decode(&head, &mut accesses)?;
            accesses.drain(..).try_for_each(|(table, row)| on_access(table, row))?;
            self.offset += (head.len() + length) as u64;
        }
    }

    fn decode(
        &self,
        head: &[u8; BLOCK_HEAD_BYTES],
        accesses: &mut Vec<(TableId, u64)>,
    ) -> Result<(), TraceFormatError> {
        if xxh3_64(&self.payload) != number(&head[8..]) {
            return Err(self.form("block: the checksum does not match".into()));
        }
        let mut rest = self.payload.as_slice();
        while !rest.is_empty() {
            let (Some(table), Some(row)) = (take_number(&mut rest), take_number(&mut rest)) else {
                return Err(self.form("block: a number is longer than 64 bits or cut".into()));
            };
            let Some(known) = usize::try_from(table).ok().and_then(|t| self.header.tables.get(t)) else {
                let tables = self.header.tables.len();
                return Err(self.form(format!("block: expected a table below {tables}, got {table}")));
            };
            if row >= known.rows {
                let (name, rows) = (&known.name, known.rows);
                return Err(
                    self.form(format!("block: table {name:?}: expected a row below {rows}, got {row}"))
                );
            }
            accesses.push((TableId(table as u32), row));
        }
        let wanted = number(&head[4..8]);
        if accesses.len() as u64 != wanted {
            return Err(self.form(format!("block: expected {wanted} accesses, got {}", accesses.len())));
        }
        Ok(())
    }

    fn cut(&self, rest: usize) -> FileEnd {
        FileEnd::Truncated { read: self.offset, rest: rest as u64 }
    }

    fn form(&self, reason: String) -> TraceFormatError {
        TraceFormatError::Form { offset: self.offset, reason }
    }
}

/// Reads until the buffer is full or the source ends. Returns how many bytes were read.
fn fill(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match source.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Up to 8 little-endian bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Takes a number from the front of a payload; `None` if it is cut or longer than 64 bits.
fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..u64::BITS).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests;
