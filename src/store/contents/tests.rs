//! A version has the same bytes whether its tables are in memory or in a working file.

use std::fs;
use std::path::Path;

use super::*;
use crate::rowlog::{First, RowOrder, Uniform, WorkingFile, WorkingTable};
use crate::store::{Checkpoint, PlainMemory, Purpose, open, write};
use crate::types::Version;

/// Enough rows for several chunks of a working file.
const ROWS: u64 = 100_000;
const DIM: usize = 7;
const STATES: [StateShape<'static>; 2] = [StateShape::new("sum", DIM), StateShape::new("step", 1)];
const WIDTH: usize = 2 * DIM + 1;
const ELEMENTS: [Element; 4] = [Element::F32, Element::F16, Element::Int8, Element::F32];

fn model_toml() -> String {
    let head = "[architecture]\nkind = \"dcn\"\ncross_layers = 1\ndeep = [4]\n[[dense]]\nname = \"d\"\n";
    let table = |(i, element): (usize, Element)| {
        format!(
            "[[features]]\nname = \"f{i}\"\ntable = \"t{i}\"\n\
             [[tables]]\nname = \"t{i}\"\nrows = {ROWS}\ndim = {DIM}\nelement = \"{element}\"\n"
        )
    };
    head.to_owned() + &ELEMENTS.into_iter().enumerate().map(table).collect::<String>()
}

fn uniform(table: usize) -> Uniform {
    Uniform { seed: 3, table_code: table as u64, bound: 0.25 }
}

/// Two of every three rows in the first half of a table, and the last two rows.
fn written_rows() -> Vec<u64> {
    (0..ROWS / 2).filter(|row| row % 3 != 1).chain([ROWS - 2, ROWS - 1]).collect()
}

/// The tables in memory. The rows of [`written_rows`] no longer have their first values.
fn tables() -> Vec<Table> {
    let table = |i| {
        let mut table = Table::zeroed(&PlainMemory, ROWS, DIM, &STATES).unwrap();
        let (weight, states) = table.parts_mut().unwrap();
        uniform(i).table(DIM, weight);
        let trained = Uniform { seed: 4, bound: 2.0, ..uniform(i) };
        for row in written_rows() {
            let mut record = [0.0; WIDTH];
            trained.row(row, &mut record);
            let at = row as usize;
            weight[at * DIM..][..DIM].copy_from_slice(&record[..DIM]);
            states[0].rows_mut().unwrap()[at * DIM..][..DIM].copy_from_slice(&record[DIM..2 * DIM]);
            states[1].rows_mut().unwrap()[at] = record[2 * DIM];
        }
        table
    };
    (0..ELEMENTS.len()).map(table).collect()
}

/// The same tables in a working file, the first with a row order.
fn working(dir: &Path) -> WorkingFile {
    let ranked: Vec<u64> = (0..ROWS).rev().step_by(7).collect();
    let table = |i| WorkingTable {
        rows: ROWS,
        record: RecordLayout { dim: DIM, states: STATES.to_vec() },
        first: First::Uniform(uniform(i)),
        order: (i == 0).then(|| RowOrder::hottest_first(ROWS, &ranked).unwrap()),
    };
    let file = WorkingFile::create(dir, (0..ELEMENTS.len()).map(table).collect()).unwrap();
    let rows = written_rows();
    for i in 0..ELEMENTS.len() {
        let trained = Uniform { seed: 4, bound: 2.0, ..uniform(i) };
        let mut records = vec![0.0; rows.len() * WIDTH];
        rows.iter().zip(records.chunks_mut(WIDTH)).for_each(|(&row, record)| trained.row(row, record));
        file.write(TableId(i as u32), &rows, &records).unwrap();
    }
    file
}

fn in_file(file: &WorkingFile) -> Vec<TableRows<'_>> {
    (0..file.tables().len()).map(|i| TableRows::Source(file, TableId(i as u32))).collect()
}

fn write_all(models: &Path, tables: Vec<TableRows>) -> Result<Version, StoreError> {
    let dense = vec![DenseTensor { name: "w".to_owned(), shape: vec![2], values: &[1.0, 2.0] }];
    let metadata = [("steps".to_owned(), "9".to_owned())].into();
    let checkpoint = Some(Checkpoint::default());
    let contents =
        Contents { model_toml: &model_toml(), dense, tables, metadata, checkpoint, ..Contents::default() };
    write(models, "m", &contents)
}

/// The files of a version, by name.
fn files(version: &Path) -> BTreeMap<String, Vec<u8>> {
    let below = |folder: &str| -> Vec<String> {
        let entries = fs::read_dir(version.join(folder)).unwrap().map(|entry| entry.unwrap());
        let found = entries.filter(|entry| entry.path().is_file());
        found.map(|entry| format!("{folder}{}", entry.file_name().to_str().unwrap())).collect()
    };
    let names = [below(""), below("tables/"), below("checkpoint/tables/")].concat();
    names.into_iter().map(|name| (name.clone(), fs::read(version.join(name)).unwrap())).collect()
}

#[track_caller]
fn assert_same_files(one: &Path, other: &Path) {
    let (one, other) = (files(one), files(other));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    one.iter().for_each(|(name, bytes)| assert!(other[name] == *bytes, "{name} differs"));
    assert_eq!(one.len(), 3 + 2 * ELEMENTS.len());
}

#[test]
fn a_version_written_from_a_working_file_equals_one_written_from_memory() {
    let dir = tempfile::tempdir().unwrap();
    let [here, there] = ["memory", "working"].map(|name| dir.path().join(name));
    let mut tables = tables();
    let file = working(dir.path());
    // f32 values are written unchanged, whatever their bits are. No reader takes those that are not finite.
    let odd = [f32::MAX, f32::from_bits(0xff7f_1234), -0.0, f32::MIN_POSITIVE, 0.0, 1e-45, -1.0];
    tables[3].row_mut(5).unwrap().copy_from_slice(&odd);
    let states = tables[3].states();
    let step = states[1].as_slice()[5];
    let record = [&odd[..], &states[0].as_slice()[5 * DIM..][..DIM], &[step]].concat();
    file.write(TableId(3), &[5], &record).unwrap();

    write_all(&here, tables.iter().map(TableRows::from).collect()).unwrap();
    write_all(&there, in_file(&file)).unwrap();
    assert_same_files(&here.join("m/1"), &there.join("m/1"));
    let opened = open(&there, "m", Version(1), Purpose::Train).unwrap();
    let states = opened.store.tables().iter().map(|table| table.states().len());
    assert_eq!(states.collect::<Vec<_>>(), [2; 4], "rounded rows have a state too");

    let mixed = [(&tables[0]).into(), in_file(&file)[1], (&tables[2]).into(), in_file(&file)[3]];
    write_all(&here, mixed.to_vec()).unwrap();
    assert_same_files(&here.join("m/2"), &there.join("m/1"));
}

#[test]
fn a_version_written_from_an_untouched_working_file_of_a_version_equals_it() {
    let dir = tempfile::tempdir().unwrap();
    let models = dir.path();
    write_all(models, tables().iter().map(TableRows::from).collect()).unwrap();
    let working =
        open(models, "m", Version(1), Purpose::Train).unwrap().store.into_tables().into_iter().map(|table| {
            let order = Some(RowOrder::hottest_first(ROWS, &[9, 2]).unwrap());
            WorkingTable {
                rows: ROWS,
                record: RecordLayout { dim: DIM, states: STATES.to_vec() },
                first: First::Version(table),
                order,
            }
        });
    let file = WorkingFile::create(models, working.collect()).unwrap();
    write_all(models, in_file(&file)).unwrap();
    let [first, second] = ["m/1", "m/2"].map(|path| models.join(path));
    for table in files(&first).into_keys().filter(|file| file.ends_with("safetensors")) {
        assert!(fs::read(first.join(&table)).unwrap() == fs::read(second.join(&table)).unwrap(), "{table}");
    }
}

#[test]
fn errors_of_writing_from_a_working_file_are_those_of_writing_from_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut tables = tables();
    let file = working(dir.path());
    for row in [ROWS - 1, ROWS - 2] {
        tables[1].row_mut(row).unwrap()[3] = 1e6;
        let mut record = [0.0; WIDTH];
        record[3] = 1e6;
        file.write(TableId(1), &[row], &record).unwrap();
    }
    let message = |tables| write_all(dir.path(), tables).unwrap_err().to_string();
    let refused = message(in_file(&file));
    assert_eq!(refused, message(tables.iter().map(TableRows::from).collect()));
    assert!(
        refused.starts_with("tables/t1.safetensors: row 99998: element 3: 1000000 is larger in magnitude"),
        "{refused}"
    );

    let small = WorkingTable {
        rows: 9,
        record: RecordLayout { dim: DIM, states: Vec::new() },
        first: First::Uniform(uniform(0)),
        order: None,
    };
    let small = WorkingFile::create(dir.path(), vec![small]).unwrap();
    let with = |rows| [&in_file(&file)[..3], &[rows]].concat();
    let shape = "tables/t3.safetensors: tensor \"weight\": expected shape [100000, 7], got shape [9, 7]";
    assert_eq!(message(with(TableRows::Source(&small, TableId(0)))), shape);
    let none = "working table 7: expected a table number below 1";
    assert_eq!(message(with(TableRows::Source(&small, TableId(7)))), none);
    assert_eq!(fs::read_dir(dir.path().join("m")).map_or(0, |entries| entries.count()), 0, "nothing is left");
}
