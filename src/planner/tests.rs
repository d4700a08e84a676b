//! The hit rate that `plan` predicts, compared with that of a server's cache of the planned bytes, which
//! processes skewed accesses in batches.

use crate::cache::{CacheOptions, CacheShape, EvictStep, FlatCache, Query, TableShape};
use crate::dataset::{self, Format, ReadOptions};
use crate::planner::report::Plan;
use crate::planner::simulate::{SimulatedPolicy, share};
use crate::planner::trace::{Trace, TraceBuilder};
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::types::{Batch, RawBatch, TableId};

const TABLES: usize = 8;
const ROW_BYTES: usize = 64;
/// Samples of a batch.
const BATCH: usize = 64;

fn trace(skew: &str) -> Trace {
    let shape = SyntheticShape { tables: TABLES, rows: 3000, dense: 0, multi_hot: None };
    let schema = preset::synthetic(ArchKind::Dcn, 16, shape);
    let data = format!("rows=12000,skew={skew}");
    let mut reader =
        dataset::open(Format::Synthetic, &[data.into()], &schema, ReadOptions::default()).unwrap();
    let (mut raw, mut batch, mut trace) = (RawBatch::default(), Batch::default(), TraceBuilder::new(&schema));
    while reader.read(1000, &mut raw).unwrap() > 0 {
        schema.encode(&raw, &mut batch).unwrap();
        trace.append(&batch).unwrap();
    }
    trace.finish(1.0)
}

fn simulated(trace: &Trace, policy: SimulatedPolicy, rows: usize) -> f64 {
    let mut cache = policy.cache(rows, trace.keys(), 0);
    let hits = trace.accesses.iter().filter(|&&key| cache.access(key)).count();
    hits as f64 / trace.accesses.len() as f64
}

/// The hit rate that a server's cache reports with the planned `cache.bytes` for `rows` rows.
fn served(trace: &Trace, rows: usize) -> f64 {
    let options = CacheOptions { background: false, ..CacheOptions::default() };
    let tables = trace.tables.iter().map(|t| TableShape { rows: t.keys.len() as u64, row_bytes: ROW_BYTES });
    let bytes = Plan::of(trace, &[], 0).bytes(rows) as usize;
    let cache = FlatCache::new(&CacheShape { bytes, tables: tables.collect() }, &options).unwrap();
    let mut query = Query::default();
    for batch in trace.accesses.chunks(TABLES * BATCH) {
        let pin = cache.pin();
        query.clear();
        for (t, table) in trace.tables.iter().enumerate() {
            let keys = batch.iter().skip(t).step_by(TABLES);
            query.push(TableId(t as u32), keys.map(|key| u64::from(key - table.keys.start)));
        }
        let found = pin.lookup(&mut query).unwrap();
        for miss in found.misses() {
            pin.insert(miss, &[0; ROW_BYTES]).unwrap();
        }
        drop(pin);
        while cache.evict_step() != EvictStep::Idle {}
    }
    let stats = cache.stats();
    let hits: u64 = stats.tables.iter().map(|table| table.hits).sum();
    hits as f64 / trace.accesses.len() as f64
}

#[test]
fn a_server_hits_at_most_a_point_less_than_predicted_and_than_the_best_policy() {
    for skew in ["medium", "high", "1.1"] {
        let trace = trace(skew);
        for fraction in [0.05, 0.2] {
            let rows = share(fraction, trace.keys());
            let got = served(&trace, rows);
            let policies = SimulatedPolicy::ALL.map(|policy| simulated(&trace, policy, rows));
            let best = policies.into_iter().fold(0.0, f64::max);
            let predicted = simulated(&trace, SimulatedPolicy::ServerDefault, rows);
            let about = format!(
                "skew {skew}, {rows} of {} rows: served {got:.4}, predicted {predicted:.4}, best {best:.4}",
                trace.keys()
            );
            eprintln!("{about}");
            assert!(best - got <= 0.01, "{about}");
        }
    }
}
