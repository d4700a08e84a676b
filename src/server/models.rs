//! The models that are served. Models are added and removed while calls run.
//!
//! Calls find their model in a concurrent map: its shards are locked only for the copy of a reference, so a
//! call does not wait for a model that is being added, whose batcher is started before. A model that is
//! removed is out of the map before its batcher is closed, so that the calls which have found it are
//! answered.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use super::served::Served;
use super::{Learning, RequestLimits, ServerError};
use crate::batcher::Batcher;
use crate::config::{Batchers, LearnConfig};
use crate::learnlog::{self, Learner, LearnerOptions, LogError};
use crate::metrics::{Metrics, ModelMetrics};
use crate::predict::Predict;

/// How long the removal of a model waits for calls in flight, before its batcher refuses what they queue.
const MAX_WAIT: Duration = Duration::from_secs(10);
const WAIT_STEP: Duration = Duration::from_millis(1);

/// The served models by name.
pub(crate) struct Models {
    served: DashMap<String, Arc<Served>>,
    metrics: Arc<Metrics>,
    /// Held while a model is added.
    batchers: Mutex<Batchers>,
    limits: RequestLimits,
    /// Where samples are stored, if any model takes samples.
    learning: Option<Learning>,
}

impl Models {
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        batchers: Batchers,
        limits: RequestLimits,
        learning: Option<Learning>,
    ) -> Self {
        Self { served: DashMap::new(), metrics, batchers: Mutex::new(batchers), limits, learning }
    }

    /// Opens the log of a model, if the model takes samples.
    fn learner(&self, name: &str, metrics: &Arc<ModelMetrics>) -> Result<Option<Learner>, ServerError> {
        let Some(learning) = self.learning.as_ref().filter(|learning| learning.takes(name)) else {
            return Ok(None);
        };
        let LearnConfig { max_bytes, segment_bytes, .. } = learning.config;
        let options =
            LearnerOptions { dir: learnlog::folder(&learning.models, name), max_bytes, segment_bytes };
        let learner = Learner::start(options, metrics.clone());
        let refused =
            |error: LogError| ServerError::Learn { model: name.to_owned(), error: error.to_string() };
        learner.map(Some).map_err(refused)
    }

    /// Starts the batcher of a model and serves it from now on.
    ///
    /// # Errors
    /// When a model of this name is served, or a thread cannot be started.
    pub(crate) fn add(&self, predict: Arc<dyn Predict>) -> Result<(), ServerError> {
        let description = predict.describe();
        let name = description.model;
        if self.served.contains_key(&name) {
            return Err(ServerError::DuplicateModel(name));
        }
        let metrics = self.metrics.model(&name, &description.schema);
        let learner = self.learner(&name, &metrics)?;
        let batchers = self.batchers.lock().unwrap_or_else(PoisonError::into_inner);
        let batcher = Batcher::start(predict.clone(), metrics.clone(), batchers.of(&name));
        let served = Served::new(predict, batcher.map_err(ServerError::Thread)?, metrics, self.limits);
        let served = served.with_learner(learner);
        match self.served.entry(name) {
            Entry::Occupied(taken) => Err(ServerError::DuplicateModel(taken.key().clone())),
            Entry::Vacant(free) => {
                free.insert(Arc::new(served));
                Ok(())
            }
        }
    }

    /// Changes the limits and the delay of every queue.
    pub(crate) fn set_batchers(&self, batchers: Batchers) {
        let mut known = self.batchers.lock().unwrap_or_else(PoisonError::into_inner);
        *known = batchers;
        self.served.iter().for_each(|served| served.batcher.set_queue(known.of(served.key())));
    }

    /// Ends serving a model. Returns when its calls are answered and its threads have ended, or `false` if no
    /// model of this name is served. Blocks, so it must not be called in an async task.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let Some((_, served)) = self.served.remove(name) else { return false };
        let until = Instant::now() + MAX_WAIT;
        while Arc::strong_count(&served) > 1 && Instant::now() < until {
            std::thread::sleep(WAIT_STEP);
        }
        served.batcher.join();
        served.learner.iter().for_each(Learner::join);
        self.metrics.forget(name);
        true
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Served>> {
        self.served.get(name).map(|served| served.value().clone())
    }

    /// Whether there is more than one model.
    pub(crate) fn are_several(&self) -> bool {
        self.served.len() > 1
    }

    /// All models, by ascending name.
    pub(crate) fn all(&self) -> Vec<(String, Arc<Served>)> {
        let entry = |entry: dashmap::mapref::multiple::RefMulti<'_, String, Arc<Served>>| {
            (entry.key().clone(), entry.value().clone())
        };
        let mut all: Vec<_> = self.served.iter().map(entry).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}
