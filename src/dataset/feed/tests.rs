use std::io::Write;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::dataset::Labels;
use crate::dataset::synthetic::write_criteo_tsv;
use crate::schema::preset::{self, AVAZU_FEATURES, ArchKind};
use crate::types::{RawBatch, RawValues};

/// A sample in a form that can be compared.
type Sample = (Vec<u32>, Vec<Vec<u8>>, u32);

/// All samples that a reader hands out in batches of `batch`.
fn samples(reader: &mut dyn Reader, batch: usize) -> Vec<Sample> {
    let (mut all, mut out) = (Vec::new(), RawBatch::default());
    while reader.read(batch, &mut out).unwrap() > 0 {
        all.extend((0..out.samples).map(|s| sample(&out, s)));
    }
    all
}

fn sample(batch: &RawBatch, s: usize) -> Sample {
    let width = batch.dense.len() / batch.samples;
    let dense = batch.dense[s * width..][..width].iter().map(|x| x.to_bits()).collect();
    let value = |column: &crate::types::RawFeature| {
        let (from, to) = (column.offsets[s] as usize, column.offsets[s + 1] as usize);
        match &column.values {
            RawValues::Ids(ids) => ids[from..to].iter().flat_map(|id| id.to_le_bytes()).collect(),
            RawValues::Text { bytes, ends } => {
                let begin = if from == 0 { 0 } else { ends[from - 1] as usize };
                bytes[begin..ends[to - 1] as usize].to_vec()
            }
        }
    };
    let label = batch.labels.as_ref().unwrap()[s].to_bits();
    (dense, batch.features.iter().map(value).collect(), label)
}

/// Lines in Avazu's format. A value is different in each file, line and column.
pub(crate) fn avazu_csv(rows: u64, file: u64) -> Vec<u8> {
    let mut text = format!("id,click,{}\n", AVAZU_FEATURES.join(","));
    for row in 0..rows {
        let values: Vec<_> = (0..22).map(|i| format!("{file:02x}{:06x}", row * 22 + i)).collect();
        text += &format!("{row},{},{}\n", row % 2, values.join(","));
    }
    text.into_bytes()
}

/// Files of a format: the second one is compressed, and all have malformed lines.
fn files(dir: &Path, format: Format, rows: u64) -> Vec<PathBuf> {
    if format == Format::Synthetic {
        return [format!("rows={rows},seed=1"), format!("rows={},seed=2", rows / 2)]
            .map(PathBuf::from)
            .into();
    }
    let file = |n: u64| {
        let mut text = Vec::new();
        match format {
            Format::CriteoTsv => write_criteo_tsv(rows / (n + 1), n, &mut text).unwrap(),
            _ => text = avazu_csv(rows / (n + 1), n),
        }
        let lines = text.split_inclusive(|&b| b == b'\n').enumerate();
        let spoiled =
            lines.flat_map(|(i, line)| [if i % 9 == 4 { &b"bad\n"[..] } else { b"" }, line].concat());
        let text: Vec<u8> = spoiled.collect();
        let path = dir.join(format!("{n}.log"));
        if n == 1 {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(&text).unwrap();
            std::fs::write(&path, gzip.finish().unwrap()).unwrap();
        } else {
            std::fs::write(&path, text).unwrap();
        }
        path
    };
    (0..3).map(file).collect()
}

fn feed(format: Format, files: FeedFiles) -> Feed {
    let schema = match format {
        Format::AvazuCsv => preset::avazu(ArchKind::Dcn, 1, 100),
        _ => preset::criteo(ArchKind::Dcn, 1, 100),
    };
    let options = ReadOptions { labels: Labels::Required, malformed_lines: 1000, ..ReadOptions::default() };
    let (format, stop) = (Some(format), Stop::default());
    Feed { format, files, schema, options, shuffle: None, held_out: None, stop }
}

fn list(dir: &Path, format: Format, rows: u64) -> Feed {
    feed(format, FeedFiles::List(files(dir, format, rows)))
}

fn place(epoch: u32, samples: u64) -> DataPosition {
    DataPosition { epoch, samples, file: None }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn skipping_equals_reading_and_dropping(
        format in prop::sample::select(vec![Format::CriteoTsv, Format::AvazuCsv, Format::Synthetic]),
        (rows, k, batch) in (2..300u64, 0..700u64, 1..50usize),
        block in prop::option::of(1..200u32),
        ratio in prop::option::of(0.01..0.9f64),
        (seed, epoch) in (any::<u64>(), 1..4u32),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let shuffle = block.map(|samples| Shuffle { samples, seed });
        let held_out = ratio.map(|ratio| HeldOut { ratio, seed });
        let feed = Feed { shuffle, held_out, ..list(dir.path(), format, rows) };
        let mut whole = feed.open(&place(epoch, 0)).unwrap();
        let all = samples(&mut *whole, batch);
        let k = k.min(all.len() as u64);
        let mut rest = feed.open(&place(epoch, k)).unwrap();
        prop_assert!(samples(&mut *rest, batch) == all[k as usize..]);
        prop_assert_eq!(rest.skipped(), whole.skipped());
        // In the middle of a block or of a buffer, too.
        let mut middle = feed.open(&place(epoch, 0)).unwrap();
        let mut out = RawBatch::default();
        let read = middle.read(batch, &mut out).unwrap() as u64;
        let more = k.saturating_sub(read);
        prop_assert_eq!(middle.skip(more).unwrap(), more);
        prop_assert!(samples(&mut *middle, batch) == all[(read + more) as usize..]);
        let past = feed.open(&place(epoch, all.len() as u64 + 1)).err().unwrap().to_string();
        prop_assert!(past.contains(&format!("has {} samples, but {}", all.len(), all.len() + 1)), "{}", past);
    }
}

#[test]
fn a_shuffle_permutes_within_blocks_and_differs_by_epoch_and_seed() {
    let dir = tempfile::tempdir().unwrap();
    let plain = list(dir.path(), Format::CriteoTsv, 300);
    let in_order = samples(&mut *plain.open(&place(1, 0)).unwrap(), 64);
    let shuffled = |seed: u64, epoch: u32, batch: usize| {
        let shuffle = Some(Shuffle { samples: 100, seed });
        samples(
            &mut *Feed { shuffle, ..list(dir.path(), Format::CriteoTsv, 300) }
                .open(&place(epoch, 0))
                .unwrap(),
            batch,
        )
    };
    let first = shuffled(7, 1, 64);
    assert_eq!(first, shuffled(7, 1, 33), "batches do not change the order");
    assert!(first != in_order && first != shuffled(7, 2, 64) && first != shuffled(8, 1, 64));
    assert_eq!(first.len(), in_order.len());
    for (mine, theirs) in first.chunks(100).zip(in_order.chunks(100)) {
        let sorted = |samples: &[Sample]| {
            let mut sorted = samples.to_vec();
            sorted.sort();
            sorted
        };
        assert!(sorted(mine) == sorted(theirs));
    }
}

#[test]
fn held_out_samples_and_trained_samples_are_the_whole_data() {
    let dir = tempfile::tempdir().unwrap();
    let of = |held_out| Feed { held_out, ..list(dir.path(), Format::CriteoTsv, 600) };
    let all = samples(&mut *of(None).open(&place(1, 0)).unwrap(), 64);
    let split = of(Some(HeldOut { ratio: 0.25, seed: 3 }));
    let trained = samples(&mut *split.open(&place(1, 0)).unwrap(), 64);
    assert_eq!(trained, samples(&mut *split.open(&place(2, 0)).unwrap(), 5), "the same in every epoch");
    let held_out = samples(&mut *split.open_held_out().unwrap().unwrap(), 64);
    let share = held_out.len() as f64 / all.len() as f64;
    assert!((0.2..0.3).contains(&share), "{share}");
    let mut both = [trained, held_out].concat();
    let mut expected = all.clone();
    both.sort();
    expected.sort();
    assert!(both == expected);
    assert!(of(None).open_held_out().unwrap().is_none());
}

/// Every batch with the place after it.
fn places(feed: &Feed, from: &DataPosition, batch: usize) -> Vec<(Vec<Sample>, DataPosition)> {
    let (mut reader, mut out, mut all) = (feed.open(from).unwrap(), RawBatch::default(), Vec::new());
    let mut place = from.clone();
    while reader.read(batch, &mut out).unwrap() > 0 {
        place.samples += out.samples as u64;
        let runs = reader.runs();
        assert_eq!(runs.iter().map(|run| run.samples).sum::<usize>(), out.samples);
        place.file = runs.last().map(|run| FileAt {
            name: run.file.name.clone(),
            samples: run.of_file,
            complete: run.ends_file,
        });
        all.push(((0..out.samples).map(|s| sample(&out, s)).collect(), place.clone()));
    }
    all
}

#[test]
fn a_followed_directory_gives_the_batches_of_its_files_as_a_list_and_continues_at_every_batch() {
    let dir = tempfile::tempdir().unwrap();
    for format in [Format::CriteoTsv, Format::AvazuCsv] {
        let paths = files(dir.path(), format, 200);
        std::fs::write(dir.path().join("4.end"), "").unwrap();
        let of_list = places(&feed(format, FeedFiles::List(paths)), &DataPosition::begin(1), 32);
        let follow = FollowedDir::new(dir.path(), Some("4.end".to_owned()));
        let followed = feed(format, FeedFiles::Followed(follow));
        let batches = places(&followed, &DataPosition::begin(1), 32);
        let mut as_of_list = batches.clone();
        // The ends of listed files are not looked at.
        as_of_list.iter_mut().for_each(|(_, place)| place.file.as_mut().unwrap().complete = false);
        assert!(as_of_list == of_list);
        for (n, (_, place)) in batches.iter().enumerate() {
            assert!(places(&followed, place, 32)[..] == batches[n + 1..], "{place:?}");
        }
    }
}

/// A directory with a file of so many generated samples for each name, and an empty file `zz` as its end.
fn followed(dir: &Path, files: &[(&str, u64)]) -> Feed {
    for (seed, (name, rows)) in files.iter().enumerate() {
        let mut text = Vec::new();
        write_criteo_tsv(*rows, seed as u64, &mut text).unwrap();
        std::fs::write(dir.join(name), text).unwrap();
    }
    std::fs::write(dir.join("zz"), "").unwrap();
    feed(Format::CriteoTsv, FeedFiles::Followed(FollowedDir::new(dir, Some("zz".to_owned()))))
}

fn at(name: &str, samples: u64, complete: bool) -> DataPosition {
    DataPosition { epoch: 1, samples, file: Some(FileAt { name: name.to_owned(), samples, complete }) }
}

#[test]
fn a_followed_file_that_is_shorter_than_what_was_trained_is_an_error_and_the_next_file_is_not_skipped() {
    let dir = tempfile::tempdir().unwrap();
    // The other files would have enough samples.
    for rows in [0, 100] {
        let feed = followed(dir.path(), &[("a", rows), ("b", 3000)]);
        for complete in [false, true] {
            let error = feed.open(&at("a", 2000, complete)).err().unwrap().to_string();
            let expected = format!("/a: has {rows} samples, but 2000 were trained on before");
            assert!(error.ends_with(&expected), "{error}");
        }
    }
}

#[test]
fn a_followed_file_that_was_trained_to_its_end_may_be_gone_and_others_may_not() {
    let dir = tempfile::tempdir().unwrap();
    let feed = followed(dir.path(), &[("a", 64), ("b", 70)]);
    let all = places(&feed, &DataPosition::begin(1), 32);
    let complete: Vec<bool> = all.iter().map(|(_, place)| place.file.as_ref().unwrap().complete).collect();
    assert_eq!(complete, [false, true, false, false, true]);
    std::fs::remove_file(dir.path().join("a")).unwrap();
    assert!(places(&feed, &all[1].1, 32) == all[2..]);
    // The last one is as in the cursor of an earlier program.
    for unfinished in [all[0].1.clone(), at("a", 64, false)] {
        let error = feed.open(&unfinished).err().unwrap().to_string();
        let samples = unfinished.samples;
        assert!(error.contains(&format!("/a: there is no such file, and only its first {samples} ")));
        assert!(error.contains("put it back"), "{error}");
    }
}

#[test]
fn a_followed_file_is_complete_only_at_its_last_byte() {
    let dir = tempfile::tempdir().unwrap();
    let feed = followed(dir.path(), &[("a", 64)]);
    let path = dir.path().join("a");
    let complete = |text: Vec<u8>| {
        std::fs::write(&path, text).unwrap();
        let all = places(&feed, &DataPosition::begin(1), 32);
        all.last().unwrap().1.file.as_ref().unwrap().complete
    };
    let text = std::fs::read(&path).unwrap();
    assert!(complete(text.clone()) && complete(text.strip_suffix(b"\n").unwrap().to_vec()));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    assert!(complete(gzip.finish().unwrap()));
    // A malformed line may be followed by good ones, so it is not looked behind.
    assert!(!complete([&text[..], b"bad\n"].concat()));
}

#[test]
fn a_reader_that_waits_for_a_file_keeps_the_samples_in_hand_during_a_pause() {
    let dir = tempfile::tempdir().unwrap();
    let paths = files(dir.path(), Format::CriteoTsv, 90);
    let expected =
        places(&feed(Format::CriteoTsv, FeedFiles::List(paths.clone())), &DataPosition::begin(1), 32);
    let hidden = dir.path().join(".hidden");
    std::fs::rename(&paths[2], &hidden).unwrap();
    let follow = FollowedDir::new(dir.path(), Some("2.log".to_owned()));
    let followed = feed(Format::CriteoTsv, FeedFiles::Followed(follow));
    let mut reader = followed.open(&DataPosition::begin(1)).unwrap();
    let (mut out, mut got) = (RawBatch::default(), Vec::new());
    let whole = (90 + 45) / 32;
    for _ in 0..whole {
        reader.read(32, &mut out).unwrap();
        got.push((0..out.samples).map(|s| sample(&out, s)).collect::<Vec<_>>());
    }
    let stop = followed.stop.clone();
    let pause = std::thread::spawn(move || stop.pause());
    assert_eq!(reader.read(32, &mut out).unwrap(), 0);
    pause.join().unwrap();
    std::fs::rename(&hidden, &paths[2]).unwrap();
    followed.stop.resume();
    while reader.read(32, &mut out).unwrap() > 0 {
        got.push((0..out.samples).map(|s| sample(&out, s)).collect());
    }
    let expected: Vec<_> = expected.into_iter().map(|(batch, _)| batch).collect();
    assert!(got == expected);
}

#[test]
fn a_pipe_whose_first_bytes_are_waited_for_stays_open_during_a_pause() {
    let dir = tempfile::tempdir().unwrap();
    let paths = files(dir.path(), Format::CriteoTsv, 90);
    let list =
        |paths: [&PathBuf; 2]| feed(Format::CriteoTsv, FeedFiles::List(paths.map(Clone::clone).into()));
    let begin = DataPosition::begin(1);
    let expected = samples(&mut *list([&paths[0], &paths[1]]).open(&begin).unwrap(), 32);
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let piped = list([&paths[0], &pipe]);
    let mut reader = piped.open(&begin).unwrap();
    let stop = piped.stop.clone();
    let writer = std::thread::spawn(move || {
        // Waits until the reader has opened the pipe.
        let writer = std::fs::File::options().write(true).open(pipe).unwrap();
        stop.pause();
        writer
    });
    assert_eq!(reader.read(1000, &mut RawBatch::default()).unwrap(), 0);
    let mut writer = writer.join().unwrap();
    writer.write_all(&std::fs::read(&paths[1]).unwrap()).unwrap();
    drop(writer);
    piped.stop.resume();
    assert!(samples(&mut *reader, 1000) == expected);
}

#[test]
fn a_file_that_becomes_shorter_while_it_is_read_is_an_error_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.tsv");
    let mut text = Vec::new();
    write_criteo_tsv(8000, 1, &mut text).unwrap();
    std::fs::write(&path, &text).unwrap();
    let feed = feed(Format::CriteoTsv, FeedFiles::List(vec![path.clone()]));
    let mut reader = feed.open(&DataPosition::begin(1)).unwrap();
    let mut out = RawBatch::default();
    assert_eq!(reader.read(10, &mut out).unwrap(), 10);
    let share = reader.share().unwrap();
    assert!(share > 0.0 && share < 1.0, "{share}");
    std::fs::File::options().write(true).open(&path).unwrap().set_len(text.len() as u64 / 2).unwrap();
    let error = loop {
        match reader.read(1000, &mut out) {
            Ok(0) => panic!("the rest was lost without an error"),
            Ok(_) => {}
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("cut.tsv") && error.contains("when it was opened"), "{error}");
}

#[test]
fn a_shuffled_block_that_was_read_is_done_only_as_its_samples_are_handed_out() {
    let dir = tempfile::tempdir().unwrap();
    let samples = 400;
    let path = dir.path().join("data.tsv");
    write_criteo_tsv(samples, 1, std::fs::File::create(&path).unwrap()).unwrap();
    // One block, and several of which the last is not full.
    for block in [1000, 150] {
        let shuffle = Some(Shuffle { samples: block, seed: 1 });
        let feed = Feed { shuffle, ..feed(Format::CriteoTsv, FeedFiles::List(vec![path.clone()])) };
        let mut reader = feed.open(&DataPosition::begin(1)).unwrap();
        let (mut out, mut before) = (RawBatch::default(), 0.0);
        for read in 1..=samples {
            assert_eq!(reader.read(1, &mut out).unwrap(), 1);
            let share = reader.share().unwrap();
            assert!(share >= before, "{share} after {before}");
            if block == 1000 {
                // The first bytes are looked at when the file is opened.
                assert!((share * samples as f64 - read as f64).abs() < 1.0, "{share} after {read} samples");
            }
            before = share;
        }
        assert!((before - 1.0).abs() < 1e-9, "{before}");
        assert_eq!((reader.read(1, &mut out).unwrap(), reader.share()), (0, Some(1.0)));
    }
}

#[test]
fn an_interrupt_ends_an_epoch_after_a_whole_batch() {
    let dir = tempfile::tempdir().unwrap();
    let feed = list(dir.path(), Format::CriteoTsv, 200);
    let mut reader = feed.open(&DataPosition::begin(1)).unwrap();
    let mut out = RawBatch::default();
    assert_eq!(reader.read(10, &mut out).unwrap(), 10);
    feed.stop.interrupt_flag().store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(reader.read(10, &mut out).unwrap(), 0);
}

#[test]
fn an_interrupt_ends_the_skip_to_a_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let mut text = Vec::new();
    write_criteo_tsv(50, 1, &mut text).unwrap();
    // To read on is an error.
    text.extend(b"bad\n".repeat(1001));
    std::fs::write(&path, text).unwrap();
    let list = || FeedFiles::List(vec![path.clone()]);
    let followed = FeedFiles::Followed(FollowedDir::new(dir.path(), None));
    let file = FileAt { name: "a".to_owned(), samples: 100, complete: false };
    let (shuffle, held_out) = (Shuffle { samples: 10, seed: 1 }, HeldOut { ratio: 0.1, seed: 1 });
    for (files, shuffle, held_out, file) in [
        (list(), None, None, None),
        (list(), Some(shuffle), None, None),
        (list(), None, Some(held_out), None),
        (list(), Some(shuffle), Some(held_out), None),
        (followed, None, None, Some(file)),
    ] {
        let feed = Feed { shuffle, held_out, ..feed(Format::CriteoTsv, files) };
        let place = DataPosition { file, ..place(1, 100) };
        let error = feed.open(&place).err().unwrap().to_string();
        assert!(error.contains("more than 1000 malformed lines"), "{error}");
        feed.stop.interrupt();
        let mut reader = feed.open(&place).unwrap();
        assert_eq!(reader.read(10, &mut RawBatch::default()).unwrap(), 0);
    }
}
