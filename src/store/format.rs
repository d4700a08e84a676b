//! The file formats of a version: functions that encode values to bytes and decode them, without file access.
//! `docs/file-formats.md` describes the formats for users.
//!
//! ```text
//! models/<name>/<version>/
//!   MANIFEST.json                          what the version is; length and checksum of the other files
//!   model.toml                             the schema, as text
//!   dense.safetensors                      dense weights
//!   tables/<table>.safetensors             the rows of a table of the schema: all, or the changed ones
//!   checkpoint/                            what training needs to continue; servers do not read it
//!     dense.safetensors                    optimizer state of the dense weights
//!     tables/<table>.safetensors           optimizer state of the rows, and f32 rows if `weight` is rounded
//!     cursor.json                          the position of training in its data
//! ```
//!
//! A version is *full*, or a *delta* of the version before it: its dense weights are complete, and its tables
//! hold only the rows that changed since its base. Version N has the rows of the newest full version F <= N,
//! overwritten by the deltas F+1 to N in this order.
//!
//! # A tensor file
//!
//! It is a plain safetensors file, which any safetensors library reads, with two restrictions: the header is
//! padded so that the data begins on a page, and tensors have one of four types. The `safetensors` crate
//! pads headers to 8 bytes only and needs each tensor in one buffer, so this module encodes the header.
//!
//! ```text
//! at            bytes         field
//! 0             8             n: length of the header, u64 little-endian; 8 + n is a multiple of 4096
//! 8             n             header: one JSON object, then spaces
//! 8 + n         data          the tensors end to end in the order written, little-endian,
//!                             row-major, without gaps; the file ends where the last one does
//!
//! header:       {"NAME": {"dtype": "F32", "shape": [ROWS, DIM], "data_offsets": [BEGIN, END]}, ...}
//!               dtype is F32, F16, U8 or U64; offsets count bytes from 8 + n;
//!               "__metadata__" (text to text) is allowed and ignored
//! ```
//!
//! The tensors of a table's two files are these. R is the number of rows of the table, or of the changed rows
//! in a delta. D is the dimension:
//!
//! ```text
//! tables/<table>             keys      U64 [R]          only in a delta: the changed rows, ascending
//!                            weight    see below [R, W]
//! checkpoint/tables/<table>  weight    F32 [R, D]       only if `weight` is rounded: the rows as trained
//!                            <state>   F32 [R, D] or [R, 1], for each kind of optimizer state
//! ```
//!
//! A file of `checkpoint/` without tensors is not written. The table's `element` in `model.toml` gives the
//! type of the served `weight`. A row of it holds the same bytes as in memory (`types::element`), a multiple
//! of 4:
//!
//! ```text
//! element   dtype   shape            a row
//! f32       F32     [ROWS, DIM]      the elements
//! f16       F16     [ROWS, D2]       the elements, and a zero if DIM is odd; D2 = DIM rounded up to 2
//! int8      U8      [ROWS, D4 + 8]   DIM steps, zeros up to D4 = DIM rounded up to 4, then scale and
//!                                    bias as f32: element i is step i * scale + bias
//! ```
//!
//! # The manifest
//!
//! ```text
//! {
//!   "format": 2,                        this layout; a reader refuses later ones by their number
//!   "kind": "delta",                    or "full"
//!   "base": {                           only in a delta
//!     "version": 6,                     the version before this one
//!     "xxh3_128": "0f…32 hex digits"    the checksum in the base's manifest
//!   },
//!   "training": {                       absent if the version was not trained here
//!     "steps": 120000,                  steps of the optimizer
//!     "samples": 15360000,              samples trained
//!     "last_batch_unix_ms": 1795392000000
//!   },
//!   "quality": {"auc": 0.7812, ...},    figures of the training or the validation; absent if there are none
//!   "files": {                          every other file, by its path in the version
//!     "model.toml": {"bytes": 812, "xxh3_128": "…"}, ...
//!   },
//!   "metadata": {"optimizer": "adam"},  notes of the writer, text to text
//!   "xxh3_128": "…"                     of this file with the 32 digits of this value all 0
//! }
//! ```
//!
//! The checksum is the last field and covers every other byte, even white space.
//!
//! # Earlier formats
//!
//! Format 1 has only full versions, and no `kind`, `base`, `training`, `quality` and `checkpoint/`. The
//! optimizer state is in `dense.safetensors` and `tables/`, after the weights. Rounded tables have none.
//! `metadata` has `steps`.

mod manifest;

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

pub(crate) use manifest::{Base, Checksum, FileEntry, MAX_TRAINED, Manifest, TrainingTotals};

use crate::types::{Element, named};
use manifest::FORMAT;

/// The tensor of the rows of a table.
pub(crate) const WEIGHT: &str = "weight";
/// The tensor of the numbers of a delta's changed rows.
pub(crate) const KEYS: &str = "keys";
/// Tensor data begins on a multiple of this many bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// The longest header of a tensor file that is written or read.
pub(crate) const MAX_HEADER_BYTES: u64 = 4 << 20;
const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// Why bytes are not of this format.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages document the variants
pub enum FormatError {
    #[error("header: needs {expected} bytes, the file has {got}")]
    HeaderTruncated { expected: u64, got: u64 },
    #[error("{field}: limit {limit} bytes, got {got}")]
    TooLong { field: &'static str, limit: u64, got: u64 },
    #[error("header: data begins at byte {got}, expected a multiple of {PAGE_BYTES}")]
    Unaligned { got: u64 },
    #[error("{field}: {reason}")]
    Json { field: &'static str, reason: String },
    #[error("tensor {0:?}: name is used twice or reserved")]
    Name(String),
    #[error("tensor {tensor:?}: expected dtype F32, F16, U8 or U64, got {got:?}")]
    UnknownDtype { tensor: String, got: String },
    #[error("tensor {tensor:?}: expected dtype {}, got {}", expected.name(), got.name())]
    Dtype { tensor: String, expected: Dtype, got: Dtype },
    #[error("tensor {tensor:?}: expected data_offsets {expected:?}, got {got:?}")]
    Offsets { tensor: String, expected: (u64, u64), got: (u64, u64) },
    #[error("tensor {tensor:?}: shape {shape:?} takes 2^64 bytes or more")]
    Overflow { tensor: String, shape: Vec<u64> },
    #[error("data: expected {expected} bytes, got {got}")]
    Data { expected: u64, got: u64 },
    #[error("format: expected 1 to {FORMAT}, got {0}")]
    Version(u32),
    #[error("xxh3_128: manifest was changed after it was written: expected {expected}, got {got}")]
    Changed { expected: Checksum, got: Checksum },
}

/// The element type of a tensor, by its safetensors name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// Unsigned bytes.
    U8,
    /// Unsigned 64-bit integers.
    U64,
}

named! { Dtype: F32 = "F32", F16 = "F16", U8 = "U8", U64 = "U64" }

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::U8 => 1,
            Self::U64 => 8,
        }
    }
}

/// The tensor type for the rows of a table, and the tensor elements per row.
#[must_use]
pub(crate) fn weight_type(element: Element, dim: usize) -> (Dtype, u64) {
    let dtype = match element {
        Element::F32 => Dtype::F32,
        Element::F16 => Dtype::F16,
        Element::Int8 => Dtype::U8,
    };
    (dtype, element.row_bytes(dim) as u64 / dtype.bytes())
}

/// A tensor of a file. The safetensors format calls its element type `dtype`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Unique in the file.
    pub name: String,
    pub dtype: Dtype,
    /// Elements along each axis, slowest first.
    pub shape: Vec<u64>,
    /// Offset of the first byte in the file.
    pub begin: u64,
    /// Offset past the last byte.
    pub end: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Encodes the length, header and padding of a file that holds these tensors in this order.
///
/// # Errors
/// [`FormatError`] when a name is used twice or reserved, a shape overflows, or the header exceeds
/// [`MAX_HEADER_BYTES`].
pub(crate) fn encode_header(tensors: &[(&str, Dtype, &[u64])]) -> Result<Vec<u8>, FormatError> {
    let mut entries = BTreeMap::new();
    let mut begin = 0_u64;
    for (name, dtype, shape) in tensors {
        let bytes = tensor_bytes(name, *dtype, shape)?;
        let end = begin.checked_add(bytes).ok_or_else(|| overflow(name, shape))?;
        let dtype = dtype.name().to_owned();
        let entry = Entry { dtype, shape: shape.to_vec(), data_offsets: (begin, end) };
        if *name == METADATA || entries.insert(*name, entry).is_some() {
            return Err(FormatError::Name((*name).to_owned()));
        }
        begin = end;
    }
    let json = serde_json::to_vec(&entries)
        .map_err(|e| FormatError::Json { field: "header", reason: e.to_string() })?;
    let total = (LENGTH_BYTES + json.len() as u64).next_multiple_of(PAGE_BYTES);
    let length = total - LENGTH_BYTES;
    if length > MAX_HEADER_BYTES {
        return Err(FormatError::TooLong { field: "header", limit: MAX_HEADER_BYTES, got: length });
    }
    let mut header = length.to_le_bytes().to_vec();
    header.extend_from_slice(&json);
    header.resize(total as usize, b' ');
    Ok(header)
}

/// Parses the header of a whole file. Returns the tensors in the order of their data, after checking that
/// each is within `file`. Allocations are bounded by [`MAX_HEADER_BYTES`].
///
/// # Errors
/// [`FormatError`] for the first violation of the format.
pub(crate) fn parse_header(file: &[u8]) -> Result<Vec<Tensor>, FormatError> {
    let got = file.len() as u64;
    let Some((length, rest)) = file.split_first_chunk() else {
        return Err(FormatError::HeaderTruncated { expected: LENGTH_BYTES, got });
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(FormatError::TooLong { field: "header", limit: MAX_HEADER_BYTES, got: length });
    }
    let data = LENGTH_BYTES + length;
    let Some(json) = rest.get(..length as usize) else {
        return Err(FormatError::HeaderTruncated { expected: data, got });
    };
    if !data.is_multiple_of(PAGE_BYTES) {
        return Err(FormatError::Unaligned { got: data });
    }
    let Entries(entries) = serde_json::from_slice(json)
        .map_err(|e| FormatError::Json { field: "header", reason: e.to_string() })?;
    place(entries, data, got - data)
}

/// Checks that the tensors fill the data of `bytes` bytes without gaps or overlaps. Adds `data`, the offset
/// of the data in the file, to their offsets.
fn place(mut entries: Vec<(String, Entry)>, data: u64, bytes: u64) -> Result<Vec<Tensor>, FormatError> {
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(twice) = entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(FormatError::Name(twice[0].0.clone()));
    }
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut end = 0_u64;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, Entry { dtype, shape, data_offsets }) in entries {
        let Some(dtype) = Dtype::ALL.into_iter().find(|known| known.name() == dtype) else {
            return Err(FormatError::UnknownDtype { tensor: name, got: dtype });
        };
        let begin = end;
        end =
            begin.checked_add(tensor_bytes(&name, dtype, &shape)?).ok_or_else(|| overflow(&name, &shape))?;
        if data_offsets != (begin, end) {
            return Err(FormatError::Offsets { tensor: name, expected: (begin, end), got: data_offsets });
        }
        if end > bytes {
            return Err(FormatError::Data { expected: end, got: bytes });
        }
        tensors.push(Tensor { name, dtype, shape, begin: data + begin, end: data + end });
    }
    if end != bytes {
        return Err(FormatError::Data { expected: end, got: bytes });
    }
    Ok(tensors)
}

fn tensor_bytes(name: &str, dtype: Dtype, shape: &[u64]) -> Result<u64, FormatError> {
    let elements = shape.iter().try_fold(1_u64, |product, &axis| product.checked_mul(axis));
    elements.and_then(|n| n.checked_mul(dtype.bytes())).ok_or_else(|| overflow(name, shape))
}

fn overflow(name: &str, shape: &[u64]) -> FormatError {
    FormatError::Overflow { tensor: name.to_owned(), shape: shape.to_vec() }
}

/// The entries in the order of the header. A map would drop the first of two equal names, which [`place`]
/// must refuse.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value::<BTreeMap<String, String>>()?;
            } else {
                entries.push((name, map.next_value()?));
            }
        }
        Ok(Entries(entries))
    }
}

#[cfg(test)]
mod tests;
