use super::super::super::trace::tests::{accesses, trace};
use super::super::Ranked;
use super::super::summary::KEY_BYTES;
use super::*;
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use proptest::prelude::*;

fn schema() -> Schema {
    let shape = SyntheticShape { tables: 3, rows: 1000, dense: 0, multi_hot: None };
    preset::synthetic(ArchKind::Dcn, 4, shape)
}

fn counts(wanted: &[(u32, u64)], rows: usize) -> Counts {
    let mut counts = Counts::within(&schema(), rows * KEY_BYTES).unwrap();
    wanted.iter().for_each(|&(table, row)| counts.push(TableId(table), row));
    counts
}

proptest! {
    #[test]
    fn rows_that_fit_give_the_same_file_as_a_trace(wanted in accesses(300)) {
        let file = || tempfile::NamedTempFile::new().unwrap();
        let (streamed, whole) = (file(), file());
        let exact = Ranked::of(&trace(&wanted));
        exact.write(whole.path()).unwrap();
        let rows = exact.tables.iter().map(|table| table.rows.len()).sum::<usize>();
        let counts = counts(&wanted, rows);
        let json = json!({ "accesses": wanted.len(), "ids": rows, "floor": 0, "exact": true });
        prop_assert_eq!(counts.json(), json);
        counts.write(streamed.path()).unwrap();
        prop_assert_eq!(std::fs::read(streamed.path()).unwrap(), std::fs::read(whole.path()).unwrap());
    }

    #[test]
    fn without_room_rows_above_the_floor_are_kept_and_counts_are_at_most_the_floor_too_high(
        wanted in accesses(300), rows in 1usize..12,
    ) {
        let counts = counts(&wanted, rows);
        let json = counts.json();
        let file = tempfile::NamedTempFile::new().unwrap();
        counts.write(file.path()).unwrap();
        let (got, exact) = (Ranked::read(file.path()).unwrap(), Ranked::of(&trace(&wanted)));
        prop_assert_eq!(json["floor"].as_u64(), Some(got.floor));
        prop_assert_eq!(json["ids"].as_u64(), Some(got.hottest().len() as u64));
        prop_assert_eq!(json["exact"].as_bool(), Some(got == exact));
        let count = |row: u64, t: usize| {
            let at = got.tables[t].rows.iter().position(|r| *r == row)?;
            Some(got.tables[t].counts[at])
        };
        for wanted in exact.hottest() {
            match count(wanted.row, wanted.table) {
                Some(count) => prop_assert!((wanted.count..=wanted.count + got.floor).contains(&count)),
                None => prop_assert!(wanted.count <= got.floor),
            }
        }
        for table in &got.tables {
            let ranks = table.rows.iter().zip(&table.counts);
            prop_assert!(ranks.map(|(&r, &c)| (Reverse(c), r)).is_sorted());
        }
    }
}

#[test]
fn the_last_row_of_the_largest_table_has_its_own_key_and_larger_tables_are_refused() {
    let (table, row) = (19_999, (1 << 48) - 1);
    let last = Counted { key: RowId::new(TableId(table), row).number(), count: 7 };
    assert_eq!((table_of(&last), row_count(&last)), (TableId(table), RowCount { row, count: 7 }));
    let mut schema = schema();
    schema.tables[0].rows = row + 1;
    assert_eq!(schema.check(), Ok(()));
    schema.tables[0].rows += 1;
    assert!(schema.check().is_err());
}

#[test]
fn text_says_whether_counts_are_exact() {
    let wanted = [(0, 1), (0, 1), (1, 2), (2, 3)];
    assert_eq!(counts(&wanted, 3).text(1.0), "4 accesses of 3 rows of 3 tables\n");
    let text = counts(&wanted, 2).text(0.5);
    assert!(text.contains("4 accesses of more rows than fit: 1 rows of 3 tables are kept"), "{text}");
    assert!(text.contains("at most 2 too high; no other row has more than 2 accesses"), "{text}");
    assert!(text.ends_with("a sample of 50 % of the rows\n"), "{text}");
}
