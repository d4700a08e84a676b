//! Training that fails, a damaged checkpoint and a deleted model: the server serves on.

use std::fs;
use std::path::Path;
use std::process::Command;

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use super::site::{LAST_ONLY, MODEL, Site, shown, shows, version_on_disk};
use crate::program::{Served, check_listed_versions, highest_version};
use crate::switching::wait;

#[test]
fn when_training_fails_the_server_goes_on_and_ends_with_an_error() {
    let site = Site::new(1600);
    let served = site.follow("--publish-every 2steps --max-malformed 0");
    site.arrive(0);
    wait("a version is served", || shown(&served, "serving_version") > 1.0);
    fs::write(format!("{}/1", site.incoming), "not a sample\n").unwrap();
    wait("training fails", || shows(&served, "training_state", -1.0));
    // Of the samples before the file.
    wait("the last version is served", || shown(&served, "serving_version") == version_on_disk(&site) as f64);
    let version = shown(&served, "serving_version");
    assert_eq!(served.score(MODEL, &site.workshop.valid, "")["version"], version as u64);
    let status = served.status();
    let model = &status["models"][0];
    assert!(model["state"] == "ready" && model["training"] == "failed", "{model}");
    let mut events = status["events"].as_array().unwrap().iter();
    let failed = events.find(|event| event["kind"] == "training_failed").unwrap();
    assert!(failed["text"].as_str().unwrap().contains("incoming/1"), "{failed}");
    assert_eq!(served.get("/readyz").0, 200);
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    assert_eq!(log.matches("training has failed; the server goes on").count(), 1, "{log}");
    assert!(log.contains("error: training has failed: ") && log.contains("incoming/1"), "{log}");
}

#[test]
fn a_restart_without_the_data_serves_the_last_version() {
    let site = Site::new(200);
    let data = site.workshop.path("day.tsv");
    fs::copy(&site.workshop.train, &data).unwrap();
    let first = site.serve(&data, LAST_ONLY);
    wait("training ends", || shows(&first, "training_state", 0.0));
    first.terminate();
    assert!(first.ended().0.success());
    let version = version_on_disk(&site);
    fs::remove_file(&data).unwrap();
    let served = site.serve(&data, LAST_ONLY);
    assert_eq!(served.score(MODEL, &site.workshop.valid, "")["version"], version);
    wait("training fails", || shows(&served, "training_state", -1.0));
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    let last = log.lines().last().unwrap();
    assert!(last.contains("error: training has failed: ") && last.contains("day.tsv"), "{log}");
    assert_eq!(version_on_disk(&site), version);
}

#[test]
fn a_model_that_cannot_be_prepared_does_not_end_a_server_that_serves_others_already() {
    let site = Site::new(100);
    site.workshop.train(ArchKind::Deepfm);
    // Preparing ends when something is written into the pipe.
    let config = site.workshop.path("config.pipe");
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    let line = format!("--train new={} --model-config {config} --format criteo-tsv", site.incoming);
    let served = Served::listening(&site.workshop.models, &line);
    let is_ready = |status: &Value| {
        let mut models = status["models"].as_array().unwrap().iter();
        models.any(|model| model["name"] == "deepfm" && model["state"] == "ready")
    };
    wait("the other model is served", || is_ready(&served.status()));
    fs::write(&config, "not a schema\n").unwrap();
    served.said("training has failed; the server goes on", 1);
    assert_eq!(served.metric("flechette_training_state", &["model=\"new\""]), -1.0);
    assert_eq!(served.score("deepfm", &site.workshop.valid, "")["version"], 1);
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    let last = log.lines().last().unwrap();
    assert!(last.contains("error: training has failed: ") && last.contains("config.pipe"), "{log}");
}

#[test]
fn a_version_whose_checkpoint_is_damaged_is_served_and_training_goes_on_from_the_one_before() {
    // Versions published on the way could be complete, or replace the one without damage.
    let site = Site::new(500);
    let data = site.workshop.train.clone();
    let (first, line) = (site.serve(&data, LAST_ONLY), format!("--data {data}"));
    wait("training ends", || shows(&first, "training_state", 0.0));
    first.terminate();
    assert!(first.ended().0.success());
    for file in ["cursor.json", "dense.safetensors", "tables/C1.safetensors"] {
        let version = version_on_disk(&site);
        let path = format!("{}/{MODEL}/{version}/checkpoint/{file}", site.workshop.models);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
        let served = site.serve(&data, LAST_ONLY);
        wait("training ends", || shows(&served, "training_state", 0.0));
        wait("its version is served", || shown(&served, "serving_version") > version as f64);
        served.terminate();
        let (status, log) = served.ended();
        assert!(
            status.success() && log.contains(&format!("loaded model=\"{MODEL}\" version={version}")),
            "{log}"
        );
        assert!(log.lines().any(|line| line.contains("WARN") && line.contains(file)), "{file}: {log}");
        site.compare_with_train(&line, "");
    }
}

#[test]
fn a_server_whose_model_is_deleted_serves_on_and_publishes_again() {
    let site = Site::new(1600);
    let served = site.follow("--publish-every 4steps");
    site.arrive(0);
    wait("a version is served", || shown(&served, "serving_version") > 1.0);
    let (before, models) = (version_on_disk(&site), Path::new(&site.workshop.models));
    let model = models.join(MODEL);
    // The server may write into the directory meanwhile.
    wait("the model is deleted", || fs::remove_dir_all(&model).is_ok() || !model.exists());
    assert_eq!(served.score(MODEL, &site.workshop.valid, "")["version"], before);
    site.arrive(1);
    wait("a version is published", || highest_version(models, MODEL) > Some(before));
    wait("it is served", || shown(&served, "serving_version") > before as f64);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && log.contains("training has ended at a signal"), "{log}");
    check_listed_versions(&site.workshop.models, MODEL);
}
