use super::*;

#[test]
fn a_replaced_object_is_kept_while_it_is_read_and_freed_afterwards() {
    let drops = std::sync::Arc::new(());
    let object = Replaceable::new((1, drops.clone()));
    let reading = object.read();
    for i in 2..2000 {
        object.replace((i, drops.clone()));
        assert_eq!((reading.0, object.read().0), (1, i));
    }
    drop(reading);
    drop(object);
    // Later pins free the object after a bounded delay.
    for _ in 0..10_000 {
        crossbeam_epoch::pin().flush();
    }
    assert_eq!(std::sync::Arc::strong_count(&drops), 1);
}

#[test]
fn a_replaced_object_is_freed_by_later_readers() {
    let drops = std::sync::Arc::new(());
    let object = Replaceable::new(drops.clone());
    object.replace(std::sync::Arc::default());
    for _ in 0..100_000 {
        std::thread::yield_now();
        drop(object.read());
        if std::sync::Arc::strong_count(&drops) == 1 {
            return;
        }
    }
    panic!("the object is kept though no thread reads it");
}

#[test]
fn held_slots_are_freed_only_by_batches_that_begin_after_the_release() {
    let (epochs, retired) = (Epochs::default(), RetireList::default());
    retired.hold();
    retired.put(Unlinked::withdrawn(crate::types::FlatKey(9), Location::slot(5)), &epochs);
    let between = epochs.pin();
    let mut freed = 0;
    assert_eq!(retired.reclaim(&epochs, |_| freed += 1), 1, "held");
    retired.release(&epochs);
    assert_eq!(retired.reclaim(&epochs, |_| freed += 1), 1, "a batch began before the release");
    drop(between);
    assert_eq!(retired.reclaim(&epochs, |_| freed += 1), 0);
    assert_eq!(freed, 1);
}

#[test]
fn slots_are_freed_in_order_and_at_most_as_many_as_requested() {
    let (epochs, retired) = (Epochs::default(), RetireList::default());
    let put =
        |slot| retired.put(Unlinked::withdrawn(crate::types::FlatKey(9), Location::slot(slot)), &epochs);
    (0..10).for_each(put);
    let mut freed = Vec::new();
    for (most, left) in [(0, 10), (3, 7), (1, 6)] {
        assert_eq!(retired.reclaim_some(&epochs, most, |slot| freed.push(slot.location().offset())), left);
    }
    let pin = epochs.pin();
    put(10);
    assert_eq!(retired.reclaim(&epochs, |slot| freed.push(slot.location().offset())), 1, "pinned");
    drop(pin);
    assert_eq!(retired.reclaim(&epochs, |slot| freed.push(slot.location().offset())), 0);
    assert_eq!(freed, (0..11).collect::<Vec<_>>());
}

#[test]
fn a_tag_is_free_when_every_batch_up_to_it_is_finished() {
    let epochs = Epochs::default();
    let first = epochs.pin();
    let second = epochs.pin();
    let tag = epochs.tag();
    let third = epochs.pin();
    assert_eq!(tag, second.number());
    assert!(epochs.oldest() <= tag);
    drop(first);
    assert!(epochs.oldest() <= tag);
    drop(second);
    assert!(epochs.oldest() > tag, "the third batch is newer than the tag");
    assert_eq!(epochs.oldest(), third.number());
    drop(third);
    assert_eq!(epochs.oldest(), u64::MAX);
}

#[test]
fn an_owned_pin_is_seen_until_another_thread_drops_it() {
    let epochs = Arc::new(Epochs::default());
    let mut pins: Vec<_> = (0..2 * CELLS + 1).map(|_| epochs.pin_owned()).collect();
    while !pins.is_empty() {
        assert_eq!(epochs.oldest(), pins[0].number());
        let first = pins.remove(0);
        std::thread::spawn(move || drop(first)).join().unwrap();
    }
    assert_eq!(epochs.oldest(), u64::MAX);
    drop(epochs.pin());
    assert_eq!(epochs.oldest(), u64::MAX, "its cell is reused");
}

#[test]
fn more_pins_than_one_block_has_cells_are_all_seen() {
    let epochs = Epochs::default();
    let mut pins: Vec<_> = (0..3 * CELLS + 1).map(|_| epochs.pin()).collect();
    assert!(pins.windows(2).all(|w| w[0].number() < w[1].number()));
    while !pins.is_empty() {
        assert_eq!(epochs.oldest(), pins[0].number());
        pins.remove(0);
    }
    assert_eq!(epochs.oldest(), u64::MAX);
}
