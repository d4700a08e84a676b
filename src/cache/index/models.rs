//! Loom models of the index with epochs and a retire list: a batch reads only the rows of its keys.

use super::super::epoch::{Epochs, RetireList};
use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// Entries are inserted with a stamp that is older than [`FRESH`] batches, so that every lookup writes a new
/// stamp.
const INSERTED: u64 = 0_u64.wrapping_sub(10);

/// The real index with two buckets, the real epochs and the real retire list, with rows that loom watches.
/// The model fails if a row is written while it may be read, or if a row is found under another row's key.
struct Cache {
    index: Index,
    epochs: Epochs,
    retired: RetireList,
    rows: Vec<UnsafeCell<u64>>,
}

// SAFETY: rows are accessed only as the argument in `index.rs` allows, and loom checks that this is sound.
unsafe impl Sync for Cache {}
// SAFETY: as above.
unsafe impl Send for Cache {}

impl Cache {
    fn new(rows: usize) -> Arc<Self> {
        Arc::new(Self {
            index: Index::new(2).unwrap(),
            epochs: Epochs::default(),
            retired: RetireList::default(),
            rows: (0..rows).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    /// The first `N` keys with this pair of buckets.
    fn keys<const N: usize>(&self, pair: [usize; 2]) -> [u64; N] {
        let mut keys = (2..).filter(|&key| self.index.pair(FlatKey(key)) == pair);
        std::array::from_fn(|_| keys.next().unwrap())
    }

    /// Writes a row that is not linked.
    fn write(&self, row: u64, key: u64) {
        // SAFETY: a model writes a row only before the row is linked, or after it was freed.
        self.rows[row as usize].with_mut(|r| unsafe { *r = key });
    }

    fn insert(&self, key: u64, row: u64, replace: bool) -> LinkOutcome {
        self.write(row, key);
        let entry = Entry { key: FlatKey(key), location: Location::slot(row), now: Stamp::of(INSERTED) };
        let coldness = |_, age| u64::from(age);
        self.index.insert(entry, replace.then_some(&coldness), |_| true)
    }

    /// Unlinks all entries of a bucket.
    fn evict(&self, bucket: usize) {
        let retire = |unlinked| self.retired.put(unlinked, &self.epochs);
        self.index.visit_bucket(bucket, Stamp::of(1), |_, _, _| EntryDecision::Unlink, retire);
    }

    /// The rows that may be used again.
    fn reclaim(&self) -> Vec<u64> {
        let mut free = Vec::new();
        self.retired.reclaim(&self.epochs, |slot| free.push(slot.location().offset()));
        free
    }

    /// Runs a batch. Checks that a row found under a key is that key's row. Returns how many rows are found.
    fn read(&self, keys: &[u64]) -> usize {
        let pin = self.epochs.pin();
        let found = keys.iter().filter(|&&key| {
            let pinned = self.index.get(FlatKey(key), Stamp::of(pin.number()), &pin);
            if let Some(pinned) = &pinned {
                let row = &self.rows[pinned.location().offset() as usize];
                // SAFETY: found under a pin that lives.
                assert_eq!(row.with(|r| unsafe { *r }), key, "the row of its key");
            }
            pinned.is_some()
        });
        found.count()
    }
}

/// A batch in another thread.
fn reader<const N: usize>(cache: &Arc<Cache>, keys: [u64; N]) -> loom::thread::JoinHandle<usize> {
    let cache = cache.clone();
    loom::thread::spawn(move || cache.read(&keys))
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// A slot of the index gets another key. If no batch holds the old row, the row's memory is reused too. A
/// lookup of the old entry renews its stamp. It must not write the old location back with the stamp.
#[test]
fn a_reader_gets_its_keys_row_while_the_entry_is_replaced() {
    model(|| {
        let cache = Cache::new(2);
        let [old, new] = cache.keys([0, 1]);
        cache.insert(old, 0, false);
        let reader = reader(&cache, [old, new]);
        cache.evict(0);
        let row = cache.reclaim().pop().unwrap_or(1);
        assert_eq!(cache.insert(new, row, false), LinkOutcome::New);
        reader.join().unwrap();
        assert_eq!(cache.read(&[new]), 1);
    });
}

/// A key is evicted, another key takes its slot and is evicted, and the first key returns with another row.
#[test]
fn a_reader_gets_its_keys_row_though_the_key_left_and_returned() {
    model(|| {
        let cache = Cache::new(3);
        let [key, other] = cache.keys([0, 1]);
        cache.insert(key, 0, false);
        let reader = reader(&cache, [key]);
        cache.evict(0);
        cache.insert(other, 1, false);
        cache.evict(0);
        let row = cache.reclaim().pop().unwrap_or(2);
        cache.insert(key, row, false);
        reader.join().unwrap();
        assert_eq!(cache.read(&[key]), 1);
    });
}

/// If both buckets of a new key are full, the key takes the slot of a victim. The slot is not empty in
/// between.
#[test]
fn a_reader_gets_its_keys_row_while_full_buckets_make_room() {
    model(|| {
        let cache = Cache::new(5);
        let [a, b, c, d, new] = cache.keys([0, 1]);
        for (row, key) in [a, b, c, d].into_iter().enumerate() {
            assert_eq!(cache.insert(key, row as u64, false), LinkOutcome::New);
        }
        let Some(victim) = victim(&cache, new) else { panic!("the buckets are full") };
        let reader = reader(&cache, [victim, new]);
        let LinkOutcome::Replaced(out) = cache.insert(new, 4, true) else { panic!("the buckets are full") };
        assert_eq!(out.key.0, victim);
        cache.retired.put(out, &cache.epochs);
        for row in cache.reclaim() {
            cache.write(row, 0);
        }
        reader.join().unwrap();
        assert_eq!(cache.read(&[new]), 1);
    });
}

/// The key of the entry that an insert of `key` replaces. All entries are equally old, so it is the last one.
fn victim(cache: &Cache, key: u64) -> Option<u64> {
    let [_, second] = cache.index.pair(FlatKey(key));
    cache.index.ages(second, Stamp::of(1)).last().map(|entry| entry.key.0)
}

/// An entry whose row moves to another slot keeps its key and its place in the index.
#[test]
fn a_reader_gets_its_keys_row_while_the_row_moves() {
    model(|| {
        let cache = Cache::new(2);
        let [key] = cache.keys([1, 0]);
        cache.insert(key, 0, false);
        let reader = reader(&cache, [key]);
        cache.write(1, key);
        let retire = |unlinked| cache.retired.put(unlinked, &cache.epochs);
        cache.index.visit_bucket(1, Stamp::of(1), |_, _, _| EntryDecision::Relink(Location::slot(1)), retire);
        for row in cache.reclaim() {
            cache.write(row, 0);
        }
        reader.join().unwrap();
        assert_eq!(cache.read(&[key]), 1);
    });
}

/// Two batches insert the same row: one succeeds, and both find it.
#[test]
fn of_two_inserts_of_a_key_one_wins() {
    model(|| {
        let cache = Cache::new(2);
        let [key] = cache.keys([0, 1]);
        let other = {
            let cache = cache.clone();
            loom::thread::spawn(move || {
                let link = cache.insert(key, 1, false);
                assert_eq!(cache.read(&[key]), 1);
                link == LinkOutcome::New
            })
        };
        let mine = cache.insert(key, 0, false) == LinkOutcome::New;
        assert_eq!(cache.read(&[key]), 1);
        assert!(mine != other.join().unwrap(), "one and only one");
        assert_eq!(cache.index.entries(), 1);
    });
}

/// Two keys have the same buckets in opposite order, and both keys are inserted into bucket 1.
#[test]
fn two_inserts_into_one_bucket_both_stay_and_do_not_deadlock() {
    model(|| {
        let cache = Cache::new(4);
        let full: [u64; 2] = cache.keys([0, 0]);
        (0..2).for_each(|row| assert_eq!(cache.insert(full[row], row as u64, false), LinkOutcome::New));
        let ([mine], [others]) = (cache.keys([0, 1]), cache.keys([1, 0]));
        let other = {
            let cache = cache.clone();
            loom::thread::spawn(move || assert_eq!(cache.insert(others, 3, false), LinkOutcome::New))
        };
        assert_eq!(cache.insert(mine, 2, false), LinkOutcome::New);
        other.join().unwrap();
        assert_eq!(cache.read(&[mine, others]), 2);
        assert_eq!(cache.index.entries(), 4);
    });
}
