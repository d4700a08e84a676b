use super::*;
use proptest::prelude::*;

fn tables() -> impl Strategy<Value = Vec<TableShape>> {
    let rows = (0u32..30).prop_flat_map(|bits| 0..=(1u64 << bits));
    let table = (rows, 1usize..200).prop_map(|(rows, dim)| TableShape { rows, row_bytes: 4 * dim });
    prop::collection::vec(table, 1..40)
}

proptest! {
    #[test]
    fn index_and_pool_stay_within_the_bytes_and_hold_a_row_of_each_size(
        tables in tables(),
        bytes in (8u32..36).prop_flat_map(|bits| 0..=(1usize << bits)),
    ) {
        let minimum = Minimum::of(&tables).bytes;
        match (CacheShape { bytes, tables }).layout() {
            Ok(layout) => {
                prop_assert!(layout.bytes() <= bytes);
                prop_assert!(layout.buckets >= MIN_BUCKETS);
                prop_assert!(layout.slabs.slabs >= layout.slabs.row_bytes.len());
            }
            Err(error) => {
                prop_assert!(bytes < minimum);
                prop_assert!(error.to_string().contains("cache.bytes"));
                prop_assert!(error.to_string().contains(&minimum.to_string()));
            }
        }
    }

    #[test]
    fn the_reported_minimum_is_enough(tables in tables()) {
        let bytes = Minimum::of(&tables).bytes;
        let enough = CacheShape { bytes, tables: tables.clone() };
        let too_little = CacheShape { bytes: bytes - 1, tables };
        prop_assert!(enough.layout().is_ok());
        prop_assert!(too_little.layout().is_err());
    }

    #[test]
    fn the_bytes_of_a_fraction_hold_it_and_cost_at_most_about_twice_the_minimum(
        tables in tables(),
        fraction in 0.0f64..=1.0,
    ) {
        let shape = CacheShape::from_fraction(fraction, tables.clone());
        let layout = shape.layout().unwrap();
        let held: Vec<_> = tables
            .iter()
            .map(|t| TableShape { rows: (t.rows as f64 * fraction).ceil() as u64, ..*t })
            .collect();
        prop_assert!(layout.holds(&held));
        // Each row costs its bytes, 20 bytes of index and a bit of a slab's record. The bound adds the room
        // above the watermark and partly used slabs. The worst case is a small pool with slabs of one large
        // row, each of which holds one smaller row.
        let cost: f64 = held.iter().map(|t| t.rows as f64 * (t.row_bytes as f64 + 20.5)).sum();
        let most = cost / WATERMARKS.high * 2.05 + 3.0 * Minimum::of(&tables).bytes as f64 + 4096.0;
        prop_assert!(shape.bytes as f64 <= most, "{} bytes for {cost}", shape.bytes);
    }
}

proptest! {
    #[test]
    fn the_reported_minimum_is_enough_with_every_policy(
        tables in tables(),
        misses in prop_oneof![Just(AdmissionOption::ALL), Just(AdmissionOption::DEFAULT)],
        ranked in 0u64..2000,
        pointers in 0u64..1000,
    ) {
        let eviction = EvictionOption::Lfu((0..ranked).map(|id| RowId::new(TableId(0), id)).collect());
        let options = CacheOptions { admission: misses, eviction, pointers, ..CacheOptions::default() };
        let rows: Vec<u64> = tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width).unwrap();
        let plan = |bytes| CacheShape { bytes, tables: tables.clone() }.plan(&keys, &options);
        let Err(CacheError::TooSmall { minimum, .. }) = plan(0) else { panic!("nothing fits no bytes") };
        let least = plan(minimum).unwrap();
        let bytes = least.layout.bytes() + least.sketch_bytes + Ranks::bytes_of(least.ranked);
        prop_assert!(bytes <= minimum, "{bytes} of {minimum}");
        prop_assert!(plan(minimum - 1).is_err());
        for bytes in minimum..minimum + 200 {
            prop_assert!(plan(bytes).is_ok(), "{bytes} bytes, more than {minimum}, are refused");
        }
    }
}

#[test]
fn all_rows_of_a_criteo_model_cost_little_more_than_their_bytes() {
    let tables = vec![TableShape { rows: 100_000, row_bytes: 64 }; 26];
    let shape = CacheShape::from_fraction(0.1, tables);
    let rows = 260_000.0 * 64.0;
    let index = 260_000.0 * 20.0;
    assert!((shape.bytes as f64) < (rows + index) / WATERMARKS.high * 1.05);
}
