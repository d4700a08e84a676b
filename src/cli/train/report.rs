//! What `train` reports at the end, as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::epochs::Epochs;
use super::trained::Trained;
use crate::cli::or_dash;
use crate::trainer::eval::Quality;
use crate::trainer::{Pipeline, PlanStats};
use crate::types::Version;

/// The result of a run.
pub(crate) struct Report<'a> {
    pub epochs: &'a Epochs<'a>,
    pub model: &'a Trained,
    pub version: Version,
    /// Of the written version.
    pub quality: Option<Quality>,
    pub interrupted: bool,
    /// Whether all was trained; a signal may have ended the evaluation.
    pub complete: bool,
}

impl Report<'_> {
    pub(crate) fn json(&self) -> Value {
        let Self { epochs, model, quality, interrupted, .. } = self;
        let quality = quality.as_ref();
        let validations = epochs.validated.iter().map(
            |(epoch, q)| json!({ "epoch": epoch, "rows": q.samples, "auc": q.auc, "logloss": q.log_loss }),
        );
        let progressive = epochs.progress.progressive.quality().map(|progressive| {
            let q = progressive.quality;
            let calibration = progressive.calibration;
            json!({ "samples": q.samples, "auc": q.auc, "logloss": q.log_loss, "calibration": calibration })
        });
        json!({
            "model": epochs.args.name, "version": self.version.0, "rows": self.rows(),
            "epochs": self.epoch(), "steps": model.state().steps, "skipped": epochs.skipped,
            "samples_per_s": self.samples_per_s(), "seconds": epochs.progress.seconds(),
            "valid_rows": quality.map(|q| q.samples), "auc": quality.and_then(|q| q.auc),
            "logloss": quality.map(|q| q.log_loss),
            "normalized_entropy": quality.and_then(|q| q.normalized_entropy),
            "infinite_losses": quality.map(|q| q.infinite), "scratchpad": model.scratchpad_json(),
            "validations": validations.collect::<Vec<_>>(), "progressive": progressive,
            "best_epoch": epochs.validation.best.map(|best| best.epoch), "interrupted": interrupted,
        })
    }

    /// The epoch that was reached.
    fn epoch(&self) -> u32 {
        if self.complete { self.epochs.epochs_trained } else { self.epochs.position.epoch }
    }

    /// Samples of an epoch, or of its part if none was trained to the end.
    fn rows(&self) -> u64 {
        if self.epochs.epoch_samples > 0 { self.epochs.epoch_samples } else { self.epochs.position.samples }
    }

    fn samples_per_s(&self) -> f64 {
        self.epochs.progress.samples() as f64 / self.epochs.progress.seconds()
    }

    pub(crate) fn text(&self) -> String {
        let Self { epochs, model, .. } = self;
        let (epoch, rows, skipped) = (self.epoch(), self.rows(), epochs.skipped);
        let (all_steps, samples_per_s) = (model.state().steps, self.samples_per_s());
        let steps = match all_steps - epochs.steps_before {
            own if own == all_steps => format!("{own} steps"),
            own => format!("{own} steps ({all_steps} in all)"),
        };
        let trained = if self.complete {
            format!("trained {rows} rows x {epoch} epoch(s)")
        } else {
            format!("trained {} samples up to epoch {epoch}", epochs.progress.samples())
        };
        let mut text = format!("{trained}, {steps}, {samples_per_s:.0} samples/s, {skipped} lines skipped\n");
        // Writing to a string cannot fail.
        if let Some(last) = epochs.progress.last_samples() {
            let _ = writeln!(text, "{last}");
        }
        if let Trained::OnDisk { pipeline, .. } = model {
            text += &scratchpad_text(pipeline);
        }
        if let Some(quality) = &self.quality {
            text += &validation_text(quality);
        }
        text
    }
}

/// What the scratchpad and the stages did.
fn scratchpad_text(pipeline: &Pipeline) -> String {
    let PlanStats { hits, fills, evictions, bubbles, splits, .. } = pipeline.stats();
    let slots = pipeline.slots();
    let mut text = format!(
        "scratchpad: {slots} slots, {hits} hits, {fills} fills, {evictions} evictions, {bubbles} bubbles, \
         {splits} batches split\n"
    );
    let worked =
        pipeline.worked().map(|(stage, time)| format!("{} {:.1} s", stage.name(), time.as_secs_f64()));
    // Writing to a string cannot fail.
    let _ = writeln!(text, "stages worked: {}", worked.collect::<Vec<_>>().join(", "));
    let settings = pipeline.settings();
    if !settings.exact() {
        let (replicas, apart) = (settings.replicas, settings.steps_apart());
        let _ = writeln!(text, "{replicas} replicas, averaged at most {apart} steps apart: not exact");
    }
    text
}

/// The quality of the written version.
fn validation_text(quality: &Quality) -> String {
    let Quality { samples, log_loss, infinite, .. } = quality;
    let (auc, entropy) = (or_dash(quality.auc, 4), or_dash(quality.normalized_entropy, 4));
    let mut text = format!(
        "validation: {samples} rows, AUC {auc}, log loss {log_loss:.4}, normalized entropy {entropy}\n"
    );
    if *infinite > 0 {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "validation: {infinite} rows have an infinite loss");
    }
    text
}
