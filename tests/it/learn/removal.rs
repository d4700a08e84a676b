//! Samples are removed when a version has them. Training goes on when versions or the whole model are
//! deleted.

use std::fs;
use std::path::{Path, PathBuf};

use flechette::cli::client;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::Schema;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::types::RawBatch;

use super::sending::{send_file, wait_for_samples, workshop};
use super::served::{labelled, labels, log_of};
use crate::program::{LAST_VERSION, Served, Workshop, highest_version};
use crate::serving::channel;
use crate::switching::wait;

/// A server that was sent 1,600 samples, which take several segments, and has trained on them.
struct SmallSegments {
    workshop: Workshop,
    schema: Schema,
    flags: String,
    served: Served,
    log: PathBuf,
}

impl SmallSegments {
    fn train() -> Self {
        let (workshop, schema, _) = workshop(400);
        let Workshop { models, train, .. } = &workshop;
        let settings = workshop.path("segments.toml");
        fs::write(&settings, "[learn]\nsegment_bytes = \"64Ki\"\n").unwrap();
        let flags = format!("--train log=learn --batch 32 --publish-every 1steps --config {settings}");
        let served = Served::start(models, &flags);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        for _ in 0..4 {
            assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
        }
        wait_for_samples(models, 200 + 1600);
        let log = log_of(Path::new(models), "log");
        Self { workshop, schema, flags, served, log }
    }
}

#[test]
fn training_goes_on_from_an_older_version_when_the_last_one_was_deleted() {
    let SmallSegments { workshop, schema, flags, served, log } = SmallSegments::train();
    let Workshop { models, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    wait("the first samples are removed", || !log.join("0000000001.fllearn").exists());
    drop(served);
    let last = highest_version(Path::new(models), "log").unwrap();
    let path = |version: u64| Path::new(models).join("log").join(version.to_string());
    // The first version was trained on a file.
    let mut left = (2..=last).filter(|version| path(*version).exists());
    let oldest = left.next().unwrap();
    left.for_each(|version| fs::remove_dir_all(path(version)).unwrap());
    let cursor = fs::read(path(oldest).join("checkpoint/cursor.json")).unwrap();
    let cursor: serde_json::Value = serde_json::from_slice(&cursor).unwrap();
    let segment = cursor["file"]["name"].as_str().expect("a version that was trained on the log");
    assert!(!log.join(segment).exists(), "{segment} was removed with a later version");
    let served = Served::start(models, &flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait("the new samples are in a version", || {
        served.metric("flechette_serving_version", &["model=\"log\""]) > oldest as f64
    });
    assert_eq!(served.metric("flechette_training_state", &["model=\"log\""]), 1.0);
    served.terminate();
    let (_, said) = served.ended();
    let warning = "is missing, but a later segment exists: training begins at the first sample of the log";
    assert!(said.contains(warning), "{said}");
}

#[test]
fn samples_that_a_killed_process_trained_on_and_did_not_remove_are_removed_at_the_next_start() {
    let SmallSegments { workshop, flags, served, log, .. } = SmallSegments::train();
    let models = &workshop.models;
    let segment = |number: u64| log.join(format!("{number:010}.fllearn"));
    let left = || (1..100).filter(|number| segment(*number).exists()).collect::<Vec<_>>();
    wait("all samples but those of the last file are removed", || left().len() == 1);
    drop(served);
    let last = left()[0];
    assert!(last > 1);
    fs::copy(segment(last), segment(last - 1)).unwrap();
    // There is nothing to train on, so no version is published.
    let served = Served::start(models, &flags);
    wait("the file is removed", || left() == [last]);
    wait("training goes on", || served.metric("flechette_training_state", &["model=\"log\""]) == 1.0);
}

#[test]
fn a_server_whose_model_is_deleted_acknowledges_only_samples_that_it_trains_on() {
    let (workshop, schema, _) = workshop(400);
    let Workshop { models, train, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let flags = &format!("--train log=learn --batch 32 --publish-every 200ms {LAST_VERSION}");
    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
    // 200 samples were trained before.
    wait_for_samples(models, 200 + 400 / 32 * 32);
    let (model, newest) = (Path::new(models).join("log"), || highest_version(Path::new(models), "log"));
    let before = newest();
    // The server may write into the directory meanwhile.
    wait("the model is deleted", || fs::remove_dir_all(&model).is_ok() || !model.exists());

    let mut reader =
        dataset::open(Format::CriteoTsv, &[valid.into()], &schema, ReadOptions::default()).unwrap();
    let mut raw = RawBatch::default();
    reader.read(8, &mut raw).unwrap();
    let message = labelled(client::request("log", &schema, &raw), 0.5);
    let ctr = CtrClient::new(runtime.block_on(channel(served.grpc)));
    wait("samples are stored", || runtime.block_on(ctr.clone().learn(message.clone())).is_ok());
    assert_eq!(labels(&log_of(Path::new(models), "log")), [0.5; 8]);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait("a version is published", || newest() > before);
    wait_for_samples(models, 200 + 608);
    let version = newest().unwrap() as f64;
    wait("it is served", || served.metric("flechette_serving_version", &["model=\"log\""]) == version);
    drop(served);

    // The cursor is one of the new log.
    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
    wait_for_samples(models, 200 + 1008 / 32 * 32);
    served.terminate();
    let (ended, said) = served.ended();
    assert!(ended.success() && !said.contains("training begins at the first sample"), "{said}");
}
