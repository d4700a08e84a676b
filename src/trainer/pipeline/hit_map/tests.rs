use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn it_is_a_map_even_where_tags_are_equal_or_crowd_at_its_end(
        count in 1_usize..20,
        // Few tags, near each other, so that runs are long, meet and go round.
        steps in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0_u32..6), 1..200),
        base in prop::sample::select(vec![0_u32, u32::MAX - 5, 1 << 31]),
    ) {
        let mut map = HitMap::new(count).unwrap();
        let mut plain: BTreeMap<u32, Tag> = BTreeMap::new();
        for (at, insert, tag) in steps {
            let (slot, tag) = (at.index(count) as u32, Tag(base + tag));
            match (plain.get(&slot).copied(), insert) {
                (None, true) => {
                    map.insert(tag, slot);
                    plain.insert(slot, tag);
                }
                (Some(tag), false) => {
                    map.remove(tag, slot);
                    plain.remove(&slot);
                }
                _ => {}
            }
            for slot in 0..count as u32 {
                for tag in (0..6).map(|tag| Tag(base + tag)) {
                    let there = plain.get(&slot) == Some(&tag);
                    prop_assert_eq!(map.find(tag, |found| found == slot), there.then_some(slot));
                    let any = map.find(tag, |_| true);
                    prop_assert_eq!(any.is_some(), plain.values().any(|&of| of == tag));
                    prop_assert!(any.is_none_or(|slot| plain[&slot] == tag));
                }
            }
        }
        map.clear();
        prop_assert!((0..6).all(|tag| map.find(Tag(base + tag), |_| true).is_none()));
    }
}

#[test]
fn no_slots_are_a_map_too() {
    let map = HitMap::new(0).unwrap();
    assert_eq!(map.find(Tag(9), |_| true), None);
}
