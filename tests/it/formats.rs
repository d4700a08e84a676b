//! Every format of a version that was ever released can be read: a model of each is in `tests/fixtures`, and
//! another one with int8 rows. In format 1 the latter was not written by a program of that time: a script
//! wrote the tensors of the first version of format 2 as `src/store/format.rs` describes format 1.

use std::fs;
use std::path::{Path, PathBuf};

use flechette::store::{self, Purpose};
use flechette::types::{TableId, Version};
use serde_json::{Value, json};

use crate::program::{Served, run, run_failing, run_json};

/// The directories of the formats, and their numbers.
fn formats() -> Vec<(PathBuf, u64)> {
    fixtures("format-")
}

/// As [`formats`], of the models with int8 rows.
fn int8_formats() -> Vec<(PathBuf, u64)> {
    fixtures("int8-format-")
}

fn fixtures(prefix: &str) -> Vec<(PathBuf, u64)> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let number = |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    let entries = fs::read_dir(fixtures).unwrap().map(|entry| entry.unwrap().path());
    let mut formats: Vec<_> = entries.filter_map(|path| number(&path).map(|number| (path, number))).collect();
    formats.sort_by_key(|(_, number)| *number);
    formats
}

/// A copy of a fixture, in which a model can be trained.
fn copied(fixture: &Path) -> tempfile::TempDir {
    let models = tempfile::tempdir().unwrap();
    for entry in walkdir::WalkDir::new(fixture).into_iter().map(Result::unwrap) {
        let to = models.path().join(entry.path().strip_prefix(fixture).unwrap());
        if entry.file_type().is_dir() {
            fs::create_dir_all(to).unwrap();
        } else if entry.path().parent() != Some(fixture) {
            fs::copy(entry.path(), to).unwrap();
        }
    }
    models
}

fn numbers(path: &Path) -> Vec<f64> {
    fs::read_to_string(path).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_model_of_every_format_is_listed_served_with_its_scores_and_trained_on() {
    for formats in [formats(), int8_formats()] {
        let found: Vec<u64> = formats.iter().map(|(_, number)| *number).collect();
        assert_eq!(found, [1, 2]);
        formats.iter().for_each(|(fixture, format)| is_listed_served_and_trained_on(fixture, *format));
    }
}

fn is_listed_served_and_trained_on(fixture: &Path, format: u64) {
    let models = copied(fixture);
    let dir = models.path().to_str().unwrap();
    let listed = run_json(&format!("versions --models {dir} --json"));
    assert_eq!(listed["models"][0]["name"], "small");
    for version in listed["models"][0]["versions"].as_array().unwrap() {
        assert_eq!(version["good"], true, "{version}");
        let manifest = format!("{dir}/small/{}/MANIFEST.json", version["version"]);
        let manifest: Value = serde_json::from_str(&fs::read_to_string(manifest).unwrap()).unwrap();
        assert_eq!(manifest["format"], format);
    }
    let served = Served::start(dir, "");
    let out = models.path().join("scores.txt");
    run_json(&format!(
        "score --addr http://{} --model small --format synthetic rows=4,seed=9,skew=medium --json \
         --out {}",
        served.grpc,
        out.display()
    ));
    drop(served);
    let (scores, expected) = (numbers(&out), numbers(&fixture.join("scores.txt")));
    assert_eq!(scores.len(), 4);
    // The bits depend on the kind of processor.
    let near = scores.iter().zip(&expected).all(|(score, expected)| (score - expected).abs() < 1e-6);
    assert!(near, "format {format}: {scores:?}, expected {expected:?}");
    if format > 1 {
        // Its cursor is that of one epoch over 200 samples.
        let resumed = run_json(&format!(
            "train --resume --format synthetic --data rows=200,seed=1,skew=medium --batch 32 --epochs 2 \
             --models {dir} --name small --json"
        ));
        assert_eq!((&resumed["version"], &resumed["steps"]), (&3.into(), &14.into()));
        fs::remove_dir_all(format!("{dir}/small/3")).unwrap();
    }
    let trained = run_json(&format!(
        "train --from latest --format synthetic --data rows=64,seed=2,skew=medium --batch 32 \
         --models {dir} --name small --json"
    ));
    // Format 1 has no f32 rows of the rounded table, so the steps begin again.
    assert_eq!(trained["steps"], if format == 1 { 2 } else { 9 });
}

#[test]
fn int8_rows_of_every_format_are_read_as_they_were_written() {
    for (fixture, format) in int8_formats() {
        let models = copied(&fixture);
        // The rows of each version, as `examples/python/score_from_files.py` reads them.
        let rows = fs::read_to_string(fixture.join("rows.json")).unwrap();
        let versions: Vec<Vec<Vec<f32>>> = serde_json::from_str(&rows).unwrap();
        assert_eq!(versions.len() as u64, format, "format 2 also has a delta");
        for (version, rows) in (1..).zip(versions) {
            let opened = store::open(models.path(), "small", Version(version), Purpose::Serve).unwrap();
            let table = opened.store.table(TableId(0)).unwrap();
            assert_eq!((rows.len(), table.row(60)), (60, None));
            for (row, expected) in (0..).zip(rows) {
                assert_eq!(decoded(table.row(row).unwrap()), expected, "version {version}, row {row}");
            }
        }
    }
}

/// An int8 row with 5 elements: the steps, 3 zeros, scale and bias.
fn decoded(row: &[u8]) -> Vec<f32> {
    let number = |at: usize| f32::from_le_bytes(row[at..at + 4].try_into().unwrap());
    row[..5].iter().map(|&step| f32::from(step) * number(8) + number(12)).collect()
}

#[test]
fn the_list_of_the_versions_of_format_2_says_what_their_manifests_say_and_which_one_is_served() {
    let (fixture, _) = formats().into_iter().find(|(_, format)| *format == 2).unwrap();
    let models = copied(&fixture);
    let dir = models.path().to_str().unwrap();
    let check = |served: [bool; 2]| {
        let listed = run_json(&format!("versions --models {dir} --name small --json"));
        let expected = json!([
            {
                "version": 1, "kind": "full", "base": null, "step": 4, "samples": 128,
                "last_batch_unix_ms": 1_795_397_280_901_u64, "bytes": 37_914,
                "quality": {
                    "progressive_auc": 0.498_307_291_666_666_65,
                    "progressive_calibration": 1.448_888_735_845_685,
                    "progressive_log_loss": 0.717_531_269_482_961_2,
                },
                "good": true, "refused": null, "training_refused": null, "served": served[0], "labels": [],
            },
            {
                "version": 2, "kind": "delta", "base": 1, "step": 7, "samples": 200,
                "last_batch_unix_ms": 1_795_397_280_916_u64, "bytes": 37_344,
                "quality": {
                    "progressive_auc": 0.5272,
                    "progressive_calibration": 1.428_174_489_339_192_8,
                    "progressive_log_loss": 0.712_644_023_946_866_4,
                },
                "good": true, "refused": null, "training_refused": null, "served": served[1], "labels": [],
            },
        ]);
        assert_eq!(listed["models"][0]["versions"], expected);

        let table = String::from_utf8(run(&format!("versions --models {dir}")).stdout).unwrap();
        let mut lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        // How long ago it was trained.
        for line in &mut lines[2..] {
            line.remove(6);
        }
        let yes = served.map(|served| if served { "yes" } else { "no" });
        let expected = [
            "small".to_owned(),
            "VERSION KIND BASE STEP SAMPLES BYTES TRAINED GOOD SERVED LABELS QUALITY".to_owned(),
            format!(
                "1 full - 4 128 37914 yes {} - progressive_auc 0.4983, progressive_calibration 1.4489, \
                 progressive_log_loss 0.7175",
                yes[0]
            ),
            format!(
                "2 delta 1 7 200 37344 yes {} - progressive_auc 0.5272, progressive_calibration 1.4282, \
                 progressive_log_loss 0.7126",
                yes[1]
            ),
        ];
        assert_eq!(lines.iter().map(|line| line.join(" ")).collect::<Vec<_>>(), expected, "{table}");
    };
    check([false, false]);
    let served = Served::start(dir, "");
    check([false, true]);
    drop(served);
    check([false, false]);
}

#[test]
fn a_version_of_a_later_format_is_refused_by_its_number() {
    let (fixture, latest) = formats().pop().unwrap();
    let models = copied(&fixture);
    let manifest = models.path().join("small/2/MANIFEST.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let text = text.replacen(&format!("\"format\": {latest}"), &format!("\"format\": {}", latest + 1), 1);
    fs::remove_file(&manifest).unwrap();
    fs::write(&manifest, text).unwrap();
    let dir = models.path().display();
    let data = "--format synthetic --data rows=64,seed=2,skew=medium";
    let refused = run_failing(2, &format!("train --from 2 {data} --models {dir} --name small"));
    let expected = format!("MANIFEST.json: format: expected 1 to {latest}, got {}", latest + 1);
    assert!(refused.ends_with(&expected), "{refused}");
    for flags in ["", " --quick"] {
        let listed = String::from_utf8(run(&format!("versions --models {dir}{flags}")).stdout).unwrap();
        assert!(listed.lines().last().unwrap().ends_with(&expected), "{listed}");
    }
}
