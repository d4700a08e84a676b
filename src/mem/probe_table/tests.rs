use std::collections::BTreeMap;

use bytemuck::Zeroable;
use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    tag: u32,
    /// The value plus 1, because a bucket of zeros is empty.
    value: u32,
}

impl Entry {
    fn new(tag: Tag, value: u32) -> Self {
        Self { tag: tag.0, value: value + 1 }
    }
}

impl Bucket for Entry {
    fn is_empty(&self) -> bool {
        self.value == 0
    }

    fn tag(&self) -> Tag {
        Tag(self.tag)
    }
}

#[test]
fn homes_are_spread_over_all_buckets_also_if_there_are_more_than_tags() {
    for buckets in [1_usize, 1000, 1 << 32, 5 << 32] {
        let homes = [0, 1 << 30, 1 << 31, 3 << 30, u32::MAX].map(|tag| home(Tag(tag), buckets));
        assert_eq!(homes[..4], [0, buckets / 4, buckets / 2, buckets / 4 * 3 + buckets % 4 * 3 / 4]);
        assert!((buckets - buckets.div_ceil(1 << 32)..buckets).contains(&homes[4]), "{homes:?}");
    }
}

proptest! {
    #[test]
    fn the_table_is_a_map_even_if_tags_are_equal_or_their_runs_wrap_around(
        count in 1_usize..20,
        // Few tags, near each other, so that runs are long, meet and wrap around.
        steps in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0_u32..6), 1..200),
        base in prop::sample::select(vec![0_u32, u32::MAX - 5, 1 << 31]),
    ) {
        let mut table = ProbeTable::<Entry>::new(count).unwrap();
        let mut expected: BTreeMap<u32, Tag> = BTreeMap::new();
        for (at, insert, tag) in steps {
            let (value, tag) = (at.index(count) as u32, Tag(base + tag));
            match (expected.get(&value).copied(), insert) {
                (None, true) => {
                    table.insert(Entry::new(tag, value));
                    expected.insert(value, tag);
                }
                (Some(tag), false) => {
                    table.remove(tag, |entry| *entry == Entry::new(tag, value));
                    expected.remove(&value);
                }
                _ => {}
            }
            for value in 0..count as u32 {
                for tag in (0..6).map(|tag| Tag(base + tag)) {
                    let entry = Entry::new(tag, value);
                    let there = expected.get(&value) == Some(&tag);
                    table.prefetch(tag);
                    prop_assert_eq!(table.find(tag, |found| *found == entry), there.then_some(&entry));
                    let any = table.find(tag, |found| found.tag() == tag);
                    prop_assert_eq!(any.is_some(), expected.values().any(|&of| of == tag));
                    prop_assert!(any.is_none_or(|entry| expected[&(entry.value - 1)] == tag));
                }
            }
        }
        table.clear();
        prop_assert!((0..6).all(|tag| table.find(Tag(base + tag), |_| true).is_none()));
    }
}

#[test]
fn a_table_without_capacity_is_empty() {
    let table = ProbeTable::<Entry>::new(0).unwrap();
    assert_eq!(table.find(Tag(9), |_| true), None);
}
