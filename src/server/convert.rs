//! Converts a request message to a batch, and scores to a response message.
//!
//! The message is untrusted: the number of samples is compared with its limit before the columns are read,
//! and then with what they have. [`Schema::encode`] checks the rest, which depends on the schema: transforms,
//! hashing and the number of ids of each sample.

mod column;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use super::ctr::{LearnHead, LearnMessage, PredictMessage};
use super::proto;
use super::received::{Malformed, Received, fields};
use crate::learnlog::{Checksum, Record, schema_sum};
use crate::predict::Description;
use crate::schema::{AbsentIdError, Arity, EncodeError, Schema, Transform};
use crate::types::{Batch, RawBatch, RawFeature, RawValues, Scores};
use column::Column;

/// Why a request cannot be converted to a batch of the model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConvertError {
    #[error("message: malformed: {0}")]
    Malformed(#[from] Malformed),
    #[error("features[{at}]: malformed: {error}")]
    MalformedColumn { at: usize, error: Malformed },
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
    #[error("dense_order: made for another model or schema: expected the dense inputs {expected}")]
    DenseOrder { expected: String },
    #[error("labels: expected {samples} labels, one per sample, got {got}")]
    LabelCount { samples: usize, got: usize },
    #[error("labels: sample {sample}: expected a number from 0 to 1, got {got}")]
    Label { sample: usize, got: f32 },
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Absent(#[from] AbsentIdError),
}

/// The inputs of a model by name.
pub(crate) struct Inputs {
    pub schema: Arc<Schema>,
    checksum: Checksum,
    dense_order: u64,
    /// Index of each feature in the schema.
    indices: HashMap<String, usize>,
    pub max_samples: usize,
}

impl Inputs {
    /// The inputs of a model whose requests may have `max_samples` samples.
    #[must_use]
    pub(crate) fn new(schema: Arc<Schema>, max_samples: usize) -> Self {
        let indices = schema.features.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        let (checksum, dense_order) = (schema_sum(&schema), schema.dense_order());
        Self { checksum, dense_order, schema, indices, max_samples }
    }

    /// Overwrites `out` with the batch of a request.
    ///
    /// # Errors
    /// When the request is not a batch of this model, or exceeds a limit.
    pub(crate) fn encode(&self, request: &PredictMessage, out: &mut Batch) -> Result<(), ConvertError> {
        let samples = request.head.samples as usize;
        self.check_dense_order(request.head.dense_order)?;
        self.convert(samples, out, |scratch| self.fill(&request.message, scratch), |_| ())
    }

    /// The samples of a request for the log, after the same checks as those of [`Self::encode`].
    ///
    /// # Errors
    /// As [`Self::encode`], and when the labels are wrong, or a dense value is too large to train on.
    pub(crate) fn record(&self, request: LearnMessage, out: &mut Batch) -> Result<Record, ConvertError> {
        let Received { head: LearnHead { samples, labels, dense_order, .. }, message } = request;
        self.check_dense_order(dense_order)?;
        if labels.len() != samples as usize && samples as usize <= self.max_samples {
            return Err(ConvertError::LabelCount { samples: samples as usize, got: labels.len() });
        }
        if let Some(sample) = labels.iter().position(|label| !(0.0..=1.0).contains(label)) {
            return Err(ConvertError::Label { sample, got: labels[sample] });
        }
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
        self.convert(samples as usize, out, |scratch| self.fill(&message, scratch), record)?
    }

    /// Checks that a client has ordered its dense numbers for this schema, if it says for which order it has.
    fn check_dense_order(&self, dense_order: u64) -> Result<(), ConvertError> {
        if dense_order == 0 || dense_order == self.dense_order {
            return Ok(());
        }
        let dense = self.schema.dense.iter().map(|dense| dense.name.as_str());
        Err(ConvertError::DenseOrder { expected: clip(dense.collect::<Vec<_>>().join(", ")) })
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
        fill: impl FnOnce(&mut ConvertScratch) -> Result<(), E>,
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
            if scratch.bytes() > SCRATCH_BYTES {
                *scratch = ConvertScratch::default();
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

    /// Reads the columns of a request of either kind, in the order of the schema.
    fn fill(&self, message: &[u8], scratch: &mut ConvertScratch) -> Result<(), ConvertError> {
        let names = &self.schema.features;
        scratch.raw.dense.clear();
        scratch.seen.clear();
        scratch.seen.resize(names.len(), false);
        let mut at = 0;
        for field in fields(message) {
            let field = field?;
            match field.number {
                DENSE => field.floats(&mut scratch.raw.dense)?,
                FEATURES => {
                    self.fill_column(at, field.bytes()?, scratch)?;
                    at += 1;
                }
                _ => {}
            }
        }
        match scratch.seen.iter().position(|seen| !seen) {
            Some(missing) => Err(ConvertError::MissingFeature { name: names[missing].name.clone() }),
            None => Ok(()),
        }
    }

    /// Reads the column at this position of a request.
    fn fill_column(
        &self,
        at: usize,
        message: &[u8],
        scratch: &mut ConvertScratch,
    ) -> Result<(), ConvertError> {
        let ConvertScratch { raw, seen, column } = scratch;
        let name = column.read(message).map_err(|error| ConvertError::MalformedColumn { at, error })?;
        // Most clients send features in the order of the schema.
        let Some(index) = self.index(name, at) else {
            return Err(ConvertError::UnknownFeature { name: clip(name.to_owned()) });
        };
        if std::mem::replace(&mut seen[index], true) {
            return Err(ConvertError::DuplicateFeature { name: name.to_owned() });
        }
        column.fill(name, raw.samples, &mut raw.features[index])
    }
}

/// Fields of a request of either kind.
const DENSE: u32 = 4;
const FEATURES: u32 = 5;

/// Memory that conversions reuse. Without it a request of 26 columns would take more than 50 allocations.
pub(crate) struct ConvertScratch {
    pub raw: RawBatch,
    /// For each feature of the schema, whether the request has its column.
    seen: Vec<bool>,
    column: Column,
}

/// A scratch of more bytes is freed after the conversion.
const SCRATCH_BYTES: usize = 1 << 20;

impl Default for ConvertScratch {
    fn default() -> Self {
        let raw = RawBatch { samples: 0, dense: Vec::new(), features: Vec::new(), labels: None };
        Self { raw, seen: Vec::new(), column: Column::default() }
    }
}

impl ConvertScratch {
    /// Its memory, apart from what each column takes in any case.
    fn bytes(&self) -> usize {
        let Self { raw, column, .. } = self;
        let columns = raw.features.iter().map(|column| {
            let values = match &column.values {
                RawValues::Ids(ids) => 8 * ids.capacity(),
                RawValues::Text { bytes, ends } => bytes.capacity() + 4 * ends.capacity(),
            };
            values + 4 * column.offsets.capacity()
        });
        4 * raw.dense.capacity() + column.bytes() + columns.sum::<usize>()
    }
}

thread_local! {
    static SCRATCH: RefCell<ConvertScratch> = RefCell::default();
}

fn no_values() -> RawFeature {
    RawFeature { offsets: Vec::new(), values: RawValues::Ids(Vec::new()) }
}

/// Replaces values by no ids, and keeps their memory if they are ids.
pub(crate) fn no_ids(values: &mut RawValues) -> &mut Vec<u64> {
    loop {
        match values {
            RawValues::Text { .. } => *values = RawValues::Ids(Vec::new()),
            RawValues::Ids(ids) => {
                ids.clear();
                return ids;
            }
        }
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
        dense_order: schema.dense_order(),
        ..proto::GetModelResponse::default()
    }
}

/// The name of the architecture in `model.toml`.
pub(crate) fn architecture(schema: &Schema) -> &'static str {
    schema.architecture.kind().name()
}

#[cfg(test)]
pub(crate) mod tests;
