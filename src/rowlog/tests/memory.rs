//! The tables of a working file may be larger than memory. Training on a working file and writing a version
//! from it need memory in proportion to the rows of a batch, not of the table.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::rowlog::{First, RowOrder, Uniform, WorkingFile, WorkingTable};
use crate::schema::Schema;
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::store;
use crate::store::{Checkpoint, Contents, Purpose, RecordLayout, StateShape, TableRows};
use crate::types::TableId;

use crate::store::tests::footprint::{measured_alone, memory};

const CHILD: &str = "FLECHETTE_TEST_WORKING_MEMORY";
const ROWS: u64 = 1 << 20;
const DIM: usize = 24;
const T: TableId = TableId(0);

/// Updates every row of the lower half of the table. The rows of a batch are spread over this half.
fn train(file: &WorkingFile) {
    let batches = 128;
    for batch in 0..batches {
        let rows: Vec<u64> = (batch..ROWS / 2).step_by(batches as usize).collect();
        let mut records = vec![0.0; rows.len() * 2 * DIM];
        file.read(T, &rows, &mut records).unwrap();
        for (record, &row) in records.chunks_mut(2 * DIM).zip(&rows) {
            record.fill(row as f32);
        }
        file.write(T, &rows, &records).unwrap();
    }
}

/// Does nothing as a test. The next test runs it in a child process, because it measures the memory of its
/// process.
#[test]
fn child_that_trains_and_writes_a_large_working_file() {
    let Some(models) = std::env::var_os(CHILD) else { return };
    let models = Path::new(&models);
    let shape = SyntheticShape { tables: 1, rows: ROWS, dense: 0, multi_hot: None };
    let schema = preset::synthetic(ArchKind::Dcn, DIM, shape);
    let before = memory("RssAnon");
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(before));
    thread::scope(|scope| {
        // Pages of the file do not count, because the kernel can reclaim them. The kernel records no peak of
        // only anonymous memory, so this thread samples it.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(memory("RssAnon"), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
        });
        // With the records in a log, and with a fixed place for each row.
        train_and_write(&models.join("log"), &schema, None);
        let ranked: Vec<u64> = (0..10_000).rev().collect();
        train_and_write(
            &models.join("placed"),
            &schema,
            Some(RowOrder::hottest_first(ROWS, &ranked).unwrap()),
        );
        done.store(true, Ordering::Relaxed);
    });
    // The table has 192 MiB.
    let took = peak.into_inner() - before;
    assert!(took < 32 << 20, "it took {took} bytes");
    println!("measured");
}

fn train_and_write(models: &Path, schema: &Schema, order: Option<RowOrder>) {
    std::fs::create_dir(models).unwrap();
    let table = WorkingTable {
        rows: ROWS,
        record: RecordLayout { dim: DIM, states: vec![StateShape::new("sum", DIM)] },
        first: First::Uniform(Uniform { seed: 1, table_code: 2, bound: 0.5 }),
        order,
    };
    let file = WorkingFile::create(models, vec![table]).unwrap();
    train(&file);
    assert_eq!(file.first_not_finite(T).unwrap(), None);
    let tables = vec![TableRows::Source(&file, T)];
    let contents = Contents {
        model_toml: &schema.to_toml(),
        tables,
        checkpoint: Some(Checkpoint::default()),
        ..Contents::default()
    };
    let version = store::write(models, "m", &contents).unwrap();

    let opened = store::open(models, "m", version, Purpose::Train).unwrap();
    let table = &opened.store.tables()[0];
    for row in [0, 1, 9_999, ROWS / 2 - 1] {
        assert_eq!(table.row_values(row), Some(&[row as f32; DIM][..]));
        assert_eq!(table.states()[0].as_slice()[row as usize * DIM..][..DIM], [row as f32; DIM]);
    }
    assert!(table.row_values(ROWS - 1).unwrap().iter().all(|x| x.abs() <= 0.5));
}

#[test]
fn training_on_a_working_file_and_writing_it_need_far_less_memory_than_the_table() {
    let dir = tempfile::tempdir().unwrap();
    measured_alone(
        "rowlog::tests::memory::child_that_trains_and_writes_a_large_working_file",
        CHILD,
        dir.path(),
    );
}
