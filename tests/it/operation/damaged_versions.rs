//! Damaged versions are named and listed, and the last good one serves.

use std::fs;
use std::path::{Path, PathBuf};

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::{Served, Workshop, run, run_json};

fn version_dir(models: &str, name: &str, version: u64) -> PathBuf {
    Path::new(models).join(name).join(version.to_string())
}

/// Changes a file of a version. The file is read-only, so it is replaced.
fn replace(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_version_whose_checkpoint_is_damaged_is_served_and_listed_as_one_that_cannot_be_continued() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let models = &workshop.models;
    let listed =
        || run_json(&format!("versions --models {models} --json"))["models"][0]["versions"][0].clone();
    assert_eq!(listed()["training_refused"], Value::Null);
    let damaged = version_dir(models, "dlrm", 1).join("checkpoint/tables/C4.safetensors");
    replace(&damaged, |bytes| *bytes.last_mut().unwrap() ^= 1);
    let one = listed();
    assert_eq!(one["good"], true);
    assert!(one["training_refused"].as_str().unwrap().contains("C4.safetensors: corrupt"), "{one}");
    let table = String::from_utf8(run(&format!("versions --models {models}")).stdout).unwrap();
    assert!(table.contains("training cannot continue from it: "), "{table}");
    let served = Served::start(models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

#[test]
fn damaged_versions_are_named_and_the_last_good_one_serves() {
    let workshop = Workshop::new(300, 50);
    for version in 1..=3 {
        assert_eq!(workshop.train(ArchKind::Dlrm)["version"], version);
    }
    let models = &workshop.models;
    let truncated = version_dir(models, "dlrm", 3).join("tables/C4.safetensors");
    replace(&truncated, |bytes| bytes.truncate(bytes.len() / 2));
    let corrupt = version_dir(models, "dlrm", 2).join("dense.safetensors");
    replace(&corrupt, |bytes| *bytes.last_mut().unwrap() ^= 1);
    let listed = |flags: &str| {
        let listed = run_json(&format!("versions --models {models} --json {flags}"));
        let versions = listed["models"][0]["versions"].as_array().unwrap();
        versions.iter().map(|one| (one["good"].clone(), one["bytes"].clone())).collect::<Vec<_>>()
    };
    let (checked, quick) = (listed(""), listed("--quick"));
    for (good, (checked, quick)) in [true, false, false].into_iter().zip(checked.into_iter().zip(quick)) {
        assert_eq!((checked.0, quick.0), (good.into(), Value::Null));
        assert!(checked.1.as_u64() > Some(0) && checked.1 == quick.1);
    }

    let served = Served::start(models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    assert_eq!(served.metric("flechette_newer_versions_refused", &[]), 2.0);
    assert_eq!(served.metric("flechette_switches_refused_total", &[]), 2.0);
    let (code, text) = served.get("/readyz");
    let older = "ready\nolder version: model dlrm serves version 1: version 2 is refused: ";
    assert!(code == 200 && text.starts_with(older) && text.contains("; version 3 is refused: "), "{text}");
    let status = served.status();
    let kinds: Vec<_> = status["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["loaded", "refused", "refused"], "{status}");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success());
    for (version, path, fault) in [(3, &truncated, "truncated"), (2, &corrupt, "corrupt")] {
        let of_version = |line: &&str| line.contains(&format!("version={version}"));
        assert_eq!(log.lines().filter(of_version).count(), 1, "{log}");
        let line = log.lines().find(of_version).unwrap();
        assert!(line.contains("version refused") && line.contains(fault), "{line}");
        assert!(line.contains(path.to_str().unwrap()), "{line}");
    }
}
