//! The contract of a flat cache: properties that every implementation must fulfil. The implementations are
//! the cache on the host (`host`), on a simulated CUDA device (`cache/gpu/tests/cusim.rs`) and on NVIDIA's
//! driver (`cache/gpu/tests/cuda.rs`). A [`Subject`] runs batches. Its output is compared with rows that
//! encode their table, id and version, pooled by the host's kernel.
//!
//! This file has the subject and the properties of every cache. `world` has tables and batches, `versions`
//! switching, `pointers` the unified index, `narrow` keys that rows share, `warm` initial and hot rows, and
//! `hit_rate` the hit rate of the default policy.

mod hit_rate;
mod host;
pub(crate) mod narrow;
mod pointers;
mod versions;
pub(crate) mod warm;
mod world;

use std::collections::HashSet;
use std::time::Duration;

use crate::cache::{
    CacheError, CacheStats, EvictStep, EvictionOption, Switched, WATERMARKS, WarmRow, Warmed,
};
use crate::types::{Batch, RowId, TableId};
use proptest::prelude::*;

pub(crate) use pointers::*;
pub(crate) use versions::*;
pub(crate) use world::*;

/// The result of a batch.
pub(crate) struct Seen {
    pub matrix: Vec<f32>,
    /// The missing rows that the subject fetched from the store.
    pub fetched: Vec<RowId>,
    pub version: u64,
}

/// Rows to warm a cache with.
pub(crate) type Rows<'i, 'r> = dyn Iterator<Item = WarmRow<'r>> + 'i;

/// A cache implementation and one worker that runs batches on it.
pub(crate) trait Subject: Send + Sync + Sized {
    /// Runs a batch. If rows are missing, `meanwhile` is called after the lookup and before any row is read.
    fn embed(&mut self, world: &World, batch: &Batch, meanwhile: impl FnOnce()) -> Seen;
    /// Another worker of the same cache.
    fn another(&self, world: &World) -> Self;
    fn version(&self) -> u64;
    fn switch(&self, version: u64, changed: &[(TableId, u64, &[u8])]) -> Result<Switched, String>;
    /// Allows pointers to the rows of a table in the current version until the result is dropped. Dropping it
    /// overwrites the rows, so that a late read shows.
    fn host_rows(&self, world: &World, table: TableId) -> Box<dyn Send>;
    fn set_pointers(&self, capacity: u64);
    fn observe(&self, ids: u64, elapsed: Duration);
    fn evict_step(&self) -> EvictStep;
    /// Waits until no operation is pending.
    fn settle(&self);
    fn stats(&self) -> CacheStats;
    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError>;
    fn hot_rows(&mut self) -> Vec<RowId>;
}

/// Runs a batch and checks its output and its counts. Returns hits and misses.
pub(crate) fn run(subject: &mut impl Subject, world: &World, batch: &Batch) -> (u64, u64) {
    let (before, pointed_before) = (totals(&subject.stats()), pointed(&subject.stats()));
    let Seen { matrix, fetched, version } = subject.embed(world, batch, || ());
    world.assert_is(&matrix, batch, version);
    let distinct: HashSet<_> = fetched.iter().collect();
    assert_eq!(distinct.len(), fetched.len(), "each missing row is fetched once");
    let wanted: HashSet<RowId> = world
        .lookups
        .iter()
        .flat_map(|l| batch.features[l.feature].ids.iter().map(move |&id| (l, id)))
        .filter(|(l, id)| *id < world.tables[l.table.index()].rows)
        .map(|(l, id)| RowId::new(l.table, id))
        .collect();
    assert!(fetched.iter().all(|row| wanted.contains(row)), "only rows of the batch are fetched");
    let after = totals(&subject.stats());
    let (hits, misses) = (after.0 - before.0, after.1 - before.1);
    let pointed = pointed(&subject.stats()) - pointed_before;
    assert_eq!(hits + pointed + misses, world.present(batch), "each occurrence is counted once");
    assert_eq!(misses, fetched.len() as u64, "each missed row is counted once");
    (hits, misses)
}

pub(crate) fn totals(stats: &CacheStats) -> (u64, u64, u64) {
    let sum = |of: fn(&crate::cache::stats::TableStats) -> u64| stats.tables.iter().map(of).sum();
    (sum(|t| t.hits), sum(|t| t.misses), sum(|t| t.evictions))
}

pub(crate) fn pointed(stats: &CacheStats) -> u64 {
    stats.tables.iter().map(|table| table.pointed).sum()
}

pub(crate) fn settle(subject: &impl Subject) {
    for _ in 0..10_000 {
        subject.settle();
        if subject.evict_step() == EvictStep::Idle {
            return;
        }
    }
    panic!("eviction does not become idle");
}

pub(crate) fn a_hit_is_the_row_inserted<S: Subject>(
    new: impl Fn(&World) -> S,
    world: &World,
    batches: usize,
    draw: u64,
) {
    let (mut subject, mut draw) = (new(world), draw);
    for i in 0..batches {
        let batch = world.bags(i * 5 % 17, 120, &mut draw);
        run(&mut subject, world, &batch);
        if i % 3 == 0 {
            subject.evict_step();
        }
    }
    settle(&subject);
    let stats = subject.stats();
    assert_eq!(stats.entries, stats.inserted - totals(&stats).2);
    assert!(stats.total_bytes <= world.bytes as u64 && stats.pool_used_bytes <= stats.pool_bytes);
    let full = (stats.pool_used_bytes as f64 / stats.pool_bytes as f64)
        .max(stats.entries as f64 / stats.entry_capacity as f64);
    assert!(full <= WATERMARKS.high, "{full} in use after eviction");
}

pub(crate) fn all_miss_all_hit_and_a_mixture<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(1000, &[16, 4], 400 << 10);
    let mut subject = new(&world);
    let mut batch = |ids: std::ops::Range<u64>| {
        let ids: Vec<u64> = ids.collect();
        let seen = run(&mut subject, &world, &world.one_hot(&[ids.clone(), ids]));
        subject.settle();
        seen
    };
    assert_eq!(batch(0..40), (0, 80));
    assert_eq!(batch(0..40), (80, 0));
    assert_eq!(batch(20..60), (40, 40));
    assert_eq!(batch(0..60), (120, 0));
}

/// Holds for LRU, and for LFU too: no row here has a rank from a counts file, and LFU evicts such rows oldest
/// first.
pub(crate) fn eviction_goes_to_the_low_watermark_and_takes_the_oldest<S: Subject>(
    new: impl Fn(&World) -> S,
    eviction: EvictionOption,
) {
    let world = World::new(100_000, &[16], 128 << 10).with(|options| options.eviction = eviction);
    let mut subject = new(&world);
    let mut next = 20;
    let share = |stats: &CacheStats| {
        let pool = stats.pool_used_bytes as f64 / stats.pool_bytes as f64;
        pool.max(stats.entries as f64 / stats.entry_capacity as f64)
    };
    while share(&subject.stats()) <= WATERMARKS.high {
        // The first 20 rows are used in every batch.
        let ids = (0..20).chain(next..next + 44).collect();
        run(&mut subject, &world, &world.one_hot(&[ids]));
        subject.settle();
        next += 44;
    }
    let before = subject.stats();
    settle(&subject);
    let after = subject.stats();
    let left = share(&after);
    assert!(left <= WATERMARKS.low && left > WATERMARKS.low - 0.02, "{left} left");
    let evicted = before.entries - after.entries;
    let mut present = |ids: std::ops::Range<u64>| {
        let (mut hits, wanted) = (0, ids.end - ids.start);
        for start in ids.step_by(10) {
            let ids: Vec<u64> = (start..start + 10).collect();
            hits += run(&mut subject, &world, &world.one_hot(&[ids])).0;
        }
        hits as f64 / wanted as f64
    };
    assert_eq!(present(0..20), 1.0, "the rows in use stay");
    assert!(present(next - 200..next) > 0.97, "the newest rows stay");
    let oldest = present(20..20 + evicted / 10 * 10);
    assert!(oldest < 0.5, "{oldest} of the oldest rows are still there");
}

pub(crate) fn memory_passes_from_one_row_size_to_another<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(10_000, &[16, 5], 12 << 10);
    let mut subject = new(&world);
    for (t, other) in [(0, 1), (1, 0), (0, 1)] {
        let of = |ids: Vec<u64>| {
            let mut columns = vec![vec![10_000; ids.len()]; 2];
            columns[t] = ids;
            world.one_hot(&columns)
        };
        for start in 0..40u64 {
            run(&mut subject, &world, &of((start * 20..start * 20 + 20).collect()));
            subject.evict_step();
        }
        let mut hits = 0;
        for _ in 0..60 {
            hits = run(&mut subject, &world, &of((0..60).collect())).0;
            settle(&subject);
        }
        assert_eq!(hits, 60, "table {t} did not get the memory of table {other}");
    }
}

/// Checks that the counts are consistent. No operation may be pending.
pub(crate) fn assert_adds_up(stats: &CacheStats) {
    let evictions = totals(stats).2;
    assert_eq!(stats.entries, stats.inserted + stats.pointers - evictions, "{stats:?}");
    assert!(stats.pool_used_bytes <= stats.pool_bytes && stats.entries <= 2 * stats.entry_capacity);
}

/// Random operations for [`whatever_happens_a_row_is_its_batchs_versions`].
pub(crate) fn any_steps() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..20, 1..60)
}

/// Tables of 120 rows in a cache of random size, with a random choice of pointers, key width and eviction
/// policy.
pub(crate) fn any_world() -> impl Strategy<Value = World> {
    let dims = prop::collection::vec(1usize..20, 1..4);
    let bits = prop_oneof![Just(64), 4u32..12];
    (dims, 0usize..6000, 0u64..300, bits, any::<bool>()).prop_map(|(dims, room, pointers, bits, by_rank)| {
        let world = World::new(120, &dims, room).with_a_shared_feature().with_pointers(pointers);
        let ranked = (0..60).map(|id| RowId::new(TableId(0), id)).collect();
        narrow::keys(world, bits).with(|options| {
            options.eviction = if by_rank { EvictionOption::Lfu(ranked) } else { EvictionOption::Lru };
        })
    })
}
