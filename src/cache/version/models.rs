//! A loom model of the switch, with the real pins. The current version, the admission flag and the index,
//! which has one entry, are plain atomics here. `index/models.rs` models the real index.

use super::super::epoch::Epochs;
use crate::sync::{AtomicU64, Ordering};
use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;

/// Bits of `current`: the new version is current, and it has an overlay.
const NEW: u64 = 2;
const OVERLAY: u64 = 1;

/// States of the index's entry.
const ABSENT: u64 = 0;
const OLD_ROW: u64 = 1;
const NEW_ROW: u64 = 2;

#[derive(Default)]
struct Model {
    epochs: Epochs,
    current: AtomicU64,
    paused: AtomicBool,
    entry: AtomicU64,
}

impl Model {
    /// A batch of the old version inserts the row if rows are admitted. One of the new version that reads no
    /// overlay must not find the old row.
    fn batch(&self) {
        let pin = self.epochs.pin();
        match self.current.load(Ordering::Acquire) {
            0 if !self.paused.load(Ordering::Acquire) => self.entry.store(OLD_ROW, Ordering::Release),
            NEW => assert_ne!(self.entry.load(Ordering::Acquire), OLD_ROW, "a stale hit"),
            _ => {}
        }
        drop(pin);
    }

    /// Whether no earlier batch runs. The real switch waits until that holds.
    fn earlier_batches_have_ended(&self) -> bool {
        let tag = self.epochs.tag();
        self.epochs.oldest() > tag
    }

    fn switch(&self) {
        self.paused.store(true, Ordering::Release);
        if !self.earlier_batches_have_ended() {
            return;
        }
        // The overlay has the row only if it is cached now.
        let cached = self.entry.load(Ordering::Acquire) != ABSENT;
        self.current.swap(NEW | OVERLAY, Ordering::AcqRel);
        if !self.earlier_batches_have_ended() {
            return;
        }
        if cached {
            self.entry.store(NEW_ROW, Ordering::Release);
        }
        self.current.swap(NEW, Ordering::AcqRel);
        self.paused.store(false, Ordering::Release);
    }
}

#[test]
fn a_batch_of_the_new_version_finds_no_old_row_though_old_ones_insert_until_the_switch() {
    loom::model(|| {
        let model = Arc::new(Model::default());
        let batches = model.clone();
        let other = loom::thread::spawn(move || {
            batches.batch();
            batches.batch();
        });
        model.switch();
        other.join().unwrap();
    });
}
