//! Builds the lookup tier of a model from the configuration: a cache in front of the store, or the store
//! alone.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use crate::cache::key::KeyWidth;
use crate::cache::policy::Watermarks;
use crate::cache::{AdmissionOption, CacheOptions, CacheShape, EvictionOption, FlatCache, TableShape};
use crate::cli::{InputError, error_line};
use crate::config::{
    BatcherConfig, CacheAdmission, CacheConfig, CacheEviction, CacheMode, CacheSize, Config, DeviceKind,
    TableMemory,
};
use crate::device::cuda::Nvidia;
use crate::device::cuda::pinned::PinnedHost;
use crate::engine::LookupTier;
use crate::engine::gpu::{GpuLookupTier, GpuTierOptions};
use crate::mem::available::{available_bytes, memory_bytes};
use crate::planner::counts::Ranked;
use crate::schema::Schema;
use crate::store::{Opened, PlainMemory};
use crate::types::RowId;

/// The default of `cache.fraction`.
const DEFAULT_FRACTION: f64 = 0.1;

/// How long a switch waits for the batches that began before it.
const SWITCH_WAIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// Builds the lookup tiers of all models.
pub(crate) struct TierBuilder {
    pub config: Arc<Config>,
    pub device: Option<Arc<Nvidia>>,
    /// The rows of `cache.counts`.
    pub counts: Option<Ranked>,
}

pub(crate) struct BuiltTier {
    pub tier: LookupTier,
    pub memory: RowMemory,
    /// The model's rows in `cache.counts`, by descending count.
    pub ranked: Vec<RowId>,
}

/// Where the rows of a model's tables are, for all its versions.
#[derive(Clone)]
pub(crate) enum RowMemory {
    /// Where `store.memory` says.
    AsOpened {
        /// Whether a cache is in front of them.
        cached: bool,
    },
    /// Copied to RAM, so that a cache on the host may point at them.
    Ram,
    /// Copied to pinned memory, so that a cache on this device may point at them.
    Pinned(Arc<Nvidia>),
}

impl RowMemory {
    /// Copies the rows there, unless they stay where they are.
    pub(crate) fn load(&self, opened: &mut Opened) -> anyhow::Result<()> {
        match self {
            Self::AsOpened { .. } => return Ok(()),
            Self::Ram => {
                let copied = opened.store.rows_copied(&PlainMemory);
                opened.store = copied.context("cache.pointers: loading the tables into RAM")?;
            }
            Self::Pinned(device) => {
                match opened.store.rows_copied(&PinnedHost(device.clone())) {
                    Ok(pinned) => opened.store = pinned,
                    // After a failure of the device, the driver refuses this for ever.
                    Err(error) => {
                        tracing::warn!(%error, "cache.pointers: no pointers without pinned memory");
                        Self::Ram.load(opened)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Prepares loaded rows for the reads of requests.
    pub(crate) fn prepare(&self, opened: &mut Opened) {
        match self {
            Self::AsOpened { cached: false } => opened.store.prefault(),
            // Missed rows are cold and scattered, so reading ahead in the tables' files would be wasted.
            _ if !fits_ram(opened) => opened.store.expect_disk(),
            _ => {}
        }
    }
}

/// Reads the file of `cache.counts`, if one is configured.
pub(crate) fn counts(config: &CacheConfig) -> anyhow::Result<Option<Ranked>> {
    let Some(path) = &config.counts else { return Ok(None) };
    let ranked = Ranked::read(path).map_err(|e| InputError(e.into())).context("cache.counts")?;
    Ok(Some(ranked))
}

impl TierBuilder {
    /// Where a version's tables are when it is opened. Tables at which a cache may point are copied from the
    /// mapped files, because pointers need rows without deltas, or pinned memory.
    pub(crate) fn memory(&self) -> TableMemory {
        let cache = &self.config.cache;
        let on = cache.mode == CacheMode::On || (cache.mode == CacheMode::Auto && self.device.is_some());
        if on && cache.pointers > 0.0 { TableMemory::Mapped } else { self.config.memory }
    }

    /// Whether the model gets a cache.
    fn is_on(&self, opened: &Opened) -> bool {
        match self.config.cache.mode {
            CacheMode::On => true,
            CacheMode::Off => false,
            // Caching RAM in RAM only costs time.
            CacheMode::Auto => {
                self.device.is_some() || (opened.store.row_memory().mapped > 0 && !fits_ram(opened))
            }
        }
    }

    /// The store alone. Warns of settings that have no effect then.
    fn without_cache(&self) -> BuiltTier {
        if self.config.cache.size.is_some() {
            tracing::warn!(
                "cache.bytes or cache.fraction has no effect: cache.mode auto means off, because the tables \
                 are in memory or fit in it"
            );
        }
        if self.device.is_some() {
            tracing::warn!("cache.mode is off, so the GPU is not used: it would only hold the cache");
        }
        let memory = RowMemory::AsOpened { cached: false };
        BuiltTier { tier: LookupTier::Store, memory, ranked: Vec::new() }
    }

    /// The model's rows in `cache.counts`, by descending count.
    fn ranked(&self, schema: &Schema) -> Vec<RowId> {
        let Some(counts) = &self.counts else { return Vec::new() };
        let rows = counts.rows_of(schema).into_iter();
        let ranked: Vec<_> = rows.map(|(table, row)| RowId::new(table, row.row)).collect();
        if ranked.is_empty() {
            tracing::warn!("cache.counts: contains no row of this model's tables");
        }
        ranked
    }

    /// Builds the tier of a model. If `cache.pointers` is above 0, the tables are loaded into memory first.
    pub(crate) fn build(&self, name: &str, opened: &mut Opened) -> anyhow::Result<BuiltTier> {
        if !self.is_on(opened) {
            return Ok(self.without_cache());
        }
        let mut ranked = self.ranked(&opened.schema);
        let mut options = options(&self.config.cache, &mut ranked, opened);
        let (tier, memory) = match &self.device {
            None => self.on_host(opened, &mut options)?,
            Some(device) => {
                match self.on_device(device, self.config.batchers.of(name), opened, &mut options) {
                    Ok(built) => built,
                    Err(error) if self.config.device.kind == DeviceKind::Auto => {
                        tracing::warn!(
                            "device.kind is auto: the GPU cannot hold the cache, so the host holds it: {}",
                            error_line(error.as_ref())
                        );
                        self.on_host(opened, &mut options)?
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        if let EvictionOption::Lfu(rows) = std::mem::take(&mut options.eviction) {
            ranked = rows;
        }
        Ok(BuiltTier { tier, memory, ranked })
    }

    fn on_host(
        &self,
        opened: &mut Opened,
        options: &mut CacheOptions,
    ) -> anyhow::Result<(LookupTier, RowMemory)> {
        options.pointers = pointers(&self.config.cache, opened);
        let memory = match options.pointers {
            0 => RowMemory::AsOpened { cached: true },
            _ => {
                tracing::warn!(
                    "cache.pointers: without a GPU a pointer saves nothing over a miss, so 0 is faster"
                );
                RowMemory::Ram
            }
        };
        memory.load(opened)?;
        let shape = shape(self.config.cache.size, &opened.schema, options)?;
        let cache = FlatCache::new(&shape, options).map_err(|e| InputError(e.into()))?;
        prefault(&cache);
        Ok((LookupTier::Host(cache), memory))
    }

    fn on_device(
        &self,
        device: &Arc<Nvidia>,
        batcher: &BatcherConfig,
        opened: &mut Opened,
        options: &mut CacheOptions,
    ) -> anyhow::Result<(LookupTier, RowMemory)> {
        options.pointers = pointers(&self.config.cache, opened);
        let memory = match options.pointers {
            0 => RowMemory::AsOpened { cached: true },
            _ => RowMemory::Pinned(device.clone()),
        };
        memory.load(opened)?;
        let shape = GpuTierOptions {
            schema: &opened.schema,
            cache_shape: &shape(self.config.cache.size, &opened.schema, options)?,
            cache_options: options,
            contexts: batcher.workers,
            max_samples: batcher.max_samples,
            staging_bytes: self.config.cache.staging_bytes,
        };
        let tier = GpuLookupTier::new(device.clone(), &shape).map_err(|e| InputError(e.into()))?;
        Ok((LookupTier::Gpu(tier), memory))
    }
}

/// Gets the memory of a cache on the host, unless the system has less: then it is taken as the cache fills.
fn prefault(cache: &FlatCache) {
    // At most the bytes of the setting, and less if all rows take less.
    let bytes = cache.stats().total_bytes;
    match available_bytes() {
        Some(free) if free < bytes => tracing::warn!(
            bytes,
            free,
            "the cache may become larger than the free memory: the system ends the server if it does"
        ),
        _ => cache.prefault(),
    }
}

/// Whether the tables take at most half of the machine's memory. The other half is for everything else.
fn fits_ram(opened: &Opened) -> bool {
    memory_bytes().is_none_or(|ram| opened.store.row_bytes() <= ram / 2)
}

/// The configured options without pointers. For `lfu` the rows of `ranked` are moved into the options.
fn options(config: &CacheConfig, ranked: &mut Vec<RowId>, opened: &Opened) -> CacheOptions {
    CacheOptions {
        admission: match config.admission {
            CacheAdmission::All => AdmissionOption::ALL,
            CacheAdmission::Probability(p) => AdmissionOption::Probability { p, seed: 0 },
            CacheAdmission::Frequency(misses) => AdmissionOption::Frequency { misses },
        },
        eviction: match config.eviction {
            CacheEviction::Lru => EvictionOption::Lru,
            CacheEviction::Lfu => EvictionOption::Lfu(std::mem::take(ranked)),
        },
        watermarks: Watermarks { high: config.high_watermark, low: config.low_watermark },
        // The configuration accepts 2 to 64 bits only, so the fallback is not used.
        key_width: KeyWidth::new(config.key_bits).unwrap_or(KeyWidth::W64),
        version: opened.store.version(),
        switch_wait: SWITCH_WAIT,
        ..CacheOptions::default()
    }
}

/// Most rows that the cache may point at.
fn pointers(config: &CacheConfig, opened: &Opened) -> u64 {
    if config.pointers == 0.0 {
        return 0;
    }
    if !fits_ram(opened) {
        tracing::warn!(
            "cache.pointers: no pointers are used, because the tables do not fit in half of the memory"
        );
        return 0;
    }
    let rows: f64 = opened.store.tables().iter().map(|table| table.rows() as f64).sum();
    (rows * config.pointers).ceil() as u64
}

fn shape(size: Option<CacheSize>, schema: &Schema, options: &CacheOptions) -> anyhow::Result<CacheShape> {
    let table =
        |t: &crate::schema::TableSchema| TableShape { rows: t.stored_rows(), row_bytes: t.row_bytes() };
    let tables = schema.tables.iter().map(table).collect();
    match size.unwrap_or(CacheSize::Fraction(DEFAULT_FRACTION)) {
        CacheSize::Fraction(fraction) => {
            Ok(CacheShape::for_options(fraction, tables, options).map_err(|e| InputError(e.into()))?)
        }
        CacheSize::Bytes(bytes) => {
            let bytes = usize::try_from(bytes).context("cache.bytes: more than this machine can address")?;
            Ok(CacheShape { bytes, tables })
        }
    }
}
