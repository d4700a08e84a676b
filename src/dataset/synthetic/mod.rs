//! Generated samples of any schema: ids follow a power law, dense values a bell curve, and labels a known
//! [`Truth`].
//!
//! The "file" is a description, `rows=N,seed=S,skew=K,lengths=L,truth=T`, of which only `rows` is required.
//! Defaults are in parentheses. `seed` (0) selects the samples. `truth` (0) selects the hot ids and the
//! weights of all ids, so two seeds with one truth give training and test data of the same model. `skew`
//! (`medium`) is `uniform`, `low`, `medium`, `high` or an exponent. `lengths` (`uniform`) is the number of
//! ids of a multi-hot sample: `uniform` from 0 to the feature's maximum, `max`, or a number.
//!
//! Sample `n` is a pure function of the description and `n`, so batch sizes do not change the data.

mod random;
mod skew;
mod truth;
mod write;

use std::iter::repeat_n;
use std::path::PathBuf;
use std::str::FromStr;
use std::vec::IntoIter;

use super::{DatasetError, Reader};
use crate::mem::unit;
use crate::pace::give_way;
use crate::schema::{Arity, Schema, Transform};
use crate::types::{RawBatch, RawKind, RawValues};
use random::{Purpose, Stream, bell};
use skew::IdSampler;
pub use skew::Skew;
pub(crate) use truth::Truth;
use truth::{LOG_DEVIATION, LOG_MEAN, sigmoid};
pub use write::write_criteo_tsv;

/// A description of generated samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Description {
    pub rows: u64,
    pub seed: u64,
    pub skew: Skew,
    pub lengths: Lengths,
    /// Seed of the [`Truth`] and of the selection of hot ids.
    pub truth: u64,
}

/// How many ids a sample of a multi-hot feature has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// Uniform from 0 to the feature's maximum.
    Uniform,
    /// The feature's maximum.
    Max,
    /// This number, or the feature's maximum if that is less.
    Fixed(u32),
}

impl FromStr for Description {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut description =
            Self { rows: 0, seed: 0, skew: Skew::Medium, lengths: Lengths::Uniform, truth: 0 };
        let mut seen = Vec::new();
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!("expected key=value, got {part:?}"));
            };
            let whole =
                || value.parse().map_err(|_| format!("{key}: expected a whole number, got {value:?}"));
            match key {
                "rows" => description.rows = whole()?,
                "seed" => description.seed = whole()?,
                "truth" => description.truth = whole()?,
                "skew" => description.skew = value.parse()?,
                "lengths" => description.lengths = lengths(value)?,
                _ => return Err(format!("unknown key {key:?}, expected rows, seed, skew, lengths or truth")),
            }
            if seen.contains(&key) {
                return Err(format!("{key} occurs twice"));
            }
            seen.push(key);
        }
        if seen.contains(&"rows") { Ok(description) } else { Err("rows is missing".into()) }
    }
}

fn lengths(value: &str) -> Result<Lengths, String> {
    match value {
        "uniform" => Ok(Lengths::Uniform),
        "max" => Ok(Lengths::Max),
        number => {
            let refused = |_| format!("lengths: expected uniform, max or a whole number, got {value:?}");
            number.parse().map(Lengths::Fixed).map_err(refused)
        }
    }
}

/// Reads generated samples of several descriptions, one after the other.
pub(crate) struct Synthetic {
    schema: Schema,
    generator: Generator,
    rest: IntoIter<Description>,
    /// Samples of all descriptions.
    total: u64,
    /// Samples that were generated or skipped.
    done: u64,
}

pub(crate) fn open(paths: &[PathBuf], schema: &Schema) -> Result<Synthetic, DatasetError> {
    let refused = |text: &str, reason| DatasetError::Synthetic { text: text.into(), reason };
    let parse = |path: &PathBuf| {
        let text = path.to_string_lossy();
        text.parse::<Description>().map_err(|reason| refused(&text, reason))
    };
    let descriptions = paths.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    schema.check().map_err(|error| refused("schema", error.to_string()))?;
    let total = descriptions.iter().fold(0, |sum: u64, one| sum.saturating_add(one.rows));
    let mut rest = descriptions.into_iter();
    let Some(first) = rest.next() else { return Err(DatasetError::NoFiles) };
    Ok(Synthetic { schema: schema.clone(), generator: Generator::new(schema, first), rest, total, done: 0 })
}

impl Reader for Synthetic {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        self.generator.reset(out);
        while !self.generator.append(max_samples, out) {
            let Some(next) = self.rest.next() else { break };
            self.generator = Generator::new(&self.schema, next);
        }
        self.done += out.samples as u64;
        Ok(out.samples)
    }

    /// Takes no time, because a sample does not depend on the samples before it.
    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        let mut left = samples;
        loop {
            let rest = self.generator.description.rows - self.generator.next_row;
            self.generator.next_row += rest.min(left);
            left -= rest.min(left);
            if left == 0 {
                break;
            }
            let Some(next) = self.rest.next() else { break };
            self.generator = Generator::new(&self.schema, next);
        }
        self.done += samples - left;
        Ok(samples - left)
    }

    fn share(&self) -> Option<f64> {
        Some(self.done as f64 / self.total.max(1) as f64)
    }
}

/// Generates the samples of one description.
pub(crate) struct Generator {
    description: Description,
    dense: Vec<Transform>,
    features: Vec<FeatureSampler>,
    dense_draws: Stream,
    label_draws: Stream,
    truth: Truth,
    next_row: u64,
    transformed: Vec<f32>,
}

struct FeatureSampler {
    ids: IdSampler,
    arity: Arity,
    draws: Stream,
}

impl Generator {
    /// A generator for a schema, which must be valid. Features that share a table share its hot ids.
    pub(crate) fn new(schema: &Schema, description: Description) -> Self {
        let rows_of = |name: &str| schema.tables.iter().find(|t| t.name == name).map_or(1, |t| t.rows);
        let features = schema.features.iter().enumerate().map(|(i, feature)| {
            let rows = rows_of(&feature.table)
                .min(feature.wide_table.as_deref().map_or(u64::MAX, rows_of))
                .min(feature.hash.map_or(u64::MAX, |hash| hash.modulus));
            let place = schema.table_id(&feature.table).map_or(0, |id| u64::from(id.0));
            let ids = IdSampler::new(description.skew, rows.max(1), description.truth, place);
            let draws = Stream::new(description.seed, Purpose::Ids, i as u64);
            FeatureSampler { ids, arity: feature.arity, draws }
        });
        Self {
            description,
            dense: schema.dense.iter().map(|d| d.transform).collect(),
            features: features.collect(),
            dense_draws: Stream::new(description.seed, Purpose::Dense, 0),
            label_draws: Stream::new(description.seed, Purpose::Label, 0),
            truth: Truth::new(schema, description.truth),
            next_row: 0,
            transformed: Vec::new(),
        }
    }

    /// Clears a batch and gives it columns of ids.
    pub(crate) fn reset(&self, out: &mut RawBatch) {
        out.begin(repeat_n(RawKind::Ids, self.features.len()), true);
    }

    /// Appends samples. Returns true when the batch has `max_samples` or is full, false after the last
    /// sample.
    pub(crate) fn append(&mut self, max_samples: usize, out: &mut RawBatch) -> bool {
        while out.samples < max_samples {
            give_way();
            if self.next_row == self.description.rows {
                return false;
            }
            self.append_row(out);
            if out.is_full() {
                return true;
            }
        }
        true
    }

    fn append_row(&mut self, out: &mut RawBatch) {
        let row = self.next_row;
        self.next_row += 1;
        self.transformed.clear();
        let mut words = self.dense_draws.words(row);
        for &transform in &self.dense {
            let value = dense_value(transform, bell(words.next_u64()));
            out.dense.push(value);
            self.transformed.push(transform.apply(value));
        }
        let mut logit = self.truth.dense_part(&self.transformed);
        for (i, (sampler, column)) in self.features.iter().zip(&mut out.features).enumerate() {
            let RawValues::Ids(ids) = &mut column.values else { continue };
            let mut words = sampler.draws.words(row);
            let begin = ids.len();
            let count = length(sampler.arity, self.description.lengths, || words.next_u64());
            for _ in 0..count {
                ids.push(sampler.ids.id(words.next_u64()));
            }
            column.offsets.push(ids.len() as u32);
            logit += self.truth.feature_part(i, &ids[begin..]);
        }
        let clicks = unit(self.label_draws.word(row)) < sigmoid(logit);
        out.labels.get_or_insert_default().push(f32::from(u8::from(clicks)));
        out.samples += 1;
    }
}

/// The number of ids of a sample. `word` draws a random word.
fn length(arity: Arity, lengths: Lengths, word: impl FnOnce() -> u64) -> u32 {
    match (arity, lengths) {
        (Arity::OneHot, _) => 1,
        (Arity::MultiHot { max }, Lengths::Max) => max,
        (Arity::MultiHot { max }, Lengths::Fixed(count)) => count.min(max),
        (Arity::MultiHot { max }, Lengths::Uniform) => (word() % (u64::from(max) + 1)) as u32,
    }
}

/// The raw value for a draw of the bell curve: the transformed value is about normally distributed. For log1p
/// the raw value is a whole number, at least 0.
fn dense_value(transform: Transform, bell: f64) -> f32 {
    let value = match transform {
        Transform::None => bell,
        Transform::Log1p => (LOG_MEAN + LOG_DEVIATION * bell).exp_m1().max(0.0).floor(),
        Transform::Standardize { mean, std } => f64::from(mean) + f64::from(std) * bell,
    };
    value as f32
}

#[cfg(test)]
mod tests;
