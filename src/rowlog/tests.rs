//! A working file behaves like a vector of records.

#[cfg(not(flechette_loom))]
mod memory;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use proptest::prelude::*;
use proptest::sample::Index;

use super::region::Placed;
use super::*;
use crate::mem::{HostMemory, mix64};
use crate::schema;
use crate::store::PlainMemory;
use crate::store::bytes::Bytes;
use crate::store::{RecordLayout, State, StateShape};
use crate::types::Element;

const UNIFORM: Uniform = Uniform { seed: 5, table_code: 11, bound: 0.5 };
const T: TableId = TableId(0);

fn table(rows: u64, dim: usize, states: &[(&'static str, usize)]) -> WorkingTable {
    let states = states.iter().map(|&(name, width)| StateShape { name, width }).collect();
    WorkingTable { rows, record: RecordLayout { dim, states }, first: First::Uniform(UNIFORM), order: None }
}

fn file(tables: Vec<WorkingTable>) -> (tempfile::TempDir, WorkingFile) {
    let dir = tempfile::tempdir().unwrap();
    let file = WorkingFile::create(dir.path(), tables).unwrap();
    (dir, file)
}

fn records(file: &WorkingFile, table: TableId, rows: &[u64]) -> Vec<f32> {
    let mut records = vec![f32::NAN; rows.len() * file.tables()[table.index()].width()];
    file.read(table, rows, &mut records).unwrap();
    records
}

fn disk_bytes(file: &WorkingFile) -> u64 {
    file.stripes.files().map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

/// The shape of a table, and the ranked rows of its order if it has one.
type Wanted = ((u64, usize, Vec<usize>), Option<Vec<Index>>);

fn wanted() -> impl Strategy<Value = Wanted> {
    let states = prop::collection::vec(1_usize..5, 0..3);
    let order = prop::option::of(prop::collection::vec(any::<Index>(), 0..40));
    ((1_u64..120, 1_usize..9, states), order)
}

fn made(((rows, dim, widths), order): &Wanted) -> WorkingTable {
    let states: Vec<_> = ["a", "b"].into_iter().zip(widths.iter().copied()).collect();
    let order =
        order.as_ref().map(|ranked| RowOrder::hottest_first(*rows, &distinct(ranked, *rows)).unwrap());
    WorkingTable { order, ..table(*rows, *dim, &states) }
}

/// The distinct rows that these indices select, in the same order.
fn distinct(rows: &[Index], of: u64) -> Vec<u64> {
    let mut seen = std::collections::BTreeSet::new();
    rows.iter().map(|row| row.index(of as usize) as u64).filter(|&row| seen.insert(row)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn reads_give_the_last_written_record_or_the_first_value(
        wanted in prop::collection::vec(wanted(), 1..4),
        steps in prop::collection::vec(
            (any::<Index>(), any::<bool>(), prop::collection::vec(any::<Index>(), 0..60)),
            0..25,
        ),
    ) {
        let (_dir, file) = file(wanted.iter().map(made).collect());
        let mut plain: Vec<Vec<Vec<f32>>> = file.tables().iter().map(|of| (0..of.rows()).map(|row| {
            let mut record = vec![0.0; of.width()];
            UNIFORM.row(row, &mut record[..of.record().dim]);
            record
        }).collect()).collect();
        let mut next = 1.0;
        for (at, writes, rows) in &steps {
            let at = at.index(plain.len());
            let (table, width) = (TableId(at as u32), file.tables()[at].width());
            let mut rows = distinct(rows, file.tables()[at].rows());
            rows.sort();
            if *writes {
                let written: Vec<f32> = (0..rows.len() * width).map(|i| next + i as f32).collect();
                next += written.len() as f32;
                file.write(table, &rows, &written).unwrap();
                for (&row, record) in rows.iter().zip(written.chunks(width)) {
                    plain[at][row as usize] = record.to_vec();
                }
            }
            let expected: Vec<f32> = rows.iter().flat_map(|&row| plain[at][row as usize].clone()).collect();
            prop_assert_eq!(records(&file, table, &rows), expected);
        }
        for (at, plain) in plain.iter().enumerate() {
            let (table, rows): (_, Vec<u64>) = (TableId(at as u32), (0..plain.len() as u64).collect());
            prop_assert_eq!(&records(&file, table, &rows), &plain.concat());
            let mut all = Vec::new();
            file.for_each_chunk(table, |first, records| {
                assert_eq!(first as usize * file.tables()[at].width(), all.len());
                all.extend_from_slice(records);
                Ok(())
            }).unwrap();
            prop_assert_eq!(all, plain.concat());
        }
    }
}

#[test]
fn a_run_is_adjacent_in_the_file_and_of_bounded_length() {
    let ranked = [50, 7, 51, 3];
    let ordered = WorkingTable {
        order: Some(RowOrder::hottest_first(1 << 20, &ranked).unwrap()),
        ..table(1 << 20, 16, &[])
    };
    let placed = |rows, dim| WorkingTable {
        order: Some(RowOrder::hottest_first(rows, &[]).unwrap()),
        ..table(rows, dim, &[])
    };
    let (_dir, file) = file(vec![ordered, placed(1 << 20, 16), placed(9, 1 << 20)]);
    let runs = |at: usize, rows: &[u64], gap: usize| -> Vec<Vec<usize>> {
        let of = &file.tables()[at];
        let Layout::Placed { order, .. } = of.layout() else { panic!("rows have fixed places") };
        let place = |row| place_in(order.as_ref(), row);
        let placed = rows.iter().enumerate();
        let mut placed: Vec<_> = placed.map(|(index, &row)| Placed { place: place(row), index }).collect();
        of.runs(&mut placed, 1 << 20, gap).map(|run| run.iter().map(|row| row.index).collect()).collect()
    };
    // The ranked rows have places 0 to 3; rows 60 and 61 have places 60 and 61, because all ranked rows are
    // below them.
    assert_eq!(runs(0, &[3, 7, 50, 51, 60, 61], 0), [vec![2, 1, 3, 0], vec![4, 5]]);
    assert_eq!(runs(1, &[3, 7, 50, 51, 60, 61], 0), [vec![0], vec![1], vec![2, 3], vec![4, 5]]);
    assert_eq!(
        runs(1, &[3, 7, 50, 51, 60, 61], 3 * 64),
        [vec![0, 1], vec![2, 3], vec![4, 5]],
        "gaps are read too"
    );
    let many: Vec<u64> = (100..100 + 40_000).collect();
    let lengths: Vec<usize> = runs(1, &many, 0).iter().map(Vec::len).collect();
    assert_eq!(lengths, [16_384, 16_384, 7_232], "a megabyte of records of 64 bytes");
    assert_eq!(runs(2, &[1, 2], 0), [[0], [1]], "a run has at least one record");
    assert_eq!(runs(1, &[], 0), [[0_usize; 0]; 0]);
}

#[test]
fn rows_that_were_never_written_are_uniform_and_take_no_disk_space() {
    let (dir, file) = file(vec![table(1 << 30, 8, &[("sum", 1)]), table(100, 3, &[])]);
    let rows = [0, 1, 77, (1 << 30) - 1];
    let mut expected = [0.0; 9];
    for (row, record) in rows.iter().zip(records(&file, T, &rows).chunks(9)) {
        UNIFORM.row(*row, &mut expected[..8]);
        assert_eq!(record, expected);
    }
    assert_eq!(disk_bytes(&file), 0);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
    file.write(T, &[1 << 29], &[1.0; 9]).unwrap();
    assert!((1..100_000).contains(&disk_bytes(&file)), "{}", disk_bytes(&file));
    assert_eq!(file.tables()[0].end() % 4096, 0);
    let length: u64 = file.stripes.files().map(|file| file.metadata().unwrap().len()).sum();
    assert!(length >= file.tables()[1].end());
    let shape = &file.tables()[0];
    assert_eq!(
        (shape.rows(), shape.record().dim, shape.width(), &shape.record().states[..]),
        (1 << 30, 8, 9, &[StateShape::new("sum", 1)][..])
    );
}

/// A version's table with the rows of [`UNIFORM`] and the states `sum` and `step`.
fn version(memory: &dyn HostMemory, rows: u64) -> Table {
    let mut version =
        Table::zeroed(memory, rows, 3, &[StateShape::new("sum", 3), StateShape::new("step", 1)]).unwrap();
    let (weight, states) = version.parts_mut().unwrap();
    UNIFORM.table(3, weight);
    states.iter_mut().for_each(|state: &mut State| {
        state.rows_mut().unwrap().iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
    });
    version
}

#[test]
fn first_values_from_a_version_include_its_states_if_name_width_and_order_match() {
    let of = |states: &[(&'static str, usize)], version: Table| WorkingTable {
        first: First::Version(version),
        ..table(4, 3, states)
    };
    let same = [("sum", 3), ("step", 1)];
    let f16 = schema::TableSchema { rows: 4, dim: 3, element: Element::F16, ..Default::default() };
    let rounded = version(&PlainMemory, 4).encoded(Element::F16, &PlainMemory).unwrap();
    let mut bytes = Bytes::zeroed(&PlainMemory, rounded.as_bytes().unwrap().len()).unwrap();
    bytes.as_mut_slice().unwrap().copy_from_slice(rounded.as_bytes().unwrap());
    let (_dir, file) = file(vec![
        of(&same, version(&PlainMemory, 4)),
        of(&[("step", 1), ("sum", 3)], version(&PlainMemory, 4)),
        of(&same, version(&PlainMemory, 4).encoded(Element::F32, &PlainMemory).unwrap()),
        of(&same, Table::from_parts(&f16, Element::F16, bytes, vec![]).unwrap()),
    ]);
    let mut weight = [0.0; 3];
    UNIFORM.row(2, &mut weight);
    let record = |table, row| records(&file, TableId(table), &[row]);
    assert_eq!(record(0, 2), [&weight[..], &[6.0, 7.0, 8.0, 2.0]].concat());
    assert_eq!(record(1, 2), [&weight[..], &[0.0; 4]].concat(), "the states are in another order");
    assert_eq!(record(2, 2), [&weight[..], &[0.0; 4]].concat(), "the version has no states");
    Element::F16.decode(rounded.row(2).unwrap(), &mut weight);
    assert_eq!(record(3, 2), [&weight[..], &[0.0; 4]].concat());
    file.write(T, &[2], &[9.0; 7]).unwrap();
    assert_eq!(records(&file, T, &[1, 2])[7..], [9.0; 7]);
}

#[test]
fn threads_on_different_rows_do_not_interfere() {
    let order = RowOrder::hottest_first(4000, &(0..2000).rev().collect::<Vec<_>>()).unwrap();
    for order in [Some(order), None] {
        let (_dir, file) = file(vec![WorkingTable { order, ..table(4000, 5, &[("sum", 1)]) }]);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let file = &file;
                scope.spawn(move || {
                    // Every page, bitmap word and segment is shared by all threads.
                    let rows: Vec<u64> = (0..4000).filter(|row| row % 4 == thread).collect();
                    for (round, rows) in (0..40).flat_map(|_| rows.chunks(97)).enumerate() {
                        let value = (round * 4) as f32 + thread as f32;
                        file.write(T, rows, &vec![value; rows.len() * 6]).unwrap();
                        assert!(records(file, T, rows).iter().all(|&x| x == value));
                    }
                });
            }
        });
        let all: Vec<u64> = (0..4000).collect();
        let records = records(&file, T, &all);
        assert!(records.chunks(6).zip(0..).all(|(record, row)| record[0] % 4.0 == (row % 4) as f32));
    }
}

#[test]
fn a_log_takes_at_most_one_and_a_half_times_its_rows_however_often_they_are_written() {
    let rows = 20_000_u64;
    let (_dir, file) = file(vec![table(rows, 15, &[])]);
    let mut values = vec![0.0; rows as usize];
    let mut most = 0;
    for round in 1..400_u64 {
        // First a tenth of the rows, then all of them, and always some hot ones.
        let among = if round < 50 { rows / 10 } else { rows };
        let mut some: Vec<u64> = (0..500).map(|n| mix64(round << 16 | n) % among).collect();
        some.extend((0..200).map(|n| mix64(!(round << 16 | n)) % (rows / 50)));
        some.sort_unstable();
        some.dedup();
        some.iter().for_each(|&row| values[row as usize] = round as f32);
        let written: Vec<f32> = some.iter().flat_map(|_| [round as f32; 15]).collect();
        file.write(T, &some, &written).unwrap();
        if round == 49 {
            most = disk_bytes(&file);
        }
    }
    let record = 16 * 4;
    // By round 49, 2,000 rows were written. A segment has 1,250 places.
    assert!(most < (3_000 + 5 * 1_250) * record + (1 << 16), "{most}");
    assert!(disk_bytes(&file) < (30_000 + 5 * 1_250) * record + (2 << 16), "{}", disk_bytes(&file));
    let mut row = 0;
    file.for_each_chunk(T, |_, records| {
        for record in records.chunks(15) {
            let mut first = [0.0; 15];
            UNIFORM.row(row, &mut first);
            let value = values[row as usize];
            assert_eq!(record, if value == 0.0 { first } else { [value; 15] }, "row {row}");
            row += 1;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(row, rows);
}

#[test]
fn the_first_written_row_that_is_not_finite_is_found() {
    let order = RowOrder::hottest_first(300_000, &[299_999, 250_000]).unwrap();
    let wanted = || WorkingTable { order: Some(order.clone()), ..table(300_000, 2, &[("sum", 1)]) };
    let (_dir, file) = file(vec![wanted(), wanted()]);
    let rows: Vec<u64> = (0..300_000).step_by(2).chain([299_999]).collect();
    file.write(T, &rows, &vec![1.0; rows.len() * 3]).unwrap();
    assert_eq!(file.first_not_finite(T).unwrap(), None);
    file.write(T, &[8], &[1.0, 1.0, f32::NAN]).unwrap();
    assert_eq!(file.first_not_finite(T).unwrap(), Some(8), "a state");
    file.write(T, &[8], &[1.0; 3]).unwrap();
    file.write(T, &[299_999], &[1.0, f32::NAN, 1.0]).unwrap();
    assert_eq!(file.first_not_finite(T).unwrap(), Some(299_999));
    file.write(T, &[250_000, 250_004], &[f32::INFINITY; 6]).unwrap();
    assert_eq!(file.first_not_finite(T).unwrap(), Some(250_000));
    assert_eq!(file.first_not_finite(TableId(1)).unwrap(), None, "nothing was written");
}

/// The table as a log, and with fixed places in the order of rows.
fn both_layouts(table: impl Fn() -> WorkingTable) -> [WorkingTable; 2] {
    let order = RowOrder::hottest_first(table().rows, &[]).unwrap();
    [table(), WorkingTable { order: Some(order), ..table() }]
}

#[test]
fn rows_that_left_the_page_cache_are_requested_and_read_as_written() {
    let (_dir, file) = file(vec![table(4000, 32, &[])]);
    let rows: Vec<u64> = (0..4000).collect();
    let written: Vec<f32> = rows.iter().flat_map(|&row| [row as f32; 32]).collect();
    file.write(T, &rows, &written).unwrap();
    for file in file.stripes.files() {
        file.sync_all().unwrap();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
    let requested: Vec<u64> = rows.into_iter().step_by(7).collect();
    let of = &file.tables()[0];
    let offset = |row| of.offset(of.place(&file.stripes, row).unwrap());
    if file.stripes.in_memory(offset(requested[100])) {
        return crate::skip::skip("the file system keeps written data in memory");
    }
    let expected: Vec<f32> = requested.iter().flat_map(|&row| [row as f32; 32]).collect();
    assert_eq!(records(&file, T, &requested), expected);
    assert!(requested.iter().all(|&row| file.stripes.in_memory(offset(row))));
}

#[test]
fn rows_that_were_never_written_are_not_read_from_the_file() {
    both_layouts(|| table(300_000, 4, &[])).into_iter().for_each(never_written);
}

fn never_written(table: WorkingTable) {
    let (_dir, file) = file(vec![table]);
    // No row is marked as written here, so a reader that uses these bytes gets NaN.
    file.stripes.write(bytemuck::cast_slice(&vec![f32::NAN; 1_200_000]), 0).unwrap();
    let written = [0, 1, 700, 299_999];
    file.write(T, &written, &[1.0; 16]).unwrap();
    assert_eq!(file.first_not_finite(T).unwrap(), None);
    let (mut all, mut first) = (Vec::new(), [0.0; 4]);
    file.for_each_chunk(T, |_, records| {
        all.extend_from_slice(records);
        Ok(())
    })
    .unwrap();
    for (row, record) in all.chunks(4).enumerate() {
        UNIFORM.row(row as u64, &mut first);
        assert_eq!(record, if written.contains(&(row as u64)) { [1.0; 4] } else { first }, "row {row}");
    }
    assert_eq!(records(&file, T, &[0, 2, 299_999])[4..8], all[8..12]);
}

#[test]
fn invalid_requests_are_errors_and_change_nothing() {
    let (_dir, file) = file(vec![table(5, 2, &[])]);
    let message = |table, rows: &[u64], elements: usize| {
        let mut records = vec![0.0; elements];
        let read = file.read(TableId(table), rows, &mut records).unwrap_err().to_string();
        assert_eq!(read, file.write(TableId(table), rows, &records).unwrap_err().to_string());
        read
    };
    assert_eq!(message(0, &[1, 5], 4), "working table 0: expected a row below 5, got 5");
    assert_eq!(message(0, &[2, 2], 4), "working table 0: expected ascending rows, got 2 after 2");
    assert_eq!(message(0, &[1, 2], 3), "working table 0: expected 4 elements of records, got 3");
    assert_eq!(message(1, &[], 0), "working table 1: expected a table number below 1");
    assert_eq!(disk_bytes(&file), 0);
    assert!(file.for_each_chunk(TableId(1), |_, _| Ok(())).is_err());
    assert!(file.first_not_finite(TableId(1)).is_err());
}

#[test]
fn a_file_that_cannot_be_created_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let message = |dir: &Path, table| WorkingFile::create(dir, vec![table]).unwrap_err().to_string();
    let order = Some(RowOrder::hottest_first(4, &[1]).unwrap());
    let order = WorkingTable { order, ..table(5, 2, &[]) };
    assert_eq!(message(dir.path(), order), "working table 0: order: expected 5 rows, got 4");
    let first = WorkingTable { first: First::Version(version(&PlainMemory, 4)), ..table(5, 2, &[]) };
    let shapes = "working table 0: first values: expected shape [5, 2], got [4, 3]";
    assert_eq!(message(dir.path(), first), shapes);
    let long = message(dir.path(), table(1 << 60, 2, &[]));
    assert_eq!(
        long,
        format!(
            "working table 0: expected a file of less than 2^63 bytes, got {} rows of 2 f32",
            1_u64 << 60
        )
    );
    assert!(message(dir.path(), table(5, usize::MAX, &[("sum", 1)])).contains("2^63"));
    let none = dir.path().join("none");
    assert_eq!(message(&none, table(5, 2, &[])), format!("{}: no such directory", none.display()));
    fs::write(&none, "").unwrap();
    assert!(message(&none, table(5, 2, &[])).ends_with(": not a directory"));
    let left = dir.path().join(format!(".working.{}.0.tmp", std::process::id()));
    fs::write(&left, "another's").unwrap();
    WorkingFile::create(dir.path(), vec![table(5, 2, &[])]).unwrap();
    assert_eq!(fs::read(&left).unwrap(), b"another's");
}

/// A small file system, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn on_a_full_disk_writes_are_errors_and_rows_keep_their_records() {
    let dir = tempfile::tempdir().unwrap();
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(dir.path()).output();
    if !mount.is_ok_and(|output| output.status.success()) {
        return crate::skip::skip("it mounts a small tmpfs, which needs root");
    }
    let disk = SmallDisk(dir);
    both_layouts(|| table(1 << 20, 15, &[])).into_iter().for_each(|table| fill_disk(&disk, table));
}

fn fill_disk(disk: &SmallDisk, table: WorkingTable) {
    let in_place = table.order.is_some();
    let file = WorkingFile::create(disk.0.path(), vec![table]).unwrap();
    let (all, mut full) = ((0..30_000).collect::<Vec<u64>>(), 0);
    for rows in all.chunks(100) {
        let written: Vec<f32> = rows.iter().flat_map(|&row| [row as f32; 15]).collect();
        if let Err(error) = file.write(T, rows, &written) {
            let place = disk.0.path().join("(working file)");
            assert!(matches!(&error, StoreError::DiskFull { path } if *path == place), "{error}");
            full += 1;
        }
    }
    assert!(full > 0, "the disk never fills");
    let mut first = [0.0; 15];
    let mut kept = 0;
    for (row, record) in all.iter().zip(records(&file, T, &all).chunks(15)) {
        UNIFORM.row(*row, &mut first);
        kept += u64::from(record == [*row as f32; 15]);
        assert!(record == [*row as f32; 15] || record == first, "row {row}");
    }
    assert!(kept > 15_000, "{kept} rows");
    if in_place {
        file.write(T, &[0], &[7.0; 15]).unwrap();
        assert_eq!(records(&file, T, &[0]), [7.0; 15], "a row with disk space can be written");
    }
}
