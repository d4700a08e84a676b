use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::dataset::{DataPosition, Feed, FeedFiles, Format, ReadOptions};
use crate::learnlog::{Log, Record};
use crate::schema::preset::{self, ArchKind};
use crate::store::disk::SystemDisk;
use crate::types::{RawFeature, RawValues};

fn schema() -> Schema {
    let mut schema = preset::criteo(ArchKind::Dcn, 1, 100);
    schema.dense.truncate(1);
    schema.features.truncate(1);
    schema
}

/// Samples of one request. Every other request sends strings.
fn record(schema: &Schema, numbers: std::ops::Range<u32>) -> Record {
    let samples = numbers.len();
    let mut column = if numbers.start.is_multiple_of(2) { RawFeature::ids() } else { RawFeature::text() };
    for n in numbers.clone() {
        match &mut column.values {
            RawValues::Ids(ids) => ids.push(u64::from(n)),
            RawValues::Text { bytes, ends } => {
                bytes.extend(n.to_string().bytes());
                ends.push(bytes.len() as u32);
            }
        }
        column.offsets.push(column.values.len() as u32);
    }
    let raw = RawBatch {
        samples,
        dense: numbers.map(|n| n as f32).collect(),
        features: vec![column],
        labels: Some(vec![0.0; samples]),
    };
    Record::new(&raw, schema_sum(schema))
}

fn feed(dir: &Path, until_end: bool, stop: &Stop) -> Feed {
    Feed {
        format: Some(Format::CriteoTsv),
        files: FeedFiles::Learned(Learned::new(dir, until_end)),
        schema: schema(),
        options: ReadOptions::default(),
        shuffle: None,
        held_out: None,
        stop: stop.clone(),
    }
}

/// A feed that waits at the end of the log, and for so long for a file that is missing.
fn waiting(dir: &Path, lost_after: Duration) -> Feed {
    let learned = Learned { lost_after, ..Learned::new(dir, false) };
    Feed { files: FeedFiles::Learned(learned), ..feed(dir, false, &Stop::default()) }
}

/// A log of requests with 1 to 5 samples, in small segments, and the number of its samples.
fn log(dir: &Path) -> (Log, u32) {
    let mut log = Log::open(&SystemDisk, dir, 300).unwrap();
    let mut begin = 0;
    for n in 0..20 {
        let end = begin + 1 + n % 5;
        log.append(&[record(&schema(), begin..end)]).1.unwrap();
        begin = end;
    }
    (log, begin)
}

fn rest(reader: &mut dyn Reader, batch: usize) -> Vec<u32> {
    let (mut all, mut out) = (Vec::new(), RawBatch::default());
    while reader.read(batch, &mut out).unwrap() > 0 {
        let RawValues::Ids(ids) = &out.features[0].values else { panic!("strings are not hashed") };
        assert_eq!((ids.len(), out.labels.as_ref().unwrap().len()), (out.samples, out.samples));
        all.extend(out.dense.iter().map(|&n| n as u32));
    }
    all
}

#[test]
fn reading_from_any_cursor_gives_the_rest_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (_log, samples) = log(dir.path());
    let feed = feed(dir.path(), true, &Stop::default());
    for batch in [1, 4, 7] {
        let mut reader = feed.open(&DataPosition::begin(1)).unwrap();
        let mut out = RawBatch::default();
        let mut read = 0;
        while reader.read(batch, &mut out).unwrap() > 0 {
            read += out.samples as u32;
            assert_eq!(reader.runs().iter().map(|run| run.samples).sum::<usize>(), out.samples);
            let last = reader.runs().last().unwrap();
            let file = Some(FileAt {
                name: last.file.name.clone(),
                samples: last.of_file,
                complete: last.ends_file,
            });
            let mut again = feed.open(&DataPosition { epoch: 1, samples: read.into(), file }).unwrap();
            assert_eq!(rest(&mut *again, 5), (read..samples).collect::<Vec<_>>());
        }
        assert_eq!(read, samples);
    }
}

#[test]
fn a_cursor_outside_the_log_is_an_error_that_names_the_segment() {
    let dir = tempfile::tempdir().unwrap();
    let (_log, _) = log(dir.path());
    let feed = feed(dir.path(), true, &Stop::default());
    let at = |name: &str, samples| DataPosition {
        epoch: 1,
        samples,
        file: Some(FileAt { name: name.to_owned(), samples, complete: false }),
    };
    let error = |place: &DataPosition| match feed.open(place) {
        Ok(mut reader) => reader.read(1, &mut RawBatch::default()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    let last = crate::learnlog::segments(dir.path()).unwrap().last().copied().unwrap();
    let short = error(&at(&name_of(last), 99));
    assert!(short.contains("but 99 were trained on before"), "{short}");
    crate::learnlog::remove_consumed(dir.path(), &name_of(2)).unwrap();
    let missing = error(&at(&name_of(1), 1));
    assert!(missing.contains("0000000001.fllearn: missing"), "{missing}");
    assert!(error(&at("day.tsv", 1)).contains("day.tsv: is not the name of a segment"));
    let other = Feed { schema: preset::criteo(ArchKind::Dcn, 2, 100), ..feed };
    let mut reader = other.open(&DataPosition::begin(1)).unwrap();
    let error = reader.read(1, &mut RawBatch::default()).unwrap_err().to_string();
    assert!(error.contains("0000000002.fllearn: samples of another schema"), "{error}");
}

#[test]
fn a_waiting_reader_gets_samples_as_they_come_and_continues_after_a_pause() {
    let dir = tempfile::tempdir().unwrap();
    let (mut log, samples) = log(dir.path());
    let stop = Stop::default();
    let mut reader = feed(dir.path(), false, &stop).open(&DataPosition::begin(1)).unwrap();
    assert!(reader.may_wait());
    let mut out = RawBatch::default();
    let mut read = Vec::new();
    while read.len() + 8 <= samples as usize {
        read.extend((0..reader.read(8, &mut out).unwrap()).map(|s| out.dense[s] as u32));
    }
    let waiting = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while waiting.load(Ordering::SeqCst) {
                stop.pause();
                sleep(Duration::from_millis(1));
            }
        });
        // The batch is begun, and the reader waits for its rest until the pause.
        assert_eq!(reader.read(8, &mut out).unwrap(), 0);
        waiting.store(false, Ordering::SeqCst);
    });
    stop.resume();
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in samples..samples + 8 {
                log.append(&[record(&schema(), n..n + 1)]).1.unwrap();
            }
        });
        assert_eq!(reader.read(8, &mut out).unwrap(), 8, "{:?}", began.elapsed());
    });
    read.extend(out.dense.iter().map(|&n| n as u32));
    assert_eq!(read, (0..read.len() as u32).collect::<Vec<_>>());
    assert!(read.len() > samples as usize - 8);
}

#[test]
fn bytes_that_are_not_known_to_be_durable_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let (mut log, samples) = log(dir.path());
    let known = std::fs::read(dir.path().join("durable")).unwrap();
    log.append(&[record(&schema(), samples..samples + 1)]).1.unwrap();
    std::fs::write(dir.path().join("durable"), known).unwrap();
    let feed = feed(dir.path(), true, &Stop::default());
    let mut reader = feed.open(&DataPosition::begin(1)).unwrap();
    assert_eq!(rest(&mut *reader, 100).len(), samples as usize);
    drop(log);
    crate::learnlog::repair(dir.path()).unwrap();
    assert_eq!(rest(&mut *reader, 100), [samples]);
}

#[test]
fn a_place_in_another_log_or_after_the_end_of_this_one_is_lacking() {
    let dir = tempfile::tempdir().unwrap();
    let (log, _) = log(dir.path());
    let learned = Learned::new(dir.path(), true);
    let own = learned.id().unwrap();
    let numbers = crate::learnlog::segments(dir.path()).unwrap();
    let last = Durable::read(dir.path()).unwrap().unwrap().segment;
    assert_eq!(numbers, (1..=last).collect::<Vec<_>>());
    let at = |number, samples| FileAt { name: name_of(number), samples, complete: false };
    let lacks = |place: &FileAt, log: Option<&str>| learned.lacks(place, log).unwrap().unwrap_or_default();
    for number in [1, last] {
        // Cursors of earlier programs have no id.
        for log in [None, own.as_deref()] {
            assert_eq!(lacks(&at(number, 1), log), "");
            assert!(lacks(&at(number, 99), log).contains("but the version was trained on 99"));
        }
        assert!(lacks(&at(number, 1), Some("other")).contains("was trained on another log"));
    }
    assert!(lacks(&at(last + 1, 1), None).contains("has 0 samples, but the version was trained on 1"));
    // A later version was trained on its samples, and was deleted.
    crate::learnlog::remove_consumed(dir.path(), &name_of(2)).unwrap();
    assert!(lacks(&at(1, 1), own.as_deref()).ends_with("is missing, but a later segment exists"));
    drop(log);
    crate::learnlog::repair(dir.path()).unwrap();
    assert_eq!(learned.id().unwrap(), own, "the log has the same id when it is opened again");
    // The segments are deleted, and the numbers begin again.
    for number in crate::learnlog::segments(dir.path()).unwrap() {
        std::fs::remove_file(dir.path().join(name_of(number))).unwrap();
    }
    crate::learnlog::repair(dir.path()).unwrap();
    assert!(lacks(&at(1, 1), own.as_deref()).contains("was trained on another log"));
}

#[test]
fn a_batch_that_is_not_full_is_handed_out_when_the_log_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let (_log, samples) = log(dir.path());
    let (feed, stop) = (feed(dir.path(), false, &Stop::default()), Stop::default());
    let feed = Feed { stop: stop.clone(), ..feed };
    let FeedFiles::Learned(Learned { shortage, .. }) = feed.files.clone() else { panic!("a log") };
    let mut reader = feed.open(&DataPosition::begin(1)).unwrap();
    std::fs::write(dir.path().join("full"), "300").unwrap();
    let mut out = RawBatch::default();
    assert_eq!(reader.read(1000, &mut out).unwrap(), samples as usize);
    assert_eq!(shortage.limit(), Some(300));
    // An empty batch would be the end of the data.
    std::thread::scope(|scope| {
        let began = Instant::now();
        scope.spawn(|| {
            sleep(3 * POLL);
            stop.pause();
        });
        assert_eq!(reader.read(1000, &mut out).unwrap(), 0);
        assert!(began.elapsed() >= 2 * POLL);
    });
}

#[test]
fn a_sample_that_is_too_large_to_train_on_is_left_out_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    // Earlier servers stored such samples.
    let mut schema = schema();
    schema.dense[0].transform = crate::schema::Transform::None;
    let raw = |values: &[f32]| RawBatch {
        samples: values.len(),
        dense: values.to_vec(),
        features: vec![RawFeature {
            offsets: (0..=values.len() as u32).collect(),
            values: RawValues::Ids(vec![0; values.len()]),
        }],
        labels: Some(vec![0.0; values.len()]),
    };
    let mut log = Log::open(&SystemDisk, dir.path(), u64::MAX).unwrap();
    for values in [&[0.0, 3e38, 1.0][..], &[-2e19], &[2.0, 3.0, 1e3]] {
        log.append(&[Record::new(&raw(values), schema_sum(&schema))]).1.unwrap();
    }
    let feed = Feed { schema, ..feed(dir.path(), true, &Stop::default()) };
    let (mut reader, mut out) = (feed.open(&DataPosition::begin(1)).unwrap(), RawBatch::default());
    let mut places = Vec::new();
    while reader.read(2, &mut out).unwrap() > 0 {
        let runs = reader.runs();
        assert_eq!(runs.iter().map(|run| run.samples).sum::<usize>(), out.samples);
        places.push((out.dense.clone(), runs.last().unwrap().of_file));
    }
    assert_eq!(places, [(vec![0.0, 1.0], 3), (vec![2.0, 3.0], 6), (vec![1e3], 7)]);
    let file = Some(FileAt { name: name_of(1), samples: 3, complete: false });
    let mut reader = feed.open(&DataPosition { epoch: 1, samples: 2, file }).unwrap();
    reader.read(9, &mut out).unwrap();
    assert_eq!(out.dense, [2.0, 3.0, 1e3]);
}

#[test]
fn a_reader_whose_log_was_deleted_begins_with_the_first_sample_of_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("learn");
    // Either at the end of the log, or within it.
    for behind in [0, 30] {
        let (before, samples) = log(&path);
        let mut reader = feed(&path, true, &Stop::default()).open(&DataPosition::begin(1)).unwrap();
        let mut out = RawBatch::default();
        let most = samples as usize - behind;
        assert_eq!(reader.read(most, &mut out).unwrap(), most);
        let first = reader.runs()[0].clone();
        drop(before);
        std::fs::remove_dir_all(&path).unwrap();
        // The rest of the request that was read, and of its segment.
        let left = rest(&mut *reader, 1).len();
        assert!(left <= behind, "{left}");
        // `durable` is the same.
        let (_after, again) = log(&path);
        assert_eq!(reader.read(again as usize, &mut out).unwrap(), again as usize);
        assert_eq!(out.dense.iter().map(|&n| n as u32).collect::<Vec<_>>(), (0..again).collect::<Vec<_>>());
        let run = reader.runs()[0].clone();
        assert_eq!(run.file.name, first.file.name);
        assert!(first.file.log.is_some() && run.file.log.is_some() && run.file.log != first.file.log);
        assert_eq!(run.samples as u64, run.of_file);
        std::fs::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn a_reader_waits_while_its_log_is_removed_file_by_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("learn");
    let (before, _) = log(&path);
    let mut reader = waiting(&path, Duration::from_secs(300)).open(&DataPosition::begin(1)).unwrap();
    let mut out = RawBatch::default();
    assert_eq!(reader.read(1, &mut out).unwrap(), 1);
    let old = reader.runs()[0].file.log.clone();
    drop(before);
    std::fs::remove_file(path.join(name_of(2))).unwrap();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| {
            // The rest of the first segment, and then the new log.
            while reader.runs()[0].file.log == old {
                assert_eq!(reader.read(1, &mut out).unwrap(), 1);
            }
            out.dense[0]
        });
        sleep(2 * POLL);
        std::fs::remove_dir_all(&path).unwrap();
        let mut new = Log::open(&SystemDisk, &path, u64::MAX).unwrap();
        new.append(&[record(&schema(), 77..78)]).1.unwrap();
        assert_eq!(read.join().unwrap(), 77.0);
    });
}

#[test]
fn a_reader_that_waits_takes_a_missing_segment_for_lost_after_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let (_log, _) = log(dir.path());
    std::fs::remove_file(dir.path().join(name_of(2))).unwrap();
    let lost_after = Duration::from_secs(1);
    let mut reader = waiting(dir.path(), lost_after).open(&DataPosition::begin(1)).unwrap();
    let (begun, mut out) = (Instant::now(), RawBatch::default());
    let error = loop {
        if let Err(error) = reader.read(1, &mut out) {
            break error.to_string();
        }
    };
    assert!(error.contains(&name_of(2)) && error.contains("missing"), "{error}");
    assert!(begun.elapsed() >= lost_after);
}
