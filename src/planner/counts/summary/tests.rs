use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// Small keys, the lower ones more frequent, and keys just below `u64::MAX`.
fn keys(most: usize) -> impl Strategy<Value = Vec<u64>> {
    let key = (0u64..40, any::<bool>()).prop_map(|(k, high)| if high { u64::MAX - k } else { k * k / 20 });
    prop::collection::vec(key, 1..most)
}

fn bytes(summary: &Summary) -> usize {
    16 * summary.counted.capacity() + 4 * summary.index.capacity()
}

/// Checks the bounds of the module docs against exact counts.
fn check(summary: &Summary, exact: &HashMap<u64, u64>) -> Result<(), TestCaseError> {
    let floor = summary.floor();
    let held: HashMap<u64, u64> = summary.counted.iter().map(|c| (c.key, c.count)).collect();
    prop_assert_eq!(held.len(), summary.keys(), "a key is kept twice");
    for (key, &accesses) in exact {
        match held.get(key) {
            Some(&count) => {
                prop_assert!(
                    (accesses..=accesses + floor).contains(&count),
                    "{count} of {accesses}, {floor}"
                );
                prop_assert_eq!(
                    summary.index[summary.slot(*key)] as usize,
                    summary.counted.iter().position(|c| c.key == *key).unwrap()
                );
            }
            None => prop_assert!(accesses <= floor, "{accesses} accesses dropped, floor {floor}"),
        }
    }
    prop_assert!(held.keys().all(|key| exact.contains_key(key)));
    let mut accesses: Vec<u64> = exact.values().copied().collect();
    accesses.sort_unstable_by(|a, b| b.cmp(a));
    let half = summary.room.div_ceil(2);
    for j in 0..half.min(accesses.len()) {
        let others: u64 = accesses[j..].iter().sum();
        prop_assert!(floor * (half - j) as u64 <= others, "floor {floor}, {others} without {j}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn counts_are_never_too_low_at_most_the_floor_too_high_and_the_floor_is_bounded(
        wanted in keys(400), room in 1usize..30,
    ) {
        let mut summary = Summary::within(room * KEY_BYTES).unwrap();
        let mut exact = HashMap::new();
        for key in wanted {
            summary.add(key);
            *exact.entry(key).or_default() += 1;
            prop_assert!(summary.keys() <= room);
            check(&summary, &exact)?;
        }
        prop_assert_eq!(summary.floor() == 0, exact.len() <= room);
    }

    #[test]
    fn memory_stays_within_its_bytes_for_any_keys(
        bytes_given in KEY_BYTES..200_000, step in 1u64..1000, repeats in 1u64..4,
    ) {
        let mut summary = Summary::within(bytes_given).unwrap();
        prop_assert!(bytes(&summary) <= bytes_given);
        for n in 0..20_000u64 {
            summary.add(n / repeats * step);
        }
        prop_assert!(bytes(&summary) <= bytes_given);
        prop_assert!(summary.keys() <= bytes_given / KEY_BYTES);
    }
}

#[test]
fn every_key_is_still_found_after_the_index_has_grown() {
    let mut summary = Summary::within(5000 * KEY_BYTES).unwrap();
    let mut exact = HashMap::new();
    for n in 0..60_000u64 {
        // A third of the accesses go to 100 keys, the others to 20,000 keys in turn.
        let key = if n % 3 == 0 { n / 3 % 100 } else { 1000 + n % 20_000 };
        summary.add(key);
        *exact.entry(key).or_default() += 1;
    }
    assert!(summary.floor() > 0 && summary.index.len() == 10_000);
    check(&summary, &exact).unwrap();
    let mut counted = summary.into_counted();
    counted.sort_unstable_by_key(|c| std::cmp::Reverse(c.count));
    assert!(counted[..100].iter().all(|c| c.key < 100));
}

#[test]
fn more_bytes_than_the_system_has_are_an_error_or_are_not_touched() {
    // Keys have 32-bit indices, so at most 96 GiB of address space is reserved.
    if let Ok(mut summary) = Summary::within(usize::MAX) {
        summary.add(1);
        assert_eq!((summary.room, summary.keys()), (u32::MAX as usize, 1));
    }
}
