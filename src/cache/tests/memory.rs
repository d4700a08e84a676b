//! A cache under load takes at most `cache.bytes` and the additional memory that docs/cache.md states.
//! `tests/it/cache_memory.rs` measures a server.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cache::{
    AdmissionOption, CacheOptions, CacheShape, EvictionOption, FlatCache, NewRow, Query, TableShape,
};
use crate::mem::mix64;
use crate::store::tests::footprint::memory;
use crate::types::{RowId, TableId, Version};

/// Allowed memory in addition to `cache.bytes`.
const CACHE_EXTRA: u64 = 8 << 20;
/// Bytes for each cached row while hot rows are listed, and for each of them that a version switch changes.
const HOT_ROW: u64 = 16;
const CHANGED_ROW: u64 = 140;

const BYTES: usize = 24 << 20;
const TABLES: [TableShape; 2] =
    [TableShape { rows: 1 << 20, row_bytes: 64 }, TableShape { rows: 1 << 20, row_bytes: 32 }];
const ROW: [u8; 64] = [7; 64];

/// Environment variable of a measured process: its eviction policy.
const MEASURED: &str = "CACHE_MEMORY_EVICTION";

/// Runs itself as a child process for each eviction policy, because memory is measured per process.
#[test]
fn a_cache_under_load_stays_within_its_bytes_and_what_is_stated() {
    match std::env::var(MEASURED).as_deref() {
        Ok("lru") => return measure(EvictionOption::Lru),
        Ok(_) => {
            let ranked = (0..1 << 20).map(|id| RowId::new(TableId((id % 2) as u32), id)).collect();
            return measure(EvictionOption::Lfu(ranked));
        }
        Err(_) => {}
    }
    for eviction in ["lru", "lfu"] {
        let name = "cache::tests::memory::a_cache_under_load_stays_within_its_bytes_and_what_is_stated";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", name, "--nocapture"]).env(MEASURED, eviction).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        eprint!("{err}");
        assert!(child.status.success(), "{eviction}:\n{out}{err}");
        assert!(out.contains("test result: ok. 1 passed"), "the child did not run {name}:\n{out}{err}");
        assert_eq!(err.matches(" bytes of ").count(), 3, "three measurements: {err}");
    }
}

fn measure(eviction: EvictionOption) {
    let options = CacheOptions { admission: AdmissionOption::DEFAULT, eviction, ..CacheOptions::default() };
    let before = memory("VmRSS");
    let within = |what: &str, more: u64| {
        let took = memory("VmHWM") - before;
        let allowed = BYTES as u64 + CACHE_EXTRA + more;
        eprintln!("{what}: {took} bytes of {allowed}, {more} of them temporary");
        assert!(took <= allowed, "{what}: {took} bytes, allowed {allowed}");
    };
    let cache = &FlatCache::new(&CacheShape { bytes: BYTES, tables: TABLES.to_vec() }, &options).unwrap();
    let (stop, evictions) = (&AtomicBool::new(false), || evictions(cache));
    std::thread::scope(|scope| {
        let _at_the_end = Stop(stop);
        for seed in 0..2 {
            scope.spawn(move || load(cache, seed, stop));
        }
        // While this batch is unfinished, evicted slots are not freed. Waits until the cache is at its limit
        // of slots that wait to be freed.
        let pin = cache.pin();
        while cache.stats().rejected_full == 0 {
            std::thread::yield_now();
        }
        drop(pin);
        let full = evictions();
        while evictions() < full + 2 * cache.stats().entry_capacity {
            std::thread::yield_now();
        }
        within("evicting", 0);
        // This is checked before the switches, because a switch removes changed rows for which there is no
        // room.
        let stats = cache.stats();
        assert!(stats.pool_used_bytes > stats.pool_bytes / 2, "the cache is not full: {stats:?}");

        let entries = cache.stats().entry_capacity;
        for _ in 0..5 {
            let hot = cache.hot_rows();
            assert!(hot.len() as u64 > entries / 2, "{} hot rows", hot.len());
        }
        // Twice, because malloc may keep the freed memory of one list without using it for the next.
        within("listing hot rows", 2 * HOT_ROW * entries);

        let changed = 1 << 19;
        let (mut most, mut carried) = (0, 0);
        for version in 1..6 {
            let rows = (0..changed).map(|id| NewRow::of((TableId(0), id, &ROW[..])));
            let switched = cache.switch(Version(version), |_| rows).unwrap();
            most = most.max(switched.changed);
            carried += switched.carried;
        }
        // One switch may find no free slot, because the load takes them as fast as they are freed.
        assert!(carried > 0);
        within("switching versions", CHANGED_ROW * most);
    });
    let stats = cache.stats();
    assert!(stats.total_bytes <= BYTES as u64, "{stats:?}");
}

/// Stops the load when it is dropped, so also if the test fails.
struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn evictions(cache: &FlatCache) -> u64 {
    cache.stats().tables.iter().map(|table| table.evictions).sum()
}

/// Runs batches of random rows until `stop` is set.
fn load(cache: &FlatCache, seed: u64, stop: &AtomicBool) {
    let (mut query, mut draw) = (Query::default(), seed << 32);
    while !stop.load(Ordering::Relaxed) {
        let pin = cache.pin();
        query.clear();
        for (t, table) in TABLES.iter().enumerate() {
            let ids = (0..2000).map(|i| mix64(draw + i) % table.rows % (1 << 18));
            query.push(TableId(t as u32), ids);
            draw += 2000;
        }
        let found = pin.lookup(&mut query).unwrap();
        for miss in found.misses() {
            pin.insert(miss, &ROW[..TABLES[miss.table.index()].row_bytes]).unwrap();
        }
    }
}
