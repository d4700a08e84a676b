//! The file formats of a version: functions that encode values to bytes and decode them, without file access.
//! `docs/file-formats.md` describes the formats for users.
//!
//! ```text
//! models/<name>/<version>/
//!   model.toml                  the schema, as text
//!   dense.safetensors           dense weights and their optimizer state
//!   tables/<table>.safetensors  one file per table of the schema
//!   MANIFEST.json               length and checksum of the other files
//! ```
//!
//! # A tensor file
//!
//! It is a plain safetensors file, which any safetensors library reads, with two restrictions: the header is
//! padded so that the data begins on a page, and tensors have one of three types. The `safetensors` crate
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
//!               dtype is F32, F16 or U8; offsets count bytes from 8 + n;
//!               "__metadata__" (text to text) is allowed and ignored
//! ```
//!
//! A table file holds `weight` first, so that rows begin on a page, and then one F32 tensor per kind of
//! optimizer state, `rows x dim` or `rows x 1`. (`keys` is reserved for tables with rows not numbered from
//! 0; this format version refuses it.) The table's `element` in `model.toml` gives the type of `weight`. A
//! row of it holds the same bytes as in memory (`types::element`), a multiple of 4:
//!
//! ```text
//! element   dtype   shape            a row
//! f32       F32     [ROWS, DIM]      the elements
//! f16       F16     [ROWS, D2]       the elements, and a zero if DIM is odd; D2 = DIM rounded up to 2
//! int8      U8      [ROWS, D4 + 8]   DIM steps, zeros up to D4 = DIM rounded up to 4, then scale and
//!                                    bias as f32: element i is step i * scale + bias
//! ```
//!
//! Rows that are not f32 were rounded when the version was written, so training does not continue from them
//! to the bit: their tables have no optimizer state.
//!
//! # The manifest
//!
//! ```text
//! {
//!   "format": 1,                        this layout; other numbers are refused
//!   "files": {                          every other file, by its path in the version
//!     "model.toml": {"bytes": 812, "xxh3_128": "0f…32 hex digits"}, ...
//!   },
//!   "metadata": {"steps": "120000"},    notes of the writer, text to text
//!   "xxh3_128": "…"                     of this file with the 32 digits of this value all 0
//! }
//! ```
//!
//! A manifest is valid only if encoding the parsed manifest gives the same bytes again. So a change of any
//! byte is detected, even in white space.

mod manifest;

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

pub(crate) use manifest::{Checksum, FileEntry, Manifest};

use crate::types::{Element, named};
use manifest::FORMAT;

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
    #[error("tensor {tensor:?}: expected dtype F32, F16 or U8, got {got:?}")]
    UnknownDtype { tensor: String, got: String },
    #[error("tensor {tensor:?}: expected dtype {}, got {}", expected.name(), got.name())]
    Dtype { tensor: String, expected: Dtype, got: Dtype },
    #[error("tensor {tensor:?}: expected data_offsets {expected:?}, got {got:?}")]
    Offsets { tensor: String, expected: (u64, u64), got: (u64, u64) },
    #[error("tensor {tensor:?}: shape {shape:?} takes 2^64 bytes or more")]
    Overflow { tensor: String, shape: Vec<u64> },
    #[error("data: expected {expected} bytes, got {got}")]
    Data { expected: u64, got: u64 },
    #[error("format: expected {FORMAT}, got {0}")]
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
}

named! { Dtype: F32 = "F32", F16 = "F16", U8 = "U8" }

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::U8 => 1,
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
