//! A run in a server from its flags to its end: what it trains once, publishes at a signal, and shows of its
//! quality.

use std::fs;
use std::path::Path;

use flechette::schema::preset::ArchKind;

use super::site::{LAST_ONLY, MODEL, PARTS, Site, shown, shows, version_on_disk};
use crate::program::{Served, run, run_failing};
use crate::switching::wait;

#[test]
fn a_signal_publishes_what_was_trained_and_the_next_start_continues() {
    let site = Site::new(1600);
    let rare = "--publish-every 1000s";
    for (stop, parts) in [(3, 0..3), (6, 3..6)] {
        let served = site.follow(rare);
        let before = version_on_disk(&site);
        parts.for_each(|part| site.arrive(part));
        let own = if stop == 3 { 576.0 } else { 600.0 };
        wait("the parts are trained", || shown(&served, "training_samples_total") >= own);
        assert_eq!(version_on_disk(&site), before);
        served.terminate();
        let (status, log) = served.ended();
        assert!(status.success() && log.contains("training has ended at a signal"), "{log}");
        assert_eq!(version_on_disk(&site), before + 1, "{log}");
    }
    let served = site.follow(rare);
    (6..PARTS).for_each(|part| site.arrive(part));
    wait("training ends", || shows(&served, "training_state", 0.0));
    wait("the last version is served", || shown(&served, "serving_version") == version_on_disk(&site) as f64);
    drop(served);
    site.compare_with_train_of_parts("");
}

#[test]
fn a_file_is_trained_once_and_the_server_goes_on() {
    let site = Site::new(500);
    let data = site.workshop.train.clone();
    let served = site.serve(&data, LAST_ONLY);
    wait("training ends", || shows(&served, "training_state", 0.0));
    wait("its version is served", || shown(&served, "serving_version") == 2.0);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    let again = site.serve(&data, "");
    wait("there is nothing to train", || shows(&again, "training_state", 0.0));
    assert_eq!(again.score(MODEL, &site.workshop.valid, "")["version"], 2);
    again.terminate();
    let (status, log) = again.ended();
    assert!(status.success() && log.contains("the run is complete"), "{log}");
    site.compare_with_train(&format!("--data {data}"), "");
    // Another file continues from the last version, and needs no model.toml.
    let more = site.workshop.valid.clone();
    let line = format!("--train {MODEL}={more} --format criteo-tsv");
    let served = Served::start(&site.workshop.models, &line);
    wait("its version is served", || shown(&served, "serving_version") > 3.0);
    drop(served);
    // So does another file of the same name, and a directory.
    let other = site.workshop.path("other");
    fs::create_dir(&other).unwrap();
    let same_name = Path::new(&other).join(Path::new(&more).file_name().unwrap());
    fs::copy(&data, &same_name).unwrap();
    for source in [same_name.to_str().unwrap(), &other] {
        let before = version_on_disk(&site);
        let line = format!("--train {MODEL}={source} --format criteo-tsv --publish-every 100ms");
        let served = Served::start(&site.workshop.models, &line);
        wait("a version of the samples is served", || shown(&served, "serving_version") > before as f64);
    }
}

#[test]
fn flags_of_training_that_cannot_be_used_are_refused_by_name() {
    let site = Site::new(10);
    let (models, flags, incoming) = (&site.workshop.models, &site.flags, &site.incoming);
    let line = |more: &str| format!("serve --models {models} --grpc 127.0.0.1:0 --http 127.0.0.1:0 {more}");
    for (more, words) in [
        ("--batch 64".to_owned(), "--train <NAME=SOURCE>"),
        ("--scratchpad 0.5".to_owned(), "--train <NAME=SOURCE>"),
        (format!("--train m={incoming}"), "--format: missing"),
        (format!("--train m {flags}"), "expected NAME=SOURCE"),
        (format!("--train a/b={incoming} {flags}"), "--train: model"),
        (format!("--train m={incoming} --format criteo-tsv"), "--model-config: missing"),
        (format!("--train m={incoming}/none {flags}"), "none"),
        (format!("--train m={incoming}/none {flags} --follow-until 3"), "--follow-until: used only with"),
        (
            format!("--train m={incoming} {flags} --follow-until incoming/3"),
            "--follow-until: expected the name",
        ),
        (format!("--train m={incoming} {flags} --follow-until 3.part"), "--follow-until: expected the name"),
        (format!("--train m={incoming} --train n={incoming} {flags}"), "--train: given twice"),
        (format!("--train m={incoming} {flags} --epochs 2"), "--epochs: only for data files"),
        (format!("--train m=learn {flags} --shuffle 10"), "--shuffle: only for data files"),
        (format!("--train m=learn {flags} --data-seed 1"), "--data-seed: only for data files"),
    ] {
        let output = run(&line(&more));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{more}: {error}");
    }
    let served = site.follow("");
    let second = run_failing(1, &line(&format!("--train {MODEL}={incoming} {flags}")));
    assert!(second.contains("another process trains \"dlrm\" and publishes"), "{second}");
    served.terminate();
    assert!(served.ended().0.success());
    // Two tables differ. The first one is named.
    let before = version_on_disk(&site);
    let config = fs::read_to_string(site.workshop.config(ArchKind::Dlrm, 8, 1000)).unwrap();
    let differing = site.workshop.path("differing.toml");
    fs::write(&differing, config.replacen("default = \"zeros\"", "default = \"error\"", 2)).unwrap();
    let other =
        format!("--train {MODEL}={incoming} --model-config {differing} --format criteo-tsv --batch 32");
    let schema = run_failing(2, &line(&other));
    let expected = format!(
        "not the schema of version {before}: tables[\"C1\"].default: expected \"zeros\", got \"error\""
    );
    assert!(schema.ends_with(&expected), "{schema}");
    assert_eq!(version_on_disk(&site), before, "nothing was written");
}

#[test]
fn the_quality_of_the_last_samples_is_shown_between_versions_and_printed_at_the_end() {
    let site = Site::new(1600);
    let served = site.follow("--publish-every 1000s");
    site.arrive(0);
    wait("steps are measured", || shown(&served, "progressive_log_loss") > 0.0);
    assert_eq!(version_on_disk(&site), 1);
    drop(served);

    let site = Site::new(500);
    let served = site.serve(&site.workshop.train, "--window 400");
    wait("training ends", || shows(&served, "training_state", 0.0));
    served.terminate();
    let (status, log) = served.ended();
    let printed = "last 400 samples, before training on them: AUC 0.";
    let lines = log.lines().filter(|line| line.contains(printed) && line.contains(" model=\"dlrm\""));
    assert!(status.success() && lines.count() == 1, "{log}");
}
