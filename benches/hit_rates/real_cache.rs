//! Runs the real cache on a trace: the cache operations of the engine, without a model.

use flechette::cache::{AdmissionOption, CacheOptions, CacheShape, EvictStep, FlatCache, Query, TableShape};
use flechette::planner::trace::Trace;
use flechette::types::TableId;

use crate::{Rates, Tally};

/// Elements per row.
const DIM: usize = 16;

/// The result of a run.
#[derive(Clone, Copy, Default)]
pub struct Run {
    pub rates: Rates,
    /// Mean number of cached rows over the batches of the second half.
    pub mean_rows: f64,
}

/// Runs a trace in batches of `samples` samples through a cache of at most `rows` rows.
pub fn run(trace: &Trace, rows: usize, samples: usize, admission: AdmissionOption) -> anyhow::Result<Run> {
    let options = CacheOptions { background: false, admission, ..CacheOptions::default() };
    let cache = FlatCache::new(&shape(trace, rows, &options)?, &options)?;
    let width = trace.tables.len();
    let (mut query, mut tally, mut held) = (Query::default(), Tally::of(trace), Vec::new());
    let row = [0; 4 * DIM];
    for batch in trace.accesses.chunks(width * samples) {
        let pin = cache.pin();
        query.clear();
        for (t, table) in trace.tables.iter().enumerate() {
            let keys = batch.iter().skip(t).step_by(width);
            query.push(TableId(t as u32), keys.map(|key| u64::from(key - table.keys.start)));
        }
        let found = pin.lookup(&mut query)?;
        for miss in found.misses() {
            pin.insert(miss, &row)?;
        }
        tally.add(batch.len(), (batch.len() - found.misses().len()) as u64);
        drop(pin);
        while cache.evict_step() != EvictStep::Idle {}
        held.push(cache.stats().entries as f64);
    }
    let later = &held[held.len() / 2..];
    Ok(Run { rates: tally.rates(), mean_rows: later.iter().sum::<f64>() / later.len() as f64 })
}

/// The smallest shape that has slots and index entries for `rows` rows, found by bisection.
fn shape(trace: &Trace, rows: usize, options: &CacheOptions) -> anyhow::Result<CacheShape> {
    let table = |table: &flechette::planner::trace::TraceTable| TableShape {
        rows: table.keys.len() as u64,
        row_bytes: 4 * DIM,
    };
    let tables: Vec<TableShape> = trace.tables.iter().map(table).collect();
    let shape = |bytes: usize| CacheShape { bytes, tables: tables.clone() };
    let holds = |bytes: usize| {
        FlatCache::new(&shape(bytes), options).is_ok_and(|cache| {
            let stats = cache.stats();
            stats.pool_bytes >= (rows * DIM * 4) as u64 && stats.entry_capacity >= rows as u64
        })
    };
    let (mut too_few, mut enough) = (0, 4096);
    while !holds(enough) {
        too_few = enough;
        enough *= 2;
        anyhow::ensure!(enough < 1 << 36, "no shape of {rows} rows");
    }
    while enough - too_few > 64 {
        let middle = too_few + (enough - too_few) / 2;
        *(if holds(middle) { &mut enough } else { &mut too_few }) = middle;
    }
    Ok(shape(enough))
}
