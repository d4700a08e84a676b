use super::super::epoch::Epochs;
use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// Inserts a key. With `replace`, a full pair of buckets evicts its longest unused entry.
fn insert(index: &Index, key: u64, offset: u64, batch: u64, replace: bool) -> LinkOutcome {
    let entry = Entry { key: FlatKey(key), location: Location::slot(offset), now: Stamp::of(batch) };
    let coldness = |_, age| u64::from(age);
    index.insert(entry, replace.then_some(&coldness), |_| true)
}

fn find(index: &Index, epochs: &Epochs, key: u64, batch: u64) -> Option<u64> {
    let pin = epochs.pin();
    index.get(FlatKey(key), Stamp::of(batch), &pin).map(|pinned| pinned.location().offset())
}

fn evict_all(index: &Index, bucket: usize, now: Stamp, victim: impl Fn(u64) -> bool) -> Vec<u64> {
    let mut out = Vec::new();
    let decide = |key: FlatKey, _: PinnedLocation<'_>, _| {
        if victim(key.0) { EntryDecision::Unlink } else { EntryDecision::Keep }
    };
    index.visit_bucket(bucket, now, decide, |unlinked| out.push(unlinked.key.0));
    out
}

proptest! {
    #[test]
    fn it_finds_what_a_map_finds(
        buckets in 1usize..20,
        ops in prop::collection::vec((0u8..4, 2u64..200), 1..600),
    ) {
        let index = Index::new(buckets).unwrap();
        let epochs = Epochs::default();
        let mut map: HashMap<u64, u64> = HashMap::new();
        for (i, (op, key)) in ops.into_iter().enumerate() {
            let (batch, offset) = (i as u64, i as u64 + 1000);
            match op {
                0 | 1 => match insert(&index, key, offset, batch, op == 0) {
                    LinkOutcome::New => prop_assert_eq!(map.insert(key, offset), None),
                    LinkOutcome::Present => prop_assert!(map.contains_key(&key)),
                    LinkOutcome::Replaced(out) => {
                        prop_assert_eq!(map.remove(&out.key.0), Some(out.location().offset()));
                        prop_assert_eq!(map.insert(key, offset), None);
                    }
                    LinkOutcome::Full => prop_assert!(op == 1 && map.len() >= SLOTS),
                },
                2 => prop_assert_eq!(find(&index, &epochs, key, batch), map.get(&key).copied()),
                _ => {
                    for out in evict_all(&index, key as usize % buckets, Stamp::of(batch), |k| k % 3 == 0) {
                        prop_assert!(map.remove(&out).is_some());
                    }
                }
            }
            prop_assert_eq!(index.entries(), map.len() as u64);
        }
        for (&key, &offset) in &map {
            prop_assert_eq!(find(&index, &epochs, key, 0), Some(offset));
        }
    }

    /// A lookup renews a stamp only if it is more than [`FRESH`] batches old.
    #[test]
    fn of_lookups_in_quick_succession_only_the_first_writes_a_stamp(
        first in any::<u64>(),
        gaps in prop::collection::vec(0u64..4 * u64::from(FRESH), 0..60),
    ) {
        let (index, epochs) = (Index::new(1).unwrap(), Epochs::default());
        insert(&index, 7, 7, first, false);
        let (mut batch, mut stamped) = (first, first);
        for gap in gaps {
            batch = batch.wrapping_add(gap);
            prop_assert_eq!(find(&index, &epochs, 7, batch), Some(7));
            if batch.wrapping_sub(stamped) > u64::from(FRESH) {
                stamped = batch;
            }
            let ages: Vec<u32> = index.ages(0, Stamp::of(batch)).map(|entry| entry.age).collect();
            prop_assert_eq!(ages, [batch.wrapping_sub(stamped) as u32]);
        }
    }

    #[test]
    fn ages_count_batches_across_the_stamps_wrap(batch in any::<u64>(), ago in 0u64..1 << 20) {
        let then = batch.saturating_sub(ago);
        prop_assert_eq!(u64::from(Stamp::of(batch).age(Stamp::of(then))), batch - then);
        prop_assert_eq!(Stamp::of(then).age(Stamp::of(then.wrapping_add(ago % AHEAD))), 0);
    }
}

#[test]
fn a_full_pair_of_buckets_evicts_its_coldest_entry() {
    let index = Index::new(1).unwrap();
    let epochs = Epochs::default();
    for key in 2..10 {
        assert_eq!(insert(&index, key, key, key, true), LinkOutcome::New);
    }
    assert_eq!(find(&index, &epochs, 2, 20), Some(2), "just used, so 3 is the coldest");
    let newcomer = |replace| insert(&index, 50, 50, 21, replace);
    assert_eq!(newcomer(false), LinkOutcome::Full);
    assert!(matches!(newcomer(true), LinkOutcome::Replaced(out) if out.key == FlatKey(3)));
    assert_eq!(find(&index, &epochs, 3, 22), None);
    assert_eq!(find(&index, &epochs, 50, 22), Some(50));
}

#[test]
fn at_the_load_limit_nearly_every_key_has_found_a_slot() {
    let index = Index::new(4096).unwrap();
    let links = (0..capacity(index.buckets())).map(|i| insert(&index, i + 2, i, 0, false));
    let full = links.filter(|link| *link == LinkOutcome::Full).count() as u64;
    assert!(
        full * 200 < capacity(index.buckets()),
        "{full} of {} keys had no slot",
        capacity(index.buckets())
    );
}
