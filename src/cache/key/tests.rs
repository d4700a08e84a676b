use super::*;
use proptest::prelude::*;

/// A table's number of rows, from 1 to 2^40, with all magnitudes equally likely.
fn corpus() -> impl Strategy<Value = u64> {
    (0u32..=40).prop_flat_map(|bits| (1u64 << bits.saturating_sub(1))..=(1u64 << bits))
}

/// The first, middle and last id of a table, and the given ids modulo its rows.
fn probes(rows: u64, inner: &[u64]) -> Vec<u64> {
    let mut ids = vec![0, rows / 2, rows - 1];
    ids.extend(inner.iter().map(|i| i % rows));
    ids.sort_unstable();
    ids.dedup();
    ids
}

proptest! {
    #[test]
    fn keys_are_distinct_unreserved_and_decodable(
        rows in prop::collection::vec(corpus(), 1..=300),
        inner in prop::collection::vec(any::<u64>(), 4),
    ) {
        let keys = FlatKeys::new(&rows, KeyWidth::W64).unwrap();
        let mut seen = std::collections::HashSet::new();
        for (t, &rows) in rows.iter().enumerate() {
            let table = TableId(t as u32);
            for id in probes(rows, &inner) {
                let key = keys.encode(table, id).unwrap();
                prop_assert!(key != EMPTY && key != TOMBSTONE);
                prop_assert!(seen.insert(key), "key {key:?} of two rows");
                prop_assert_eq!(keys.decode(key), Some((table, id)));
            }
            prop_assert_eq!(keys.encode(table, rows), None);
        }
    }

    #[test]
    fn no_code_is_a_prefix_of_another(rows in prop::collection::vec(corpus(), 1..=300)) {
        let keys = FlatKeys::new(&rows, KeyWidth::W64).unwrap();
        let mut blocks: Vec<(u64, u64)> = keys
            .codes
            .iter()
            .map(|c| (c.base, c.base + (1u64 << id_bits(c.rows))))
            .collect();
        for &(start, end) in &blocks {
            prop_assert_eq!(start % (end - start), 0, "a code's id bits begin at zero");
        }
        blocks.sort_unstable();
        prop_assert!(blocks[0].0 >= 2);
        prop_assert!(blocks.windows(2).all(|w| w[0].1 <= w[1].0));
    }

    #[test]
    fn codes_do_not_overlap_and_are_exact_if_they_fit(
        rows in prop::collection::vec(corpus(), 1..=60),
        bits in 2u32..=64,
        inner in prop::collection::vec(any::<u64>(), 8),
    ) {
        let wanted = RESERVED + rows.iter().map(|&r| 1u128 << id_bits(r)).sum::<u128>();
        let Ok(keys) = FlatKeys::new(&rows, KeyWidth::new(bits).unwrap()) else {
            prop_assert!(RESERVED + rows.len() as u128 > 1 << bits, "refused without need");
            return Ok(());
        };
        prop_assert_eq!(keys.codes.iter().all(|c| c.is_exact()), wanted <= 1 << bits);
        let mut blocks: Vec<(u128, u128)> =
            keys.codes.iter().map(|c| (c.base.into(), u128::from(c.base) + (1 << c.bits))).collect();
        blocks.sort_unstable();
        prop_assert!(blocks[0].0 >= RESERVED && blocks[blocks.len() - 1].1 <= 1 << bits);
        prop_assert!(blocks.windows(2).all(|w| w[0].1 <= w[1].0), "no code is a prefix of another");
        for (t, &rows) in rows.iter().enumerate() {
            let table = TableId(t as u32);
            for id in probes(rows, &inner) {
                let key = keys.encode(table, id).unwrap();
                prop_assert!(key != EMPTY && key != TOMBSTONE);
                prop_assert_eq!(keys.table_of(key), Some(table));
                let exact = keys.code(table).unwrap().is_exact();
                prop_assert_eq!(keys.decode(key), exact.then_some((table, id)));
            }
            prop_assert_eq!(keys.encode(table, rows), None);
        }
    }

    #[test]
    fn a_narrow_width_is_shared_by_size_without_rest(
        rows in prop::collection::vec(1u64..100_000, 1..40),
        bits in 6u32..20,
    ) {
        let Ok(bits_of) = share(&rows, KeyWidth::new(bits).unwrap()) else { return Ok(()) };
        for (a, b) in (0..rows.len()).flat_map(|a| (0..rows.len()).map(move |b| (a, b))) {
            prop_assert!(rows[a] <= rows[b] || bits_of[a] >= bits_of[b], "a smaller table has more keys");
        }
        let free = (1u128 << bits) - RESERVED - bits_of.iter().map(|&b| 1u128 << b).sum::<u128>();
        let mut narrow = (0..rows.len()).filter(|&t| bits_of[t] < id_bits(rows[t]));
        prop_assert!(narrow.all(|t| free < 1 << bits_of[t]), "{free} keys are left");
    }

    #[test]
    fn fixed_length_codes_do_not_overlap(
        rows in prop::collection::vec(corpus(), 1..=60),
        bits in 2u32..=64,
        inner in prop::collection::vec(any::<u64>(), 8),
    ) {
        let Ok(keys) = FlatKeys::fixed_length(&rows, KeyWidth::new(bits).unwrap()) else {
            prop_assert!(2 * (rows.len() + 1) > 1 << bits.min(32));
            return Ok(());
        };
        for (t, &rows) in rows.iter().enumerate() {
            for id in probes(rows, &inner) {
                let key = keys.encode(TableId(t as u32), id).unwrap();
                prop_assert!(key != EMPTY && key != TOMBSTONE && u128::from(key.0) < 1 << bits);
                prop_assert_eq!(keys.table_of(key), Some(TableId(t as u32)));
            }
        }
    }
}

#[test]
fn keys_without_a_row_do_not_decode() {
    let keys = FlatKeys::new(&[3, 1000], KeyWidth(32)).unwrap();
    assert_eq!(keys.decode(EMPTY), None);
    assert_eq!(keys.decode(TOMBSTONE), None);
    assert_eq!(keys.decode(FlatKey(u64::MAX)), None);
    let past = FlatKey(keys.encode(TableId(0), 2).unwrap().0 + 1);
    assert_eq!(keys.decode(past), None);
}

#[test]
fn the_error_of_a_narrow_width_has_the_needed_bits() {
    let error = FlatKeys::new(&[1 << 40; 7], KeyWidth::new(3).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "flat keys of 3 bits cannot tell 7 tables apart: 4 bits are needed");
}

#[test]
fn small_tables_stay_exact_while_large_ones_share_keys() {
    // The reserved keys and the two small tables take 2 + 4 + 1024 keys. The two large tables share the other
    // 2^16 - 1030. One has four times the rows of the other.
    let keys = FlatKeys::new(&[4_000_000, 3, 1_000_000, 1000], KeyWidth::new(16).unwrap()).unwrap();
    let bits: Vec<u32> = keys.codes.iter().map(|c| c.bits()).collect();
    assert_eq!(bits, [15, 2, 14, 10]);
    let exact: Vec<bool> = keys.codes.iter().map(|c| c.is_exact()).collect();
    assert_eq!(exact, [false, true, false, true]);
}

#[test]
fn hashed_ids_spread_over_their_keys() {
    let keys = FlatKeys::new(&[1 << 20], KeyWidth::new(11).unwrap()).unwrap();
    let code = keys.code(TableId(0)).unwrap();
    let mut counts = std::collections::HashMap::<_, u32>::new();
    (0..1u64 << 20).for_each(|id| *counts.entry(code.key(id).unwrap()).or_default() += 1);
    assert_eq!(counts.len(), 1 << code.bits());
    assert!(counts.values().all(|&n| (512..2048).contains(&n)), "each key about 1024 ids");
}
