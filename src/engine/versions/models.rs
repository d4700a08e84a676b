//! A loom model of a switch as the engine makes it, with the real [`Versions`] and the real cache.

use super::*;
use crate::cache::{
    AdmissionOption, CacheOptions, CacheShape, Cached, FlatCache, NewRow, Query, Source, TableShape,
};
use crate::sync::{AtomicU64, Ordering};
use crate::types::{RowId, TableId};

const OLD: Version = Version(1);
const NEW: Version = Version(2);
const TABLE: TableId = TableId(0);
const ROW: u64 = 3;

/// A version whose dense weights and rows are its number.
struct Parts {
    weights: u64,
    rows: u64,
    /// Batches that use the version.
    batches: Arc<AtomicU64>,
}

impl Parts {
    fn new(version: Version, batches: &Arc<AtomicU64>) -> Self {
        Self { weights: version.0, rows: version.0, batches: batches.clone() }
    }

    /// What a batch does that has this row.
    fn use_with(&self, row: u64) {
        self.batches.fetch_add(1, Ordering::AcqRel);
        assert_eq!(self.weights, row, "weights and row of two versions");
        self.batches.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        // A failed model drops its versions too.
        if !std::thread::panicking() {
            assert_eq!(self.batches.load(Ordering::Acquire), 0, "a version is dropped while a batch uses it");
        }
    }
}

struct Engine {
    versions: Versions<Parts>,
    cache: FlatCache,
    batches: [Arc<AtomicU64>; 2],
}

impl Engine {
    /// An engine of the old version with a small cache, whose eviction no thread drives.
    fn new() -> Self {
        let tables = vec![TableShape { rows: 8, row_bytes: 8 }];
        let options = CacheOptions {
            admission: AdmissionOption::ALL,
            version: OLD,
            background: false,
            ..CacheOptions::default()
        };
        let batches = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        Self {
            versions: Versions::new(OLD, Arc::new(Parts::new(OLD, &batches[0]))),
            cache: FlatCache::new(&CacheShape { bytes: 1 << 10, tables }, &options).unwrap(),
            batches,
        }
    }

    fn batch_with_cache(&self) {
        let (pin, mut query) = (self.cache.pin(), Query::default());
        let parts = self.versions.of(pin.version()).expect("the version of a pin is in use");
        query.push(TABLE, [ROW]);
        let found = pin.lookup(&mut query).unwrap();
        match found.source(0) {
            Source::Row(bytes) => parts.use_with(u64::from_ne_bytes(bytes.try_into().unwrap())),
            _ => {
                pin.insert(&found.misses()[0], &parts.rows.to_ne_bytes()).unwrap();
                parts.use_with(parts.rows);
            }
        }
        // The dense layers may run after the pin is dropped, as on a device.
        drop(pin);
        parts.use_with(parts.rows);
    }

    fn batch_without_cache(&self) {
        let parts = self.versions.current();
        parts.use_with(parts.rows);
    }

    /// As [`Engine::switch`](crate::engine::Engine::switch) does it with rows that are known to have changed.
    fn switch(&self) {
        let new = Arc::new(Parts::new(NEW, &self.batches[1]));
        let row = new.rows.to_ne_bytes();
        self.versions.begin(NEW, new);
        let rows = |cached: Cached<'_>| {
            let linked = cached.linked(&[RowId::new(TABLE, ROW)]);
            linked
                .into_iter()
                .map(|changed| NewRow { row: changed, bytes: Some(&row[..]) })
                .collect::<Vec<_>>()
        };
        self.cache.switch(NEW, rows).unwrap();
        drop(self.versions.end());
        assert_eq!(self.versions.version(), NEW);
    }
}

fn model(batch: fn(&Engine), count: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let engine = Arc::new(Engine::new());
        let of_thread = engine.clone();
        let other = loom::thread::spawn(move || (0..count).for_each(|_| batch(&of_thread)));
        engine.switch();
        other.join().unwrap();
        batch(&engine);
    });
}

#[test]
fn a_batch_with_a_cache_uses_one_version_while_another_is_taken_over() {
    model(Engine::batch_with_cache, 2);
}

#[test]
fn a_batch_without_a_cache_uses_one_version_while_another_is_taken_over() {
    model(Engine::batch_without_cache, 2);
}
