use std::path::Path;

use clap::Parser;
use serde_json::Value;

use super::*;
use crate::cli::train::lock::ModelLock;
use crate::cli::train::publishing::PublishContext;
use crate::config::{Config, Flags};
use crate::dataset::Stop;
use crate::dataset::synthetic::write_criteo_tsv;
use crate::schema::Schema;
use crate::schema::preset::{self, ArchKind};
use crate::store;
use crate::types::VersionSelector;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

/// The flags of a run whose models are in `dir`.
fn args(dir: &Path, more: &str) -> Args {
    let dir = dir.display();
    let line = format!(
        "train --model-config - --format criteo-tsv --models {dir} --name m --batch 32 --optimizer adam \
         {more}"
    );
    Line::try_parse_from(line.split_whitespace()).unwrap_or_else(|e| panic!("{e}")).args
}

fn schema() -> Schema {
    preset::criteo(ArchKind::Dlrm, 4, 200)
}

/// Checksums and notes of a version.
fn contents(args: &Args, version: Version) -> Value {
    let path = args.models.join(&args.name).join(version.to_string()).join("MANIFEST.json");
    let mut manifest: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    manifest["xxh3_128"].take();
    manifest["training"]["last_batch_unix_ms"].take();
    manifest
}

/// Versions are written only when they are asked for.
fn versions<'a>(args: &'a Args, model: &Trained) -> WrittenVersions<'a> {
    let config = Config::resolve(&Flags::default(), [], None).unwrap();
    let (highest, lock) = (args.highest_version(), ModelLock::default());
    let context = PublishContext { from: None, highest, metrics: None, lock };
    WrittenVersions::new(args, &config, model, context).unwrap()
}

fn saved(args: &Args, model: &mut Trained) -> Version {
    model.save(&args.models, &args.name, &CutNotes::default(), None).unwrap().version
}

/// Trains to the end, and returns the written version.
fn trained(args: &Args, from: Option<(&Cursor, Version)>) -> Value {
    let feed = args.feed(&schema(), &Stop::default());
    let opened = from
        .map(|(_, version)| store::open(&args.models, &args.name, version, store::Purpose::Train).unwrap());
    let mut model = Trained::begin(args, &feed, opened, None).unwrap();
    let mut epochs = Epochs::new(args, &feed).unwrap();
    if let Some((cursor, version)) = from {
        epochs = epochs.at(cursor, version).unwrap();
    }
    let mut versions = versions(args, &model);
    epochs.train(&mut model, &mut versions).unwrap();
    let version = saved(args, &mut model);
    let mut json = contents(args, version);
    json["validation"] = serde_json::to_value(epochs.validation).unwrap();
    json
}

/// Trains `steps` steps of an epoch, and returns the cursor, which was written and read, and the version.
fn stopped(args: &Args, epoch: u32, steps: u64) -> (Cursor, Version) {
    let feed = args.feed(&schema(), &Stop::default());
    let mut model = Trained::begin(args, &feed, None, None).unwrap();
    let mut epochs = Epochs::new(args, &feed).unwrap();
    while epochs.position.epoch < epoch {
        let (now, mut versions) = (epochs.position.epoch, versions(args, &model));
        epochs.epoch(&mut model, &mut versions).unwrap();
        epochs.position = DataPosition::begin(now + 1);
        epochs.validate(now, &mut model, &mut versions).unwrap();
    }
    epochs.progress.begin(epoch, 0);
    let mut reader = feed.open(&epochs.position).unwrap();
    let data = Data { reader: &mut *reader, batch: 32, steps };
    model.epoch(data, |progress| epochs.step(0, progress)).unwrap();
    let text = serde_json::to_string(&epochs.cursor(model.state())).unwrap();
    let version = saved(args, &mut model);
    (serde_json::from_str(&text).unwrap(), version)
}

#[test]
fn a_best_version_that_cannot_be_written_does_not_end_training() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    write_criteo_tsv(200, 1, std::fs::File::create(&data).unwrap()).unwrap();
    let flags = format!("--data {} --epochs 2 --valid-ratio 0.2 --save-best", data.display());
    let args = args(dir.path(), &flags);
    let feed = args.feed(&schema(), &Stop::default());
    let mut model = Trained::begin(&args, &feed, None, None).unwrap();
    let mut epochs = Epochs::new(&args, &feed).unwrap();
    let mut versions = versions(&args, &model);
    // The directory of the model cannot be made.
    std::fs::write(dir.path().join("m"), "").unwrap();
    epochs.train(&mut model, &mut versions).unwrap();
    assert!(epochs.is_complete());
    let best = epochs.validation.best.unwrap();
    assert_eq!((best.version, epochs.unwritten_best()), (None, Some(best.epoch)));
}

#[test]
fn only_the_weights_of_the_end_of_an_epoch_have_the_quality_of_its_validation() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    write_criteo_tsv(200, 1, std::fs::File::create(&data).unwrap()).unwrap();
    let flags = format!("--data {} --epochs 2 --valid-ratio 0.2", data.display());
    let args = args(dir.path(), &flags);
    let feed = args.feed(&schema(), &Stop::default());
    let mut model = Trained::begin(&args, &feed, None, None).unwrap();
    let mut epochs = Epochs::new(&args, &feed).unwrap();
    let mut versions = versions(&args, &model);
    let quality = |epochs: &Epochs<'_>, model: &Trained| (epochs.cut_notes(model.state()).quality)();
    epochs.epoch(&mut model, &mut versions).unwrap();
    epochs.position = DataPosition::begin(2);
    epochs.validate(1, &mut model, &mut versions).unwrap();
    assert_eq!(quality(&epochs, &model)["valid_log_loss"], epochs.validated[0].1.log_loss);
    epochs.progress.begin(2, 0);
    let mut reader = feed.open(&epochs.position).unwrap();
    let data = Data { reader: &mut *reader, batch: 32, steps: 1 };
    model.epoch(data, |progress| epochs.step(0, progress)).unwrap();
    let within = quality(&epochs, &model);
    assert_eq!(epochs.position.samples, 32);
    assert!(within.keys().all(|name| name.starts_with("progressive_")) && !within.is_empty(), "{within:?}");
    epochs.train(&mut model, &mut versions).unwrap();
    assert_eq!(quality(&epochs, &model)["valid_log_loss"], epochs.validated[1].1.log_loss);
}

#[test]
fn the_version_of_a_best_epoch_replaces_those_that_the_run_wrote_before() {
    let dir = tempfile::tempdir().unwrap();
    let args = args(dir.path(), "--data none --epochs 9 --valid-ratio 0.2 --save-best");
    let feed = args.feed(&schema(), &Stop::default());
    let mut model = Trained::begin(&args, &feed, None, None).unwrap();
    assert_eq!(saved(&args, &mut model), Version(1), "from before the run");
    let mut epochs = Epochs::new(&args, &feed).unwrap();
    let mut versions = versions(&args, &model);
    let mut best = |epoch: u32| {
        epochs.validation.add(epoch, 1.0 / f64::from(epoch));
        epochs.write_best(&mut model, &mut versions).unwrap();
        let numbers: Vec<u64> = store::versions(dir.path(), "m").unwrap().iter().map(|v| v.0).collect();
        (epochs.best_version().map(|version| version.0), numbers)
    };
    assert_eq!(best(1), (Some(2), vec![1, 2]));
    assert_eq!(best(2), (Some(3), vec![1, 3]));
    let labels = [("good".to_owned(), VersionSelector::Version(Version(3)))].into();
    store::labels::save(dir.path(), "m", &labels).unwrap();
    assert_eq!(best(3), (Some(4), vec![1, 3, 4]));
    let served = store::open(dir.path(), "m", Version(4), store::Purpose::Serve).unwrap();
    assert_eq!(best(4), (Some(5), vec![1, 3, 4, 5]));
    drop(served);
    assert_eq!(best(5), (Some(6), vec![1, 3, 6]));
}

#[test]
fn a_run_that_continues_at_a_cursor_writes_the_bytes_of_a_run_that_did_not_stop() {
    let dir = tempfile::tempdir().unwrap();
    let followed = dir.path().join("followed");
    std::fs::create_dir(&followed).unwrap();
    for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
        let file = std::fs::File::create(followed.join(name)).unwrap();
        write_criteo_tsv(130, n as u64, file).unwrap();
    }
    let list = ["a", "b", "c"].map(|name| followed.join(name).display().to_string()).join(" ");
    let (follow, schedule) = (followed.display(), "--lr-warmup 5 --lr-decay cosine --lr-decay-steps 12");
    for (flags, epoch, steps) in [
        (format!("--data {list} {schedule}"), 1, 7),
        (format!("--data {list} --epochs 3 --shuffle 100 --valid-ratio 0.2 --early-stop 3 {schedule}"), 2, 4),
        (format!("--data {list} --epochs 2 --shuffle 50 --scratchpad 0.3"), 2, 5),
        (format!("--data {list} --epochs 2 --valid-ratio 0.1 --early-stop 2 --scratchpad 0.3"), 1, 99),
        (format!("--follow {follow} --follow-until c {schedule}"), 1, 5),
        (format!("--follow {follow} --follow-until c --scratchpad 0.3"), 1, 99),
    ] {
        let args = args(&dir.path().join("models"), &flags);
        let whole = trained(&args, None);
        let (cursor, version) = stopped(&args, epoch, steps);
        assert_eq!((cursor.epoch, cursor.file.is_some()), (epoch, flags.contains("--follow ")), "{flags}");
        assert_eq!(trained(&args, Some((&cursor, version))), whole, "{flags}");
    }
}

#[test]
fn training_ends_at_data_that_cannot_be_read_and_goes_on_when_it_is_mended() {
    let malformed = "no sample\n".repeat(150);
    for more in ["", "--scratchpad 0.5"] {
        let dir = tempfile::tempdir().unwrap();
        let (data, valid) = (dir.path().join("data"), dir.path().join("valid"));
        let mut rows = Vec::new();
        write_criteo_tsv(300, 1, &mut rows).unwrap();
        let rows = String::from_utf8(rows).unwrap();
        let first = |count| rows.split_inclusive('\n').take(count).collect::<String>();
        let (shown_data, shown_valid) = (data.display(), valid.display());
        let flags = format!("--data {shown_data} --valid {shown_valid} --epochs 2 --early-stop 2 {more}");
        let args = args(dir.path(), &flags);
        let write = |path: &Path, text: &str| std::fs::write(path, text).unwrap();
        write(&data, &rows);
        write(&valid, &first(100));
        let whole = trained(&args, None);
        let ends_at = |samples| {
            let feed = args.feed(&schema(), &Stop::default());
            let mut model = Trained::begin(&args, &feed, None, None).unwrap();
            let mut epochs = Epochs::new(&args, &feed).unwrap();
            let mut versions = versions(&args, &model);
            epochs.train(&mut model, &mut versions).unwrap();
            assert_eq!(epochs.position, DataPosition { samples, ..DataPosition::begin(1) });
            let failed = epochs.failed.take().unwrap().to_string();
            assert!(failed.contains("malformed"), "{failed}");
            let cursor = epochs.cursor(model.state());
            (cursor, saved(&args, &mut model))
        };
        write(&data, &(first(200) + &malformed));
        let (cursor, version) = ends_at(192);
        write(&data, &rows);
        assert_eq!(trained(&args, Some((&cursor, version))), whole, "{more}");
        write(&valid, &(first(50) + &malformed));
        let (cursor, version) = ends_at(300);
        write(&valid, &first(100));
        assert_eq!(trained(&args, Some((&cursor, version))), whole, "{more}");
    }
}

#[test]
fn a_server_trains_on_all_that_a_pipe_has_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    // As a pipe, it is read only once.
    let mut args = args(dir.path(), "--data /dev/null");
    let feed = args.feed(&schema(), &Stop::default());
    let mut model = Trained::begin(&args, &feed, None, None).unwrap();
    let version = saved(&args, &mut model);
    let ended = |args: &Args| {
        let mut cursor = Epochs::new(args, &feed).unwrap().cursor(model.state());
        (cursor.epoch, cursor.samples) = (2, 0);
        Epochs::new(args, &feed).unwrap().at(&cursor, version).unwrap().is_complete()
    };
    assert!(ended(&args));
    args.alone = false;
    assert!(!ended(&args));
}
