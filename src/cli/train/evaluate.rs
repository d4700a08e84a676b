//! Validation: after each epoch with the trained rows, and at the end with the rows of the written version.

use anyhow::anyhow;

use super::Args;
use super::trained::Trained;
use crate::cli::score_file::ScoreFile;
use crate::cli::training_flags::is_pipe;
use crate::cli::{InputError, output};
use crate::dataset::{DatasetError, Feed, Reader};
use crate::store;
use crate::trainer::eval::Quality;
use crate::trainer::{self};
use crate::types::{RawBatch, Version};

/// Samples per batch of the evaluation.
const EVALUATION_BATCH: usize = 4096;

/// The validation data; `None` without any. An interrupt ends it early.
fn open(args: &Args, feed: &Feed) -> anyhow::Result<Option<Box<dyn Reader + Send>>> {
    match &args.valid {
        Some(valid) => Ok(Some(feed.open_other(valid)?)),
        None => Ok(feed.open_held_out()?),
    }
}

/// The quality of the model in training; `None` without validation data.
///
/// # Errors
/// When the data cannot be read.
pub(crate) fn trained(args: &Args, feed: &Feed, model: &mut Trained) -> anyhow::Result<Option<Quality>> {
    let Some(mut reader) = open(args, feed)? else { return Ok(None) };
    model.prepare_logits()?;
    let quality = trainer::evaluate(&feed.schema, &mut *reader, EVALUATION_BATCH, |batch, logits| {
        model.logits(batch, logits)
    })?;
    of_samples(args, feed, quality)
}

/// The quality, unless the validation data has no samples: their log loss would be the best possible. An
/// interrupt may have ended it before the first one.
fn of_samples(args: &Args, feed: &Feed, quality: Option<Quality>) -> anyhow::Result<Option<Quality>> {
    if quality.as_ref().is_none_or(|quality| quality.samples > 0) || feed.stop.interrupted() {
        return Ok(quality);
    }
    let what = match &args.valid {
        Some(path) => format!("--valid: {}", path.display()),
        None => "--valid-ratio".to_owned(),
    };
    Err(InputError(anyhow!("{what}: no samples to validate on")).into())
}

/// The quality of a written version; `None` without validation data. Writing may have rounded rows. The dense
/// weights of `model` are replaced by those of the version.
///
/// # Errors
/// When the data or the version cannot be read.
pub(crate) fn written(
    args: &Args,
    feed: &Feed,
    model: &mut Trained,
    version: Version,
) -> anyhow::Result<Option<Quality>> {
    let Some(reader) = open(args, feed)? else { return Ok(None) };
    let mut reader = SkipsOf { inner: reader, samples: 0, skips: Vec::new() };
    let opened = store::open(&args.models, &args.name, version, store::Purpose::Serve)?;
    let state = model.state_mut();
    state.read_dense(|name| opened.dense.get(name).map(|t| (t.shape().to_vec(), t.values().to_vec())))?;
    let (mut all, mut scores) = (Vec::new(), Vec::new());
    let quality = trainer::evaluate(&feed.schema, &mut reader, EVALUATION_BATCH, |batch, logits| {
        state.forward_rows_of(&opened.store, batch)?;
        state.read_logits(logits);
        if args.valid_out.is_some() {
            state.read_probabilities(&mut scores);
            all.extend_from_slice(&scores);
        }
        Ok::<_, crate::predict::PredictError>(())
    })?;
    // After an interrupt the last scores are missing, so the file is left as it is.
    if let Some(path) = args.valid_out.as_ref().filter(|_| !feed.stop.interrupted()) {
        let file = ScoreFile::create("--valid-out", path);
        let mut file = file.map_err(|error| output::unwritten("--valid-out", path, error))?;
        file.write(&all, &[], &reader.skips)?;
        file.finish()?;
    }
    of_samples(args, feed, quality)
}

/// Keeps which lines a reader has skipped.
struct SkipsOf {
    inner: Box<dyn Reader + Send>,
    /// Samples that were read.
    samples: usize,
    /// For each skipped line: the number of samples before it.
    skips: Vec<usize>,
}

impl Reader for SkipsOf {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let read = self.inner.read(max_samples, out)?;
        self.skips.extend(self.inner.skips().iter().map(|skip| self.samples + skip));
        self.samples += read;
        Ok(read)
    }

    fn inner(&self) -> Option<&dyn Reader> {
        Some(&*self.inner)
    }
}

/// Checks that the scores can be written, before hours of training.
pub(crate) fn check_out(args: &Args) -> anyhow::Result<()> {
    let Some(path) = &args.valid_out else { return Ok(()) };
    let inputs = args.data.data.iter().chain(&args.valid).chain(&args.model_config);
    output::check("--valid-out", path, inputs)?;
    if !is_pipe(path) {
        // It is written under another name first.
        ScoreFile::create("--valid-out", path).map_err(|e| output::refused("--valid-out", path, e))?;
    }
    Ok(())
}
