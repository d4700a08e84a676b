//! A request message to a batch, with every rule of the wire checked on the way, and an answer
//! back to a message.
//!
//! The message is untrusted: its counts are compared with each other and with the limits before
//! anything is sized by them. What the schema says of values (transforms, hashing, how many ids
//! a sample may have) is the schema's own business and is checked by its encoder.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use prost::bytes::Bytes;

use super::proto;
use crate::predict::Description;
use crate::schema::{AbsentId, Arity, EncodeError, Schema, Transform};
use crate::types::{Batch, RawBatch, RawFeature, RawValues, Scores};

/// Why a request is not a batch of the model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConvertError {
    /// Nothing to score.
    #[error("samples: expected at least 1, got 0")]
    NoSamples,
    /// More samples than a request may have.
    #[error("samples: limit {limit} (server.max_samples), got {got}")]
    TooManySamples {
        /// The limit.
        limit: usize,
        /// What came.
        got: usize,
    },
    /// A column that the model does not have.
    #[error("features: unknown feature {name:?}")]
    UnknownFeature {
        /// What came.
        name: String,
    },
    /// A column of the model that did not come.
    #[error("features: {name:?} is missing")]
    MissingFeature {
        /// The column.
        name: String,
    },
    /// A column that came more than once.
    #[error("features: {name:?} is given more than once")]
    DuplicateFeature {
        /// The column.
        name: String,
    },
    /// A column with ids and strings.
    #[error("feature {name:?}: expected ids or strings, got {ids} ids and {strings} strings")]
    BothValues {
        /// The column.
        name: String,
        /// How many ids came.
        ids: usize,
        /// How many strings came.
        strings: usize,
    },
    /// Not one length a sample.
    #[error("feature {name:?}: lengths: expected {samples} lengths, one a sample, got {got}")]
    LengthCount {
        /// The column.
        name: String,
        /// Samples of the request.
        samples: usize,
        /// How many lengths came.
        got: usize,
    },
    /// Lengths that do not add up to the values.
    #[error("feature {name:?}: lengths: expected a sum of {values}, the count of values, got {sum}")]
    LengthSum {
        /// The column.
        name: String,
        /// How many values came.
        values: usize,
        /// What the lengths add up to.
        sum: u64,
    },
    /// No lengths, and not one value a sample.
    #[error("feature {name:?}: without lengths expected {samples} values, one a sample, got {values}")]
    ValueCount {
        /// The column.
        name: String,
        /// Samples of the request.
        samples: usize,
        /// How many values came.
        values: usize,
    },
    /// Values that the schema does not take.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// An id past a table whose default is `error`.
    #[error(transparent)]
    Absent(#[from] AbsentId),
}

/// What a model takes, looked up by name.
pub(crate) struct Inputs {
    /// The schema that this was made of.
    pub schema: Arc<Schema>,
    places: HashMap<String, usize>,
    max_samples: usize,
}

impl Inputs {
    /// The inputs of a model whose requests may have `max_samples` samples.
    #[must_use]
    pub(crate) fn new(schema: Arc<Schema>, max_samples: usize) -> Self {
        let places = schema.features.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        Self { schema, places, max_samples }
    }

    /// Writes the batch that a request means over `out`, whose memory is used again.
    ///
    /// # Errors
    /// [`ConvertError`], naming the field, the limit or expectation, and what came.
    pub(crate) fn encode(&self, request: proto::PredictRequest, out: &mut Batch) -> Result<(), ConvertError> {
        let samples = request.samples as usize;
        if samples == 0 {
            return Err(ConvertError::NoSamples);
        }
        if samples > self.max_samples {
            return Err(ConvertError::TooManySamples { limit: self.max_samples, got: samples });
        }
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.raw.samples = samples;
            scratch.raw.dense = request.dense;
            let encoded = self.fill(samples, request.features, scratch).and_then(|()| {
                self.schema.encode(&scratch.raw, out)?;
                Ok(self.schema.check_absent(out)?)
            });
            if raw_bytes(&scratch.raw) > SCRATCH_BYTES {
                *scratch = Scratch::default();
            }
            encoded
        })
    }

    /// Fills the columns in the schema's order.
    fn fill(
        &self,
        samples: usize,
        columns: Vec<proto::FeatureColumn>,
        scratch: &mut Scratch,
    ) -> Result<(), ConvertError> {
        let names = &self.schema.features;
        scratch.seen.clear();
        scratch.seen.resize(names.len(), false);
        scratch.raw.features.resize_with(names.len(), no_values);
        for (i, column) in columns.into_iter().enumerate() {
            // Most clients send the schema's order, which needs no hashing of names.
            let place = match names.get(i) {
                Some(feature) if feature.name == column.name => i,
                _ => match self.places.get(&column.name) {
                    Some(&place) => place,
                    None => return Err(ConvertError::UnknownFeature { name: clip(column.name) }),
                },
            };
            if std::mem::replace(&mut scratch.seen[place], true) {
                return Err(ConvertError::DuplicateFeature { name: column.name });
            }
            fill_column(samples, column, &mut scratch.raw.features[place])?;
        }
        match scratch.seen.iter().position(|seen| !seen) {
            Some(missing) => Err(ConvertError::MissingFeature { name: names[missing].name.clone() }),
            None => Ok(()),
        }
    }
}

/// What a conversion needs on the way and keeps for the next: without it a request of 26 columns
/// would take more than 50 allocations.
struct Scratch {
    raw: RawBatch,
    /// Whether each column has come.
    seen: Vec<bool>,
}

/// A scratch that has grown past this is given back to the system.
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
    // The sum is the count of values of one message, so no partial sum passes 32 bits.
    let mut end = 0;
    raw.offsets.push(end);
    raw.offsets.extend(lengths.iter().map(|length| {
        end += length;
        end
    }));
    Ok(())
}

/// The strings end to end. Their bytes came in one message, so 32 bits hold their ends.
fn fill_text(strings: &[Bytes], values: &mut RawValues) {
    if let RawValues::Ids(_) = values {
        *values = RawValues::Text { bytes: Vec::new(), ends: Vec::new() };
    }
    let RawValues::Text { bytes, ends } = values else { return };
    bytes.clear();
    ends.clear();
    for string in strings {
        bytes.extend_from_slice(string);
        ends.push(bytes.len() as u32);
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

/// Most bytes of a client's name that are said back.
const NAME_BYTES: usize = 80;

/// A name that a client sent, short enough to be sent back in a header.
pub(crate) fn clip(name: String) -> String {
    truncated(name, NAME_BYTES)
}

/// At most `longest` bytes of a text, on a character's boundary, and dots where some were cut.
pub(crate) fn truncated(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let end = (0..=longest).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
    }
    text
}

/// The answer's message.
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
    proto::PredictResponse { scores: scores.probabilities, version: scores.version.0, absent }
}

/// What `GetModel` tells.
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
    }
}

/// The architecture's name, as `model.toml` spells it.
pub(crate) fn architecture(schema: &Schema) -> &'static str {
    schema.architecture.kind().name()
}
