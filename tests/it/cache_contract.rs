//! What a flat cache promises, as properties of any device: of the host's here, and of the simulated CUDA
//! device's in `cusim_cache`. A subject runs batches; what it gives is held against rows that say whose they are
//! and which version of them, pooled by the host's kernel.
//!
//! Here are the subjects and what every cache promises; in `narrow` what one of narrow keys does, in `warm` what
//! a cache begins with and holds.

pub mod narrow;
pub mod warm;

use std::collections::HashSet;

use flechette::cache::{
    AdmissionOption, CacheError, CacheOptions, CacheShape, CacheStats, EvictStep, EvictionOption, FlatCache,
    Query, Source, TableShape, WATERMARKS, Warmed,
};
use flechette::device::host;
use flechette::schema::{Lookup, Pooling};
use flechette::types::{Batch, Element, Jagged, TableId, scatter};
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
#[cfg(feature = "cusim")]
pub const MAX_SAMPLES: usize = 64;
#[cfg(feature = "cusim")]
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
            scatter(*draw) % limit
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

    /// The bytes of a row that says in every value whose it is and of which version; `None` for an absent id.
    pub fn row(&self, table: TableId, id: u64, version: u64) -> Option<Vec<u8>> {
        let lookup = self.lookups.iter().find(|l| l.table == table).unwrap();
        let value = |i: usize| {
            let name = id << 30 | u64::from(table.0) << 20 | version << 10 | i as u64;
            ((scatter(name) >> 48) as f32 - 32768.0) / 16.0
        };
        let values: Vec<f32> = (0..lookup.dim).map(value).collect();
        let mut row = vec![0; lookup.element.row_bytes(lookup.dim)];
        lookup.element.encode(&values, &mut row).unwrap();
        (id < self.tables[table.index()].rows).then_some(row)
    }

    /// The values of a row.
    #[cfg(feature = "cusim")]
    pub fn values(&self, lookup: &Lookup, id: u64, version: u64) -> Vec<f32> {
        let mut values = vec![0.0; lookup.dim];
        lookup.element.decode(&self.row(lookup.table, id, version).unwrap(), &mut values);
        values
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

/// What came of a batch.
pub struct Seen {
    pub matrix: Vec<f32>,
    /// The rows that were asked for.
    pub fetched: Vec<(TableId, u64)>,
}

/// Rows that a cache is to begin with.
pub type Rows<'i, 'r> = dyn Iterator<Item = (TableId, u64, &'r [u8])> + 'i;

/// A cache and a worker of it.
pub trait Subject {
    /// Runs a batch; rows that are missing are those of `version`.
    fn embed(&mut self, world: &World, batch: &Batch, version: u64) -> Seen;
    fn evict_step(&mut self) -> EvictStep;
    /// Until nothing is under way.
    fn settle(&mut self);
    fn stats(&self) -> CacheStats;
    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError>;
    fn hot_rows(&mut self) -> Vec<(TableId, u64)>;
}

#[cfg(feature = "cusim")]
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs a batch and checks all that can be checked of one.
pub fn run(subject: &mut impl Subject, world: &World, batch: &Batch) -> (u64, u64) {
    let before = totals(&subject.stats());
    let Seen { matrix, fetched } = subject.embed(world, batch, 0);
    world.assert_is(&matrix, batch, 0);
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
    assert_eq!(hits + misses, world.present(batch), "hits and misses count occurrences");
    assert!(misses >= fetched.len() as u64 && (misses > 0) != fetched.is_empty());
    (hits, misses)
}

pub fn totals(stats: &CacheStats) -> (u64, u64, u64) {
    let sum = |of: fn(&flechette::cache::TableStats) -> u64| stats.tables.iter().map(of).sum();
    (sum(|t| t.hits), sum(|t| t.misses), sum(|t| t.evictions))
}

pub fn settle(subject: &mut impl Subject) {
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
    settle(&mut subject);
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
    settle(&mut subject);
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
            settle(&mut subject);
        }
        assert_eq!(hits, 60, "table {t} has taken the room of table {other}");
    }
}

// ---- The host. ----

pub struct HostSubject {
    cache: FlatCache,
    query: Query,
}

impl Subject for HostSubject {
    fn embed(&mut self, world: &World, batch: &Batch, version: u64) -> Seen {
        let (pin, query) = (self.cache.pin(), &mut self.query);
        query.clear();
        let mut at = Vec::new();
        for lookup in &world.lookups {
            let rows = world.tables[lookup.table.index()].rows;
            let ids = batch.features[lookup.feature].ids.iter().copied();
            at.push(query.push(lookup.table, ids.filter(|&id| id < rows)).start);
        }
        let found = pin.lookup(query).unwrap();
        let mut fetched = Vec::new();
        for miss in found.misses() {
            let row = world.row(miss.table, miss.id, version).unwrap();
            pin.insert(miss.table, miss.id, &row).unwrap();
            fetched.push((miss.table, miss.id));
        }
        // By lookup and id, what the cache has under it.
        let mut rows = std::collections::HashMap::new();
        for (lookup, at) in world.lookups.iter().zip(at) {
            let shape = world.tables[lookup.table.index()];
            let ids = batch.features[lookup.feature].ids.iter().filter(|id| **id < shape.rows);
            for (i, &id) in ids.enumerate() {
                let row = match found.source(found.uniques()[at + i]) {
                    Source::Row(row) => row.to_vec(),
                    Source::Host(_) => unreachable!("no host rows are registered"),
                    Source::Miss(_) => world.row(lookup.table, id, version).unwrap(),
                };
                rows.insert((lookup.table, id), row);
            }
        }
        let matrix = world.pooled(batch, |lookup, id| rows.get(&(lookup.table, id)).cloned());
        Seen { matrix, fetched }
    }

    fn evict_step(&mut self) -> EvictStep {
        self.cache.evict_step()
    }

    fn settle(&mut self) {}

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
    HostSubject { cache: FlatCache::new(&world.shape(), &world.options).unwrap(), query: Query::default() }
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
}

#[test]
fn on_the_host_all_miss_all_hit_and_a_mixture() {
    all_miss_all_hit_and_a_mixture(on_host);
}

#[test]
fn on_the_host_eviction_goes_to_the_low_watermark_and_takes_the_oldest() {
    for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![])] {
        eviction_goes_to_the_low_watermark_and_takes_the_oldest(on_host, eviction);
    }
}

#[test]
fn on_the_host_memory_passes_from_one_row_size_to_another() {
    memory_passes_from_one_row_size_to_another(on_host);
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
