use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// One slot and its link. A batch reads the slot if it finds the link. The evictor unlinks the slot, takes a
/// tag, and overwrites the slot if all batches up to the tag have ended. loom fails the model on a data race.
#[test]
fn a_slot_is_never_overwritten_under_a_batch_that_found_it() {
    loom::model(|| {
        let epochs = Arc::new(Epochs::default());
        let link = Arc::new(AtomicU64::new(1));
        let slot = Arc::new(UnsafeCell::new(7u64));
        let batch = {
            let (epochs, link, slot) = (epochs.clone(), link.clone(), slot.clone());
            loom::thread::spawn(move || {
                let pin = epochs.pin();
                if link.load(Ordering::Acquire) == 1 {
                    // SAFETY: the model's claim: no write while the pin lives; loom checks it.
                    assert_eq!(slot.with(|s| unsafe { *s }), 7);
                }
                drop(pin);
            })
        };
        link.store(0, Ordering::Release);
        let tag = epochs.tag();
        if epochs.oldest() > tag {
            // SAFETY: as above.
            slot.with_mut(|s| unsafe { *s = 8 });
        }
        batch.join().unwrap();
    });
}

/// As the model above, but two batches use the same cell one after the other.
#[test]
fn a_reused_cell_still_orders_the_previous_batch() {
    loom::model(|| {
        let epochs = Arc::new(Epochs::default());
        let link = Arc::new(AtomicU64::new(1));
        let slot = Arc::new(UnsafeCell::new(7u64));
        let batches = {
            let (epochs, link, slot) = (epochs.clone(), link.clone(), slot.clone());
            loom::thread::spawn(move || {
                for _ in 0..2 {
                    let _pin = epochs.pin();
                    if link.load(Ordering::Acquire) == 1 {
                        // SAFETY: as above.
                        assert_eq!(slot.with(|s| unsafe { *s }), 7);
                    }
                }
            })
        };
        link.store(0, Ordering::Release);
        let tag = epochs.tag();
        if epochs.oldest() > tag {
            // SAFETY: as above.
            slot.with_mut(|s| unsafe { *s = 8 });
        }
        batches.join().unwrap();
    });
}

/// A slot of a version's overlay (`version.rs`) is linked, evicted and, when free, overwritten, while a batch
/// finds it in the overlay. loom fails the model on a data race.
#[test]
fn an_overlay_slot_that_the_index_evicts_is_not_overwritten_under_a_batch() {
    loom::model(|| {
        let shared = Arc::new((Epochs::default(), RetireList::default(), AtomicU64::new(1)));
        let slot = Arc::new(UnsafeCell::new(7u64));
        shared.1.hold();
        let batch = {
            let (shared, slot) = (shared.clone(), slot.clone());
            loom::thread::spawn(move || {
                let (epochs, _, current) = &*shared;
                let pin = epochs.pin();
                if current.load(Ordering::Acquire) == 1 {
                    // SAFETY: the model's claim: no write while the pin lives; loom checks it.
                    assert_eq!(slot.with(|s| unsafe { *s }), 7);
                }
                drop(pin);
            })
        };
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
        let shared = Arc::new((Epochs::default(), RetireList::default(), AtomicU64::new(1)));
        let slot = Arc::new(UnsafeCell::new(7u64));
        shared.1.hold();
        let batch = {
            let (shared, slot) = (shared.clone(), slot.clone());
            loom::thread::spawn(move || {
                let (epochs, _, current) = &*shared;
                let pin = epochs.pin();
                if current.load(Ordering::Acquire) == 1 {
                    // SAFETY: the model's claim: no write while the pin lives; loom checks it.
                    assert_eq!(slot.with(|s| unsafe { *s }), 7);
                }
                drop(pin);
            })
        };
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
