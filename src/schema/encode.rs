//! From what a file or a request says to what a model reads: the transforms of dense values and the
//! hashing of strings, applied in one place so that training and serving cannot drift apart.
//!
//! A [`RawBatch`] may have come from anyone. Every offset and length is checked before it is
//! used, so that no value of it can cause a panic.

use super::{AbsentDefault, Arity, Feature, Schema};
use crate::predict::PredictError;
use crate::types::{Batch, Jagged, RawBatch, RawFeature, RawValues};

/// Why a raw batch cannot be encoded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EncodeError {
    /// The dense values are not `samples x width`.
    #[error("dense: expected {samples} samples x {width} values, got {got} values")]
    DenseWidth {
        /// Samples of the batch.
        samples: usize,
        /// Dense features of the schema.
        width: usize,
        /// What came.
        got: usize,
    },
    /// A dense value is NaN or infinite, as it came.
    #[error("dense feature {feature:?}, sample {sample}: expected a finite number, got {value}")]
    NotFinite {
        /// The dense feature's name.
        feature: String,
        /// Which sample.
        sample: usize,
        /// What came.
        value: f32,
    },
    /// A dense value is not finite after its transform.
    #[error("dense feature {feature:?}, sample {sample}: {value} is not finite after its transform")]
    TransformOverflow {
        /// The dense feature's name.
        feature: String,
        /// Which sample.
        sample: usize,
        /// What came.
        value: f32,
    },
    /// Not one column a feature.
    #[error("features: expected {expected} columns, got {got}")]
    FeatureCount {
        /// Features of the schema.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Not one offset a sample and one more.
    #[error("feature {feature:?}: expected an offset for each of {samples} samples and one more, got {got}")]
    OffsetCount {
        /// The feature's name.
        feature: String,
        /// Samples of the batch.
        samples: usize,
        /// How many offsets came.
        got: usize,
    },
    /// The offsets do not begin at 0.
    #[error("feature {feature:?}: the first offset must be 0, got {got}")]
    FirstOffset {
        /// The feature's name.
        feature: String,
        /// What came.
        got: u32,
    },
    /// An offset is below the one before it.
    #[error("feature {feature:?}: offset {index} is {got}, expected at least {least}")]
    OffsetOrder {
        /// The feature's name.
        feature: String,
        /// Which offset.
        index: usize,
        /// The one before it.
        least: u32,
        /// What came.
        got: u32,
    },
    /// The offsets do not end at the count of values.
    #[error("feature {feature:?}: the samples have {expected} values in all, got {got}")]
    ValueCount {
        /// The feature's name.
        feature: String,
        /// The last offset.
        expected: usize,
        /// How many values came.
        got: usize,
    },
    /// The strings' ends fall, or do not end with the bytes.
    #[error("feature {feature:?}: the ends of strings do not divide its {bytes} bytes at string {index}")]
    TextEnds {
        /// The feature's name.
        feature: String,
        /// Which string.
        index: usize,
        /// Bytes of all strings.
        bytes: usize,
    },
    /// A one-hot feature with none or several ids.
    #[error("feature {feature:?}, sample {sample}: expected exactly 1 id, got {got}")]
    OneHot {
        /// The feature's name.
        feature: String,
        /// Which sample.
        sample: usize,
        /// How many ids came.
        got: u32,
    },
    /// A multi-hot feature with too many ids.
    #[error("feature {feature:?}, sample {sample}: at most {max} ids, got {got}")]
    MultiHot {
        /// The feature's name.
        feature: String,
        /// Which sample.
        sample: usize,
        /// The schema's limit.
        max: u32,
        /// How many ids came.
        got: u32,
    },
    /// Strings for a feature that declares no hash.
    #[error("feature {feature:?}: strings came, but the model declares no hash for it: send ids")]
    NoHash {
        /// The feature's name.
        feature: String,
    },
}

impl Schema {
    /// Applies the schema's transforms and hashing to `raw` and writes the result over `out`,
    /// whose memory is used again. Labels are not looked at.
    ///
    /// # Errors
    /// [`EncodeError`] when `raw` is not of the schema's shape or has a value that is not finite;
    /// `out` then holds no sample.
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
                let seen = dense.transform.apply(value);
                // log1p hides a NaN by clamping, so the raw value is looked at as well.
                if !(value.is_finite() && seen.is_finite()) {
                    let feature = dense.name.clone();
                    return Err(if value.is_finite() {
                        EncodeError::TransformOverflow { feature, sample, value }
                    } else {
                        EncodeError::NotFinite { feature, sample, value }
                    });
                }
                out.push(seen);
            }
        }
        Ok(())
    }

    /// Looks for an id past a table whose default is `error`: the first one in the order of
    /// features, then of samples. The batch must be of the schema's shape.
    ///
    /// # Errors
    /// [`PredictError::AbsentId`] with that id.
    pub(crate) fn check_absent(&self, batch: &Batch) -> Result<(), PredictError> {
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
                return Err(PredictError::AbsentId {
                    feature,
                    table: table.name.clone(),
                    id,
                    rows: table.rows,
                });
            }
        }
        Ok(())
    }
}

/// Whether a column's offsets are of the batch's samples, the feature's arity and the column's values.
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
