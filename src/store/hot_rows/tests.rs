//! Hot rows read back as they were saved, and every malformed file is refused.

use std::fs;

use proptest::prelude::*;

use super::super::atomic_write::{ABANDONED, failing::Failing};
use super::*;

fn hot_rows() -> impl Strategy<Value = HotRows> {
    let tables = prop::collection::vec("\\PC{0,12}", 0..6);
    (tables, prop::collection::vec((any::<u32>(), any::<u64>()), 0..200)).prop_map(|(tables, rows)| {
        let count = tables.len() as u32;
        let row = |(table, row): (u32, u64)| Some(HotRow { table: table.checked_rem(count)?, row });
        let rows = rows.into_iter().filter_map(row);
        HotRows { rows: rows.collect(), tables }
    })
}

fn example() -> HotRows {
    let rows = [(1, 7), (0, u64::MAX), (1, 0)].map(|(table, row)| HotRow { table, row });
    HotRows { tables: vec!["C1".into(), "C2".into()], rows: rows.to_vec() }
}

/// The bytes of the file that holds these rows.
fn saved(rows: &HotRows) -> Vec<u8> {
    let models = tempfile::tempdir().unwrap();
    rows.save(models.path(), "m").unwrap();
    fs::read(path(models.path(), "m")).unwrap()
}

/// The bytes followed by their checksum.
fn summed(body: &[u8]) -> Vec<u8> {
    [body, &xxh3_128(body).to_le_bytes()].concat()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn saved_rows_are_loaded_unchanged(rows in hot_rows()) {
        let models = tempfile::tempdir().unwrap();
        rows.save(models.path(), "m").unwrap();
        prop_assert_eq!(HotRows::load(models.path(), "m").unwrap(), Some(rows));
    }

    #[test]
    fn a_file_cut_short_or_with_a_changed_byte_is_refused(
        rows in hot_rows(), at in any::<prop::sample::Index>(), by in 1u8..,
    ) {
        let bytes = saved(&rows);
        let at = at.index(bytes.len());
        prop_assert!(HotRows::parse(&bytes[..at]).is_err());
        let mut changed = bytes.clone();
        changed[at] ^= by;
        prop_assert!(HotRows::parse(&changed).is_err());
        prop_assert!(HotRows::parse(&[&bytes[..], &[by]].concat()).is_err());
    }

    /// Any bytes can have a correct checksum, so the contents are checked too.
    #[test]
    fn any_bytes_are_hot_rows_or_an_error_but_never_a_panic(
        rows in hot_rows(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        noise in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let _ = HotRows::parse(&noise);
        let mut body = saved(&rows);
        body.truncate(body.len() - SUM_BYTES);
        for (at, byte) in changes {
            let at = at.index(body.len());
            body[at] = byte;
        }
        if let Ok(read) = HotRows::parse(&summed(&body)) {
            prop_assert!(read.rows.iter().all(|row| (row.table as usize) < read.tables.len()));
        }
        let _ = HotRows::parse(&summed(&[&body[..], &noise].concat()));
    }
}

#[test]
fn each_kind_of_malformed_file_has_its_message() {
    let bytes = saved(&example());
    let body = &bytes[..bytes.len() - SUM_BYTES];
    let changed = |at: usize, by: &[u8]| {
        let mut body = body.to_vec();
        body[at..at + by.len()].copy_from_slice(by);
        HotRows::parse(&summed(&body)).unwrap_err().to_string()
    };
    let message = |bytes: &[u8]| HotRows::parse(bytes).unwrap_err().to_string();
    assert_eq!(message(b"table,row"), "not a hot rows file: expected the file to begin with FLHOTROW");
    assert_eq!(message(&bytes[..20]), "damaged: expected 40 bytes, got 20");
    assert_eq!(message(&bytes[..bytes.len() - 1]), "damaged: the checksum does not match");
    assert_eq!(changed(8, &[2]), "format version: expected 1, got 2");
    assert_eq!(changed(12, &u32::MAX.to_le_bytes()), "tables: expected at most 65536, got 4294967295");
    assert_eq!(changed(16, &[0, 0, 0, 2]), "rows: expected at most 16777216, got 33554432");
    assert_eq!(changed(26, &[0xff]), "name of table 0: not UTF-8");
    assert_eq!(changed(body.len() - ROW_BYTES, &[2]), "row 2: expected a table below 2, got 2");
}

#[test]
fn a_missing_file_is_none_and_a_foreign_file_is_an_error_with_its_path() {
    let models = tempfile::tempdir().unwrap();
    assert_eq!(HotRows::load(models.path(), "m").unwrap(), None);
    fs::create_dir_all(models.path().join("m/state")).unwrap();
    fs::write(path(models.path(), "m"), "C1 7\n").unwrap();
    let error = HotRows::load(models.path(), "m").unwrap_err().to_string();
    assert!(error.contains("hot_rows.flhot: not a hot rows file"), "{error}");
    let long = File::create(path(models.path(), "m")).unwrap();
    long.set_len(MAX_BYTES + 1).unwrap();
    let error = HotRows::load(models.path(), "m").unwrap_err().to_string();
    assert!(error.contains("bytes: expected at most"), "{error}");
}

#[test]
fn whichever_call_fails_the_file_is_the_old_one_or_the_new_one_and_no_temporary_file_is_left() {
    let models = tempfile::tempdir().unwrap();
    let old = example();
    old.save(models.path(), "m").unwrap();
    let new = HotRows { rows: vec![HotRow { table: 0, row: 5 }], ..example() };
    let mut failures = 0;
    loop {
        let disk = Failing::at(failures);
        let saved = new.save_on(&disk, models.path(), "m");
        let found = HotRows::load(models.path(), "m").unwrap();
        let names: Vec<_> =
            fs::read_dir(models.path().join("m/state")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, [FILE]);
        if saved.is_ok() {
            assert_eq!(found, Some(new));
            break;
        }
        assert!(saved.unwrap_err().to_string().ends_with("disk full"));
        assert!(found.as_ref() == Some(&old) || found.as_ref() == Some(&new), "{found:?}");
        failures += 1;
    }
    assert_eq!(failures, 7, "create, three appends, sync, rename, sync of the folder");
}

#[test]
fn the_temporary_file_of_a_dead_writer_is_removed_once_it_is_old() {
    let models = tempfile::tempdir().unwrap();
    example().save(models.path(), "m").unwrap();
    let state = models.path().join("m/state");
    let [old, young] = ["1", "2"].map(|pid| state.join(format!(".hot_rows.{pid}.tmp")));
    let long_ago = std::time::SystemTime::now() - 2 * ABANDONED;
    File::create(&old).unwrap().set_modified(long_ago).unwrap();
    File::create(&young).unwrap();
    example().save(models.path(), "m").unwrap();
    assert_eq!((old.exists(), young.exists()), (false, true));
}

mod fuzz {
    use super::*;
    use crate::fuzz::bytes::{Input, mutated};
    use crate::fuzz::run;

    #[test]
    fn hot_rows_with_a_good_checksum() {
        let seed = saved(&example());
        run(mutated([&seed[..seed.len() - SUM_BYTES]], &["FLHOTROW"]), |Input(body)| {
            let Ok(rows) = HotRows::parse(&summed(&body)) else { return false };
            assert!(rows.rows.iter().all(|row| (row.table as usize) < rows.tables.len()));
            // The head is followed by the rows.
            assert!(body.starts_with(&rows.head(rows.rows.len()).unwrap()));
            true
        });
    }
}
