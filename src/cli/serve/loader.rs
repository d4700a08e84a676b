//! Loads a model: the version of `stable`, its lookup tier, its cache's first rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;

use super::cache::{self, BuiltTier, TierBuilder};
use super::stamps::{Stamper, Stamps};
use super::versions::{VersionRefusal, refusal};
use super::{LiveSettings, LoadedModel, warm};
use crate::cli::{InputError, background};
use crate::config::{Config, DeviceKind, TraceConfig, VersionPolicy};
use crate::device::cuda::Nvidia;
use crate::device::{self, Choice, cuda};
use crate::engine::{Engine, EngineParts, read_weights};
use crate::metrics::{EventKind, Metrics, ModelMetrics};
use crate::model::Model;
use crate::schema::Schema;
use crate::server::Labels;
use crate::store::hot_rows::STATE;
use crate::store::{self, Candidates, Latest, Opened, Purpose, Refusal};
use crate::trace::recorder::{Recorder, RecorderOptions};
use crate::types::{Version, VersionSelector};

/// The GPU to use, or `None` for the host.
fn choose_device(config: &Config) -> anyhow::Result<Option<Arc<Nvidia>>> {
    let open = || cuda::open(0, config.device.kernel_cache.as_deref());
    let device = device::choose(config.device.kind, open).map_err(|e| InputError(e.into()))?;
    if device.is_fallback() {
        tracing::warn!("{device}");
    } else {
        tracing::info!("{device}");
    }
    Ok(match device {
        Choice::Host { .. } => None,
        Choice::Cuda(device) => Some(Arc::new(device)),
    })
}

/// Loads models. All models share these fields.
pub(crate) struct Loader {
    pub config: Arc<Config>,
    pub models: PathBuf,
    pub metrics: Arc<Metrics>,
    pub live: Arc<LiveSettings>,
    tiers: TierBuilder,
}

impl Loader {
    /// Opens the device.
    ///
    /// # Errors
    /// When the device or `cache.counts` cannot be used.
    pub(crate) fn new(
        config: &Config,
        models: &Path,
        metrics: Arc<Metrics>,
        live: Arc<LiveSettings>,
    ) -> anyhow::Result<Self> {
        let config = Arc::new(config.clone());
        let tiers = TierBuilder {
            device: choose_device(&config)?,
            counts: cache::counts(&config.cache)?,
            config: config.clone(),
        };
        Ok(Self { config, models: models.to_owned(), metrics, live, tiers })
    }

    /// How versions are opened, so that their rows are where `store.memory` says.
    fn purpose(&self) -> Purpose {
        Purpose::ServeFrom(self.tiers.memory())
    }

    /// Opens the version that `stable` names: the highest good one of the policy, unless it was set. The
    /// versions above it are refused; each has its stamps from before it was opened.
    fn open_stable(&self, name: &str) -> anyhow::Result<(Opened, Vec<(Refusal, Stamps)>)> {
        let traffic = self.live.traffic(name);
        let set = store::labels::load(&self.models, name)?;
        let stable = Labels { settings: traffic.labels, set }.stable();
        let versions = match (stable, traffic.versions) {
            (VersionSelector::Version(version), _) => vec![version],
            (VersionSelector::Latest, VersionPolicy::Given(versions)) => versions.into_iter().collect(),
            (VersionSelector::Latest, VersionPolicy::Latest(_)) => store::versions(&self.models, name)?,
        };
        // Read before the versions are opened, so that later changes are noticed.
        let mut stamper = Stamper::new(&self.models, name);
        let stamps = versions.iter().map(|version| (*version, stamper.of_chain(*version, &[])));
        let mut stamps: BTreeMap<Version, Stamps> = stamps.collect();
        let candidates = Candidates { models: &self.models, name, versions: &versions };
        let opened = store::open_highest(candidates, self.purpose(), check_weights);
        let labelled = || format!("label stable names version {stable}; flechette label sets it");
        let Latest { opened, refused } = match stable {
            VersionSelector::Version(_) => opened.with_context(labelled)?,
            VersionSelector::Latest => opened?,
        };
        let refused = refused.into_iter().filter_map(|refusal| {
            let stamps = stamps.remove(&refusal.version)?;
            Some((refusal, stamps))
        });
        Ok((opened, refused.collect()))
    }

    /// The engine of the version of a model that `stable` names. Fills its cache, unless `cache.warm` is off.
    ///
    /// # Errors
    /// When the model has no good version, or its cache, its recorder or its threads cannot be had.
    pub(crate) fn load(&self, name: &str) -> anyhow::Result<LoadedModel> {
        let Self { config, models, .. } = self;
        let (mut opened, refused) = self.open_stable(name)?;
        let BuiltTier { tier, memory, ranked } = self.tiers.build(name, &mut opened)?;
        memory.prepare(&mut opened);
        let metrics = self.metrics.model(name, &opened.schema);
        let threads = background::pool("compute", config.threads.compute).context("threads.compute")?;
        let recorder = recorder_of(&config.trace, &opened.schema, &models.join(name), &metrics)?;
        let parts = EngineParts {
            name: name.to_owned(),
            lookup_tier: tier,
            metrics,
            threads: Arc::new(threads),
            max_samples: config.batchers.of(name).max_samples,
        };
        let table_bytes = opened.store.row_bytes();
        let engine = Engine::new(opened, parts)?.with_pointers();
        match engine.self_test() {
            Err(error) if config.device.kind == DeviceKind::Cuda => return Err(error.into()),
            // With `auto` the engine has logged the failure, and computes scores on the host.
            Err(_) | Ok(()) => {}
        }
        let cache_bytes = engine.cache_stats().map(|stats| stats.total_bytes);
        let version = engine.version();
        tracing::info!(
            model = name,
            version = version.0,
            table_bytes,
            cache_bytes = cache_bytes.unwrap_or(0),
            "loaded"
        );
        if config.cache.warm && cache_bytes.is_some() {
            warm::fill(&engine, models, ranked);
        }
        let engine = Arc::new(match recorder {
            Some(recorder) => engine.with_recorder(recorder),
            None => engine,
        });
        let refused = refused.into_iter().map(|(Refusal { version, reason }, stamps)| {
            engine.count_refused();
            self.metrics.events.record(EventKind::Refused, name, format!("version {version}: {reason}"));
            let text = refusal(version, &reason.to_string());
            (version, VersionRefusal::new(stamps, text, reason.may_pass()))
        });
        let refused = Arc::new(refused.collect());
        Ok(LoadedModel { engine, memory, refused })
    }
}

/// Checks that a version has the dense tensors of its architecture.
fn check_weights(opened: &Opened) -> Result<(), String> {
    let model = Model::new(&opened.schema);
    read_weights(&model, opened).map(|_| ()).map_err(|e| e.to_string())
}

/// Starts recording a model's accesses, if `trace.rate` is not 0. `folder` is the model's directory.
fn recorder_of(
    config: &TraceConfig,
    schema: &Schema,
    folder: &Path,
    metrics: &Arc<ModelMetrics>,
) -> anyhow::Result<Option<Recorder>> {
    if config.rate == 0.0 {
        return Ok(None);
    }
    let folder = folder.join(STATE);
    let options = RecorderOptions { folder, rate: config.rate, max_bytes: config.max_bytes };
    let recorder = Recorder::start(schema, &options, metrics.clone());
    Ok(Some(recorder.context("trace.rate: threads")?))
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
