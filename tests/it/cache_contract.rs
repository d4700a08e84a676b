//! What a flat cache promises, as properties of any device: of the host's here, and of the simulated CUDA
//! device's in `cusim_cache`. A subject runs batches; what it gives is held against rows that say whose they are
//! and which version of them, pooled by the host's kernel.
//!
//! Here are the subjects and what every cache promises; in `narrow` what one of narrow keys does, in `warm` what
//! a cache begins with and holds.

pub mod narrow;
pub mod warm;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use flechette::cache::{
    AdmissionOption, CacheError, CacheOptions, CacheShape, CacheStats, EvictStep, EvictionOption, FlatCache,
    HostRows, Query, Source, Switched, TableShape, WATERMARKS, Warmed,
};
use flechette::compute::gather_pool as host;
use flechette::mem::mix64;
use flechette::schema::{Lookup, Pooling};
use flechette::types::{Batch, Element, Jagged, TableId, Version};
use proptest::prelude::*;

/// Tables, and what a batch looks up in them.
#[derive(Clone, Debug)]
pub struct World {
    pub tables: Vec<TableShape>,
    pub lookups: Vec<Lookup>,
    pub features: usize,
    pub dense_width: usize,
    pub stride: usize,
    pub bytes: usize,
    /// What the cache is to be like.
    pub options: CacheOptions,
}

/// Most samples and ids of a batch of a test.
pub const MAX_SAMPLES: usize = 64;
pub const MAX_IDS: usize = 4096;

impl World {
    /// A table of so many rows for each dim, and a feature for each table.
    pub fn new(rows: u64, dims: &[usize], bytes: usize) -> Self {
        let element = |t: usize| Element::ALL[t % 3];
        let table = |(t, &dim): (usize, &usize)| TableShape { rows, row_bytes: element(t).row_bytes(dim) };
        let tables: Vec<_> = dims.iter().enumerate().map(table).collect();
        let (dense_width, mut column) = (2, 3);
        let mut lookups = Vec::new();
        for (t, &dim) in dims.iter().enumerate() {
            let pooling = if t % 2 == 0 { Pooling::Sum } else { Pooling::Mean };
            let (table, element) = (TableId(t as u32), element(t));
            lookups.push(Lookup { feature: t, table, dim, element, pooling, column });
            column += dim;
        }
        let least = CacheShape::from_fraction(0.0, tables.clone()).bytes;
        let (features, stride, bytes) = (dims.len(), column, least + bytes);
        let options =
            CacheOptions { admission: AdmissionOption::ALL, background: false, ..CacheOptions::default() };
        Self { tables, lookups, features, dense_width, stride, bytes, options }
    }

    /// The same with other options, and as much room.
    pub fn with(mut self, options: impl FnOnce(&mut CacheOptions)) -> Self {
        let least =
            |world: &Self| CacheShape::for_options(0.0, world.tables.clone(), &world.options).unwrap().bytes;
        let before = least(&self);
        options(&mut self.options);
        self.bytes = self.bytes - before + least(&self);
        self
    }

    /// Lets the last feature be read from the first table of the same dim too.
    pub fn with_a_shared_feature(mut self) -> Self {
        let last = self.lookups[self.lookups.len() - 1];
        let first = self.lookups[0];
        self.lookups.push(Lookup { feature: last.feature, column: self.stride, ..first });
        self.stride += first.dim;
        self
    }

    /// Makes room for so many pointers.
    pub fn with_pointers(mut self, pointers: u64) -> Self {
        self.options.pointers = pointers;
        self.bytes += (pointers as usize).div_ceil(6) * 128;
        self
    }

    pub fn shape(&self) -> CacheShape {
        CacheShape { bytes: self.bytes, tables: self.tables.clone() }
    }

    /// A batch of one id a bag: sample `s` of feature `f` has `ids[f][s]`.
    pub fn one_hot(&self, ids: &[Vec<u64>]) -> Batch {
        let samples = ids[0].len();
        let column = |ids: &Vec<u64>| Jagged { offsets: (0..=samples as u32).collect(), ids: ids.clone() };
        let dense = (0..samples * self.dense_width).map(|i| i as f32).collect();
        Batch { samples, dense, features: ids.iter().map(column).collect() }
    }

    /// A batch of bags of 0 to 4 ids below `spread`, duplicates and absent ids among them.
    pub fn bags(&self, samples: usize, spread: u64, draw: &mut u64) -> Batch {
        let mut next = |limit: u64| {
            *draw = draw.wrapping_add(1);
            mix64(*draw) % limit
        };
        let mut batch = Batch::empty(self.features);
        batch.samples = samples;
        batch.dense = (0..samples * self.dense_width).map(|_| next(1000) as f32 - 500.0).collect();
        for feature in &mut batch.features {
            for _ in 0..samples {
                let ids: Vec<u64> =
                    (0..next(5)).map(|_| if next(20) == 0 { u64::MAX } else { next(spread) }).collect();
                feature.push(&ids);
            }
        }
        batch
    }

    /// The matrix that a batch is to give.
    pub fn expected(&self, batch: &Batch, version: u64) -> Vec<f32> {
        self.pooled(batch, |lookup, id| self.row(lookup.table, id, version))
    }

    /// Checks a batch's matrix against its rows of a version.
    pub fn assert_is(&self, matrix: &[f32], batch: &Batch, version: u64) {
        let expected = self.expected(batch, version);
        assert_eq!(matrix.len(), expected.len());
        for (i, (got, expected)) in matrix.iter().zip(&expected).enumerate() {
            let (sample, column) = (i / self.stride, i % self.stride);
            // The column that no lookup names may hold anything.
            let same = got.to_bits() == expected.to_bits() || column == self.dense_width;
            assert!(
                same,
                "sample {sample} column {column}: expected {expected}, got {got} {:x}",
                got.to_bits()
            );
        }
    }

    /// Pools whatever rows it is given.
    fn pooled(&self, batch: &Batch, row: impl Fn(&Lookup, u64) -> Option<Vec<u8>>) -> Vec<f32> {
        let mut out = vec![0.0; batch.samples * self.stride];
        for s in 0..batch.samples {
            let dense = &batch.dense[s * self.dense_width..][..self.dense_width];
            out[s * self.stride..][..self.dense_width].copy_from_slice(dense);
        }
        for lookup in &self.lookups {
            let feature = &batch.features[lookup.feature];
            let rows: Vec<Option<Vec<u8>>> = feature.ids.iter().map(|&id| row(lookup, id)).collect();
            let rows: Vec<Option<&[u8]>> = rows.iter().map(Option::as_deref).collect();
            let pool = host::PoolLookup {
                offsets: &feature.offsets,
                dim: lookup.dim,
                element: lookup.element,
                mean: lookup.pooling == Pooling::Mean,
                column: lookup.column,
            };
            host::gather_pool(&pool, &rows, &mut out, self.stride);
        }
        out
    }

    /// The bytes of a row as a version has it, which say in every value whose it is and which version made it;
    /// `None` for an absent id.
    pub fn row(&self, table: TableId, id: u64, version: u64) -> Option<Vec<u8>> {
        let lookup = self.lookups.iter().find(|l| l.table == table).unwrap();
        let made = (1..=version).rev().take(5).find(|&v| changes(v, id)).unwrap_or(0);
        let value = |i: usize| {
            let name = id << 30 | u64::from(table.0) << 20 | i as u64;
            ((mix64(name ^ mix64(made)) >> 48) as f32 - 32768.0) / 16.0
        };
        let values: Vec<f32> = (0..lookup.dim).map(value).collect();
        let mut row = vec![0; lookup.element.row_bytes(lookup.dim)];
        lookup.element.encode(&values, &mut row).unwrap();
        (id < self.tables[table.index()].rows).then_some(row)
    }

    /// All rows of a table as a version has them, one after the other.
    pub fn all_rows(&self, table: TableId, version: u64) -> Vec<u8> {
        (0..self.tables[table.index()].rows).flat_map(|id| self.row(table, id, version).unwrap()).collect()
    }

    /// Switches a cache to a version, with all rows that it changes.
    pub fn switch(&self, subject: &impl Subject, version: u64) -> Switched {
        let ids = |t: usize| (0..self.tables[t].rows).filter(|&id| changes(version, id));
        let row = |t, id| (TableId(t as u32), id, self.row(TableId(t as u32), id, version).unwrap());
        let rows: Vec<_> = (0..self.tables.len()).flat_map(|t| ids(t).map(move |id| row(t, id))).collect();
        let rows: Vec<_> = rows.iter().map(|(table, id, row)| (*table, *id, &row[..])).collect();
        subject.switch(version, &rows).unwrap()
    }

    /// Occurrences of a batch that have a row.
    fn present(&self, batch: &Batch) -> u64 {
        let of = |l: &Lookup| {
            let rows = self.tables[l.table.index()].rows;
            batch.features[l.feature].ids.iter().filter(|id| **id < rows).count() as u64
        };
        self.lookups.iter().map(of).sum()
    }
}

/// Which rows a version changes: every fifth.
fn changes(version: u64, id: u64) -> bool {
    version > 0 && id % 5 == version % 5
}

/// What came of a batch.
pub struct Seen {
    pub matrix: Vec<f32>,
    /// The rows that were asked for.
    pub fetched: Vec<(TableId, u64)>,
    /// The version that the batch was of.
    pub version: u64,
}

/// Rows that a cache is to begin with.
pub type Rows<'i, 'r> = dyn Iterator<Item = (TableId, u64, &'r [u8])> + 'i;

/// A cache and a worker of it.
pub trait Subject: Send + Sync + Sized {
    /// Runs a batch. Where rows are missing, `meanwhile` is called once the others are found, and before any is
    /// read.
    fn embed(&mut self, world: &World, batch: &Batch, meanwhile: impl FnOnce()) -> Seen;
    /// Another worker of the same cache.
    fn another(&self, world: &World) -> Self;
    fn version(&self) -> u64;
    fn switch(&self, version: u64, changed: &[(TableId, u64, &[u8])]) -> Result<Switched, String>;
    /// Lets the cache point at the rows of a table, as they are in its version, until this is dropped. Then they
    /// are overwritten.
    fn host_rows(&self, world: &World, table: TableId) -> Box<dyn Send>;
    fn set_pointers(&self, capacity: u64);
    fn observe(&self, ids: u64, elapsed: Duration);
    fn evict_step(&self) -> EvictStep;
    /// Until nothing is under way.
    fn settle(&self);
    fn stats(&self) -> CacheStats;
    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError>;
    fn hot_rows(&mut self) -> Vec<(TableId, u64)>;
}

/// Runs a batch and checks all that can be checked of one.
pub fn run(subject: &mut impl Subject, world: &World, batch: &Batch) -> (u64, u64) {
    let (before, pointed_before) = (totals(&subject.stats()), pointed(&subject.stats()));
    let Seen { matrix, fetched, version } = subject.embed(world, batch, || ());
    world.assert_is(&matrix, batch, version);
    let distinct: HashSet<_> = fetched.iter().collect();
    assert_eq!(distinct.len(), fetched.len(), "each missing row is fetched once");
    let wanted: HashSet<(TableId, u64)> = world
        .lookups
        .iter()
        .flat_map(|l| batch.features[l.feature].ids.iter().map(|&id| (l.table, id)))
        .collect();
    assert!(fetched.iter().all(|row| wanted.contains(row)), "only what the batch wants is fetched");
    let after = totals(&subject.stats());
    let (hits, misses) = (after.0 - before.0, after.1 - before.1);
    let pointed = pointed(&subject.stats()) - pointed_before;
    assert_eq!(hits + pointed + misses, world.present(batch), "each occurrence is counted once");
    assert_eq!(misses, fetched.len() as u64, "each missed row is counted once");
    (hits, misses)
}

pub fn totals(stats: &CacheStats) -> (u64, u64, u64) {
    let sum = |of: fn(&flechette::cache::TableStats) -> u64| stats.tables.iter().map(of).sum();
    (sum(|t| t.hits), sum(|t| t.misses), sum(|t| t.evictions))
}

fn pointed(stats: &CacheStats) -> u64 {
    stats.tables.iter().map(|table| table.pointed).sum()
}

pub fn settle(subject: &impl Subject) {
    for _ in 0..10_000 {
        subject.settle();
        if subject.evict_step() == EvictStep::Idle {
            return;
        }
    }
    panic!("eviction does not come to rest");
}

// ---- The properties. `new` makes a subject that evicts by hand. ----

pub fn a_hit_is_the_row_inserted<S: Subject>(
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

pub fn all_miss_all_hit_and_a_mixture<S: Subject>(new: impl Fn(&World) -> S) {
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

/// By age, or by the ranks of rows that have none.
pub fn eviction_goes_to_the_low_watermark_and_takes_the_oldest<S: Subject>(
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

pub fn memory_passes_from_one_row_size_to_another<S: Subject>(new: impl Fn(&World) -> S) {
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
        assert_eq!(hits, 60, "table {t} has taken the room of table {other}");
    }
}

// ---- Versions. ----

/// What must hold of the counts when nothing is under way.
fn assert_adds_up(stats: &CacheStats) {
    let evictions = totals(stats).2;
    assert_eq!(stats.entries, stats.inserted + stats.pointers - evictions, "{stats:?}");
    assert!(stats.pool_used_bytes <= stats.pool_bytes && stats.entries <= 2 * stats.entry_capacity);
}

pub fn a_switch_carries_over_what_was_cached_and_keeps_the_rest_out<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(100, &[16, 4], 64 << 10);
    let mut subject = new(&world);
    let batch = |ids: std::ops::Range<u64>| {
        let ids: Vec<u64> = ids.collect();
        world.one_hot(&[ids.clone(), ids])
    };
    run(&mut subject, &world, &batch(0..50));
    subject.settle();
    assert_eq!(world.switch(&subject, 1), Switched { changed: 40, carried: 20 });
    assert_eq!(subject.version(), 1);
    assert_eq!(run(&mut subject, &world, &batch(0..64)), (100, 28));
    settle(&subject);
    assert_adds_up(&subject.stats());
    assert_eq!(subject.stats().entries, 128);
}

pub fn a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = World::new(100, &[16, 4], 64 << 10);
    let mut subject = new(&world);
    let batch = |ids: std::ops::Range<u64>| {
        let ids: Vec<u64> = ids.collect();
        world.one_hot(&[ids.clone(), ids])
    };
    run(&mut subject, &world, &batch(0..40));
    subject.settle();
    let (switcher, mut newer) = (subject.another(&world), subject.another(&world));
    let both = batch(0..50);
    std::thread::scope(|scope| {
        let mut switching = None;
        // It has found 40 rows of each table, of which 8 change, and lets in another ten, of which two change.
        let seen = subject.embed(&world, &both, || {
            let started = scope.spawn(|| world.switch(&switcher, 1));
            while newer.version() == 0 {
                std::thread::yield_now();
            }
            for fetched in [20, 4, 4] {
                newer.evict_step();
                let seen = newer.embed(&world, &both, || ());
                world.assert_is(&seen.matrix, &both, 1);
                assert_eq!((seen.version, seen.fetched.len()), (1, fetched), "changed rows are kept out");
                newer.settle();
            }
            std::thread::sleep(Duration::from_millis(20));
            newer.evict_step();
            assert!(!started.is_finished(), "the old batch is not over");
            switching = Some(started);
        });
        assert_eq!(seen.version, 0);
        world.assert_is(&seen.matrix, &both, 0);
        let switched = switching.unwrap().join().unwrap();
        assert_eq!(switched, Switched { changed: 40, carried: 16 });
    });
    // What the old batch let in of changed rows went when the overlay was merged.
    assert_eq!(run(&mut subject, &world, &both), (96, 4));
    settle(&subject);
    assert_adds_up(&subject.stats());
}

pub fn a_version_that_is_not_newer_and_a_wrong_row_change_nothing<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(10, &[4], 16 << 10);
    let mut subject = new(&world);
    world.switch(&subject, 7);
    let batch = world.one_hot(&[vec![2]]);
    run(&mut subject, &world, &batch);
    settle(&subject);
    let before = subject.stats();
    let row = world.row(TableId(0), 2, 7).unwrap();
    let error = |version, wrong| subject.switch(version, &[(TableId(0), 2, &row[..]), wrong]).unwrap_err();
    let good = (TableId(0), 3, &row[..]);
    assert_eq!(error(7, good), "version 7: expected one newer than 7");
    assert!(error(8, (TableId(0), 10, &row[..])).contains("id 10"));
    assert!(error(8, (TableId(1), 0, &row[..])).contains("table 1"));
    assert!(error(8, (TableId(0), 2, &row[1..])).contains(&format!("got {}", row.len() - 1)));
    assert_eq!((subject.version(), subject.stats()), (7, before));
    assert_eq!(run(&mut subject, &world, &batch), (1, 0));
}

pub fn a_row_that_comes_twice_has_its_last_bytes<S: Subject>(new: impl Fn(&World) -> S) {
    let world = World::new(10, &[4], 16 << 10);
    let mut subject = new(&world);
    let batch = world.one_hot(&[vec![1, 2]]);
    run(&mut subject, &world, &batch);
    subject.settle();
    let row = |id, version| world.row(TableId(0), id, version).unwrap();
    let (first, last, other) = (row(1, 0), row(1, 1), row(2, 0));
    let rows: [(_, _, &[u8]); 3] = [(TableId(0), 1, &first), (TableId(0), 2, &other), (TableId(0), 1, &last)];
    assert_eq!(subject.switch(1, &rows).unwrap(), Switched { changed: 2, carried: 2 });
    assert_eq!(run(&mut subject, &world, &batch), (2, 0));
}

/// Batches, evictions, switches, and memory of the host that comes and goes, in any order: every row is its batch's
/// version's.
pub fn whatever_happens_a_row_is_its_batchs_versions<S: Subject>(
    new: impl Fn(&World) -> S,
    world: &World,
    steps: &[u8],
    draw: u64,
) {
    let (mut subject, mut draw, mut version) = (new(world), draw, 0);
    let mut in_ram: Vec<Box<dyn Send>> = Vec::new();
    for &step in steps {
        match step {
            0 => {
                version += 1;
                world.switch(&subject, version);
                assert_eq!(subject.version(), version);
            }
            1 => in_ram.push(subject.host_rows(world, TableId(draw as u32 % world.tables.len() as u32))),
            2 => drop((!in_ram.is_empty()).then(|| in_ram.remove(0))),
            3 => subject.set_pointers(draw % (world.options.pointers + 1)),
            4..8 => drop(subject.evict_step()),
            _ => drop(run(&mut subject, world, &world.bags(16, 120, &mut draw))),
        }
    }
    settle(&subject);
    assert_adds_up(&subject.stats());
    drop(in_ram);
    subject.settle();
    assert_eq!(subject.stats().pointers, 0);
    assert_adds_up(&subject.stats());
}

// ---- The unified index. ----

/// Two tables. Of the first about a third finds room, so that in batches over all of it each row is cold in turn.
fn pointed_world() -> World {
    World::new(600, &[16, 4], 16 << 10).with_pointers(1000)
}

/// A batch of rows of the first table, and some of the second.
fn of_both(world: &World, first: impl Iterator<Item = u64>, second: &[u64]) -> Batch {
    let first: Vec<u64> = first.collect();
    let mut other = vec![u64::MAX; first.len()];
    other[..second.len()].copy_from_slice(second);
    world.one_hot(&[first, other])
}

/// A batch, some of whose rows may be pointed at.
fn read(subject: &mut impl Subject, world: &World, batch: &Batch) {
    let seen = subject.embed(world, batch, || ());
    world.assert_is(&seen.matrix, batch, seen.version);
}

/// Batches over all rows of the first table, `rounds` times. Returns hits, occurrences that were pointed at, and
/// misses.
fn walk(subject: &mut impl Subject, world: &World, rounds: u64) -> (u64, u64, u64) {
    let before = subject.stats();
    // No more at once than eviction has made room for.
    for start in (0..rounds * 600).step_by(10) {
        read(subject, world, &of_both(world, (start..start + 10).map(|id| id % 600), &[]));
        settle(subject);
    }
    let (before, after) = (&before.tables[0], &subject.stats().tables[0]);
    (after.hits - before.hits, after.pointed - before.pointed, after.misses - before.misses)
}

pub fn cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    // The one row that has a rank is of the other table.
    for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![(TableId(1), 0)])] {
        let world = pointed_world().with(|options| options.eviction = eviction);
        let mut subject = new(&world);
        subject.set_pointers(600);
        walk(&mut subject, &world, 1);
        assert_eq!(subject.stats().pointers, 0, "nobody holds rows in memory of the host");
        let _ram = subject.host_rows(&world, TableId(0));
        subject.set_pointers(100);
        walk(&mut subject, &world, 1);
        let few = subject.stats().pointers;
        assert!((80..=100).contains(&few), "{few}");
        subject.set_pointers(600);
        walk(&mut subject, &world, 2);
        let (_, pointed, missed) = walk(&mut subject, &world, 1);
        assert!(pointed > 350 && missed < 60, "{pointed} pointed at, {missed} missed");
        assert_adds_up(&subject.stats());
        assert!(subject.stats().total_bytes <= world.bytes as u64);
    }
}

pub fn a_row_that_was_pointed_at_comes_in_again<S: Subject>(new: impl Fn(&World) -> S) {
    let world = pointed_world();
    let mut subject = new(&world);
    let _ram = subject.host_rows(&world, TableId(0));
    subject.set_pointers(600);
    walk(&mut subject, &world, 2);
    let cold = of_both(&world, 0..10, &[]);
    let before = pointed(&subject.stats());
    read(&mut subject, &world, &cold);
    subject.settle();
    let once = pointed(&subject.stats());
    assert!(once > before, "they are cold");
    read(&mut subject, &world, &cold);
    assert_eq!(pointed(&subject.stats()), once, "they were let in");
    settle(&subject);
    assert_adds_up(&subject.stats());
}

pub fn memory_of_the_host_is_given_up_after_the_batches_that_were_pointed_there<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = pointed_world();
    let mut subject = new(&world);
    let ram = subject.host_rows(&world, TableId(0));
    subject.set_pointers(600);
    walk(&mut subject, &world, 2);
    let other = subject.another(&world);
    let before = other.stats().tables[0].pointed;
    // Cold rows, and one that is missing.
    let batch = of_both(&world, 0..10, &[7]);
    std::thread::scope(|scope| {
        let mut dropping = None;
        let seen = subject.embed(&world, &batch, || {
            assert!(other.stats().tables[0].pointed > before);
            let started = scope.spawn(move || drop(ram));
            while other.stats().pointers > 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert!(!started.is_finished(), "a batch may still read where it was pointed");
            dropping = Some(started);
        });
        world.assert_is(&seen.matrix, &batch, 0);
        dropping.unwrap().join().unwrap();
    });
    assert_eq!((walk(&mut subject, &world, 1).1, subject.stats().pointers), (0, 0));
    assert_adds_up(&subject.stats());
}

pub fn pointers_to_rows_that_changed_end_with_their_version<S: Subject>(new: impl Fn(&World) -> S) {
    let world = pointed_world();
    let mut subject = new(&world);
    let mut ram = subject.host_rows(&world, TableId(0));
    subject.set_pointers(600);
    walk(&mut subject, &world, 2);
    for version in 1..4 {
        let before = subject.stats().pointers;
        assert!(before > 300, "{before}");
        world.switch(&subject, version);
        let after = subject.stats().pointers;
        assert!(
            after < before && after > before / 2,
            "{after} of {before}: those to rows that are the same stay"
        );
        // Rows are held against the batches' version within.
        walk(&mut subject, &world, 1);
        drop(ram);
        walk(&mut subject, &world, 1);
        ram = subject.host_rows(&world, TableId(0));
        walk(&mut subject, &world, 2);
    }
    assert_adds_up(&subject.stats());
}

pub fn the_tuner_sets_how_many_pointers_there_are_by_what_batches_report<S: Subject>(
    new: impl Fn(&World) -> S,
) {
    let world = pointed_world();
    let mut subject = new(&world);
    let _ram = subject.host_rows(&world, TableId(0));
    let observe = |subject: &S, times: u32, per_second: &dyn Fn(u32) -> f64| {
        (0..times).for_each(|i| subject.observe(1 << 20, Duration::from_secs_f64(1.0 / per_second(i))));
    };
    // Ever faster, up to the limit.
    observe(&subject, 40, &|i| 1.0 + f64::from(i));
    walk(&mut subject, &world, 2);
    assert!(subject.stats().pointers > 300, "{}", subject.stats().pointers);
    // A marked fall: another traffic.
    observe(&subject, 4, &|_| 1.0);
    subject.evict_step();
    assert_eq!(subject.stats().pointers, 0);
    settle(&subject);
    assert_adds_up(&subject.stats());
}

// ---- The host. ----

pub struct HostSubject {
    cache: Arc<FlatCache>,
    query: Query,
    /// By table: how often its rows are held in RAM.
    in_ram: Arc<Vec<AtomicU64>>,
}

/// A table's rows in RAM.
struct InRam {
    right: Option<HostRows>,
    table: usize,
    in_ram: Arc<Vec<AtomicU64>>,
}

impl Drop for InRam {
    fn drop(&mut self) {
        drop(self.right.take());
        self.in_ram[self.table].fetch_sub(1, Ordering::AcqRel);
    }
}

impl Subject for HostSubject {
    fn embed(&mut self, world: &World, batch: &Batch, meanwhile: impl FnOnce()) -> Seen {
        let (pin, query) = (self.cache.pin(), &mut self.query);
        let version = pin.version().0;
        query.clear();
        let mut at = Vec::new();
        for lookup in &world.lookups {
            let rows = world.tables[lookup.table.index()].rows;
            let ids = batch.features[lookup.feature].ids.iter().copied();
            at.push(query.push(lookup.table, ids.filter(|&id| id < rows)).start);
        }
        let found = pin.lookup(query).unwrap();
        if !found.misses().is_empty() {
            meanwhile();
        }
        let fetched = found.misses().iter().map(|miss| (miss.table, miss.id)).collect();
        for row in found.misses().iter().chain(found.pointed()) {
            pin.insert(row, &world.row(row.table, row.id, version).unwrap()).unwrap();
        }
        // By lookup and id, what the cache has under it.
        let mut rows = std::collections::HashMap::new();
        for (lookup, at) in world.lookups.iter().zip(at) {
            let shape = world.tables[lookup.table.index()];
            let ids = batch.features[lookup.feature].ids.iter().filter(|id| **id < shape.rows);
            for (i, &id) in ids.enumerate() {
                let stored = || world.row(lookup.table, id, version).unwrap();
                let row = match found.source(found.uniques()[at + i]) {
                    Source::Row(row) => row.to_vec(),
                    Source::Host(_) => {
                        let held = self.in_ram[lookup.table.index()].load(Ordering::Acquire);
                        assert!(held > 0, "read while the store keeps it");
                        stored()
                    }
                    Source::Miss(_) => stored(),
                };
                rows.insert((lookup.table, id), row);
            }
        }
        let matrix = world.pooled(batch, |lookup, id| rows.get(&(lookup.table, id)).cloned());
        Seen { matrix, fetched, version }
    }

    fn another(&self, _: &World) -> Self {
        Self { cache: self.cache.clone(), query: Query::default(), in_ram: self.in_ram.clone() }
    }

    fn version(&self) -> u64 {
        self.cache.version().0
    }

    fn switch(&self, version: u64, changed: &[(TableId, u64, &[u8])]) -> Result<Switched, String> {
        self.cache.switch(Version(version), changed.iter().copied()).map_err(|error| error.to_string())
    }

    fn host_rows(&self, _: &World, table: TableId) -> Box<dyn Send> {
        self.in_ram[table.index()].fetch_add(1, Ordering::AcqRel);
        let right = Some(self.cache.host_rows(table).unwrap());
        Box::new(InRam { right, table: table.index(), in_ram: self.in_ram.clone() })
    }

    fn set_pointers(&self, capacity: u64) {
        self.cache.set_pointers(capacity);
    }

    fn observe(&self, ids: u64, elapsed: Duration) {
        self.cache.observe(ids, elapsed);
    }

    fn evict_step(&self) -> EvictStep {
        self.cache.evict_step()
    }

    fn settle(&self) {}

    fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError> {
        self.cache.warm(rows)
    }

    fn hot_rows(&mut self) -> Vec<(TableId, u64)> {
        self.cache.hot_rows()
    }
}

fn on_host(world: &World) -> HostSubject {
    let cache = Arc::new(FlatCache::new(&world.shape(), &world.options).unwrap());
    let in_ram = world.tables.iter().map(|_| AtomicU64::new(0)).collect();
    HostSubject { cache, query: Query::default(), in_ram: Arc::new(in_ram) }
}

/// What [`whatever_happens_a_row_is_its_batchs_versions`] does, in some order.
pub fn any_steps() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..20, 1..60)
}

/// Tables of 120 rows in a cache of some size, with room for some pointers; of keys that are wide enough as often as
/// not; from which rows go by age or by rank.
pub fn any_world() -> impl Strategy<Value = World> {
    let dims = prop::collection::vec(1usize..20, 1..4);
    let bits = prop_oneof![Just(64), 4u32..12];
    (dims, 0usize..6000, 0u64..300, bits, any::<bool>()).prop_map(|(dims, room, pointers, bits, by_rank)| {
        let world = World::new(120, &dims, room).with_a_shared_feature().with_pointers(pointers);
        let ranked = (0..60).map(|id| (TableId(0), id)).collect();
        narrow::keys(world, bits).with(|options| {
            options.eviction = if by_rank { EvictionOption::Lfu(ranked) } else { EvictionOption::Lru };
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn on_the_host_a_hit_is_the_row_inserted(
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 0usize..6000,
        draw in any::<u64>(),
    ) {
        let world = World::new(120, &dims, room).with_a_shared_feature();
        a_hit_is_the_row_inserted(on_host, &world, 40, draw);
    }

    #[test]
    fn on_the_host_a_hit_is_the_row_inserted_however_narrow_the_keys_are(
        bits in 4u32..12,
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 0usize..6000,
        draw in any::<u64>(),
    ) {
        let world = World::new(120, &dims, room).with_a_shared_feature();
        a_hit_is_the_row_inserted(on_host, &narrow::keys(world, bits), 40, draw);
    }

    #[test]
    fn on_the_host_a_key_has_the_row_last_asked_for(bits in 3u32..9, draw in any::<u64>()) {
        narrow::a_key_has_the_row_last_asked_for(on_host, bits, draw);
    }

    #[test]
    fn on_the_host_whatever_happens_a_row_is_its_batchs_versions(
        world in any_world(),
        steps in any_steps(),
        draw in any::<u64>(),
    ) {
        whatever_happens_a_row_is_its_batchs_versions(on_host, &world, &steps, draw);
    }
}

macro_rules! on_the_host {
    ($($name:ident: $property:ident;)*) => {
        $(#[test]
        fn $name() {
            $property(on_host);
        })*
    };
}

#[test]
fn on_the_host_eviction_goes_to_the_low_watermark_and_takes_the_oldest() {
    for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![])] {
        eviction_goes_to_the_low_watermark_and_takes_the_oldest(on_host, eviction);
    }
}

on_the_host! {
    on_the_host_all_miss_all_hit_and_a_mixture: all_miss_all_hit_and_a_mixture;
    on_the_host_memory_passes_from_one_row_size_to_another: memory_passes_from_one_row_size_to_another;
    on_the_host_a_switch_carries_over_what_was_cached_and_keeps_the_rest_out:
        a_switch_carries_over_what_was_cached_and_keeps_the_rest_out;
    on_the_host_a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new:
        a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new;
    on_the_host_a_version_that_is_not_newer_and_a_wrong_row_change_nothing:
        a_version_that_is_not_newer_and_a_wrong_row_change_nothing;
    on_the_host_a_row_that_comes_twice_has_its_last_bytes: a_row_that_comes_twice_has_its_last_bytes;
    on_the_host_cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss:
        cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss;
    on_the_host_a_row_that_was_pointed_at_comes_in_again: a_row_that_was_pointed_at_comes_in_again;
    on_the_host_memory_is_given_up_after_the_batches_that_were_pointed_there:
        memory_of_the_host_is_given_up_after_the_batches_that_were_pointed_there;
    on_the_host_pointers_to_rows_that_changed_end_with_their_version:
        pointers_to_rows_that_changed_end_with_their_version;
    on_the_host_the_tuner_sets_how_many_pointers_there_are_by_what_batches_report:
        the_tuner_sets_how_many_pointers_there_are_by_what_batches_report;
}

#[test]
fn on_the_host_rows_of_one_key_in_one_batch_are_rows_of_their_own() {
    narrow::rows_of_one_key_in_one_batch_are_rows_of_their_own(on_host);
}

#[test]
fn on_the_host_rows_of_low_rank_leave_first() {
    warm::rows_of_low_rank_leave_first(on_host);
}

#[test]
fn on_the_host_a_row_is_as_old_as_its_last_use_but_for_a_few_batches() {
    warm::a_row_is_as_old_as_its_last_use_but_for_a_few_batches(on_host);
}

#[test]
fn on_the_host_hot_rows_are_those_in_the_cache_the_last_used_first() {
    warm::hot_rows_are_those_in_the_cache_the_last_used_first(on_host);
}

#[test]
fn on_the_host_warm_rows_are_found_whatever_the_admission_and_keep_their_order() {
    warm::warm_rows_are_found_whatever_the_admission_and_keep_their_order(on_host);
}

#[test]
fn on_the_host_warming_ends_below_the_high_watermark_with_the_hottest_in() {
    warm::warming_ends_below_the_high_watermark_with_the_hottest_in(on_host);
}

#[test]
fn on_the_host_the_coldest_of_the_warm_rows_leave_first() {
    warm::the_coldest_of_the_warm_rows_leave_first(on_host);
}

#[test]
fn on_the_host_a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused() {
    warm::a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused(on_host);
}
