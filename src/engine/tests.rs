//! Versions that a running engine takes over. Every row element and every dense weight is a function of the
//! version, so a score that mixes two versions equals the scores of neither.

#[cfg(feature = "cusim")]
mod cusim;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, MutexGuard, mpsc};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::measure::freshness;
use super::switch::{Changes, NextVersion, SwitchError, SwitchReport};
use super::*;
use crate::cache::{AdmissionOption, BatchPin, CacheOptions, CacheShape, TableShape};
use crate::config::TableMemory;
use crate::metrics::Metrics;
use crate::model::loss::sigmoid;
use crate::store::{self, Contents, DenseTensor, Opened, PlainMemory, Table, TableRows};
use crate::types::unix_ms;

pub(crate) const MODEL: &str = "ctr";
const ROWS: u64 = 400;
/// A limit that no test reaches.
const ALL_BYTES: u64 = u64::MAX;

/// Checks a version and switches to it.
fn take_over(
    engine: &Engine,
    opened: Opened,
    changes: Changes,
    switch_bytes: u64,
) -> Result<SwitchReport, SwitchError> {
    let version = engine.accept(opened)?;
    engine.switch(NextVersion { version, changes, switch_bytes, old_stays: false })
}

/// How many rows each version changes.
#[derive(Clone, Copy)]
pub(crate) enum Writer {
    /// All.
    Everything,
    /// Every twentieth, other ones in each version.
    FivePercent,
}

/// Writes versions of a model.
pub(crate) struct World {
    models: tempfile::TempDir,
    schema: Schema,
    writer: Writer,
    /// An engine without a cache for each version.
    oracles: Vec<Engine>,
}

impl World {
    pub(crate) fn new(writer: Writer) -> Self {
        let mut text =
            "[architecture]\nkind = \"wide_deep\"\ndeep = [6]\n[[dense]]\nname = \"d\"\n".to_owned();
        for (name, arity) in [("user", ""), ("word", "arity = { multi_hot = { max = 5 } }\n")] {
            let feature =
                format!("name = \"{name}\"\ntable = \"{name}\"\nwide_table = \"{name}_wide\"\n{arity}");
            text += &format!("[[features]]\n{feature}");
        }
        for (name, dim) in [("user", 5), ("user_wide", 1), ("word", 3), ("word_wide", 1)] {
            text += &format!("[[tables]]\nname = \"{name}\"\nrows = {ROWS}\ndim = {dim}\n");
        }
        let schema = Schema::parse(&text).unwrap();
        Self { models: tempfile::tempdir().unwrap(), schema, writer, oracles: Vec::new() }
    }

    /// The directory of the models.
    pub(crate) fn models(&self) -> &Path {
        self.models.path()
    }

    /// Writes the next version. Returns the rows that differ from the one before.
    pub(crate) fn publish(&mut self) -> Vec<RowId> {
        let version = self.oracles.len() as u64 + 1;
        self.write(version, &self.schema.to_toml());
        let oracle = self.engine(version, LookupTier::Store);
        self.oracles.push(oracle);
        let tables = 0..self.schema.tables.len() as u32;
        let rows = tables.flat_map(|table| (0..ROWS).map(move |row| RowId::new(TableId(table), row)));
        rows.filter(|row| self.changed_in(row.row(), version) == version).collect()
    }

    /// Unlocks the last version, whose scores are not compared any more.
    pub(crate) fn close_last(&mut self) {
        self.oracles.pop();
    }

    /// Copies a version to another model.
    pub(crate) fn copy_version(&self, version: &str, to: &str) {
        copy(&self.models().join(MODEL).join(version), &self.models().join(to).join(version));
    }

    fn write(&self, version: u64, model_toml: &str) {
        let model = Model::<f32>::new(&self.schema);
        let weights = model.initialise(version);
        let dense: Vec<_> = model.parameters().iter().map(|p| (p, p.read(&weights.values))).collect();
        let dense = dense.iter().map(|(p, values)| DenseTensor {
            name: p.name.clone(),
            shape: p.shape.clone(),
            values,
        });
        let table = |(t, declared): (usize, &crate::schema::TableSchema)| {
            let mut table = Table::zeroed(&PlainMemory, ROWS, declared.dim, &[]).unwrap();
            let values = table.rows_mut().unwrap().chunks_mut(declared.dim).enumerate();
            for (id, row) in values {
                let made = self.changed_in(id as u64, version);
                let value = crate::mem::mix64(made << 32 | (t as u64) << 24 | id as u64) >> 40;
                row.fill(value as f32 / (1 << 24) as f32 - 0.5);
            }
            table
        };
        let tables: Vec<_> = self.schema.tables.iter().enumerate().map(table).collect();
        let contents = Contents {
            model_toml,
            dense: dense.collect(),
            tables: tables.iter().map(TableRows::from).collect(),
            ..Contents::default()
        };
        assert_eq!(store::write(self.models.path(), MODEL, &contents).unwrap(), Version(version));
    }

    /// The version that changed a row last, up to this one.
    fn changed_in(&self, id: u64, version: u64) -> u64 {
        match self.writer {
            Writer::Everything => version,
            Writer::FivePercent => (2..=version).rev().find(|v| id % 20 == v % 20).unwrap_or(1),
        }
    }

    pub(crate) fn open(&self, version: u64) -> Opened {
        self.open_from(version, TableMemory::Mapped)
    }

    fn open_from(&self, version: u64, memory: TableMemory) -> Opened {
        let purpose = store::Purpose::ServeFrom(memory);
        store::open(self.models.path(), MODEL, Version(version), purpose).unwrap()
    }

    pub(crate) fn shape(&self, fraction: f64) -> CacheShape {
        let table = |t: &crate::schema::TableSchema| TableShape { rows: t.rows, row_bytes: t.row_bytes() };
        CacheShape::from_fraction(fraction, self.schema.tables.iter().map(table).collect())
    }

    pub(crate) fn host(&self, fraction: f64) -> LookupTier {
        LookupTier::Host(FlatCache::new(&self.shape(fraction), &options()).unwrap())
    }

    pub(crate) fn engine(&self, version: u64, lookup_tier: LookupTier) -> Engine {
        let parts = EngineParts {
            name: MODEL.to_owned(),
            lookup_tier,
            metrics: Metrics::new().unwrap().model(MODEL, &self.schema),
            threads: Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap()),
            max_samples: 64,
        };
        Engine::new(self.open(version), parts).unwrap()
    }

    pub(crate) fn switch(&self, engine: &Engine, version: u64, changes: Changes) -> SwitchReport {
        take_over(engine, self.open(version), changes, ALL_BYTES).unwrap()
    }

    /// Scores a batch and compares the scores with those of the version that the engine names. Returns it.
    pub(crate) fn check(&self, engine: &Engine, seed: u64) -> Version {
        let mut batch = engine.generate_batch(seed);
        batch.logits = seed % 2 == 1;
        let scores = engine.predict(&batch).unwrap();
        batch.logits = false;
        let oracle = &self.oracles[scores.version.0 as usize - 1];
        let expected = oracle.predict(&batch).unwrap();
        let bits = |scores: &Scores| scores.probabilities.iter().map(|p| p.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&scores), bits(&expected), "version {}, batch {seed}", scores.version);
        let of_logits: Vec<u32> = scores.logits.iter().map(|z| sigmoid(*z).to_bits()).collect();
        assert_eq!(of_logits, if seed % 2 == 1 { bits(&scores) } else { Vec::new() });
        scores.version
    }

    /// Scores some batches. All of them must be of this version.
    pub(crate) fn check_all(&self, engine: &Engine, version: u64, seeds: std::ops::Range<u64>) {
        seeds.for_each(|seed| assert_eq!(self.check(engine, seed), Version(version)));
    }
}

/// Copies a directory.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        if path.is_dir() {
            copy(&path, &to.join(name));
        } else {
            fs::copy(&path, to.join(name)).unwrap();
        }
    }
}

/// A batch that has begun, and does not end before this is dropped.
pub(crate) fn begin_batch(engine: &Engine) -> BatchPin<'_> {
    let LookupTier::Host(cache) = &engine.lookup_tier else { panic!("no cache on the host") };
    cache.pin()
}

/// Lets no switch go on before this is dropped.
pub(crate) fn hold_switches(engine: &Engine) -> MutexGuard<'_, ()> {
    engine.switching.lock().unwrap()
}

/// Keeps all threads of an engine busy until the result is dropped.
pub(crate) fn occupy_threads(engine: &Engine) -> mpsc::Sender<()> {
    let (free, freed) = mpsc::channel();
    let (freed, busy) = (Mutex::new(freed), Arc::new(Barrier::new(engine.threads.current_num_threads() + 1)));
    let here = busy.clone();
    engine.threads.spawn_broadcast(move |_| {
        busy.wait();
        let _ = freed.lock().unwrap().recv();
    });
    here.wait();
    free
}

pub(crate) fn options() -> CacheOptions {
    CacheOptions { admission: AdmissionOption::ALL, version: Version(1), ..CacheOptions::default() }
}

/// The property of all lookup tiers: scores are those of the served version, before and after each switch.
pub(crate) fn every_answer_is_its_versions(writer: Writer, known: bool, tier: impl Fn(&World) -> LookupTier) {
    let mut world = World::new(writer);
    world.publish();
    let engine = world.engine(1, tier(&world)).with_pointers();
    world.check_all(&engine, 1, 0..6);
    let cached = !matches!(engine.lookup_tier, LookupTier::Store);
    let (mut changed, mut carried) = (Vec::new(), 0);
    for version in 2..5 {
        let rows = world.publish();
        changed.extend(rows.clone());
        let changes = if known { Changes::Rows(rows) } else { Changes::Unknown };
        let old = Arc::downgrade(&engine.versions.current());
        let taken = world.switch(&engine, version, changes);
        assert_eq!((taken.from, taken.to), (Version(version - 1), Version(version)));
        assert!(cached || taken.carried + taken.dropped == 0, "{taken:?}");
        carried += taken.carried;
        assert!(old.upgrade().is_none(), "the old version's memory is released");
        // The same rows as before, so that an old row would be found.
        world.check_all(&engine, version, 0..6);
    }
    // At one switch, the pool may have no room, or none of the changed rows, because rows are evicted in the
    // background.
    assert_eq!(carried > 0, cached);
    for version in [1, 4, 2] {
        let changes = if known { Changes::Rows(changed.clone()) } else { Changes::Unknown };
        assert_eq!(world.switch(&engine, version, changes).to, Version(version));
        world.check_all(&engine, version, 0..6);
    }
}

/// Sets a flag when it is dropped.
struct Ends<'f>(&'f AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Batches run in two threads while versions are published and taken over. Each batch must have the scores of
/// exactly the version that it names.
pub(crate) fn batches_during_switches_use_one_version(tier: impl Fn(&World) -> LookupTier) {
    let mut world = World::new(Writer::Everything);
    (0..8).for_each(|_| drop(world.publish()));
    let engine = world.engine(1, tier(&world));
    let (stop, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (world, engine, stop, seen) = (&world, &engine, &stop, &seen);
            scope.spawn(move || {
                // Ends the test if a check fails.
                let _ends = Ends(stop);
                let mut seed = thread;
                while !stop.load(Ordering::Acquire) {
                    let version = world.check(engine, seed % 12);
                    seen.fetch_or(1 << version.0, Ordering::AcqRel);
                    seed += 2;
                }
            });
        }
        for version in 2..=8 {
            world.switch(&engine, version, Changes::Unknown);
            let unseen = || seen.load(Ordering::Acquire) & 1 << version == 0;
            while unseen() && !stop.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Release);
    });
}

#[test]
fn every_answer_is_its_versions_without_a_cache() {
    every_answer_is_its_versions(Writer::Everything, false, |_| LookupTier::Store);
}

#[test]
fn every_answer_is_its_versions_with_a_cache() {
    for fraction in [0.05, 0.3, 1.0] {
        every_answer_is_its_versions(Writer::Everything, false, |world| world.host(fraction));
        every_answer_is_its_versions(Writer::FivePercent, false, |world| world.host(fraction));
    }
    every_answer_is_its_versions(Writer::FivePercent, true, |world| world.host(1.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The oracles of the world read mapped tables.
    #[test]
    fn scores_are_the_same_bits_wherever_the_tables_of_each_version_are(
        memories in vec(select(&[TableMemory::Auto, TableMemory::Ram, TableMemory::Mapped][..]), 1..4),
        fraction in proptest::option::of(0.05..1.0),
        seed: u64,
    ) {
        let mut world = World::new(Writer::FivePercent);
        world.publish();
        let engine = world.engine(1, fraction.map_or(LookupTier::Store, |fraction| world.host(fraction)));
        for (version, memory) in (2..).zip(memories) {
            world.publish();
            let opened = world.open_from(version, memory);
            take_over(&engine, opened, Changes::Unknown, ALL_BYTES).unwrap();
            let seed = seed >> 8;
            world.check_all(&engine, version, seed..seed + 6);
        }
    }
}

#[test]
fn batches_during_switches_use_one_version_without_a_cache() {
    batches_during_switches_use_one_version(|_| LookupTier::Store);
}

#[test]
fn batches_during_switches_use_one_version_with_a_cache() {
    batches_during_switches_use_one_version(|world| world.host(0.3));
}

#[test]
fn changed_rows_beyond_the_limit_are_dropped() {
    let mut world = World::new(Writer::Everything);
    (0..4).for_each(|_| drop(world.publish()));
    let engine = world.engine(1, world.host(1.0));
    let entries = || engine.cache_stats().unwrap().entries;
    for (version, switch_bytes) in [(2, ALL_BYTES), (3, 200), (4, 0)] {
        let before = version - 1;
        world.check_all(&engine, before, 0..6);
        let cached = entries();
        let opened = world.open(version);
        let taken = take_over(&engine, opened, Changes::Unknown, switch_bytes).unwrap();
        assert_eq!(taken.carried + taken.dropped, cached, "every row has changed");
        assert_eq!(taken.carried, entries());
        match switch_bytes {
            ALL_BYTES => assert_eq!(taken.dropped, 0),
            0 => assert_eq!(taken.carried, 0),
            // Rows of 4 to 20 bytes.
            bytes => assert!((bytes / 20..=bytes / 4).contains(&taken.carried), "{taken:?}"),
        }
    }
    world.check_all(&engine, 4, 0..6);
}

/// Counts of the cache's hits and misses.
fn lookups(engine: &Engine) -> [u64; 2] {
    let tables = engine.cache_stats().unwrap().tables;
    [tables.iter().map(|t| t.hits).sum(), tables.iter().map(|t| t.misses).sum()]
}

/// The cache has room for all rows, so a row that it does not find is one that the switch has dropped.
#[test]
fn cached_rows_that_change_are_found_after_a_switch_unless_they_may_take_no_bytes() {
    let mut world = World::new(Writer::FivePercent);
    (0..2).for_each(|_| drop(world.publish()));
    for switch_bytes in [ALL_BYTES, 0] {
        let engine = world.engine(1, world.host(1.0));
        let misses = |version| {
            let [_, before] = lookups(&engine);
            world.check_all(&engine, version, 100..106);
            lookups(&engine)[1] - before
        };
        misses(1);
        let before = misses(1);
        let taken = take_over(&engine, world.open(2), Changes::Unknown, switch_bytes).unwrap();
        let changed = taken.carried + taken.dropped;
        assert!(changed >= 20, "{taken:?}");
        // Every cached row is in one of these batches.
        let after = misses(2);
        if switch_bytes == 0 {
            assert!(taken.carried == 0 && after >= changed, "{taken:?}, misses {before}, {after}");
        } else {
            let most = changed / 10;
            assert!(taken.dropped <= most && after <= before + most, "{taken:?}, misses {before}, {after}");
        }
    }
}

#[test]
fn a_time_in_the_future_is_0_seconds_ago() {
    let now = unix_ms();
    assert_eq!(freshness(Some(now + 3_600_000)), 0.0);
    assert!((2.0..3600.0).contains(&freshness(Some(now - 2000))));
    assert!(freshness(None).is_nan());
}

#[test]
fn a_version_that_does_not_fit_is_refused_and_the_served_one_goes_on() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let engine = world.engine(1, world.host(0.3));
    let switch = |opened| take_over(&engine, opened, Changes::Unknown, ALL_BYTES).unwrap_err();
    assert!(matches!(switch(world.open(1)), SwitchError::Current(Version(1))));
    world.write(2, &world.schema.to_toml().replace("deep = [6]", "deep = [7]"));
    let error = switch(world.open(2)).to_string();
    let expected = "not the schema of the served version: architecture.deep[0]: expected 6, got 7; a \
                    restart, or unloading and loading the model, serves it if stable names it";
    assert_eq!(error, expected);
    let mut opened = world.open(2);
    opened.schema = world.schema.clone();
    opened.dense.clear();
    assert!(matches!(switch(opened), SwitchError::Weights(_)));
    world.check_all(&engine, 1, 0..6);
}
