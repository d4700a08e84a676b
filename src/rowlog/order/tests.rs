//! Orders are permutations with the ranked rows first, and only valid files are read.

use std::collections::BTreeSet;
use std::fs;

use proptest::prelude::*;

use super::*;
use crate::store::atomic_write::failing::Failing;

/// The number of rows of a table, and a ranked list of distinct rows.
fn ranked() -> impl Strategy<Value = (u64, Vec<u64>)> {
    let rows = prop_oneof![1_u64..200, 1_u64..100_000, Just(u64::MAX), Just(1 << 40)];
    rows.prop_flat_map(|rows| {
        let row = prop_oneof![0..rows, 0..rows.min(300)];
        let distinct = prop::collection::btree_set(row, 0..100).prop_map(Vec::from_iter).prop_shuffle();
        (Just(rows), distinct)
    })
}

proptest! {
    #[test]
    fn ranked_rows_take_the_first_places_and_the_others_follow_in_their_order(
        (rows, ranked) in ranked(), others in prop::collection::vec(any::<u64>(), 0..50),
    ) {
        let order = RowOrder::hottest_first(rows, &ranked).unwrap();
        prop_assert_eq!((order.rows(), order.ranked()), (rows, ranked.clone()));
        for (place, &row) in (0..).zip(&ranked) {
            prop_assert_eq!(order.place(row), place);
        }
        let sorted: BTreeSet<u64> = ranked.iter().copied().collect();
        let neighbours = ranked.iter().flat_map(|&row| [row.saturating_sub(1), (row + 1).min(rows - 1)]);
        for row in others.iter().map(|row| row % rows).chain(neighbours).filter(|row| !sorted.contains(row)) {
            let below = sorted.range(..row).count() as u64;
            prop_assert_eq!(order.place(row), ranked.len() as u64 + row - below, "row {}", row);
        }
    }

    #[test]
    fn places_are_a_permutation(rows in 1_u64..500, seed in prop::collection::vec(any::<u64>(), 0..600)) {
        let mut seen = BTreeSet::new();
        let ranked: Vec<u64> = seed.iter().map(|row| row % rows).filter(|&row| seen.insert(row)).collect();
        let order = RowOrder::hottest_first(rows, &ranked).unwrap();
        let places: BTreeSet<u64> = (0..rows).map(|row| order.place(row)).collect();
        prop_assert!(places.into_iter().eq(0..rows));
        prop_assert_eq!([rows, rows + 1, u64::MAX].map(|row| order.place(row)), [rows, rows + 1, u64::MAX]);
    }

    #[test]
    fn written_orders_are_read_unchanged(orders in prop::collection::btree_map("\\PC{0,9}", ranked(), 0..5)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m/state").join(FILE);
        let orders: BTreeMap<String, RowOrder> = orders
            .into_iter()
            .map(|(name, (rows, ranked))| (name, RowOrder::hottest_first(rows, &ranked).unwrap()))
            .collect();
        write_orders(&path, &named(&orders)).unwrap();
        prop_assert_eq!(read_orders(&path).unwrap(), Some(orders));
    }

    #[test]
    fn any_bytes_are_orders_or_an_error_but_never_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        length in any::<prop::sample::Index>(),
    ) {
        let mut bytes = encode(&named(&example())).unwrap();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = parse(&bytes);
        let _ = parse(&bytes[..length.index(bytes.len())]);
    }
}

fn example() -> BTreeMap<String, RowOrder> {
    [("C1", 9, vec![7, 0, 3]), ("C2", 5, vec![])]
        .map(|(name, rows, ranked)| (name.to_owned(), RowOrder::hottest_first(rows, &ranked).unwrap()))
        .into()
}

fn named(orders: &BTreeMap<String, RowOrder>) -> Vec<(&str, &RowOrder)> {
    orders.iter().map(|(name, order)| (name.as_str(), order)).collect()
}

#[test]
fn rows_past_the_end_and_repeated_rows_are_refused() {
    let message = |ranked: &[u64]| RowOrder::hottest_first(5, ranked).unwrap_err().to_string();
    assert_eq!(message(&[0, 5, 1]), "expected a row below 5, got 5");
    assert_eq!(message(&[4, 0, 4]), "expected distinct rows, got 4 twice");
    assert_eq!(RowOrder::hottest_first(0, &[]).unwrap().place(3), 3);
}

#[test]
fn the_error_for_a_malformed_file_names_the_field() {
    let rows: Vec<u8> = [3_u64, 1, 3].iter().flat_map(|row| row.to_le_bytes()).collect();
    let message = |dtype, shape: Vec<usize>, about: &[(&str, &str)]| {
        let view = TensorView::new(dtype, shape, &rows).unwrap();
        let about = about.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        parse(&serialize([("C1", view)], Some(about)).unwrap()).unwrap_err().to_string()
    };
    let about = [("format", FORMAT), ("version", VERSION), ("rows.C1", "4")];
    let first = |n: usize| &about[..n];
    assert_eq!(message(Dtype::U64, vec![3], first(0)), "format: expected \"flechette-order\", got \"\"");
    assert_eq!(message(Dtype::U64, vec![3], first(1)), "version: expected \"1\", got \"\"");
    assert_eq!(message(Dtype::U64, vec![3], first(2)), "rows.C1: expected a number, got \"\"");
    let twice = "tensor \"C1\": expected distinct rows, got 3 twice";
    assert_eq!(message(Dtype::U64, vec![3], first(3)), twice);
    let past = [first(2), &[("rows.C1", "3")]].concat();
    assert_eq!(message(Dtype::U64, vec![3], &past), "tensor \"C1\": expected a row below 3, got 3");
    let shape = "tensor \"C1\": expected U64 of one dimension, got U64 of [1, 3]";
    assert_eq!(message(Dtype::U64, vec![1, 3], first(3)), shape);
    assert!(message(Dtype::F32, vec![6], first(3)).contains("got F32 of [6]"));
    assert!(parse(b"row").unwrap_err().to_string().starts_with("header: not a safetensors file: "));
}

#[test]
fn a_missing_file_is_none_and_a_malformed_one_is_an_error_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    assert_eq!(read_orders(&path).unwrap(), None);
    fs::write(&path, "C1 7\n").unwrap();
    let error = read_orders(&path).unwrap_err().to_string();
    assert!(error.contains("order.safetensors: header: not a safetensors file"), "{error}");
    let order = RowOrder::hottest_first(3, &[1]).unwrap();
    for names in [vec!["C1", "C1"], vec!["__metadata__"]] {
        let orders: Vec<_> = names.into_iter().map(|name| (name, &order)).collect();
        let error = write_orders(&path, &orders).unwrap_err().to_string();
        assert!(error.ends_with(": name is used twice or reserved"), "{error}");
    }
    assert_eq!(fs::read(&path).unwrap(), b"C1 7\n");
}

#[test]
fn whichever_call_fails_the_file_is_the_old_one_or_the_new_one_and_no_temporary_file_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    let old = example();
    write_orders(&path, &named(&old)).unwrap();
    let mut new = example();
    new.insert("C1".to_owned(), RowOrder::hottest_first(9, &[8]).unwrap());
    for failure in 0.. {
        let written = write_on(&Failing::at(failure), &path, &named(&new));
        let found = read_orders(&path).unwrap().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        if written.is_ok() {
            assert_eq!((found, failure), (new, 5), "create, append, sync, rename, sync of the folder");
            return;
        }
        assert!(written.unwrap_err().to_string().ends_with("disk full"));
        assert!(found == old || found == new, "{found:?}");
    }
}

mod fuzz {
    use super::*;
    use crate::fuzz::bytes::{Input, mutated_tensors};
    use crate::fuzz::run;

    #[test]
    fn orders_of_rows() {
        let words = &["format", "version", "rows.C1", "rows.C2", "C1", "U64", "F32", "[3]", "null"];
        run(mutated_tensors([encode(&named(&example())).unwrap()], 8, words), |Input(file)| {
            let Ok(orders) = parse(&file) else { return false };
            assert_eq!(parse(&encode(&named(&orders)).unwrap()).unwrap(), orders);
            for order in orders.values() {
                assert!((0..).zip(order.ranked()).all(|(place, row)| order.place(row) == place));
            }
            true
        });
    }
}
