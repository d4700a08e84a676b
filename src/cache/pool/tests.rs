use super::*;
use proptest::prelude::*;

fn shape(slabs: usize) -> SlabShape {
    SlabShape { row_bytes: vec![4, 20, 64], slab_bytes: 128, slabs }
}

/// Takes slots of a class until no slot is free.
fn exhaust(pool: &Pool, class: Class) -> Vec<Location> {
    std::iter::from_fn(|| pool.take(class)).map(|slot| slot.location()).collect()
}

proptest! {
    #[test]
    fn slots_never_overlap_and_all_memory_is_freed(
        ops in prop::collection::vec((0u16..3, any::<bool>(), any::<prop::sample::Index>()), 1..400),
    ) {
        let pool = Pool::new(shape(6)).unwrap();
        let mut held: Vec<(Location, usize)> = Vec::new();
        for (class, take, which) in ops {
            if take {
                let bytes = pool.shape().row_bytes[usize::from(class)];
                let Some(slot) = pool.take(Class(class)) else { continue };
                let location = slot.location();
                let start = location.offset() as usize * WORD_BYTES;
                for &(other, length) in &held {
                    let other = other.offset() as usize * WORD_BYTES;
                    prop_assert!(start + bytes <= other || other + length <= start);
                }
                prop_assert!(start + bytes <= pool.shape().data_bytes());
                held.push((location, bytes));
            } else if !held.is_empty() {
                let (location, _) = held.swap_remove(which.index(held.len()));
                // SAFETY: the slot was taken above and removed from `held`. It was never in an index.
                unsafe { pool.release(location) };
            }
        }
        for (location, _) in held.drain(..) {
            // SAFETY: as above.
            unsafe { pool.release(location) };
        }
        for class in 0..3 {
            let all = exhaust(&pool, Class(class));
            prop_assert_eq!(all.len(), 6 * pool.shape().slots(Class(class)));
            for location in all {
                // SAFETY: as above.
                unsafe { pool.release(location) };
            }
        }
    }
}

#[test]
fn an_emptied_slab_is_reused_for_another_row_size() {
    let pool = Pool::new(shape(1)).unwrap();
    let small = exhaust(&pool, Class(0));
    assert_eq!(small.len(), 32);
    assert!(!pool.slots().has_room(Class(2)));
    for location in small {
        // SAFETY: taken above, never indexed.
        unsafe { pool.release(location) };
    }
    assert_eq!(exhaust(&pool, Class(2)).len(), 2);
}

#[test]
fn a_draining_slab_gives_no_slots_until_it_is_empty() {
    let pool = Pool::new(shape(2)).unwrap();
    let full = exhaust(&pool, Class(2));
    // SAFETY: taken above, never indexed.
    unsafe { pool.release(full[0]) };
    assert!(pool.slots().drain(1));
    assert!(pool.draining()(full[1]) && !pool.draining()(full[2]));
    assert!(!pool.slots().has_room(Class(2)) && !pool.slots().has_room(Class(0)));
    // SAFETY: as above.
    unsafe { pool.release(full[1]) };
    assert!(pool.slots().has_room(Class(0)));
    assert!(!pool.slots().drain(0), "no slab is draining any more");
}

#[test]
fn freed_slots_are_poisoned_in_debug() {
    let pool = Pool::new(shape(1)).unwrap();
    let mut slot = pool.take(Class(1)).unwrap();
    pool.fill(&mut slot, &[], &[1; 20]);
    let location = slot.location();
    let bits = |pool: &Pool| {
        // SAFETY: a slot of five values, which no other thread writes.
        let row = unsafe { std::slice::from_raw_parts(pool.start(location, 20).cast::<u32>().as_ptr(), 5) };
        row.to_vec()
    };
    assert_eq!(bits(&pool), [0x0101_0101; 5]);
    pool.put_back(slot);
    if cfg!(debug_assertions) {
        assert_eq!(bits(&pool), [POISON; 5]);
    }
}
