//! The bytes of a segment's header and of its records.
//! `docs/file-formats.md` (Learned samples) draws them.
//!
//! The values are those of the request, before hashing and transforms. So a reader gets the [`RawBatch`] that
//! the server made of the request.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::schema::Schema;
use crate::store::format::Checksum;
use crate::types::{RawBatch, RawFeature, RawValues};

const MAGIC: &[u8; 8] = b"FLLEARNS";
pub(crate) const VERSION: u32 = 1;
/// Bytes of a segment's header.
pub(crate) const HEADER_BYTES: usize = 36;
/// Bytes of a record before its payload.
pub(crate) const HEAD_BYTES: usize = 24;

const STRINGS: u8 = 1;
const ONE_EACH: u8 = 2;

/// The checksum of a schema. Samples of one schema cannot be read with another, because columns have no
/// names.
#[must_use]
pub(crate) fn schema_sum(schema: &Schema) -> Checksum {
    Checksum::of(schema.to_toml().as_bytes())
}

/// What is wrong with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    Foreign,
    Damaged,
    Version(u32),
}

/// The header of a segment.
#[must_use]
pub(crate) fn header(schema: Checksum) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..28].copy_from_slice(&schema.0.to_le_bytes());
    let sum = xxh3_64(&bytes[..28]);
    bytes[28..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The schema that a header names.
pub(crate) fn read_header(bytes: &[u8; HEADER_BYTES]) -> Result<Checksum, HeaderError> {
    let mut parts = UnreadBytes(bytes);
    let (magic, version) = (parts.take(8), parts.u32());
    let schema = parts.array().map(|sum| Checksum(u128::from_le_bytes(sum)));
    let sum = parts.u64();
    if magic != Some(MAGIC) {
        return Err(HeaderError::Foreign);
    }
    match (version, schema) {
        (Some(version), Some(schema)) if sum == Some(xxh3_64(&bytes[..28])) => {
            if version == VERSION {
                Ok(schema)
            } else {
                Err(HeaderError::Version(version))
            }
        }
        _ => Err(HeaderError::Damaged),
    }
}

/// The samples of one request, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub samples: u32,
    pub payload: Vec<u8>,
    pub schema: Checksum,
}

impl Record {
    /// Encodes samples with labels.
    #[must_use]
    pub(crate) fn new(raw: &RawBatch, schema: Checksum) -> Self {
        let mut payload = Vec::new();
        encode(raw, &mut payload);
        Self { samples: raw.samples as u32, payload, schema }
    }

    /// Its bytes in a segment.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        (HEAD_BYTES + self.payload.len()) as u64
    }

    /// Appends the record to `out`, as it is written at this offset of a segment. Its head says that
    /// `durable` bytes of the segment are durable.
    pub(crate) fn push(&self, at: u64, durable: u64, out: &mut Vec<u8>) {
        let head = Head { bytes: self.payload.len() as u32, samples: self.samples, durable, sum: 0 };
        let sum = head.sum_of(at, &self.payload);
        out.extend_from_slice(&head.fields());
        out.extend_from_slice(&sum.to_le_bytes());
        out.extend_from_slice(&self.payload);
    }
}

/// The beginning of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Bytes of the payload.
    pub bytes: u32,
    pub samples: u32,
    /// Bytes of the segment that were durable when the record was written.
    pub durable: u64,
    sum: u64,
}

impl Head {
    /// `None` for numbers that no record has.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let mut parts = UnreadBytes(bytes);
        let head =
            Self { bytes: parts.u32()?, samples: parts.u32()?, durable: parts.u64()?, sum: parts.u64()? };
        (head.bytes > 0 && head.samples > 0).then_some(head)
    }

    /// Whether this is the payload of the record at this offset.
    #[must_use]
    pub(crate) fn fits(&self, at: u64, payload: &[u8]) -> bool {
        self.sum == self.sum_of(at, payload)
    }

    fn fields(&self) -> [u8; 16] {
        let mut fields = [0; 16];
        fields[..4].copy_from_slice(&self.bytes.to_le_bytes());
        fields[4..8].copy_from_slice(&self.samples.to_le_bytes());
        fields[8..].copy_from_slice(&self.durable.to_le_bytes());
        fields
    }

    fn sum_of(&self, at: u64, payload: &[u8]) -> u64 {
        let mut sum = Xxh3::with_seed(at);
        sum.update(&self.fields());
        sum.update(payload);
        sum.digest()
    }
}

fn encode(raw: &RawBatch, out: &mut Vec<u8>) {
    put_floats(out, raw.labels.as_deref().unwrap_or_default());
    put_u32(out, raw.dense.len());
    put_floats(out, &raw.dense);
    put_u32(out, raw.features.len());
    for column in &raw.features {
        let one_each = column.offsets.windows(2).all(|pair| pair[1] - pair[0] == 1);
        let strings = matches!(column.values, RawValues::Text { .. });
        out.push(if strings { STRINGS } else { 0 } | if one_each { ONE_EACH } else { 0 });
        put_u32(out, column.values.len());
        if !one_each {
            column.offsets.windows(2).for_each(|pair| put_u32(out, (pair[1] - pair[0]) as usize));
        }
        match &column.values {
            RawValues::Ids(ids) => ids.iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes())),
            RawValues::Text { bytes, ends } => {
                let mut begin = 0;
                for &end in ends {
                    put_u32(out, (end - begin) as usize);
                    begin = end;
                }
                out.extend_from_slice(bytes);
            }
        }
    }
}

fn put_u32(out: &mut Vec<u8>, number: usize) {
    // A message is at most 1 GiB, so its counts fit in 32 bits.
    out.extend_from_slice(&(number as u32).to_le_bytes());
}

fn put_floats(out: &mut Vec<u8>, values: &[f32]) {
    values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

/// The samples of a payload; `None` for bytes that are not a payload with this number of samples.
pub(crate) fn decode(samples: u32, payload: &[u8]) -> Option<RawBatch> {
    let samples = samples as usize;
    let mut parts = UnreadBytes(payload);
    let labels = parts.floats(samples)?;
    let dense = parts.count()?;
    let dense = parts.floats(dense)?;
    let columns = parts.count()?;
    // Each column takes at least five bytes, so a wrong count cannot take much memory.
    let features = (0..columns).map(|_| column(samples, &mut parts)).collect::<Option<Vec<_>>>()?;
    parts.0.is_empty().then_some(RawBatch { samples, dense, features, labels: Some(labels) })
}

fn column(samples: usize, parts: &mut UnreadBytes<'_>) -> Option<RawFeature> {
    let [flags] = parts.array()?;
    let values = parts.count()?;
    let offsets = if flags & ONE_EACH == 0 {
        ends(&parts.numbers(samples)?)?
    } else {
        (0..=u32::try_from(samples).ok()?).collect()
    };
    if flags > STRINGS | ONE_EACH || offsets.last().map(|end| *end as usize) != Some(values) {
        return None;
    }
    let values = if flags & STRINGS == 0 {
        let bytes = parts.take(values.checked_mul(8)?)?;
        RawValues::Ids(bytes.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect())
    } else {
        let mut ends = ends(&parts.numbers(values)?)?;
        let bytes = parts.take(*ends.last()? as usize)?.to_vec();
        ends.remove(0);
        RawValues::Text { bytes, ends }
    };
    Some(RawFeature { offsets, values })
}

/// 0, and the sum up to each length.
fn ends(lengths: &[u32]) -> Option<Vec<u32>> {
    let mut ends = vec![0u32];
    for length in lengths {
        ends.push(ends.last()?.checked_add(*length)?);
    }
    Some(ends)
}

/// Bytes that are taken from the front.
pub(crate) struct UnreadBytes<'a>(pub &'a [u8]);

impl<'a> UnreadBytes<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Option<usize> {
        self.u32().map(|count| count as usize)
    }

    fn numbers(&mut self, count: usize) -> Option<Vec<u32>> {
        let bytes = self.take(count.checked_mul(4)?)?;
        Some(bytes.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect())
    }

    fn floats(&mut self, count: usize) -> Option<Vec<f32>> {
        Some(self.numbers(count)?.into_iter().map(f32::from_bits).collect())
    }
}
