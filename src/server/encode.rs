//! Stands in for `Schema::encode` and `Schema::check_absent` until they are merged; then this file
//! goes and `convert.rs` calls those.

use crate::schema::{AbsentDefault, Arity, Schema, Transform};
use crate::types::{Batch, Jagged, PredictError, RawBatch, RawValues};

#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("dense: expected {samples} samples x {width} values, got {got} values")]
    DenseWidth { samples: usize, width: usize, got: usize },
    #[error("dense feature {feature:?}, sample {sample}: expected a finite number, got {value}")]
    NotFinite { feature: String, sample: usize, value: f32 },
    #[error("feature {feature:?}, sample {sample}: at most {max} ids, got {got}")]
    Arity { feature: String, sample: usize, max: u32, got: u32 },
    #[error("feature {feature:?}: strings came, but the model declares no hash for it: send ids")]
    NoHash { feature: String },
}

pub(super) fn encode(schema: &Schema, raw: &RawBatch, out: &mut Batch) -> Result<(), EncodeError> {
    let (samples, width, got) = (raw.samples, schema.dense_width(), raw.dense.len());
    if samples * width != got {
        return Err(EncodeError::DenseWidth { samples, width, got });
    }
    out.clear();
    out.samples = samples;
    out.features.resize_with(schema.features.len(), Jagged::default);
    out.dense.reserve(got);
    for (i, &value) in raw.dense.iter().enumerate() {
        let dense = &schema.dense[i % width];
        let seen = match dense.transform {
            Transform::None => value,
            Transform::Log1p => value.max(0.0).ln_1p(),
            Transform::Standardize { mean, std } => (value - mean) / std,
        };
        if !(value.is_finite() && seen.is_finite()) {
            return Err(EncodeError::NotFinite { feature: dense.name.clone(), sample: i / width, value });
        }
        out.dense.push(seen);
    }
    let columns = schema.features.iter().zip(&raw.features).zip(&mut out.features);
    for ((feature, column), out) in columns {
        let name = || feature.name.clone();
        let (least, max) = match feature.arity {
            Arity::OneHot => (1, 1),
            Arity::MultiHot { max } => (0, max),
        };
        for (sample, pair) in column.offsets.windows(2).enumerate() {
            let got = pair[1] - pair[0];
            if got < least || got > max {
                return Err(EncodeError::Arity { feature: name(), sample, max, got });
            }
        }
        out.offsets.clear();
        out.offsets.extend_from_slice(&column.offsets);
        match &column.values {
            RawValues::Ids(ids) => out.ids.extend_from_slice(ids),
            RawValues::Text { bytes, ends } => {
                let hash = feature.hash.ok_or_else(|| EncodeError::NoHash { feature: name() })?;
                let begins = std::iter::once(0).chain(ends.iter().copied());
                let strings = begins.zip(ends).map(|(b, e)| &bytes[b as usize..*e as usize]);
                out.ids.extend(strings.map(|s| hash.id(s)));
            }
        }
    }
    Ok(())
}

pub(super) fn check_absent(schema: &Schema, batch: &Batch) -> Result<(), PredictError> {
    for lookup in schema.lookups() {
        let table = &schema.tables[lookup.table.index()];
        if table.default != AbsentDefault::Error {
            continue;
        }
        if let Some(&id) = batch.features[lookup.feature].ids.iter().find(|&&id| id >= table.rows) {
            return Err(PredictError::AbsentId {
                feature: schema.features[lookup.feature].name.clone(),
                table: table.name.clone(),
                id,
                rows: table.rows,
            });
        }
    }
    Ok(())
}
