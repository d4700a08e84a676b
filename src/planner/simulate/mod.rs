//! Caches simulated on a trace: the flat cache of all tables, a static cache a table, and the optimal.
//!
//! Every cache takes in every row that it misses, and every access counts, the first of a row too. The
//! flat cache of a size holds that fraction of all distinct rows of the trace, wherever they are; the
//! per-table cache gives each table that fraction of its own distinct rows, as a static division in
//! proportion to the tables does (FLECHE 2.2). Both round down, a table's share possibly to no row.

mod arc;
mod lfu;
mod list;
mod lru;
mod optimal;
mod random;
mod s3fifo;
#[cfg(test)]
mod tests;
mod wtinylfu;

use rayon::prelude::*;

use super::trace::Trace;
pub use optimal::Future;

/// A cache of keys, none of them in it when it is made.
pub trait Simulated {
    /// Asks for a key: whether it was there. It is from then on.
    fn access(&mut self, key: u32) -> bool;
}

/// Which row leaves a full cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Least recently used.
    Lru,
    /// Least frequently used.
    Lfu,
    /// Any.
    Random,
    /// Adaptive replacement cache.
    Arc,
    /// Simple and scalable FIFO.
    S3Fifo,
    /// Windowed TinyLFU.
    WTinyLfu,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Lru, Self::Lfu, Self::Random, Self::Arc, Self::S3Fifo, Self::WTinyLfu];

    /// Its name in what is printed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Random => "random",
            Self::Arc => "arc",
            Self::S3Fifo => "s3fifo",
            Self::WTinyLfu => "wtinylfu",
        }
    }

    /// An empty cache of `capacity` of the keys `0..keys`. `seed` decides what is left to chance.
    #[must_use]
    pub fn cache(self, capacity: usize, keys: u32, seed: u64) -> Box<dyn Simulated> {
        if capacity == 0 {
            return Box::new(Nothing);
        }
        match self {
            Self::Lru => Box::new(lru::Lru::new(capacity, keys)),
            Self::Lfu => Box::new(lfu::Lfu::new(capacity, keys)),
            Self::Random => Box::new(random::Random::new(capacity, keys, seed)),
            Self::Arc => Box::new(arc::Arc::new(capacity, keys)),
            Self::S3Fifo => Box::new(s3fifo::S3Fifo::new(capacity, keys)),
            Self::WTinyLfu => Box::new(wtinylfu::WTinyLfu::new(capacity, keys)),
        }
    }
}

/// A cache of no rows.
struct Nothing;

impl Simulated for Nothing {
    fn access(&mut self, _: u32) -> bool {
        false
    }
}

/// Hits of one cache on one trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hits {
    /// By table.
    pub tables: Vec<u64>,
}

impl Hits {
    /// Over all tables.
    #[must_use]
    pub(crate) fn total(&self) -> u64 {
        self.tables.iter().sum()
    }
}

/// What caches of one size do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SizeHits {
    /// The size, of all distinct rows.
    pub fraction: f64,
    /// The flat cache's rows.
    pub rows: usize,
    /// The per-table cache's rows, by table.
    pub table_rows: Vec<usize>,
    /// The flat cache, in the order of [`Policy::ALL`].
    pub flat: Vec<Hits>,
    /// The per-table cache, likewise.
    pub per_table: Vec<Hits>,
    /// The optimal flat cache.
    pub optimal: Hits,
}

/// The rows that a fraction of `rows` is.
#[must_use]
pub fn share(fraction: f64, rows: u32) -> usize {
    // A cast of a float rounds down and saturates.
    ((fraction * f64::from(rows)) as usize).min(rows as usize)
}

/// Runs a trace through every cache of every size, fractions from 0 to 1. On as many threads as the
/// current pool has, each with at most about 30 bytes a distinct row; LFU with 16 more for each access of the
/// hottest row.
#[must_use]
pub(crate) fn simulate(trace: &Trace, fractions: &[f64], seed: u64) -> Vec<SizeHits> {
    let tables = trace.table_of_keys();
    let future = Future::of(&trace.accesses, trace.keys());
    let bench = Bench { trace, tables: &tables, seed };
    let jobs: Vec<(f64, Job)> =
        fractions.iter().flat_map(|&fraction| Job::all().map(move |job| (fraction, job))).collect();
    let mut hits = jobs
        .par_iter()
        .map(|&(fraction, job)| match job {
            Job::Flat(policy) => bench.flat(policy, fraction),
            Job::PerTable(policy) => bench.per_table(policy, fraction),
            Job::Optimal => bench.optimal(&future, fraction),
        })
        .collect::<Vec<Hits>>()
        .into_iter();
    let mut take = |count: usize| hits.by_ref().take(count).collect::<Vec<Hits>>();
    let size = |&fraction: &f64| SizeHits {
        fraction,
        rows: share(fraction, trace.keys()),
        table_rows: bench.table_rows(fraction),
        flat: take(Policy::ALL.len()),
        per_table: take(Policy::ALL.len()),
        optimal: take(1).pop().unwrap_or_default(),
    };
    fractions.iter().map(size).collect()
}

/// One simulation of one size.
#[derive(Clone, Copy)]
enum Job {
    Flat(Policy),
    PerTable(Policy),
    Optimal,
}

impl Job {
    /// All, in the order that [`simulate`] takes their results.
    fn all() -> impl Iterator<Item = Self> {
        let flat = Policy::ALL.into_iter().map(Self::Flat);
        flat.chain(Policy::ALL.into_iter().map(Self::PerTable)).chain([Self::Optimal])
    }
}

/// What all simulations of a trace share.
#[derive(Clone, Copy)]
struct Bench<'t> {
    trace: &'t Trace,
    tables: &'t [u32],
    seed: u64,
}

impl Bench<'_> {
    fn flat(&self, policy: Policy, fraction: f64) -> Hits {
        let keys = self.trace.keys();
        let mut cache = policy.cache(share(fraction, keys), keys, self.seed);
        self.count(|key, _| cache.access(key))
    }

    fn per_table(&self, policy: Policy, fraction: f64) -> Hits {
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

    fn optimal(&self, future: &Future, fraction: f64) -> Hits {
        let mut hits = Hits { tables: vec![0; self.trace.tables.len()] };
        let keys = self.trace.keys();
        future.run(&self.trace.accesses, keys, share(fraction, keys), |key, hit| {
            hits.tables[self.tables[key as usize] as usize] += u64::from(hit);
        });
        hits
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
