//! The cursor of a training run: everything, besides a version, that is needed to continue the run at a batch
//! boundary as if it had not stopped, to the bit.
//!
//! It says what was trained on and how ([`RunIdentity`]), and how far ([`Cursor::position`]). A run that
//! continues must have the same [`RunIdentity`]; the first difference is named.
//!
//! **`checkpoint/cursor.json`** is one JSON object. A field with an asterisk is left out if it is null, empty
//! or false, or, for the last two of a run, 1.
//!
//! | field | content |
//! |---|---|
//! | `run` | object, see below |
//! | `epoch` | the epoch, from 1 |
//! | `samples` | samples of the epoch that were trained on |
//! | `file` | `null`, or, of a followed directory or a log, the file of the last sample: |
//! | `file.name`, `file.samples` | its name without directories; samples of it up to the last one |
//! | `file.complete`\* | `true` if it is known to have no more |
//! | `log`\* | id of the log that has the file |
//! | `steps` | steps of the model |
//! | `validation.best` | `null`, or the best `epoch`, its `log_loss` and `version` (0: this cursor's) |
//! | `validation.bad_epochs` | epochs since the best one |
//!
//! | field of `run` | flags |
//! |---|---|
//! | `format` | `--format`; empty for a log |
//! | `fields`\* | object: `columns`, `label`, `separator`, each as its flag or `null` |
//! | `files` | list of the names of `--data` without directories |
//! | `begins`\* | for each of them, XXH3-128 of its beginning (`begin_sum`), or an empty text for a pipe |
//! | `follow`\* | name of the directory of `--follow`, without those above it |
//! | `learned`\* | `true` for `--learned` |
//! | `batch`, `seed`, `lr` | numbers |
//! | `shuffle` | `null`, or `samples` and `seed` |
//! | `held_out` | `null`, or `ratio` and `seed` |
//! | `schedule` | `warmup`; `decay`: `null`, or `curve`, `start`, `steps`, `end` |
//! | `validating`\* | `valid`: `null`, or `name` and `begin` of the file; `early_stop`, `save_best` |
//! | `replicas`\*, `lambda`\* | numbers |
//!
//! A reader refuses an unknown field. A new field may be left out, as those with an asterisk: then it is not
//! known, or has its default. A format that this program cannot read has a field `format` beside `run`, with
//! a number above [`FORMAT`]. A reader looks at it before any other field, and names it in the error.
//! (`run.format` is the format of the data.)

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use super::schedule::{Decay, Schedule};
use crate::dataset::{DataPosition, FieldOptions, FileAt, HeldOut, Shuffle};
use crate::store::format::MAX_TRAINED;
use crate::types::Version;

/// The number of this format.
const FORMAT: u64 = 1;

/// The beginning of a cursor of any format.
#[derive(Deserialize)]
struct Numbered {
    #[serde(default = "this_format")]
    format: u64,
}

fn this_format() -> u64 {
    FORMAT
}

/// The most epochs of a run.
pub(crate) const MAX_EPOCHS: u32 = 1_000_000_000;

/// Why a cursor cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CursorError {
    #[error("format: expected {expected}, got {got}")]
    Format { expected: u64, got: u64 },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("{field}: expected {least} to {most}, got {got}")]
    Range { field: &'static str, least: u64, most: u64, got: u64 },
}

/// Where a training run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cursor {
    pub run: RunIdentity,
    /// The epoch, counted from 1.
    pub epoch: u32,
    /// Samples of this epoch that were trained on.
    pub samples: u64,
    /// Of a followed directory: the file of the last sample.
    pub file: Option<FileAt>,
    /// The id of the log that has the file. Cursors of earlier programs lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// Steps of the model.
    pub steps: u64,
    /// The state of the early stop.
    pub validation: Validation,
}

/// What a run trains on, and everything that decides the bytes which it trains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunIdentity {
    /// Format of the data.
    pub format: String,
    #[serde(default, skip_serializing_if = "FieldOptions::is_empty")]
    pub fields: FieldOptions,
    /// Names of the files, without their directories; empty for a followed directory.
    pub files: Vec<String>,
    /// A checksum of the beginning of each file, because files of one name may differ. Empty for a file that
    /// can be read only once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub begins: Vec<String>,
    /// Name of the followed directory, without those above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<String>,
    /// Whether the samples are those of the log.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub learned: bool,
    /// Samples per step.
    pub batch: u32,
    /// Seed of the initial weights.
    pub seed: u64,
    pub shuffle: Option<Shuffle>,
    pub held_out: Option<HeldOut>,
    pub lr: f64,
    pub schedule: Schedule,
    /// Replicas split the sums of each batch. `None` if it is not known, in a cursor of an earlier program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u64>,
    /// 1 for a single replica, which averages nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lambda: Option<u64>,
    /// How the epochs are validated; `None` if it is not known, or decides nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validating: Option<Validating>,
}

/// What decides which epoch is the best, and what happens then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Validating {
    /// The file of `--valid`.
    pub valid: Option<ValidFile>,
    pub early_stop: Option<u32>,
    pub save_best: bool,
}

/// A file with validation data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ValidFile {
    /// Without its directory.
    pub name: String,
    /// A checksum of its beginning, as [`RunIdentity::begins`].
    pub begin: String,
}

/// The results of validation so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Validation {
    pub best: Option<Best>,
    /// Epochs since the best one.
    pub bad_epochs: u32,
}

/// The epoch with the least log loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Best {
    pub epoch: u32,
    pub log_loss: f64,
    /// The number of its version, if one was written (`--save-best`); [`Self::THIS`] in the cursor of that
    /// version, which is made before the version has a number.
    pub version: Option<Version>,
}

impl Best {
    /// The version that has the cursor.
    pub(crate) const THIS: Version = Version(0);
}

impl Validation {
    /// Takes the result of an epoch. Returns whether it is the best so far. A log loss that is not finite is
    /// never the best.
    pub(crate) fn add(&mut self, epoch: u32, log_loss: f64) -> bool {
        let better = log_loss.is_finite() && self.best.is_none_or(|best| log_loss < best.log_loss);
        if better {
            *self = Self { best: Some(Best { epoch, log_loss, version: None }), bad_epochs: 0 };
        } else {
            self.bad_epochs += 1;
        }
        better
    }
}

/// Why a run cannot continue at a cursor.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag}: expected {expected}, as before, got {got}")]
pub(crate) struct OtherRun {
    pub flag: &'static str,
    pub expected: String,
    pub got: String,
}

impl OtherRun {
    /// A file has the same name, but begins otherwise.
    fn begin(flag: &'static str, name: &str) -> Self {
        let (expected, got) = (format!("{name:?} with the same beginning"), "another file of this name");
        Self { flag, expected, got: got.to_owned() }
    }
}

impl Cursor {
    /// Reads the text of a cursor.
    ///
    /// # Errors
    /// [`CursorError`], for another format by its number.
    pub(crate) fn parse(text: &str) -> Result<Self, CursorError> {
        let Numbered { format: got } = serde_json::from_str(text)?;
        if got != FORMAT {
            return Err(CursorError::Format { expected: FORMAT, got });
        }
        let cursor: Self = serde_json::from_str(text)?;
        let bad_epochs = cursor.validation.bad_epochs;
        // Training adds to each.
        for (field, got, least, most) in [
            // That of a complete run is the next one.
            ("epoch", cursor.epoch.into(), 1, u64::from(MAX_EPOCHS) + 1),
            ("samples", cursor.samples, 0, MAX_TRAINED),
            ("bad_epochs", bad_epochs.into(), 0, MAX_EPOCHS.into()),
        ] {
            if !(least..=most).contains(&got) {
                return Err(CursorError::Range { field, least, most, got });
            }
        }
        Ok(cursor)
    }

    /// The results of validation at the cursor of this version.
    #[must_use]
    pub(crate) fn validation_of(&self, version: Version) -> Validation {
        let mut validation = self.validation;
        if let Some(best) = &mut validation.best
            && best.version == Some(Best::THIS)
        {
            best.version = Some(version);
        }
        validation
    }

    /// The batch boundary from which the data is read again.
    #[must_use]
    pub(crate) fn position(&self) -> DataPosition {
        DataPosition { epoch: self.epoch, samples: self.samples, file: self.file.clone() }
    }
}

impl RunIdentity {
    /// Checks that another run trains on the same data in the same way.
    ///
    /// # Errors
    /// The flag of the first difference.
    pub(crate) fn check(&self, other: &Self) -> Result<(), OtherRun> {
        // Learned samples have neither lines nor fields. Cursors of earlier programs have those of the flags.
        if !(self.learned && other.learned) {
            same("--format", &self.format, &other.format)?;
            same("--columns", &self.fields.columns, &other.fields.columns)?;
            same("--label", &self.fields.label, &other.fields.label)?;
            same("--separator", &self.fields.separator, &other.fields.separator)?;
        }
        for (expected, got) in self.files.iter().zip(&other.files) {
            same("--data", expected, got)?;
        }
        same("--data", &self.files, &other.files)?;
        // A cursor of an earlier program says neither how files begin nor which directory was followed. The
        // same data may come from a file in one run, and from a pipe in the next.
        let fit = |(one, other): &(&String, &String)| one == other || one.is_empty() || other.is_empty();
        let fitting = self.begins.iter().zip(&other.begins).take_while(fit).count();
        if !self.begins.is_empty() && fitting < self.begins.len().max(other.begins.len()) {
            return Err(OtherRun::begin("--data", self.files.get(fitting).map_or("", |name| name)));
        }
        if self.learned || self.follow.is_some() || !self.files.is_empty() {
            // Earlier programs knew no name of `.` and `..`.
            if self.follow.as_deref() != Some("") || other.follow.is_none() {
                same("--follow", &self.follow, &other.follow)?;
            }
            same("--learned", &self.learned, &other.learned)?;
        }
        same("--batch", &self.batch, &other.batch)?;
        same("--seed", &self.seed, &other.seed)?;
        same("--shuffle", &self.shuffle.map(|s| s.samples), &other.shuffle.map(|s| s.samples))?;
        same("--valid-ratio", &self.held_out.map(|h| h.ratio), &other.held_out.map(|h| h.ratio))?;
        same("--data-seed", &self.shuffle.map(|s| s.seed), &other.shuffle.map(|s| s.seed))?;
        same("--data-seed", &self.held_out.map(|h| h.seed), &other.held_out.map(|h| h.seed))?;
        same("--lr", &self.lr, &other.lr)?;
        self.schedule.check(&other.schedule)?;
        // What is not known may be anything.
        let counts = [("--replicas", self.replicas, other.replicas), ("--lambda", self.lambda, other.lambda)];
        for (flag, own, other) in counts.iter().filter(|(_, own, other)| own.is_some() && other.is_some()) {
            same(flag, own, other)?;
        }
        let (Some(own), Some(other)) = (&self.validating, &other.validating) else { return Ok(()) };
        let name = |validating: &Validating| validating.valid.as_ref().map(|file| file.name.clone());
        same("--valid", &name(own), &name(other))?;
        if let Some(file) = own.valid.as_ref().filter(|_| own.valid != other.valid) {
            return Err(OtherRun::begin("--valid", &file.name));
        }
        same("--early-stop", &own.early_stop, &other.early_stop)?;
        same("--save-best", &own.save_best, &other.save_best)
    }
}

impl Schedule {
    /// Checks that another run has the same one.
    fn check(&self, other: &Self) -> Result<(), OtherRun> {
        same("--lr-warmup", &self.warmup, &other.warmup)?;
        let (own, other) = (self.decay, other.decay);
        let curve = |decay: Option<Decay>| decay.map(|decay| format!("{:?}", decay.curve).to_lowercase());
        same("--lr-decay", &curve(own), &curve(other))?;
        let (Some(own), Some(other)) = (own, other) else { return Ok(()) };
        same("--lr-decay-start", &own.start, &other.start)?;
        same("--lr-decay-steps", &own.steps, &other.steps)?;
        same("--lr-end", &own.end, &other.end)
    }
}

fn same<T: PartialEq + Debug>(flag: &'static str, expected: &T, got: &T) -> Result<(), OtherRun> {
    let differs = || OtherRun { flag, expected: shown(expected), got: shown(got) };
    if expected == got { Ok(()) } else { Err(differs()) }
}

/// The value of a flag, which may not be given.
fn shown(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    match text.strip_prefix("Some(").and_then(|rest| rest.strip_suffix(')')) {
        Some(given) => given.to_owned(),
        None if text == "None" => "none".to_owned(),
        None => text,
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
