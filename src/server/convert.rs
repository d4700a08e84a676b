//! Converts a request message to a batch, and scores to a response message.
//!
//! The message is untrusted: its counts are compared with each other and with the limits before memory is
//! allocated for them. [`Schema::encode`] checks the rest, which depends on the schema: transforms, hashing
//! and the number of ids of each sample.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use prost::bytes::Bytes;

use super::proto;
use crate::learnlog::{Checksum, Record, schema_sum};
use crate::predict::Description;
use crate::schema::{AbsentId, Arity, EncodeError, Schema, Transform};
use crate::types::{Batch, RawBatch, RawFeature, RawValues, Scores};

/// Why a request cannot be converted to a batch of the model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConvertError {
    #[error("samples: expected at least 1, got 0")]
    NoSamples,
    #[error("samples: limit {limit} (server.max_samples), got {got}")]
    TooManySamples { limit: usize, got: usize },
    #[error("features: unknown feature {name:?}")]
    UnknownFeature { name: String },
    #[error("features: {name:?} is missing")]
    MissingFeature { name: String },
    #[error("features: {name:?} is given more than once")]
    DuplicateFeature { name: String },
    #[error("feature {name:?}: expected ids or strings, got {ids} ids and {strings} strings")]
    BothValues { name: String, ids: usize, strings: usize },
    #[error("feature {name:?}: lengths: expected {samples} lengths, one per sample, got {got}")]
    LengthCount { name: String, samples: usize, got: usize },
    #[error("feature {name:?}: lengths: expected a sum of {values}, the number of values, got {sum}")]
    LengthSum { name: String, values: usize, sum: u64 },
    #[error("feature {name:?}: without lengths: expected {samples} values, one per sample, got {values}")]
    ValueCount { name: String, samples: usize, values: usize },
    #[error("labels: expected {samples} labels, one per sample, got {got}")]
    LabelCount { samples: usize, got: usize },
    #[error("labels: sample {sample}: expected a number from 0 to 1, got {got}")]
    Label { sample: usize, got: f32 },
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Absent(#[from] AbsentId),
}

/// The inputs of a model by name.
pub(crate) struct Inputs {
    pub schema: Arc<Schema>,
    checksum: Checksum,
    /// Index of each feature in the schema.
    indices: HashMap<String, usize>,
    pub max_samples: usize,
}

impl Inputs {
    /// The inputs of a model whose requests may have `max_samples` samples.
    #[must_use]
    pub(crate) fn new(schema: Arc<Schema>, max_samples: usize) -> Self {
        let indices = schema.features.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        Self { checksum: schema_sum(&schema), schema, indices, max_samples }
    }

    /// Overwrites `out` with the batch of a request.
    ///
    /// # Errors
    /// When the request is not a batch of this model, or exceeds a limit.
    pub(crate) fn encode(&self, request: proto::PredictRequest, out: &mut Batch) -> Result<(), ConvertError> {
        let proto::PredictRequest { samples, dense, features, .. } = request;
        let columns = Columns { dense, features };
        self.convert(samples as usize, out, |scratch| self.fill(columns, scratch), |_| ())
    }

    /// The samples of a request for the log, after the same checks as those of [`Self::encode`].
    ///
    /// # Errors
    /// As [`Self::encode`], and when the labels are wrong, or a dense value is too large to train on.
    pub(crate) fn record(
        &self,
        request: proto::LearnRequest,
        out: &mut Batch,
    ) -> Result<Record, ConvertError> {
        let proto::LearnRequest { samples, dense, features, labels, .. } = request;
        if labels.len() != samples as usize && samples as usize <= self.max_samples {
            return Err(ConvertError::LabelCount { samples: samples as usize, got: labels.len() });
        }
        if let Some(sample) = labels.iter().position(|label| !(0.0..=1.0).contains(label)) {
            return Err(ConvertError::Label { sample, got: labels[sample] });
        }
        let columns = Columns { dense, features };
        let record = |raw: &mut RawBatch| {
            let width = self.schema.dense_width().max(1);
            for (sample, dense) in raw.dense.chunks_exact(width).enumerate() {
                self.schema.check_trainable(sample, dense)?;
            }
            raw.labels = Some(labels);
            let record = Record::new(raw, self.checksum);
            raw.labels = None;
            Ok(record)
        };
        self.convert(samples as usize, out, |scratch| self.fill(columns, scratch), record)?
    }

    /// Overwrites `out` with the batch of the columns that `fill` writes, and calls `then` with the raw batch
    /// if it is valid. Before `fill`, the raw batch has its number of samples and a column for each feature.
    ///
    /// # Errors
    /// When the number of samples exceeds a limit, or the columns are not a batch of this model.
    pub(crate) fn convert<T, E: From<ConvertError>>(
        &self,
        samples: usize,
        out: &mut Batch,
        fill: impl FnOnce(&mut Scratch) -> Result<(), E>,
        then: impl FnOnce(&mut RawBatch) -> T,
    ) -> Result<T, E> {
        if samples == 0 {
            return Err(ConvertError::NoSamples.into());
        }
        if samples > self.max_samples {
            return Err(ConvertError::TooManySamples { limit: self.max_samples, got: samples }.into());
        }
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.raw.samples = samples;
            scratch.raw.features.resize_with(self.schema.features.len(), no_values);
            let encoded = fill(scratch).and_then(|()| {
                self.schema.encode(&scratch.raw, out).map_err(ConvertError::from)?;
                self.schema.check_absent(out).map_err(ConvertError::from)?;
                Ok(then(&mut scratch.raw))
            });
            if raw_bytes(&scratch.raw) > SCRATCH_BYTES {
                *scratch = Scratch::default();
            }
            encoded
        })
    }

    /// The index of a feature in the schema. `likely` is tried first, without hashing the name.
    pub(crate) fn index(&self, name: &str, likely: usize) -> Option<usize> {
        match self.schema.features.get(likely) {
            Some(feature) if feature.name == name => Some(likely),
            _ => self.indices.get(name).copied(),
        }
    }

    /// Fills the columns in the order of the schema.
    fn fill(&self, columns: Columns, scratch: &mut Scratch) -> Result<(), ConvertError> {
        let names = &self.schema.features;
        let samples = scratch.raw.samples;
        scratch.raw.dense = columns.dense;
        scratch.seen.clear();
        scratch.seen.resize(names.len(), false);
        for (i, column) in columns.features.into_iter().enumerate() {
            // Most clients send features in the order of the schema.
            let Some(index) = self.index(&column.name, i) else {
                return Err(ConvertError::UnknownFeature { name: clip(column.name) });
            };
            if std::mem::replace(&mut scratch.seen[index], true) {
                return Err(ConvertError::DuplicateFeature { name: column.name });
            }
            fill_column(samples, column, &mut scratch.raw.features[index])?;
        }
        match scratch.seen.iter().position(|seen| !seen) {
            Some(missing) => Err(ConvertError::MissingFeature { name: names[missing].name.clone() }),
            None => Ok(()),
        }
    }
}

/// The columns of a message.
struct Columns {
    dense: Vec<f32>,
    features: Vec<proto::FeatureColumn>,
}

/// Memory that conversions reuse. Without it a request of 26 columns would take more than 50 allocations.
pub(crate) struct Scratch {
    pub raw: RawBatch,
    /// For each feature of the schema, whether the request has its column.
    seen: Vec<bool>,
}

/// A scratch of more bytes is freed after the conversion.
const SCRATCH_BYTES: usize = 1 << 20;

impl Default for Scratch {
    fn default() -> Self {
        let raw = RawBatch { samples: 0, dense: Vec::new(), features: Vec::new(), labels: None };
        Self { raw, seen: Vec::new() }
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn no_values() -> RawFeature {
    RawFeature { offsets: Vec::new(), values: RawValues::Ids(Vec::new()) }
}

fn fill_column(
    samples: usize,
    column: proto::FeatureColumn,
    raw: &mut RawFeature,
) -> Result<(), ConvertError> {
    let proto::FeatureColumn { name, lengths, ids, strings } = column;
    match (ids.is_empty(), strings.is_empty()) {
        (false, false) => {
            return Err(ConvertError::BothValues { name, ids: ids.len(), strings: strings.len() });
        }
        (_, true) => raw.values = RawValues::Ids(ids),
        (true, false) => fill_text(&strings, &mut raw.values),
    }
    let values = raw.values.len();
    raw.offsets.clear();
    if lengths.is_empty() {
        if values != samples {
            return Err(ConvertError::ValueCount { name, samples, values });
        }
        raw.offsets.extend(0..=samples as u32);
        return Ok(());
    }
    if lengths.len() != samples {
        return Err(ConvertError::LengthCount { name, samples, got: lengths.len() });
    }
    let sum: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    if sum != values as u64 {
        return Err(ConvertError::LengthSum { name, values, sum });
    }
    // The sum is the number of values in one message, so no partial sum overflows 32 bits.
    let mut end = 0;
    raw.offsets.push(end);
    raw.offsets.extend(lengths.iter().map(|length| {
        end += length;
        end
    }));
    Ok(())
}

/// Concatenates the strings. A message is at most 1 GiB, so their ends fit in 32 bits.
pub(crate) fn fill_text(strings: &[Bytes], values: &mut RawValues) {
    let (bytes, ends) = no_text(values);
    for string in strings {
        bytes.extend_from_slice(string);
        ends.push(bytes.len() as u32);
    }
}

/// Replaces values by no strings, and keeps their memory if they are strings: the bytes and the ends.
pub(crate) fn no_text(values: &mut RawValues) -> (&mut Vec<u8>, &mut Vec<u32>) {
    loop {
        match values {
            RawValues::Ids(_) => *values = RawValues::Text { bytes: Vec::new(), ends: Vec::new() },
            RawValues::Text { bytes, ends } => {
                bytes.clear();
                ends.clear();
                return (bytes, ends);
            }
        }
    }
}

/// Bytes of a raw batch's values and offsets.
fn raw_bytes(raw: &RawBatch) -> usize {
    let columns = raw.features.iter().map(|column| {
        let values = match &column.values {
            RawValues::Ids(ids) => 8 * ids.len(),
            RawValues::Text { bytes, ends } => bytes.len() + 4 * ends.len(),
        };
        values + 4 * column.offsets.len()
    });
    4 * raw.dense.len() + columns.sum::<usize>()
}

/// Most bytes of a client's name in an error message.
const NAME_BYTES: usize = 80;

/// Shortens a name from a client, so that it fits in the header of an error.
pub(crate) fn clip(name: String) -> String {
    truncated(name, NAME_BYTES)
}

/// Cuts a text to at most `longest` bytes at a character boundary, and marks the cut with dots.
pub(crate) fn truncated(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let end = (0..=longest).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
    }
    text
}

/// The response message of `Predict`.
#[must_use]
pub(crate) fn response(scores: Scores, schema: &Schema) -> proto::PredictResponse {
    let mut absent = Vec::new();
    if !scores.absent.is_empty() {
        let mut counts = vec![0u64; schema.features.len()];
        for id in &scores.absent {
            if let Some(count) = counts.get_mut(id.feature as usize) {
                *count += 1;
            }
        }
        let counted = counts.into_iter().zip(&schema.features).filter(|(count, _)| *count > 0);
        absent.extend(counted.map(|(count, f)| proto::AbsentIds { feature: f.name.clone(), count }));
    }
    let Scores { version, probabilities, logits, .. } = scores;
    proto::PredictResponse { scores: probabilities, version: version.0, absent, logits }
}

/// The response message of `GetModel`.
#[must_use]
pub(crate) fn description(model: &Description, limits: proto::Limits) -> proto::GetModelResponse {
    let schema = &model.schema;
    let dense = schema.dense.iter().map(|feature| {
        let transform = match feature.transform {
            Transform::None => "none",
            Transform::Log1p => "log1p",
            Transform::Standardize { .. } => "standardize",
        };
        proto::DenseInput { name: feature.name.clone(), transform: transform.to_owned() }
    });
    let features = schema.features.iter().map(|feature| {
        let table = schema.tables.iter().find(|table| table.name == feature.table);
        let (max_ids, one_hot) = match feature.arity {
            Arity::OneHot => (1, true),
            Arity::MultiHot { max } => (max, false),
        };
        proto::CategoricalInput {
            name: feature.name.clone(),
            table: feature.table.clone(),
            rows: table.map_or(0, |table| table.rows),
            dim: table.map_or(0, |table| table.dim as u32),
            max_ids,
            one_hot,
            takes_strings: feature.hash.is_some(),
        }
    });
    proto::GetModelResponse {
        model: model.model.clone(),
        version: model.version.0,
        architecture: architecture(schema).to_owned(),
        dense: dense.collect(),
        features: features.collect(),
        limits: Some(limits),
        model_toml: schema.to_toml(),
        ..proto::GetModelResponse::default()
    }
}

/// The name of the architecture in `model.toml`.
pub(crate) fn architecture(schema: &Schema) -> &'static str {
    schema.architecture.kind().name()
}
