//! The bytes of a version on disk: pure functions from values to bytes and back, no file in sight.
//!
//! ```text
//! models/<name>/<version>/
//!   model.toml                  the schema, as text
//!   dense.safetensors           dense weights and their optimizer state
//!   tables/<table>.safetensors  one file a table of the schema
//!   MANIFEST.json               what the others must be
//! ```
//!
//! # A tensor file
//!
//! It is a plain safetensors file, which any safetensors library reads, with two habits of ours:
//! the header is padded so that the data begins on a page, and tensors are of three types alone. The public
//! writer pads to 8 bytes only and takes each tensor from one buffer, so the header is made here.
//!
//! ```text
//! at            bytes         field
//! 0             8             n: length of the header, u64 little-endian; 8 + n is a multiple of 4096
//! 8             n             header: one JSON object, then spaces
//! 8 + n         data          the tensors end to end in the order written, little-endian,
//!                             row-major, without gaps; the file ends where the last one does
//!
//! header:       {"NAME": {"dtype": "F32", "shape": [ROWS, DIM], "data_offsets": [BEGIN, END]}, ...}
//!               dtype is F32, F16 or U8; offsets count bytes from 8 + n; "__metadata__" (text to text) is allowed and ignored
//! ```
//!
//! A table file holds `weight` first, so that rows lie where the page grid lets them, and then one
//! tensor a kind of optimizer state, F32, `rows x dim` or `rows x 1`. (`keys`, for tables that are not
//! numbered from 0, is a reserved name that this format version refuses.) What `weight` is, the table's
//! `element` in `model.toml` says; a row of it is the row's bytes in memory (`types::element`), whole
//! words of 4 bytes:
//!
//! ```text
//! element   dtype   shape            a row
//! f32       F32     [ROWS, DIM]      the elements
//! f16       F16     [ROWS, D2]       the elements, and a zero if DIM is odd; D2 = DIM rounded up to 2
//! int8      U8      [ROWS, D4 + 8]   DIM steps, zeros up to D4 = DIM rounded up to 4, then scale and
//!                                    bias as f32: element i is step i * scale + bias
//! ```
//!
//! Rows that are not f32 were rounded when the version was written, and training does not go on from
//! them to the bit: their table is written without optimizer state.
//!
//! # The manifest
//!
//! ```text
//! {
//!   "format": 1,                        this page; another number is refused
//!   "files": {                          every file but this one, by its path in the version
//!     "model.toml": {"bytes": 812, "xxh3_128": "0f…32 hex digits"}, ...
//!   },
//!   "metadata": {"steps": "120000"},    the writer's own words, text to text
//!   "xxh3_128": "…"                     of this file with the 32 digits of this value all 0
//! }
//! ```
//!
//! A manifest is good if writing what was read gives the same bytes again. So any changed byte is
//! caught, in white space as in a number, and no rule is needed for what to hash.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::types::Element;

/// The number of this layout.
pub(crate) const FORMAT: u32 = 1;
/// Tensor data begins on a multiple of this many bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// The longest header of a tensor file that is written or read.
pub(crate) const MAX_HEADER_BYTES: u64 = 4 << 20;
/// The longest manifest that is written or read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 16 << 20;
const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// Why bytes are not what this format says.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The bytes end before the header does.
    #[error("header: needs {expected} bytes, the file has {got}")]
    HeaderTruncated {
        /// Bytes up to the header's end.
        expected: u64,
        /// Bytes there are.
        got: u64,
    },
    /// A header or manifest past its limit.
    #[error("{field}: limit {limit} bytes, got {got}")]
    TooLong {
        /// Which part.
        field: &'static str,
        /// The limit.
        limit: u64,
        /// What came.
        got: u64,
    },
    /// Tensor data does not begin on a page.
    #[error("header: data begins at byte {got}, expected a multiple of {PAGE_BYTES}")]
    Unaligned {
        /// Where the data begins.
        got: u64,
    },
    /// Not the JSON that belongs here.
    #[error("{field}: {reason}")]
    Json {
        /// Which part.
        field: &'static str,
        /// What the parser said.
        reason: String,
    },
    /// Two tensors of one name, or a name that is taken.
    #[error("tensor {0:?}: name is used twice or reserved")]
    Name(String),
    /// A type of element that no tensor of ours has.
    #[error("tensor {tensor:?}: expected dtype F32, F16 or U8, got {got:?}")]
    UnknownDtype {
        /// The tensor's name.
        tensor: String,
        /// What came.
        got: String,
    },
    /// A type of element that this tensor does not have.
    #[error("tensor {tensor:?}: expected dtype {}, got {}", expected.name(), got.name())]
    Dtype {
        /// The tensor's name.
        tensor: String,
        /// What it is by the schema.
        expected: Dtype,
        /// What came.
        got: Dtype,
    },
    /// A gap, an overlap, or a length that is not the shape's.
    #[error("tensor {tensor:?}: expected data_offsets {expected:?}, got {got:?}")]
    Offsets {
        /// The tensor's name.
        tensor: String,
        /// Where the tensor before it and its own shape put it.
        expected: (u64, u64),
        /// What came.
        got: (u64, u64),
    },
    /// A shape with more bytes than a number can count.
    #[error("tensor {tensor:?}: shape {shape:?} has more bytes than can be counted")]
    Overflow {
        /// The tensor's name.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The data is not as long as the tensors together.
    #[error("data: expected {expected} bytes, got {got}")]
    Data {
        /// The end of the last tensor.
        expected: u64,
        /// What follows the header.
        got: u64,
    },
    /// A manifest of another layout.
    #[error("format: expected {FORMAT}, got {0}")]
    Version(u32),
    /// A manifest that is not what its writer wrote.
    #[error("xxh3_128: manifest was changed after it was written: expected {expected}, got {got}")]
    Changed {
        /// The checksum of what it says.
        expected: Checksum,
        /// The checksum that it carries.
        got: Checksum,
    },
}

/// An XXH3 checksum of 128 bits; 32 hexadecimal digits as text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(pub u128);

impl Checksum {
    /// The checksum of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_128(bytes))
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let value = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        value.map(Self).ok_or_else(|| de::Error::custom("expected 32 hexadecimal digits"))
    }
}

/// The type of a tensor's elements, of those that safetensors knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// Bytes.
    U8,
}

impl Dtype {
    const ALL: [Self; 3] = [Self::F32, Self::F16, Self::U8];

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::U8 => "U8",
        }
    }

    /// Bytes of one element.
    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::U8 => 1,
        }
    }
}

/// The tensor type of a table's rows, and the elements of such a tensor that a row takes.
#[must_use]
pub(crate) fn weight_type(element: Element, dim: usize) -> (Dtype, u64) {
    let dtype = match element {
        Element::F32 => Dtype::F32,
        Element::F16 => Dtype::F16,
        Element::Int8 => Dtype::U8,
    };
    (dtype, element.row_bytes(dim) as u64 / dtype.bytes())
}

/// One tensor of a file: its name, type, shape and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each axis, slowest first.
    pub shape: Vec<u64>,
    /// First byte in the file.
    pub begin: u64,
    /// One past the last byte in the file.
    pub end: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The first bytes of a file of these tensors, in this order: length, header and padding.
///
/// # Errors
/// [`FormatError`] when a name comes twice or is reserved, when a shape overflows, or when the
/// header would pass [`MAX_HEADER_BYTES`].
pub fn encode_header(tensors: &[(&str, Dtype, &[u64])]) -> Result<Vec<u8>, FormatError> {
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

/// The tensors of a whole file, in the order of their data. Every tensor returned lies within
/// `file`, and what is allocated is bounded by [`MAX_HEADER_BYTES`].
///
/// # Errors
/// [`FormatError`] at the first thing that is not as this page says.
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

/// Checks that the tensors tile the `bytes` of data, and counts their places from the file's start.
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

/// The header's entries as they come: a map type would drop the first of two equal names.
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

/// What a file of the version must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length.
    pub bytes: u64,
    /// The checksum of its bytes.
    pub xxh3_128: Checksum,
}

/// What every other file of a version must be, and the writer's own words about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The files, by their path in the version with `/` between parts.
    pub files: BTreeMap<String, FileEntry>,
    /// Free text by name.
    pub metadata: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestText {
    format: u32,
    files: BTreeMap<String, FileEntry>,
    metadata: BTreeMap<String, String>,
    xxh3_128: Checksum,
}

#[derive(Deserialize)]
struct ManifestFormat {
    format: u32,
}

impl Manifest {
    /// Its bytes on disk.
    ///
    /// # Errors
    /// [`FormatError::TooLong`] past [`MAX_MANIFEST_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        Ok(self.encode_with_checksum()?.0)
    }

    fn encode_with_checksum(&self) -> Result<(Vec<u8>, Checksum), FormatError> {
        let mut text = ManifestText {
            format: FORMAT,
            files: self.files.clone(),
            metadata: self.metadata.clone(),
            xxh3_128: Checksum(0),
        };
        text.xxh3_128 = Checksum::of(&manifest_bytes(&text)?);
        Ok((manifest_bytes(&text)?, text.xxh3_128))
    }

    /// Reads the bytes of [`Manifest::encode`].
    ///
    /// # Errors
    /// [`FormatError`] when they are anything else.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let got = bytes.len() as u64;
        if got > MAX_MANIFEST_BYTES {
            return Err(FormatError::TooLong { field: "manifest", limit: MAX_MANIFEST_BYTES, got });
        }
        let json = |e: serde_json::Error| FormatError::Json { field: "manifest", reason: e.to_string() };
        let ManifestFormat { format } = serde_json::from_slice(bytes).map_err(json)?;
        if format != FORMAT {
            return Err(FormatError::Version(format));
        }
        let text: ManifestText = serde_json::from_slice(bytes).map_err(json)?;
        let manifest = Self { files: text.files, metadata: text.metadata };
        let (again, expected) = manifest.encode_with_checksum()?;
        if again != bytes {
            return Err(FormatError::Changed { expected, got: text.xxh3_128 });
        }
        Ok(manifest)
    }
}

fn manifest_bytes(text: &ManifestText) -> Result<Vec<u8>, FormatError> {
    let mut bytes = serde_json::to_vec_pretty(text)
        .map_err(|e| FormatError::Json { field: "manifest", reason: e.to_string() })?;
    bytes.push(b'\n');
    let got = bytes.len() as u64;
    if got > MAX_MANIFEST_BYTES {
        return Err(FormatError::TooLong { field: "manifest", limit: MAX_MANIFEST_BYTES, got });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
