//! The shadow of a model: a version that scores a share of the requests a second time, for comparison.
//!
//! It has a queue of its own, which is small: what does not fit is dropped and counted. A request gives it a
//! copy of its batch, and is answered whether or not the shadow ever scores it. The difference is recorded
//! when both have scored. The model is given by the caller, and should compute only when a processor is
//! free.

use std::sync::{Arc, Mutex};

use super::ServerError;
use super::serving_engine::ServingEngine;
use super::traffic::Split;
use crate::batcher::{Batcher, Terms, Ticket};
use crate::config::{BatcherConfig, Sticky};
use crate::metrics::{Metrics, ShadowMetrics};
use crate::predict::Predict;
use crate::sync::EvenPoisoned;
use crate::types::{Batch, Version};

/// Most samples of the shadow's queue, if one request may not have more.
const QUEUE_SAMPLES: usize = 8192;

/// What a shadow scores.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct ShadowOptions {
    /// The share of the requests.
    pub share: f64,
    /// Limit of one request.
    pub max_samples: usize,
}

impl ShadowOptions {
    /// The settings of its batcher, from those of its model.
    fn batcher(self, config: &BatcherConfig) -> BatcherConfig {
        let queue_samples = config.queue_samples.min(QUEUE_SAMPLES.max(self.max_samples));
        BatcherConfig { workers: 1, queue_samples, ..config.clone() }
    }
}

/// A version that scores requests a second time.
pub(crate) struct Shadowing {
    predict: Arc<dyn Predict>,
    version: Version,
    batcher: Batcher,
    options: ShadowOptions,
    split: Split,
    metrics: ShadowMetrics,
    largest: Mutex<f32>,
}

impl Shadowing {
    /// Starts the queue and its thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(crate) fn start(
        predict: Arc<dyn Predict>,
        options: ShadowOptions,
        config: &BatcherConfig,
        metrics: &Metrics,
    ) -> Result<Self, ServerError> {
        let description = predict.describe();
        let (name, schema) = (description.model.as_str(), &description.schema);
        let (metrics, batcher) = (metrics.shadow(name), options.batcher(config));
        metrics.largest.set(0.0);
        let batcher = Batcher::start_idle(predict.clone(), Metrics::hidden(name, schema), &batcher);
        Ok(Self {
            version: description.version,
            batcher: batcher.map_err(ServerError::Thread)?,
            options,
            // Another salt than that of the canary, so that the shadow gets a share of each side.
            split: Split::new(options.share, &Sticky::RequestId, schema, &format!("{name} shadow")),
            metrics,
            largest: Mutex::default(),
            predict,
        })
    }

    /// Whether this is the shadow of these parts.
    pub(crate) fn is(&self, predict: &Arc<dyn Predict>, share: f64) -> bool {
        Arc::ptr_eq(&self.predict, predict) && self.options.share == share
    }

    /// Changes the limits and the delay of its queue, to those of its model.
    pub(crate) fn set_queue(&self, config: &BatcherConfig) {
        self.batcher.set_queue(&self.options.batcher(config));
    }

    /// A copy of a batch for the shadow, if it should score it.
    pub(crate) fn copy<'s>(
        self: &'s Arc<Self>,
        by: &ServingEngine,
        batch: &Batch,
    ) -> Option<(&'s Arc<Self>, Batch)> {
        let same = by.predict.describe().version == self.version;
        (!same && self.split.takes_next()).then(|| (self, Batch { logits: false, ..batch.clone() }))
    }

    /// Queues a copy, or drops it if the shadow is busy.
    pub(crate) fn submit(self: &Arc<Self>, batch: Batch) -> Option<Compare> {
        // Without the deadline and the priority of the request, which does not wait for it.
        match self.batcher.submit(batch, Terms::default()) {
            Ok(ticket) => Some(Compare { shadow: self.clone(), ticket }),
            Err(_) => {
                self.metrics.dropped.increment(1);
                None
            }
        }
    }

    /// Drops what waits, and ends the thread. Blocks.
    pub(crate) fn end(&self) {
        self.batcher.abandon();
        self.batcher.join();
    }

    /// As [`Batcher::is_awaited`].
    pub(crate) fn is_awaited(&self) -> bool {
        self.batcher.is_awaited()
    }

    fn record(&self, served: &[f32], shadow: &[f32]) {
        let mut largest = self.largest.lock().even_poisoned();
        for (served, shadow) in served.iter().zip(shadow) {
            let difference = (served - shadow).abs();
            self.metrics.difference.record(f64::from(difference));
            *largest = largest.max(difference);
        }
        self.metrics.largest.set(f64::from(*largest));
    }
}

impl Drop for Shadowing {
    /// After the last comparison. If another shadow has begun, its next comparison sets this again.
    fn drop(&mut self) {
        self.metrics.largest.set(0.0);
    }
}

/// A request that the shadow will score. Dropping it cancels that.
pub(crate) struct Compare {
    shadow: Arc<Shadowing>,
    ticket: Ticket,
}

impl Compare {
    /// Compares with these scores when the shadow has scored too. Does not wait for it.
    pub(crate) fn with(self, served: Vec<f32>) {
        let Self { shadow, ticket } = self;
        tokio::spawn(async move {
            match ticket.await {
                Ok(scores) => shadow.record(&served, &scores.probabilities),
                Err(_) => shadow.metrics.failed.increment(1),
            }
        });
    }
}
