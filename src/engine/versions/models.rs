//! A loom model of a switch as the engine makes it, with the real pins and the real [`Versions`]. The cache
//! is its version and one row, as plain atomics. `cache/version/models.rs` models how its rows switch.

use super::*;
use crate::cache::epoch::Epochs;
use crate::sync::{AtomicU64, Ordering};

const OLD: Version = Version(1);
const NEW: Version = Version(2);

/// A version whose dense weights and rows are its number.
struct Parts {
    weights: u64,
    rows: u64,
    /// Batches that use the version.
    batches: Arc<AtomicU64>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        assert_eq!(self.batches.load(Ordering::Acquire), 0, "a version is dropped while a batch uses it");
    }
}

struct Engine {
    versions: Versions<Parts>,
    epochs: Epochs,
    cache_version: AtomicU64,
    batches: [Arc<AtomicU64>; 2],
}

impl Engine {
    fn parts(version: Version, batches: &Arc<AtomicU64>) -> Parts {
        Parts { weights: version.0, rows: version.0, batches: batches.clone() }
    }

    /// A batch of this version: it reads a missed row from the store, and the weights.
    fn run(&self, parts: &Parts, expected: Option<u64>) {
        parts.batches.fetch_add(1, Ordering::AcqRel);
        assert_eq!(parts.weights, parts.rows, "weights and rows of two versions");
        assert!(expected.is_none_or(|cached| cached == parts.weights), "cached rows of another version");
        parts.batches.fetch_sub(1, Ordering::AcqRel);
    }

    fn batch_with_cache(&self) {
        let pin = self.epochs.pin();
        let version = self.cache_version.load(Ordering::Acquire);
        let parts = self.versions.of(Version(version)).expect("the version of a pin is in use");
        self.run(&parts, Some(version));
        // The dense layers may run after the pin is dropped, as on a device.
        drop(pin);
        self.run(&parts, Some(version));
    }

    fn batch_without_cache(&self) {
        self.run(&self.versions.current(), None);
    }

    fn switch(&self) {
        self.versions.begin(NEW, Arc::new(Self::parts(NEW, &self.batches[1])));
        self.cache_version.swap(NEW.0, Ordering::AcqRel);
        // Instead of waiting, a model ends here in the interleavings in which it would wait.
        let tag = self.epochs.tag();
        if self.epochs.oldest() > tag {
            drop(self.versions.end());
            assert_eq!(self.versions.version(), NEW);
        }
    }
}

fn model(batch: fn(&Engine), count: usize) {
    loom::model(move || {
        let batches = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let engine = Arc::new(Engine {
            versions: Versions::new(OLD, Arc::new(Engine::parts(OLD, &batches[0]))),
            epochs: Epochs::default(),
            cache_version: AtomicU64::new(OLD.0),
            batches,
        });
        let of_thread = engine.clone();
        let other = loom::thread::spawn(move || (0..count).for_each(|_| batch(&of_thread)));
        engine.switch();
        other.join().unwrap();
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
