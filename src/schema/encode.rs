//! From raw samples of a file or request to a model's inputs: transforms of dense values and hashing of
//! strings. Training and serving share this code, so they cannot differ.
//!
//! A [`RawBatch`] is untrusted: every offset and length is checked before it is used, so that no value can
//! cause a panic.

use super::{AbsentDefault, Arity, Feature, Schema, TrainableRange};
use crate::types::{Batch, Jagged, RawBatch, RawFeature, RawValues};

/// Why a raw batch cannot be encoded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the fields
pub enum EncodeError {
    #[error("dense: expected {samples} samples x {width} values, got {got} values")]
    DenseWidth { samples: usize, width: usize, got: usize },
    #[error("dense feature {feature:?}, sample {sample}: expected a finite number, got {value}")]
    NotFinite { feature: String, sample: usize, value: f32 },
    #[error("dense feature {feature:?}, sample {sample}: {value} is not finite after its transform")]
    TransformOverflow { feature: String, sample: usize, value: f32 },
    #[error(
        "dense feature {feature:?}, sample {sample}: {value} is too large to train on: limit {limit:.1e} \
         after its transform"
    )]
    TooLarge { feature: String, sample: usize, value: f32, limit: f32 },
    #[error("features: expected {expected} columns, got {got}")]
    FeatureCount { expected: usize, got: usize },
    #[error("feature {feature:?}: expected an offset for each of {samples} samples and one more, got {got}")]
    OffsetCount { feature: String, samples: usize, got: usize },
    #[error("feature {feature:?}: the first offset must be 0, got {got}")]
    FirstOffset { feature: String, got: u32 },
    #[error("feature {feature:?}: offset {index} is {got}, expected at least {least}")]
    OffsetOrder { feature: String, index: usize, least: u32, got: u32 },
    #[error("feature {feature:?}: the offsets need {expected} values, got {got}")]
    ValueCount { feature: String, expected: usize, got: usize },
    #[error("feature {feature:?}: the ends of strings do not fit {bytes} bytes of text, at string {index}")]
    TextEnds { feature: String, index: usize, bytes: usize },
    #[error("feature {feature:?}, sample {sample}: expected exactly 1 id, got {got}")]
    OneHot { feature: String, sample: usize, got: u32 },
    #[error("feature {feature:?}, sample {sample}: expected at most {max} ids, got {got}")]
    MultiHot { feature: String, sample: usize, max: u32, got: u32 },
    #[error("feature {feature:?}: got strings, but the model declares no hash for it: send ids")]
    NoHash { feature: String },
}

/// An id that its table does not hold, where the table's default is `error`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("feature {feature:?}: id {id} is not in table {table:?}, which has {rows} rows and default error")]
pub struct AbsentIdError {
    feature: String,
    table: String,
    id: u64,
    rows: u64,
}

impl Schema {
    /// Applies the schema's transforms and hashing to `raw`, and overwrites `out` with the result. The
    /// memory of `out` is reused. Labels are ignored.
    ///
    /// # Errors
    /// [`EncodeError`] when `raw` does not have the schema's shape or a value is not finite; `out` is then
    /// empty.
    pub fn encode(&self, raw: &RawBatch, out: &mut Batch) -> Result<(), EncodeError> {
        let encoded = self.encode_over(raw, out);
        if encoded.is_err() {
            out.clear();
        }
        encoded
    }

    fn encode_over(&self, raw: &RawBatch, out: &mut Batch) -> Result<(), EncodeError> {
        if raw.features.len() != self.features.len() {
            let (expected, got) = (self.features.len(), raw.features.len());
            return Err(EncodeError::FeatureCount { expected, got });
        }
        out.samples = raw.samples;
        out.features.resize_with(self.features.len(), Jagged::default);
        self.encode_dense(raw, &mut out.dense)?;
        for ((feature, column), out) in self.features.iter().zip(&raw.features).zip(&mut out.features) {
            check_offsets(feature, raw.samples, column)?;
            out.offsets.clear();
            out.offsets.extend_from_slice(&column.offsets);
            out.ids.clear();
            encode_values(feature, &column.values, &mut out.ids)?;
        }
        Ok(())
    }

    fn encode_dense(&self, raw: &RawBatch, out: &mut Vec<f32>) -> Result<(), EncodeError> {
        let (samples, width, got) = (raw.samples, self.dense_width(), raw.dense.len());
        if samples.checked_mul(width) != Some(got) {
            return Err(EncodeError::DenseWidth { samples, width, got });
        }
        out.clear();
        if width == 0 {
            return Ok(());
        }
        out.reserve(got);
        for (sample, row) in raw.dense.chunks_exact(width).enumerate() {
            for (&value, dense) in row.iter().zip(&self.dense) {
                let transformed = dense.transform.apply(value);
                // log1p turns a NaN into 0 (`max`), so the raw value is checked as well.
                if !(value.is_finite() && transformed.is_finite()) {
                    let feature = dense.name.clone();
                    return Err(if value.is_finite() {
                        EncodeError::TransformOverflow { feature, sample, value }
                    } else {
                        EncodeError::NotFinite { feature, sample, value }
                    });
                }
                out.push(transformed);
            }
        }
        Ok(())
    }

    /// The raw values of each dense feature that a model can be trained on.
    pub(crate) fn trainable_ranges(&self) -> impl Iterator<Item = TrainableRange> + '_ {
        let limit = self.architecture.largest_trainable();
        self.dense.iter().map(move |column| TrainableRange { transform: column.transform, limit })
    }

    /// Checks that a model can train on the dense values of a sample, which are those before transforms.
    ///
    /// # Errors
    /// [`EncodeError::TooLarge`] for the first such value.
    pub(crate) fn check_trainable(&self, sample: usize, dense: &[f32]) -> Result<(), EncodeError> {
        for ((&value, column), range) in dense.iter().zip(&self.dense).zip(self.trainable_ranges()) {
            if !range.has(value) {
                let (feature, limit) = (column.name.clone(), range.limit);
                return Err(EncodeError::TooLarge { feature, sample, value, limit });
            }
        }
        Ok(())
    }

    /// Checks that the tables with default `error` hold all their ids. The batch must have the schema's
    /// shape.
    ///
    /// # Errors
    /// [`AbsentIdError`] for the first id that its table does not hold, in the order of features, then of
    /// samples.
    pub(crate) fn check_absent(&self, batch: &Batch) -> Result<(), AbsentIdError> {
        if self.tables.iter().all(|table| table.default != AbsentDefault::Error) {
            return Ok(());
        }
        for lookup in self.lookups() {
            let table = &self.tables[lookup.table.index()];
            let Some(column) = batch.features.get(lookup.feature) else { continue };
            if table.default != AbsentDefault::Error {
                continue;
            }
            if let Some(&id) = column.ids.iter().find(|&&id| id >= table.rows) {
                let feature = self.features[lookup.feature].name.clone();
                return Err(AbsentIdError { feature, table: table.name.clone(), id, rows: table.rows });
            }
        }
        Ok(())
    }
}

impl Feature {
    /// The values with strings replaced by their ids.
    ///
    /// # Errors
    /// [`EncodeError`] for strings of a feature without hash, or malformed strings.
    pub(crate) fn ids_of(&self, values: &RawValues) -> Result<RawValues, EncodeError> {
        let mut ids = Vec::new();
        encode_values(self, values, &mut ids)?;
        Ok(RawValues::Ids(ids))
    }
}

/// Checks a column's offsets against the batch's samples, the feature's arity and the column's values.
fn check_offsets(feature: &Feature, samples: usize, column: &RawFeature) -> Result<(), EncodeError> {
    let name = || feature.name.clone();
    let offsets = &column.offsets;
    if samples.checked_add(1) != Some(offsets.len()) {
        return Err(EncodeError::OffsetCount { feature: name(), samples, got: offsets.len() });
    }
    if offsets[0] != 0 {
        return Err(EncodeError::FirstOffset { feature: name(), got: offsets[0] });
    }
    let (least, most) = match feature.arity {
        Arity::OneHot => (1, 1),
        Arity::MultiHot { max } => (0, max),
    };
    for (sample, pair) in offsets.windows(2).enumerate() {
        let Some(got) = pair[1].checked_sub(pair[0]) else {
            let (index, least, got) = (sample + 1, pair[0], pair[1]);
            return Err(EncodeError::OffsetOrder { feature: name(), index, least, got });
        };
        if got < least || got > most {
            return Err(match feature.arity {
                Arity::OneHot => EncodeError::OneHot { feature: name(), sample, got },
                Arity::MultiHot { max } => EncodeError::MultiHot { feature: name(), sample, max, got },
            });
        }
    }
    let (expected, got) = (offsets[samples] as usize, column.values.len());
    if expected != got {
        return Err(EncodeError::ValueCount { feature: name(), expected, got });
    }
    Ok(())
}

fn encode_values(feature: &Feature, values: &RawValues, out: &mut Vec<u64>) -> Result<(), EncodeError> {
    let (bytes, ends) = match values {
        RawValues::Ids(ids) => {
            out.extend_from_slice(ids);
            return Ok(());
        }
        RawValues::Text { bytes, ends } if ends.is_empty() && bytes.is_empty() => return Ok(()),
        RawValues::Text { bytes, ends } => (bytes, ends),
    };
    let name = || feature.name.clone();
    let Some(hash) = feature.hash else { return Err(EncodeError::NoHash { feature: name() }) };
    out.reserve(ends.len());
    let mut begin = 0;
    for (index, &end) in ends.iter().enumerate() {
        let Some(value) = bytes.get(begin..end as usize) else {
            return Err(EncodeError::TextEnds { feature: name(), index, bytes: bytes.len() });
        };
        out.push(hash.id(value));
        begin = end as usize;
    }
    if begin != bytes.len() {
        return Err(EncodeError::TextEnds { feature: name(), index: ends.len(), bytes: bytes.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
