//! Simulates caches on a trace: one flat cache of all tables, and a cache of its own for each table.
//!
//! Hit rates include the first access of each row, which always misses. Only the server's default policy
//! may refuse to admit a missed row. A size is a fraction of the distinct rows of the trace. The flat cache
//! holds that fraction of all distinct rows, from any table. The per-table caches hold that fraction of the
//! distinct rows of each table: a static division in proportion to the tables (FLECHE, section 2.2). Both
//! round down, so the cache of a small table may hold no row.

mod arc;
mod lfu;
mod list;
mod lru;
mod optimal;
mod random;
mod s3fifo;
mod server;
#[cfg(test)]
mod tests;
mod wtinylfu;

use rayon::prelude::*;

use super::trace::Trace;
use crate::types::named;
pub use optimal::Future;

/// A simulated cache of keys. It starts empty.
pub trait Simulated {
    /// Uses a key. Returns whether the cache held it.
    fn access(&mut self, key: u32) -> bool;
}

/// Which rows a cache keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedPolicy {
    /// Least recently used.
    Lru,
    /// Least frequently used.
    Lfu,
    /// A random victim.
    Random,
    /// Adaptive replacement cache.
    Arc,
    /// Simple and scalable FIFO.
    S3Fifo,
    /// Windowed TinyLFU.
    WTinyLfu,
    /// The server's default: LRU, with admission at the second recent miss.
    ServerDefault,
}

named! {
    SimulatedPolicy: Lru = "lru", Lfu = "lfu", Random = "random", Arc = "arc", S3Fifo = "s3fifo",
    WTinyLfu = "wtinylfu", ServerDefault = "server"
}

impl SimulatedPolicy {
    /// An empty cache for `capacity` of the keys `0..keys`. Only the random policy uses `seed`.
    #[must_use]
    pub fn cache(self, capacity: usize, keys: u32, seed: u64) -> Box<dyn Simulated> {
        if capacity == 0 {
            return Box::new(NoRows);
        }
        match self {
            Self::Lru => Box::new(lru::Lru::new(capacity, keys)),
            Self::Lfu => Box::new(lfu::Lfu::new(capacity, keys)),
            Self::Random => Box::new(random::Random::new(capacity, keys, seed)),
            Self::Arc => Box::new(arc::Arc::new(capacity, keys)),
            Self::S3Fifo => Box::new(s3fifo::S3Fifo::new(capacity, keys)),
            Self::WTinyLfu => Box::new(wtinylfu::WTinyLfu::new(capacity, keys)),
            Self::ServerDefault => Box::new(server::ServerDefault::new(capacity, keys)),
        }
    }
}

/// A cache without room for a row.
struct NoRows;

impl Simulated for NoRows {
    fn access(&mut self, _: u32) -> bool {
        false
    }
}

/// Hits of one cache on one trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hits {
    /// Hits by table.
    pub tables: Vec<u64>,
}

impl Hits {
    #[must_use]
    pub(crate) fn total(&self) -> u64 {
        self.tables.iter().sum()
    }
}

/// The hits of caches of one size.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SizeHits {
    /// The size as a fraction of the distinct rows.
    pub fraction: f64,
    /// Rows of the flat cache.
    pub rows: usize,
    /// Rows of the per-table caches, by table.
    pub table_rows: Vec<usize>,
    pub flat: CacheHits,
    pub per_table: CacheHits,
}

/// The hits of one kind of cache under every policy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CacheHits {
    /// In the order of [`SimulatedPolicy::ALL`].
    pub policies: Vec<Hits>,
    /// Hits of the optimal policy, which knows the future.
    pub optimal: Hits,
}

impl CacheHits {
    #[must_use]
    pub(crate) fn of(&self, policy: SimulatedPolicy) -> &Hits {
        &self.policies[policy as usize]
    }
}

/// This fraction of `rows`, rounded down.
#[must_use]
pub fn share(fraction: f64, rows: u32) -> usize {
    // Casting a float rounds down and saturates.
    ((fraction * f64::from(rows)) as usize).min(rows as usize)
}

/// Runs a trace through every cache of every size. `fractions` are from 0 to 1. Uses the threads of the
/// current pool. Each thread takes at most about 30 bytes per distinct row. LFU takes 16 more per access of
/// the hottest row. All threads share 12 bytes per access.
#[must_use]
pub(crate) fn simulate(trace: &Trace, fractions: &[f64], seed: u64) -> Vec<SizeHits> {
    let tables = trace.table_of_keys();
    let simulation = Simulation { trace, tables: &tables, seed };
    let future = Future::of(&trace.accesses, trace.keys());
    let table_futures = simulation.table_futures();
    let jobs: Vec<(f64, Job)> =
        fractions.iter().flat_map(|&fraction| Job::all().map(move |job| (fraction, job))).collect();
    let mut hits = jobs
        .par_iter()
        .map(|&(fraction, job)| match job {
            Job::Flat(policy) => simulation.flat(policy, fraction),
            Job::FlatOptimal => simulation.flat_optimal(&future, fraction),
            Job::PerTable(policy) => simulation.per_table(policy, fraction),
            Job::PerTableOptimal => simulation.per_table_optimal(&table_futures, fraction),
        })
        .collect::<Vec<Hits>>()
        .into_iter();
    let mut take = || CacheHits {
        policies: hits.by_ref().take(SimulatedPolicy::ALL.len()).collect(),
        optimal: hits.next().unwrap_or_default(),
    };
    let size = |&fraction: &f64| SizeHits {
        fraction,
        rows: share(fraction, trace.keys()),
        table_rows: simulation.table_rows(fraction),
        flat: take(),
        per_table: take(),
    };
    fractions.iter().map(size).collect()
}

/// One simulation to run for a size.
#[derive(Clone, Copy)]
enum Job {
    Flat(SimulatedPolicy),
    FlatOptimal,
    PerTable(SimulatedPolicy),
    PerTableOptimal,
}

impl Job {
    /// All jobs of a size, in the order in which [`simulate`] takes their results.
    fn all() -> impl Iterator<Item = Self> {
        let flat = SimulatedPolicy::ALL.into_iter().map(Self::Flat).chain([Self::FlatOptimal]);
        flat.chain(SimulatedPolicy::ALL.into_iter().map(Self::PerTable)).chain([Self::PerTableOptimal])
    }
}

/// The inputs that all simulations of a trace share.
#[derive(Clone, Copy)]
struct Simulation<'t> {
    trace: &'t Trace,
    /// By key: the index of its table.
    tables: &'t [u32],
    seed: u64,
}

/// The accesses of one table, with its keys counted from 0, and their future.
struct TableFuture {
    accesses: Vec<u32>,
    future: Future,
}

impl Simulation<'_> {
    fn flat(&self, policy: SimulatedPolicy, fraction: f64) -> Hits {
        let keys = self.trace.keys();
        let mut cache = policy.cache(share(fraction, keys), keys, self.seed);
        self.count(|key, _| cache.access(key))
    }

    fn per_table(&self, policy: SimulatedPolicy, fraction: f64) -> Hits {
        let caches = self.table_rows(fraction).into_iter().zip(&self.trace.tables).enumerate();
        let cache = |(t, (rows, table)): (usize, (usize, &super::trace::TraceTable))| {
            (table.keys.start, policy.cache(rows, table.keys.len() as u32, self.seed ^ t as u64))
        };
        let mut caches: Vec<_> = caches.map(cache).collect();
        self.count(|key, table| {
            let (first, cache) = &mut caches[table];
            cache.access(key - *first)
        })
    }

    fn flat_optimal(&self, future: &Future, fraction: f64) -> Hits {
        let mut hits = Hits { tables: vec![0; self.trace.tables.len()] };
        let keys = self.trace.keys();
        future.run(&self.trace.accesses, keys, share(fraction, keys), |key, hit| {
            hits.tables[self.tables[key as usize] as usize] += u64::from(hit);
        });
        hits
    }

    fn per_table_optimal(&self, futures: &[TableFuture], fraction: f64) -> Hits {
        let rows = self.table_rows(fraction);
        let table_hits = |(t, table): (usize, &TableFuture)| {
            let (mut hits, keys) = (0, self.trace.tables[t].keys.len() as u32);
            table.future.run(&table.accesses, keys, rows[t], |_, hit| hits += u64::from(hit));
            hits
        };
        Hits { tables: futures.iter().enumerate().map(table_hits).collect() }
    }

    fn table_futures(&self) -> Vec<TableFuture> {
        let tables = self.trace.tables.iter();
        let mut accesses: Vec<Vec<u32>> = tables.map(|t| Vec::with_capacity(t.accesses as usize)).collect();
        for &key in &self.trace.accesses {
            let table = self.tables[key as usize] as usize;
            accesses[table].push(key - self.trace.tables[table].keys.start);
        }
        let future = |(table, accesses): (&super::trace::TraceTable, Vec<u32>)| {
            let future = Future::of(&accesses, table.keys.len() as u32);
            TableFuture { accesses, future }
        };
        self.trace.tables.iter().zip(accesses).map(future).collect()
    }

    fn table_rows(&self, fraction: f64) -> Vec<usize> {
        self.trace.tables.iter().map(|table| share(fraction, table.keys.len() as u32)).collect()
    }

    fn count(&self, mut access: impl FnMut(u32, usize) -> bool) -> Hits {
        let mut hits = Hits { tables: vec![0; self.trace.tables.len()] };
        for &key in &self.trace.accesses {
            let table = self.tables[key as usize] as usize;
            hits.tables[table] += u64::from(access(key, table));
        }
        hits
    }
}
