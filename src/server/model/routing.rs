//! The way of a request through a model: the choice of its engine, that engine's queue, and its scores.

use std::sync::Arc;
use std::time::Instant;

use super::{Canary, EngineIndex, Model};
use crate::config::{CANARY, STABLE};
use crate::metrics::LabelMetrics;
use crate::server::convert::{Inputs, clip};
use crate::server::serving_engine::{LabelledRequest, NotQueued, Queued};
use crate::server::status::CallError;
use crate::server::traffic::RequestOptions;
use crate::types::{Batch, Scores, Version, VersionSelector};

/// Which engine scores a request.
struct Choice {
    engine: EngineIndex,
    /// The version that must compute the scores.
    version: Option<Version>,
}

impl Model {
    /// Queues the batch that `encode` writes at the engine that should score it.
    ///
    /// # Errors
    /// When the version or the label is not there, the request cannot be converted, or the queue is full.
    pub(crate) fn queue(
        &self,
        options: &RequestOptions<'_>,
        encode: impl FnOnce(&Inputs, &mut Batch) -> Result<(), CallError>,
    ) -> Result<Queued, NotQueued> {
        let canary = self.canary.as_ref().filter(|_| options.version.is_none() && options.label.is_empty());
        let by_samples = canary.filter(|canary| canary.split.by_samples());
        let Choice { engine: mut index, version } = match canary {
            Some(_) if by_samples.is_some() => Choice { engine: self.stable, version: None },
            Some(Canary { engine, split }) if split.takes(options.id) => {
                Choice { engine: *engine, version: None }
            }
            _ => self.choose(options)?,
        };
        let engine = self.engine(index);
        let inputs = engine.inputs.clone();
        let started = Instant::now();
        let mut batch = engine.batcher.spare();
        encode(&inputs, &mut batch).map_err(NotQueued::at(index))?;
        batch.logits = options.logits;
        if let Some(canary) = by_samples
            && canary.split.takes_batch(&batch)
        {
            index = canary.engine;
        }
        let engine = self.engine(index);
        engine.metrics.statistics.input.add(1, started.elapsed());
        let shadow = self.parts.shadow.as_ref().and_then(|shadow| shadow.copy(engine, &batch));
        let (samples, answer_bytes) = (batch.samples, Scores::most_bytes(&batch));
        let label = self.counted(options, index).map(|metrics| LabelledRequest::begin(metrics, started));
        let ticket = engine.batcher.submit(batch, options.terms).map_err(NotQueued::at(index))?;
        let shadow = shadow.and_then(|(shadow, batch)| shadow.submit(batch));
        Ok(Queued { ticket, samples, answer_bytes, inputs, engine: index, version, shadow, label })
    }

    fn choose(&self, options: &RequestOptions<'_>) -> Result<Choice, CallError> {
        match (options.version, options.label.as_str()) {
            (None, "") => Ok(Choice { engine: self.stable, version: None }),
            (Some(version), "") => Ok(Choice { engine: self.find(version)?, version: Some(version) }),
            (None, label) => self.choose_label(label),
            (Some(_), label) => Err(CallError::Both { label: clip(label.to_owned()) }),
        }
    }

    fn choose_label(&self, label: &str) -> Result<Choice, CallError> {
        let Some(named) = self.named.iter().find(|named| named.label == label) else {
            let labels: Vec<&str> = self.named.iter().map(|named| named.label.as_str()).collect();
            let (model, labels) = (self.name.clone(), labels.join(", "));
            return Err(CallError::NoLabel { model, labels, got: clip(label.to_owned()) });
        };
        match (named.engine, named.target) {
            // The main engine may take over another version meanwhile.
            (Some(EngineIndex::MAIN), VersionSelector::Version(version)) if label != STABLE => {
                Ok(Choice { engine: EngineIndex::MAIN, version: Some(version) })
            }
            (Some(engine), _) => Ok(Choice { engine, version: None }),
            (None, VersionSelector::Version(version)) => Err(self.no_version(version)),
            (None, VersionSelector::Latest) => Err(self.no_version(self.parts.latest)),
        }
    }

    /// The series of the label for which a request is counted.
    fn counted(&self, options: &RequestOptions<'_>, engine: EngineIndex) -> Option<&Arc<LabelMetrics>> {
        if options.version.is_some() {
            return None;
        }
        let label = match options.label.as_str() {
            "" if self.canary.as_ref().is_some_and(|canary| canary.engine == engine) => CANARY,
            "" => STABLE,
            label => label,
        };
        self.named.iter().find(|named| named.label == label).map(|named| &named.metrics)
    }

    /// Awaits the scores of a queued request.
    ///
    /// # Errors
    /// When the batch failed, or another version than the requested one has computed it.
    pub(crate) async fn scores(&self, queued: Queued) -> Result<(Scores, Arc<Inputs>), CallError> {
        let Queued { ticket, inputs, version, shadow, label, .. } = queued;
        let scores = ticket.await?;
        // The version may have changed while the request was queued.
        if let Some(requested) = version.filter(|requested| *requested != scores.version) {
            return Err(self.no_version(requested));
        }
        if let Some(label) = label {
            label.scored();
        }
        if let Some(shadow) = shadow {
            shadow.with(scores.probabilities.clone());
        }
        Ok((scores, inputs))
    }
}
