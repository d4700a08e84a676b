//! The hit rate of the default policy with batches, as a server forms them, compared with simulated policies
//! that process one access at a time.

use crate::cache::{CacheOptions, CacheShape, EvictStep, FlatCache, Query, TableShape};
use crate::mem::mix64;
use crate::planner::simulate::{SimulatedPolicy, share};
use crate::planner::trace::{Trace, TraceBuilder};
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::types::TableId;

const TABLES: usize = 26;
const ROWS: u64 = 1000;
const ROW: [u8; 64] = [1; 64];

/// A trace in which each id of a table has a probability of about `1 / rank`.
fn trace(samples: u64) -> Trace {
    let shape = SyntheticShape { tables: TABLES, rows: ROWS, dense: 0, multi_hot: None };
    let mut trace = TraceBuilder::new(&preset::synthetic(ArchKind::Dcn, 16, shape));
    for access in 0..samples * TABLES as u64 {
        let uniform = mix64(access) as f64 / 2f64.powi(64);
        let table = TableId((access % TABLES as u64) as u32);
        trace.push(table, (ROWS as f64).powf(uniform) as u64 - 1).unwrap();
    }
    trace.finish(1.0)
}

/// The smallest cache with slots and index entries for `rows` rows.
fn cache_of(rows: usize) -> FlatCache {
    let options = CacheOptions { background: false, ..CacheOptions::default() };
    let tables = vec![TableShape { rows: ROWS, row_bytes: ROW.len() }; TABLES];
    let caches = (0..).map(|i| CacheShape { bytes: rows * ROW.len() + 256 * i, tables: tables.clone() });
    let mut caches = caches.filter_map(|shape| FlatCache::new(&shape, &options).ok());
    let holds = |cache: &FlatCache| {
        let stats = cache.stats();
        stats.pool_bytes >= (rows * ROW.len()) as u64 && stats.entry_capacity >= rows as u64
    };
    caches.find(holds).unwrap()
}

/// The share of accesses that hit, according to the cache's counters.
fn hit_rate(trace: &Trace, rows: usize, samples: usize) -> f64 {
    let (cache, mut query) = (cache_of(rows), Query::default());
    for batch in trace.accesses.chunks(TABLES * samples) {
        let pin = cache.pin();
        query.clear();
        for (t, table) in trace.tables.iter().enumerate() {
            let keys = batch.iter().skip(t).step_by(TABLES);
            query.push(TableId(t as u32), keys.map(|key| u64::from(key - table.keys.start)));
        }
        for miss in pin.lookup(&mut query).unwrap().misses() {
            pin.insert(miss, &ROW).unwrap();
        }
        drop(pin);
        while cache.evict_step() != EvictStep::Idle {}
    }
    let hits: u64 = cache.stats().tables.iter().map(|table| table.hits).sum();
    hits as f64 / trace.accesses.len() as f64
}

#[test]
fn in_batches_of_64_the_default_policy_is_within_a_point_of_the_best_simulated_policy() {
    for samples in [100, 1000] {
        let trace = trace(samples);
        for fraction in [0.05, 0.1, 0.2] {
            let rows = share(fraction, trace.keys());
            let rate = |policy: &SimulatedPolicy| {
                let mut cache = policy.cache(rows, trace.keys(), 1);
                let hits = trace.accesses.iter().filter(|&&key| cache.access(key)).count();
                hits as f64 / trace.accesses.len() as f64
            };
            let best = SimulatedPolicy::ALL.iter().map(rate).fold(0.0, f64::max);
            let got = hit_rate(&trace, rows, 64);
            assert!(got > best - 0.01, "{rows} of {} rows: {got}, best {best}", trace.keys());
        }
    }
}
