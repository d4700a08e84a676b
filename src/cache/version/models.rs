//! A loom model of the switch, with the real pins. The current version and the index, which has one entry,
//! are plain atomics here. `index/models.rs` models the real index.

use super::super::epoch::Epochs;
use crate::sync::{AtomicU64, Ordering};
use loom::sync::Arc;

/// Bits of `current`: the new version is current, and it has an overlay. The value of a new row is `NEW`,
/// too.
const NEW: u64 = 2;
const OVERLAY: u64 = 1;

/// A batch of the old version may insert the old row at any time. A batch of the new version never finds it.
#[test]
fn a_batch_of_the_new_version_finds_the_new_row_while_an_old_one_inserts() {
    loom::model(|| {
        let epochs = Arc::new(Epochs::default());
        let current = Arc::new(AtomicU64::new(0));
        let index = Arc::new(AtomicU64::new(0));
        let batch = || {
            let (epochs, current, index) = (epochs.clone(), current.clone(), index.clone());
            move || {
                let pin = epochs.pin();
                match current.load(Ordering::Acquire) {
                    0 => index.store(0, Ordering::Release),
                    NEW => assert_eq!(index.load(Ordering::Acquire), NEW, "a stale hit"),
                    _ => {}
                }
                drop(pin);
            }
        };
        let (first, second) = (batch(), batch());
        let other = loom::thread::spawn(move || {
            first();
            second();
        });
        current.swap(NEW | OVERLAY, Ordering::AcqRel);
        let tag = epochs.tag();
        if epochs.oldest() > tag {
            index.store(NEW, Ordering::Release);
            current.swap(NEW, Ordering::AcqRel);
        }
        other.join().unwrap();
    });
}
