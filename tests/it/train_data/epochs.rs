//! Epochs: validation, early stops, the best version, held-out samples, shuffles and the schedule of the
//! learning rate.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::workshop::{contents, workshop};
use crate::program::{Workshop, highest_version, manifest, run, run_json};

#[test]
fn every_epoch_is_validated_and_training_stops_early_or_keeps_the_best_version() {
    let (workshop, line) = workshop(700);
    let Workshop { train, valid, .. } = &workshop;
    for (name, more) in [("memory", ""), ("disk", "--scratchpad 0.3")] {
        let line =
            format!("{line} --data {train} --valid {valid} --epochs 6 --lr 0.03 --optimizer adam {more}");
        let every = run(&format!("{line} --name {name}"));
        let (report, json) =
            (String::from_utf8(every.stderr).unwrap(), String::from_utf8(every.stdout).unwrap());
        let json: Value = serde_json::from_str(&json).unwrap();
        for epoch in 1..=6 {
            assert!(report.contains(&format!("epoch {epoch} of 6: validation: 200 rows, AUC ")), "{report}");
        }
        let losses: Vec<f64> =
            json["validations"].as_array().unwrap().iter().map(|v| v["logloss"].as_f64().unwrap()).collect();
        assert_eq!(losses.len(), 6);
        // f32 rows are not rounded, so the written version is as good as the model in training.
        assert_eq!(losses[5], json["logloss"].as_f64().unwrap());
        let best = (0..6).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap();
        assert!(best < 4, "the model must overfit for this test: {losses:?}");

        let kept = run_json(&format!("{line} --name {name}-best --save-best --early-stop 2"));
        assert_eq!(kept["epochs"], best as u64 + 3, "{losses:?}");
        assert_eq!(
            (&kept["best_epoch"], &kept["logloss"]),
            (&(best as u64 + 1).into(), &losses[best].into())
        );
        let version = kept["version"].as_u64().unwrap();
        let left = fs::read_dir(format!("{}/{name}-best", workshop.models)).unwrap();
        let left = left.filter(|entry| entry.as_ref().unwrap().file_name() != "state").count();
        assert_eq!(left, 1, "those of earlier best epochs are removed");
        // A run that goes on after its best version has the same best version.
        let resumed = run_json(&format!("{line} --name {name}-best --save-best --early-stop 2 --resume"));
        assert_eq!((&resumed["version"], &resumed["best_epoch"]), (&kept["version"], &kept["best_epoch"]));
        assert_eq!(resumed["logloss"], kept["logloss"]);
        // With versions on the way, others follow that of the best epoch, so it is written again.
        let kept = run_json(&format!(
            "{line} --name {name}-on-the-way --save-best --early-stop 2 --publish-every 1steps"
        ));
        assert_eq!(
            (&kept["best_epoch"], &kept["logloss"]),
            (&(best as u64 + 1).into(), &losses[best].into())
        );
        let latest = highest_version(Path::new(&workshop.models), &format!("{name}-on-the-way")).unwrap();
        assert_eq!(kept["version"], latest);
        assert_eq!(
            contents(&workshop, &format!("{name}-on-the-way"), latest),
            contents(&workshop, &format!("{name}-best"), version)
        );
        let until_best = line.replace("--epochs 6", &format!("--epochs {}", best + 1));
        run_json(&format!("{until_best} --name {name}-until"));
        assert_eq!(
            contents(&workshop, &format!("{name}-best"), version),
            contents(&workshop, &format!("{name}-until"), 1)
        );
    }
    assert_eq!(contents(&workshop, "memory", 1), contents(&workshop, "disk", 1));
}

#[test]
fn held_out_samples_are_not_trained_and_shuffles_depend_on_the_seed_alone() {
    let (workshop, line) = workshop(800);
    let line = format!("{line} --data {}", workshop.train);
    let held_out = run_json(&format!("{line} --name ratio --valid-ratio 0.25"));
    let (trained, valid) = (held_out["rows"].as_u64().unwrap(), held_out["valid_rows"].as_u64().unwrap());
    assert_eq!(trained + valid, 800);
    assert!((120..280).contains(&valid), "{valid}");
    let progressive = &held_out["progressive"];
    assert_eq!(progressive["samples"], trained);
    assert!(progressive["auc"].is_f64() && progressive["calibration"].is_f64(), "{progressive}");
    for (name, seed) in [("one", 5), ("same", 5), ("other", 6)] {
        run_json(&format!("{line} --name {name} --shuffle 300 --data-seed {seed} --epochs 2"));
    }
    let [one, same, other] = ["one", "same", "other"].map(|name| contents(&workshop, name, 1));
    assert!(one == same && one != other);
}

#[test]
fn only_a_version_at_the_end_of_an_epoch_has_the_quality_of_its_validation() {
    let (workshop, line) = workshop(700);
    let Workshop { train, valid, models, .. } = &workshop;
    let json = run_json(&format!(
        "{line} --name m --data {train} --valid {valid} --epochs 2 --batch 16 --publish-every 1steps"
    ));
    let last = json["version"].as_u64().unwrap();
    for version in 1..=last {
        let dir = format!("{models}/m/{version}");
        // Retention removes the first ones.
        let Ok(cursor) = fs::read_to_string(format!("{dir}/checkpoint/cursor.json")) else { continue };
        let cursor: Value = serde_json::from_str(&cursor).unwrap();
        let quality = &manifest(models, "m", version)["quality"];
        let validated = quality["valid_log_loss"].is_f64() && quality["valid_auc"].is_f64();
        if cursor["samples"] == 0 {
            assert!(version == last && cursor["epoch"] == 3 && validated, "{cursor}: {quality}");
            assert_eq!(quality["valid_log_loss"], json["validations"][1]["logloss"]);
        } else {
            assert!(quality["valid_log_loss"].is_null() && !validated, "{cursor}: {quality}");
            assert!(quality["progressive_log_loss"].is_f64(), "{quality}");
        }
    }
}

#[test]
fn the_speed_that_is_reported_is_that_of_all_epochs() {
    let (workshop, line) = workshop(300);
    let json = run_json(&format!("{line} --name m --data {} --epochs 3", workshop.train));
    let samples = json["samples_per_s"].as_f64().unwrap() * json["seconds"].as_f64().unwrap();
    assert!((samples - 900.0).abs() < 0.01, "{json}");
}

#[test]
fn a_schedule_of_the_learning_rate_changes_trained_bytes_alike_in_memory_and_on_disk() {
    let (workshop, line) = workshop(600);
    let line = format!("{line} --data {}", workshop.train);
    let schedule = "--lr-warmup 2 --lr-decay poly2 --lr-decay-start 3 --lr-decay-steps 2 --lr-end 0.001";
    for (name, more) in [("constant", ""), ("memory", schedule), ("disk", schedule)] {
        let disk = if name == "disk" { "--scratchpad 0.3" } else { "" };
        run_json(&format!("{line} --name {name} {more} {disk}"));
    }
    let [constant, memory, disk] = ["constant", "memory", "disk"].map(|name| contents(&workshop, name, 1));
    assert!(memory == disk && memory != constant);
}
