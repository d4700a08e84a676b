//! Loom models of the epochs: a slot is not overwritten while a batch may read it.

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// One slot and its link. Batches read the slot if they find the link. The evictor unlinks the slot, takes a
/// tag, and overwrites the slot if all batches up to the tag have ended. loom fails the model on a data race.
fn the_evictor_and_batches(count: usize) {
    loom::model(move || {
        let epochs = Arc::new(Epochs::default());
        let link = Arc::new(AtomicU64::new(1));
        let slot = Arc::new(UnsafeCell::new(7u64));
        let batches = {
            let (epochs, link, slot) = (epochs.clone(), link.clone(), slot.clone());
            loom::thread::spawn(move || {
                for _ in 0..count {
                    read_if_linked(&epochs, &link, &slot);
                }
            })
        };
        link.store(0, Ordering::Release);
        let tag = epochs.tag();
        if epochs.oldest() > tag {
            // SAFETY: the model's claim: no write while a pin lives; loom checks it.
            slot.with_mut(|s| unsafe { *s = 8 });
        }
        batches.join().unwrap();
    });
}

/// A batch.
fn read_if_linked(epochs: &Epochs, link: &AtomicU64, slot: &UnsafeCell<u64>) {
    let pin = epochs.pin();
    if link.load(Ordering::Acquire) == 1 {
        // SAFETY: the model's claim: no write while the pin lives; loom checks it.
        assert_eq!(slot.with(|s| unsafe { *s }), 7);
    }
    drop(pin);
}

#[test]
fn a_slot_is_never_overwritten_under_a_batch_that_found_it() {
    the_evictor_and_batches(1);
}

/// As the model above, but two batches use the same cell one after the other.
#[test]
fn a_reused_cell_still_orders_the_previous_batch() {
    the_evictor_and_batches(2);
}

/// Epochs with a retired list that frees nothing, an overlay that is current, its slot, and a batch that
/// reads it.
struct WithOverlay {
    shared: Arc<(Epochs, RetireList, AtomicU64)>,
    slot: Arc<UnsafeCell<u64>>,
    batch: loom::thread::JoinHandle<()>,
}

impl WithOverlay {
    fn new() -> Self {
        let shared = Arc::new((Epochs::default(), RetireList::default(), AtomicU64::new(1)));
        let slot = Arc::new(UnsafeCell::new(7u64));
        shared.1.hold();
        let batch = {
            let (shared, slot) = (shared.clone(), slot.clone());
            loom::thread::spawn(move || read_if_linked(&shared.0, &shared.2, &slot))
        };
        Self { shared, slot, batch }
    }
}

/// A slot of a version's overlay (`version.rs`) is linked, evicted and, when free, overwritten, while a batch
/// finds it in the overlay. loom fails the model on a data race.
#[test]
fn an_overlay_slot_that_the_index_evicts_is_not_overwritten_under_a_batch() {
    loom::model(|| {
        let WithOverlay { shared, slot, batch } = WithOverlay::new();
        let (epochs, retired, current) = &*shared;
        retired.put(Unlinked::withdrawn(crate::types::FlatKey(2), Location::slot(0)), epochs);
        let reuse = |_| {
            // SAFETY: as above.
            slot.with_mut(|s| unsafe { *s = 8 });
        };
        retired.reclaim(epochs, reuse);
        current.swap(0, Ordering::AcqRel);
        retired.release(epochs);
        retired.reclaim(epochs, reuse);
        batch.join().unwrap();
    });
}

/// The evictor retires a slot of the overlay while the switch removes the overlay. In either order, the
/// slot's tag is from after the removal. loom fails the model on a data race.
#[test]
fn a_slot_retired_while_the_overlay_is_removed_is_not_overwritten_under_a_batch() {
    loom::model(|| {
        let WithOverlay { shared, slot, batch } = WithOverlay::new();
        let evictor = {
            let shared = shared.clone();
            loom::thread::spawn(move || {
                let (epochs, retired, _) = &*shared;
                retired.put(Unlinked::withdrawn(crate::types::FlatKey(2), Location::slot(0)), epochs);
            })
        };
        let (epochs, retired, current) = &*shared;
        current.swap(0, Ordering::AcqRel);
        retired.release(epochs);
        evictor.join().unwrap();
        retired.reclaim(epochs, |_| {
            // SAFETY: as above.
            slot.with_mut(|s| unsafe { *s = 8 });
        });
        batch.join().unwrap();
    });
}
