//! `MANIFEST.json`: what a version is, the length and checksum of its other files, and the notes of its
//! writer.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::FormatError;
use crate::types::Version;

/// Version of the layout that [`super`] describes. Older ones, from 1, are read too.
pub(crate) const FORMAT: u32 = 2;
/// The longest manifest that is written or read.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// An XXH3-128 checksum; 32 hexadecimal digits as text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(pub u128);

impl Checksum {
    /// Hexadecimal digits of the text.
    pub(crate) const DIGITS: usize = 32;

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
        let digits = text.len() == Checksum::DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit());
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

/// The version that a delta changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Base {
    pub version: Version,
    /// The checksum in the base's manifest, so that a delta is never applied to another version.
    pub xxh3_128: Checksum,
}

/// How far the training of a version has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingTotals {
    /// Steps of the optimizer.
    pub steps: u64,
    /// Samples trained.
    pub samples: u64,
    /// When the last batch was trained, in milliseconds since 1970.
    pub last_batch_unix_ms: u64,
}

/// What a version is, the length and checksum of its other files, and the notes of its writer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Manifest {
    /// `None` for a full version.
    pub base: Option<Base>,
    pub training: Option<TrainingTotals>,
    /// Finite figures by name, such as `auc`.
    pub quality: BTreeMap<String, f64>,
    /// By the path in the version, with `/` between its parts.
    pub files: BTreeMap<String, FileEntry>,
    /// Notes of the writer.
    pub metadata: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    // Versions of format 1, which does not name the kind, are full.
    #[default]
    Full,
    Delta,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestText {
    format: u32,
    #[serde(default)]
    kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<Base>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    training: Option<TrainingTotals>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    quality: BTreeMap<String, f64>,
    files: BTreeMap<String, FileEntry>,
    metadata: BTreeMap<String, String>,
    xxh3_128: Checksum,
}

#[derive(Deserialize)]
struct ManifestFormat {
    format: u32,
}

/// The most steps or samples: JSON programs read greater numbers inexactly.
pub(crate) const MAX_TRAINED: u64 = (1 << 53) - 1;

/// The bytes of a manifest that follow its checksum's digits.
const AFTER_CHECKSUM: &[u8] = b"\"\n}\n";

impl Manifest {
    /// The bytes of all files that it lists.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes).fold(0, u64::saturating_add)
    }

    /// The bytes on disk, and the checksum in them.
    ///
    /// # Errors
    /// [`FormatError::TooLong`] when the manifest exceeds [`MAX_MANIFEST_BYTES`].
    pub(crate) fn encode(&self) -> Result<(Vec<u8>, Checksum), FormatError> {
        let text = ManifestText {
            format: FORMAT,
            kind: if self.base.is_some() { Kind::Delta } else { Kind::Full },
            base: self.base,
            training: self.training,
            quality: self.quality.clone(),
            files: self.files.clone(),
            metadata: self.metadata.clone(),
            xxh3_128: Checksum(0),
        };
        let mut bytes = serde_json::to_vec_pretty(&text)
            .map_err(|e| FormatError::Json { field: "manifest", reason: e.to_string() })?;
        bytes.push(b'\n');
        check_length(&bytes)?;
        let checksum = Checksum::of(&bytes);
        let digits = bytes.len() - AFTER_CHECKSUM.len() - Checksum::DIGITS;
        bytes[digits..][..Checksum::DIGITS].copy_from_slice(checksum.to_string().as_bytes());
        Ok((bytes, checksum))
    }

    /// Reads the bytes of [`Manifest::encode`]. Also returns the checksum in them.
    ///
    /// # Errors
    /// [`FormatError`] for any other bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Result<(Self, Checksum), FormatError> {
        check_length(bytes)?;
        let json = |reason: String| FormatError::Json { field: "manifest", reason };
        let ManifestFormat { format } = serde_json::from_slice(bytes).map_err(|e| json(e.to_string()))?;
        if !(1..=FORMAT).contains(&format) {
            return Err(FormatError::Version(format));
        }
        let text: ManifestText = serde_json::from_slice(bytes).map_err(|e| json(e.to_string()))?;
        let (got, ending) = (text.xxh3_128, [text.xxh3_128.to_string().as_bytes(), AFTER_CHECKSUM].concat());
        let Some(before) = bytes.strip_suffix(&ending[..]) else {
            return Err(json("the checksum is not its last field".to_owned()));
        };
        let expected = Checksum::of(&[before, &[b'0'; Checksum::DIGITS], AFTER_CHECKSUM].concat());
        if got != expected {
            return Err(FormatError::Changed { expected, got });
        }
        if (text.kind == Kind::Delta) != text.base.is_some() {
            return Err(json("a delta has a base, and a full version has none".to_owned()));
        }
        let ManifestText { base, training, quality, files, metadata, .. } = text;
        // Training adds to these numbers.
        let TrainingTotals { steps, samples, .. } = training.unwrap_or_default();
        if steps.max(samples) > MAX_TRAINED {
            return Err(json(format!(
                "training: steps, samples: limit {MAX_TRAINED}, got {steps}, {samples}"
            )));
        }
        Ok((Self { base, training, quality, files, metadata }, got))
    }
}

fn check_length(bytes: &[u8]) -> Result<(), FormatError> {
    let got = bytes.len() as u64;
    if got > MAX_MANIFEST_BYTES {
        return Err(FormatError::TooLong { field: "manifest", limit: MAX_MANIFEST_BYTES, got });
    }
    Ok(())
}
