use super::super::format::{FileEnd, OpenedTrace, TraceFormatError, TraceReader};
use super::*;
use crate::metrics::Metrics;
use crate::schema::preset::{self, ArchKind, SyntheticShape};

const TABLES: usize = 3;

fn schema() -> Schema {
    let shape = SyntheticShape { tables: TABLES, rows: 1 << 40, dense: 0, multi_hot: None };
    preset::synthetic(ArchKind::Dcn, 4, shape)
}

fn batch(samples: usize, from: u64) -> Batch {
    let mut batch = Batch::empty(TABLES);
    batch.samples = samples;
    for (t, column) in batch.features.iter_mut().enumerate() {
        (0..samples as u64).for_each(|s| column.push(&[(from + s) * 1_000_003 + t as u64]));
    }
    batch
}

fn accesses(batch: &Batch) -> Vec<(u32, u64)> {
    let sample = |s| (0..TABLES as u32).map(move |t| (t, batch.features[t as usize].ids[s]));
    (0..batch.samples).flat_map(sample).collect()
}

/// The accesses in all files, and the length of each file in bytes.
fn read(folder: &Path) -> (Vec<(u32, u64)>, Vec<u64>) {
    let mut all = Vec::new();
    let files = numbered(folder).unwrap();
    for file in &files {
        let opened = TraceReader::open(File::open(&file.path).unwrap()).unwrap();
        let OpenedTrace::Whole(reader) = opened else { panic!("{}: no header", file.path.display()) };
        let ended = reader.read(|table, row| {
            all.push((table.0, row));
            Ok::<(), TraceFormatError>(())
        });
        assert_eq!(ended.unwrap(), FileEnd::Whole);
    }
    (all, files.iter().map(|file| file.bytes).collect())
}

fn options(folder: &Path, rate: f64, max_bytes: u64) -> RecorderOptions {
    RecorderOptions { folder: folder.into(), rate, max_bytes }
}

#[test]
fn all_accesses_of_the_sampled_rows_are_written_in_order_over_several_starts() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = Metrics::new().unwrap();
    let mut wanted = Vec::new();
    for start in 0..3u64 {
        let recorder =
            Recorder::start(&schema(), &options(folder.path(), 0.3, 1 << 30), metrics.model("m", &schema()));
        let recorder = recorder.unwrap();
        for i in 0..5 {
            // Starts 0 and 2 use the same rows.
            let batch = batch(100, (start % 2) * 1000 + i * 100);
            recorder.record(&batch);
            wanted.extend(accesses(&batch));
        }
    }
    wanted.retain(|&(table, row)| Sampler::new(0.3).selects(TableId(table), row));
    let (got, files) = read(folder.path());
    assert_eq!(got, wanted);
    assert_eq!(files.len(), 3);
    let page = metrics.render();
    let line = format!("flechette_trace_accesses_total{{model=\"m\"}} {}", wanted.len());
    assert!(page.contains(&line), "{line} in\n{page}");
    assert!(page.contains("flechette_trace_dropped_total{model=\"m\"} 0"), "{page}");
}

#[test]
fn files_stay_within_the_limit_and_the_newest_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = Metrics::new().unwrap();
    let limit = 1 << 20;
    let recorder =
        Recorder::start(&schema(), &options(folder.path(), 1.0, limit), metrics.model("m", &schema()));
    let recorder = recorder.unwrap();
    let mut wanted = Vec::new();
    for i in 0..100 {
        let batch = batch(1000, i * 1000);
        // Waits for the writer, so that nothing is dropped.
        while recorder.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        recorder.record(&batch);
        wanted.extend(accesses(&batch));
    }
    drop(recorder);
    let (got, files) = read(folder.path());
    assert!(files.iter().sum::<u64>() <= limit, "{files:?}");
    assert!(files.len() > 1 && got.len() > 50_000, "{} in {files:?}", got.len());
    assert!(wanted.ends_with(&got));
}

#[test]
fn a_full_queue_drops_and_counts_accesses_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = Metrics::new().unwrap();
    let options = options(folder.path(), 1.0, 1 << 30);
    let recorder = Recorder::start(&schema(), &options, metrics.model("m", &schema())).unwrap();
    recorder.waiting.fetch_add(WAITING_BYTES, Ordering::Relaxed);
    recorder.record(&batch(100, 0));
    recorder.waiting.fetch_sub(WAITING_BYTES, Ordering::Relaxed);
    recorder.record(&batch(10, 500));
    drop(recorder);
    assert_eq!(read(folder.path()).0, accesses(&batch(10, 500)));
    assert!(metrics.render().contains("flechette_trace_dropped_total{model=\"m\"} 300"));
}

#[test]
fn without_the_directory_of_the_model_accesses_are_dropped_and_it_is_not_created() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let metrics = Metrics::new().unwrap();
    let options = options(&model.join("state"), 1.0, 4 << 10);
    let recorder = Recorder::start(&schema(), &options, metrics.model("m", &schema())).unwrap();
    (0..3).for_each(|i| recorder.record(&batch(10_000, i)));
    drop(recorder);
    assert!(!model.exists());
    assert!(!metrics.render().contains("flechette_trace_dropped_total{model=\"m\"} 0"));
}

fn writer(folder: &Path) -> (Writer, Metrics) {
    let metrics = Metrics::new().unwrap();
    let options = options(folder, 1.0, 1 << 30);
    let files = RecordingFiles::new(&options, Header::of(&schema(), 1.0).bytes());
    let writer = Writer::new(files, metrics.model("m", &schema()));
    (writer, metrics)
}

/// Writes a block of one access.
fn write(writer: &mut Writer, row: u64) {
    format::push_access(&mut writer.block, TableId(1), row);
    writer.accesses = 1;
    writer.write();
}

#[test]
fn a_file_appears_only_with_a_whole_header_and_failed_attempts_back_off() {
    let folder = tempfile::tempdir().unwrap();
    let (mut writer, metrics) = writer(folder.path());
    // A directory with the temporary name prevents the creation of the file.
    let obstacle = folder.path().join("trace-00000001.fltrace.tmp");
    fs::create_dir(&obstacle).unwrap();
    write(&mut writer, 1);
    assert!(numbered(folder.path()).unwrap().is_empty());
    fs::remove_dir(&obstacle).unwrap();
    write(&mut writer, 2);
    assert!(numbered(folder.path()).unwrap().is_empty(), "the next attempt must wait");
    let waits = (0..8).map(|_| {
        fs::create_dir_all(&obstacle).unwrap();
        writer.failed.as_mut().unwrap().retry_at = Instant::now();
        write(&mut writer, 3);
        writer.failed.unwrap().wait.as_secs()
    });
    assert_eq!(waits.collect::<Vec<_>>(), [2, 4, 8, 16, 32, 60, 60, 60]);
    fs::remove_dir(&obstacle).unwrap();
    writer.failed.as_mut().unwrap().retry_at = Instant::now();
    write(&mut writer, 4);
    assert!(writer.failed.is_none());
    assert_eq!(read(folder.path()).0, [(1, 4)]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    assert!(metrics.render().contains("flechette_trace_dropped_total{model=\"m\"} 10"));
}

#[test]
fn a_block_that_fails_leaves_neither_an_empty_file_nor_a_partial_block() {
    let folder = tempfile::tempdir().unwrap();
    let (mut writer, _) = writer(folder.path());
    let files = &mut writer.files;
    // A file that is open for reading only refuses every block.
    let mut open = files.begin().unwrap();
    open.file = File::open(&open.path).unwrap();
    files.open = Some(open);
    write(&mut writer, 1);
    assert!(numbered(folder.path()).unwrap().is_empty(), "a file without a block is removed");

    writer.failed = None;
    write(&mut writer, 2);
    let open = writer.files.open.take().unwrap();
    let whole = open.bytes;
    let mut file = open.file.try_clone().unwrap();
    file.write_all(b"part of a block").unwrap();
    writer.files.open = open.without_partial_block(writer.files.header.len() as u64);
    assert_eq!(fs::metadata(&writer.files.open.as_ref().unwrap().path).unwrap().len(), whole);
    write(&mut writer, 3);
    let (accesses, files) = read(folder.path());
    assert_eq!((accesses, files.len()), (vec![(1, 2), (1, 3)], 1));
}
