//! A model's cache, as the configuration has it.

use anyhow::Context;

use crate::cache::key::KeyWidth;
use crate::cache::policy::Watermarks;
use crate::cache::{AdmissionOption, CacheOptions, CacheShape, EvictionOption, FlatCache, TableShape};
use crate::cli::InputError;
use crate::config::{CacheAdmission, CacheConfig, CacheEviction, CacheMode, CacheSize};
use crate::device::host;
use crate::planner::counts::Ranked;
use crate::schema::Schema;
use crate::store::{Opened, PlainMemory};
use crate::types::TableId;

/// Share of the rows that a cache holds when its size is not given.
const DEFAULT_FRACTION: f64 = 0.1;

/// A cache in front of a model's store, and what was known of the store's rows.
pub(super) struct Fronted {
    pub cache: FlatCache,
    /// The model's rows by descending count, where counts were given.
    pub ranked: Vec<(TableId, u64)>,
}

/// The counts that the configuration names, if it names any.
pub(super) fn counts(config: &CacheConfig) -> anyhow::Result<Option<Ranked>> {
    let Some(path) = &config.counts else { return Ok(None) };
    let ranked = Ranked::read(path).map_err(|e| InputError(e.into())).context("cache.counts")?;
    Ok(Some(ranked))
}

/// The cache in front of a model's store, if there is to be one. Where it is to point at rows, the store is brought
/// into RAM.
pub(super) fn make(
    config: &CacheConfig,
    counts: Option<&Ranked>,
    opened: &mut Opened,
) -> anyhow::Result<Option<Fronted>> {
    let on = match config.mode {
        CacheMode::On => true,
        CacheMode::Off => false,
        // A cache of RAM in RAM only costs.
        CacheMode::Auto => !fits_ram(opened),
    };
    if !on {
        if config.size.is_some() {
            tracing::warn!("cache.bytes or cache.fraction is given, but cache.mode auto means off here");
        }
        return Ok(None);
    }
    let mut ranked = counts.map_or_else(Vec::new, |counts| rows_of(counts, &opened.schema));
    if counts.is_some() && ranked.is_empty() {
        tracing::warn!("cache.counts: no row of this model's tables is in it");
    }
    let mut options = CacheOptions {
        admission: match config.admission {
            CacheAdmission::All => AdmissionOption::ALL,
            CacheAdmission::Probability(p) => AdmissionOption::Probability { p, seed: 0 },
            CacheAdmission::Frequency(misses) => AdmissionOption::Frequency { misses },
        },
        eviction: match config.eviction {
            CacheEviction::Lru => EvictionOption::Lru,
            CacheEviction::Lfu => EvictionOption::Lfu(std::mem::take(&mut ranked)),
        },
        watermarks: Watermarks { high: config.high_watermark, low: config.low_watermark },
        // The configuration takes no other width.
        key_width: KeyWidth::new(config.key_bits).unwrap_or(KeyWidth::W64),
        pointers: pointers(config, opened),
        version: opened.store.version(),
        background: true,
    };
    if options.pointers > 0 {
        opened.store = opened.store.rows_copied(&PlainMemory).context("cache.pointers: tables to RAM")?;
    }
    let shape = shape(config.size, &opened.schema, &options)?;
    let cache = FlatCache::new(&shape, &options).map_err(|e| InputError(e.into()))?;
    if let EvictionOption::Lfu(rows) = std::mem::take(&mut options.eviction) {
        ranked = rows;
    }
    Ok(Some(Fronted { cache, ranked }))
}

/// Whether the tables take at most half of the memory: half is left to whatever else there is.
pub(super) fn fits_ram(opened: &Opened) -> bool {
    host::memory_bytes().is_none_or(|ram| opened.store.row_bytes() <= ram / 2)
}

/// At how many rows the cache may point.
fn pointers(config: &CacheConfig, opened: &Opened) -> u64 {
    if config.pointers == 0.0 {
        return 0;
    }
    if !fits_ram(opened) {
        tracing::warn!("cache.pointers: the tables do not fit in half of the memory; nothing is pointed at");
        return 0;
    }
    tracing::warn!("cache.pointers: on the host device a pointer saves nothing over a miss; 0 is faster");
    let rows: f64 = opened.store.tables().iter().map(|table| table.rows() as f64).sum();
    (rows * config.pointers).ceil() as u64
}

/// The rows of a model's tables that counts name, in descending order.
fn rows_of(counts: &Ranked, schema: &Schema) -> Vec<(TableId, u64)> {
    let table = |name: &str| schema.tables.iter().position(|table| table.name == name);
    let tables: Vec<Option<usize>> = counts.tables.iter().map(|ranked| table(&ranked.name)).collect();
    let row = |row: crate::planner::counts::RankedRow| {
        let table = tables[row.table]?;
        (row.row < schema.tables[table].stored_rows()).then_some((TableId(table as u32), row.row))
    };
    counts.hottest().into_iter().filter_map(row).collect()
}

fn shape(size: Option<CacheSize>, schema: &Schema, options: &CacheOptions) -> anyhow::Result<CacheShape> {
    let table = |t: &crate::schema::Table| TableShape { rows: t.stored_rows(), row_bytes: t.row_bytes() };
    let tables = schema.tables.iter().map(table).collect();
    match size.unwrap_or(CacheSize::Fraction(DEFAULT_FRACTION)) {
        CacheSize::Fraction(fraction) => {
            Ok(CacheShape::for_options(fraction, tables, options).map_err(|e| InputError(e.into()))?)
        }
        CacheSize::Bytes(bytes) => {
            let bytes = usize::try_from(bytes).context("cache.bytes: past this machine's memory")?;
            Ok(CacheShape { bytes, tables })
        }
    }
}
