//! `MANIFEST.json`: the length and checksum of every other file of a version, and the notes of its writer.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::FormatError;

/// Version of the layout that [`super`] describes.
pub(crate) const FORMAT: u32 = 1;
/// The longest manifest that is written or read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// An XXH3-128 checksum; 32 hexadecimal digits as text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(pub u128);

impl Checksum {
    /// Hashes these bytes.
    #[must_use]
    pub(crate) fn of(bytes: &[u8]) -> Self {
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

/// The length and checksum of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub(crate) struct FileEntry {
    pub bytes: u64,
    pub xxh3_128: Checksum,
}

/// The length and checksum of every other file of a version, and the notes of its writer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Manifest {
    /// By the path in the version, with `/` between its parts.
    pub files: BTreeMap<String, FileEntry>,
    /// Notes of the writer.
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
    /// The bytes on disk.
    ///
    /// # Errors
    /// [`FormatError::TooLong`] when the manifest exceeds [`MAX_MANIFEST_BYTES`].
    pub(crate) fn encode(&self) -> Result<Vec<u8>, FormatError> {
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
    /// [`FormatError`] for any other bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
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
