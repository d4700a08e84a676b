use super::super::epoch::{Epochs, RetireList};
use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// A cache of the real index, epochs and limbo around rows that loom watches: a row that is
/// written while it may be read fails the model, and so does a row that is not its key's.
struct Cache {
    index: Index,
    epochs: Epochs,
    limbo: RetireList,
    rows: Vec<UnsafeCell<u64>>,
}

// SAFETY: rows are accessed as the module's argument allows, which is what loom checks.
unsafe impl Sync for Cache {}
// SAFETY: as above.
unsafe impl Send for Cache {}

impl Cache {
    fn new(rows: usize) -> Arc<Self> {
        Arc::new(Self {
            index: Index::new(1).unwrap(),
            epochs: Epochs::default(),
            limbo: RetireList::default(),
            rows: (0..rows).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn insert(&self, key: u64, row: u64, replace: bool) -> Link {
        // SAFETY: the model hands out a row once until it is freed.
        self.rows[row as usize].with_mut(|r| unsafe { *r = key });
        super::tests_insert(&self.index, key, row, 1, replace)
    }

    /// Unlinks whatever is there.
    fn evict(&self) {
        let out = |unlinked| self.limbo.put(unlinked, &self.epochs);
        self.index.evict(0, Stamp::of(1), |_, _, _| Fate::Leave, out);
    }

    /// The rows that may be used again.
    fn reclaim(&self) -> Vec<u64> {
        let mut free = Vec::new();
        self.limbo.reclaim(&self.epochs, |slot| free.push(slot.location().offset()));
        free
    }

    /// A batch: whatever it finds under a key is that key's row.
    fn read(&self, keys: &[u64]) {
        let pin = self.epochs.pin();
        for &key in keys {
            if let Some(held) = self.index.get(FlatKey(key), Stamp::of(pin.number()), &pin) {
                let row = &self.rows[held.location().offset() as usize];
                // SAFETY: found under a pin that lives.
                assert_eq!(row.with(|r| unsafe { *r }), key, "the row of its key");
            }
        }
    }
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// The slot in the index changes its key and, where no batch holds it, the row its content.
#[test]
fn a_reader_gets_its_keys_row_while_the_entry_is_replaced() {
    model(|| {
        let cache = Cache::new(2);
        cache.insert(2, 0, false);
        let reader = {
            let cache = cache.clone();
            loom::thread::spawn(move || cache.read(&[2, 3]))
        };
        cache.evict();
        let row = cache.reclaim().pop().unwrap_or(1);
        assert_eq!(cache.insert(3, row, false), Link::New);
        reader.join().unwrap();
        cache.read(&[3]);
    });
}

/// The key goes, another takes its slot and goes, and the key comes back with another row.
#[test]
fn a_reader_is_not_deceived_when_its_key_comes_back() {
    model(|| {
        let cache = Cache::new(3);
        cache.insert(2, 0, false);
        let reader = {
            let cache = cache.clone();
            loom::thread::spawn(move || cache.read(&[2]))
        };
        cache.evict();
        cache.insert(3, 1, false);
        cache.evict();
        let row = cache.reclaim().pop().unwrap_or(2);
        cache.insert(2, row, false);
        reader.join().unwrap();
    });
}

/// In a full bucket the newcomer takes a slot without leaving it empty between.
#[test]
fn a_reader_gets_its_keys_row_while_a_full_bucket_makes_room() {
    model(|| {
        let cache = Cache::new(3);
        cache.insert(2, 0, false);
        cache.insert(3, 1, false);
        let reader = {
            let cache = cache.clone();
            loom::thread::spawn(move || cache.read(&[2, 4]))
        };
        let Link::Replaced(out) = cache.insert(4, 2, true) else { panic!("the bucket was full") };
        cache.limbo.put(out, &cache.epochs);
        for row in cache.reclaim() {
            // SAFETY: freed.
            cache.rows[row as usize].with_mut(|r| unsafe { *r = 99 });
        }
        reader.join().unwrap();
    });
}

/// Two batches bring the same row: one is in, and both find it.
#[test]
fn of_two_inserts_of_a_key_one_wins() {
    model(|| {
        let cache = Cache::new(2);
        let other = {
            let cache = cache.clone();
            loom::thread::spawn(move || {
                let link = cache.insert(2, 1, false);
                cache.read(&[2]);
                link == Link::New
            })
        };
        let mine = cache.insert(2, 0, false) == Link::New;
        cache.read(&[2]);
        assert!(mine != other.join().unwrap(), "one and only one");
        assert_eq!(cache.index.entries(), 1);
    });
}
