//! `flechette verify` and training with a scratchpad, with the real program.

use std::fs;
use std::sync::OnceLock;

use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use serde_json::{Value, json};

use crate::program::{Workshop, manifest, real, run, run_failing, run_json};

fn count(verified: &Value, key: &str) -> u64 {
    verified[key].as_u64().unwrap_or_else(|| panic!("{key} of {verified}"))
}

const OPTIMIZERS: [&str; 4] = ["sgd", "adagrad", "rowwise_adagrad", "adam"];

/// The rows that batches need, and those of them that are read, with a scratchpad for all rows.
static NEEDED: OnceLock<[u64; 2]> = OnceLock::new();

/// Verifies an optimizer, by its number, with every policy, while stages sleep at random. All optimizers
/// together cover every pair of optimizer and policy, and each of them with every size and number of threads.
fn every_size_and_policy_is_equal(i: usize) {
    let workshop = Workshop::new(3000, 1);
    let config = workshop.config(ArchKind::Deepfm, 8, 700);
    let verify =
        format!("verify --model-config {config} --format criteo-tsv --data {} --json", workshop.train);
    let (optimizer, policies) = (OPTIMIZERS[i], ["lru", "lfu", "random", "optimal"]);
    let sizes = [("min", 64, 3), ("0.02", 64, 12), ("0.1", 300, 9), ("1.0", 300, 9)];
    for (j, policy) in policies.into_iter().enumerate() {
        let (size, batch, steps) = sizes[(i + j) % 4];
        let threads = 1 + (i + 3 * j) % 4;
        let verified = run_json(&format!(
            "{verify} --steps {steps} --batch {batch} --optimizer {optimizer} --policy {policy} \
             --scratchpad {size} --threads {threads} --jitter {i} --lookahead {}",
            1 + i % 2
        ));
        assert_eq!(verified["equal"], true, "{optimizer}, {policy}, {size}: {verified}");
        assert_eq!(verified["first_difference"], Value::Null);
        assert_eq!(count(&verified, "steps"), steps);
        let (hits, fills) = (count(&verified, "hits"), count(&verified, "fills"));
        assert!(size != "min" || count(&verified, "splits") == steps, "{verified}");
        if size == "1.0" {
            assert_eq!(count(&verified, "evictions"), 0);
            // The rows that batches need do not depend on policy and optimizer.
            let needed = [hits + fills, fills];
            assert_eq!(*NEEDED.get_or_init(|| needed), needed);
        } else {
            assert!(count(&verified, "evictions") > 0, "{verified}");
        }
    }
}

#[test]
fn sgd_is_equal_with_every_size_and_policy() {
    every_size_and_policy_is_equal(0);
}

#[test]
fn adagrad_is_equal_with_every_size_and_policy() {
    every_size_and_policy_is_equal(1);
}

#[test]
fn rowwise_adagrad_is_equal_with_every_size_and_policy() {
    every_size_and_policy_is_equal(2);
}

#[test]
fn adam_is_equal_with_every_size_and_policy() {
    every_size_and_policy_is_equal(3);
}

#[test]
fn bags_of_generated_ids_are_equal_in_large_batches_too() {
    let workshop = Workshop::new(1, 1);
    let shape = SyntheticShape { tables: 4, rows: 20_000, dense: 3, multi_hot: Some(5) };
    let config = workshop.path("bags.toml");
    fs::write(&config, synthetic(ArchKind::Dcnv2, 4, shape).to_toml()).unwrap();
    let verify = format!(
        "verify --model-config {config} --format synthetic --data rows=20000,seed=3,skew=0.8 --batch \
         4096 --json"
    );
    for (size, policy, optimizer) in
        [("0.6", "lru", "adam"), ("0.65", "optimal", "adagrad"), ("0.02", "random", "sgd")]
    {
        let verified = run_json(&format!(
            "{verify} --scratchpad {size} --policy {policy} --optimizer {optimizer} --jitter 1"
        ));
        assert_eq!(verified["equal"], true, "{size}, {policy}, {optimizer}: {verified}");
        assert_eq!(count(&verified, "steps"), 5);
        assert!(count(&verified, "evictions") > 0, "{verified}");
        assert_eq!(count(&verified, "splits") > 0, size == "0.02", "{verified}");
    }
}

#[test]
fn the_criteo_sample_is_equal() {
    let Some(data) = real("criteo_kaggle_train.tsv.zst") else { return };
    let data = data.display();
    let workshop = Workshop::new(1, 1);
    let config = workshop.config(ArchKind::Dlrm, 16, 20_000);
    let verify = format!("verify --model-config {config} --format criteo-tsv --data {data} --json");
    for (size, batch, steps, policy) in [
        ("min", 64, 2, "lru"),
        ("0.02", 512, 12, "optimal"),
        ("0.1", 4096, 3, "lfu"),
        ("1", 4096, 3, "random"),
    ] {
        let verified = run_json(&format!(
            "{verify} --scratchpad {size} --batch {batch} --steps {steps} --policy {policy} --jitter 5"
        ));
        assert_eq!(verified["equal"], true, "{size}, {policy}: {verified}");
        assert_eq!(count(&verified, "steps"), steps);
    }
}

#[test]
fn counts_fill_the_scratchpad_with_the_most_frequent_rows() {
    let workshop = Workshop::new(4000, 1);
    let (config, counts) = (workshop.config(ArchKind::Dlrm, 8, 700), workshop.path("counts"));
    let data = format!("--model-config {config} --format criteo-tsv --data {}", workshop.train);
    run_json(&format!("plan {data} --counts {counts} --json"));
    let verify = format!("verify {data} --json --steps 30 --scratchpad 0.15 --policy lfu");
    let (without, with) = (run_json(&verify), run_json(&format!("{verify} --counts {counts}")));
    assert_eq!((&without["equal"], &with["equal"]), (&json!(true), &json!(true)));
    assert!(count(&with, "fills") < count(&without, "fills"), "{with} and {without}");
}

#[test]
fn a_scratchpad_trains_the_same_version_as_memory_also_over_epochs_and_with_rows_ordered_by_counts() {
    let workshop = Workshop::new(3000, 500);
    let (config, counts) = (workshop.config(ArchKind::Deepfm, 8, 700), workshop.path("counts"));
    let Workshop { models, train, valid, .. } = &workshop;
    let data = format!("--model-config {config} --format criteo-tsv --data {train}");
    run_json(&format!("plan {data} --counts {counts} --json"));
    let line = format!(
        "train {data} --valid {valid} --models {models} --epochs 2 --batch 100 --optimizer adam --lr \
         0.01 --json"
    );
    let of = |name: &str, flags: &str| {
        let trained = run_json(&format!("{line} --name {name} {flags}"));
        (trained, manifest(models, name, 1))
    };
    let (all, expected) = of("all", "");
    assert_eq!(all["scratchpad"], Value::Null);
    assert!(of("whole", "--scratchpad 1").1 == expected, "all rows in the scratchpad");
    for (name, flags) in [
        ("part", "--scratchpad 0.1 --policy optimal --lookahead 2 --buffered 1"),
        ("bytes", "--scratchpad 400Ki --policy random --staging 100Ki"),
        ("least", "--scratchpad min"),
        ("ranked", &format!("--scratchpad 0.1 --policy lfu --counts {counts} --reorder")),
    ] {
        let (trained, written) = of(name, flags);
        assert!(written == expected, "{flags}");
        assert_eq!((&trained["auc"], &trained["logloss"]), (&all["auc"], &all["logloss"]), "{flags}");
        assert!(count(&trained["scratchpad"], "evictions") > 0, "{trained}");
    }
    // The next run uses the stored order.
    let order = format!("{models}/ranked/state/order.safetensors");
    let kept = fs::read(&order).unwrap();
    let again = run_json(&format!("{line} --name ranked --scratchpad 0.1"));
    assert_eq!(again["version"], 2);
    assert!(manifest(models, "ranked", 2) == expected && fs::read(&order).unwrap() == kept);
    fs::write(&order, b"spoilt").unwrap();
    let refused = run(&format!("{line} --name ranked --scratchpad 0.1"));
    assert!(!refused.status.success(), "a spoilt order");
    fs::write(&order, kept).unwrap();
    let other = line.replace(&config, &workshop.config(ArchKind::Deepfm, 8, 900));
    let stderr = run_failing(2, &format!("{other} --name ranked --scratchpad 0.1"));
    assert!(
        stderr.contains(&order) && stderr.contains("expected an order of 900 rows, got one of 700"),
        "{stderr}"
    );
}

#[test]
fn scratchpad_flags_are_checked_without_a_scratchpad_too_and_a_warning_says_that_they_do_nothing() {
    let workshop = Workshop::new(300, 1);
    let (config, counts) = (workshop.config(ArchKind::Dlrm, 8, 300), workshop.path("counts"));
    let Workshop { models, train, .. } = &workshop;
    let data = format!("--model-config {config} --format criteo-tsv --data {train}");
    run_json(&format!("plan {data} --counts {counts} --json"));
    let train = format!("train {data} --models {models} --name m");
    let stderr = run_failing(2, &format!("{train} --lookahead 0"));
    assert!(stderr.contains("lookahead: expected 1 to 21 batches, got 0"), "{stderr}");
    let stderr = run_failing(2, &format!("{train} --lambda 0"));
    assert!(stderr.contains("lambda: expected at least 1 step, got 0"), "{stderr}");
    for size in ["", "--scratchpad 1", "--scratchpad 1Gi"] {
        let trained = run(&format!("{train} {size} --policy lfu --counts {counts} --reorder"));
        let stderr = String::from_utf8(trained.stderr).unwrap();
        assert!(trained.status.success(), "{stderr}");
        let expected =
            "all rows are kept in memory, so these flags have no effect: --policy, --counts, --reorder";
        assert!(stderr.contains(expected), "{size}: {stderr}");
    }
    let trained = run(&format!("{train} --scratchpad 0.5 --policy lfu --counts {counts} --reorder"));
    assert!(!String::from_utf8(trained.stderr).unwrap().contains("have no effect"));
}

#[test]
fn scratchpad_min_refuses_data_that_can_be_read_only_once() {
    let workshop = Workshop::new(100, 1);
    let (config, pipe) = (workshop.config(ArchKind::Dlrm, 8, 300), workshop.path("pipe"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let data = format!("--model-config {config} --format criteo-tsv --data {pipe} --scratchpad min");
    for line in [format!("verify {data}"), format!("train {data} --models {} --name m", workshop.models)] {
        let stderr = run_failing(2, &line);
        assert!(
            stderr.contains(&format!(
                "--scratchpad min: --data must be read twice, but {pipe} is a pipe or a device"
            )),
            "{stderr}"
        );
    }
}

#[test]
fn a_small_scratchpad_has_enough_slots_of_every_size_for_a_sample() {
    let workshop = Workshop::new(1, 1);
    let shape = SyntheticShape { tables: 3, rows: 400_000, dense: 2, multi_hot: Some(4) };
    let mut schema = synthetic(ArchKind::Dcn, 16, shape);
    // No other table has this dim, so the table has its own slot size.
    (schema.tables[2].rows, schema.tables[2].dim) = (60, 5);
    let config = workshop.path("uneven.toml");
    fs::write(&config, schema.to_toml()).unwrap();
    let verify = format!("verify --model-config {config} --format synthetic --data rows=2000,seed=3 --json");
    let verified = run_json(&format!("{verify} --scratchpad 1Mi --batch 128"));
    assert_eq!(verified["equal"], true, "{verified}");
}

#[test]
fn replicas_learn_what_one_worker_learns_and_report_whether_they_are_exact() {
    let workshop = Workshop::new(6000, 1000);
    let config = workshop.config(ArchKind::Dlrm, 8, 700);
    let Workshop { models, train, valid, .. } = &workshop;
    let line = format!(
        "train --model-config {config} --format criteo-tsv --data {train} --valid {valid} --models {models} \
         --batch 200 --json"
    );
    let of = |name: &str, flags: &str| run_json(&format!("{line} --name {name} {flags}"));
    let loss = |trained: &Value| trained["logloss"].as_f64().unwrap();
    let one = of("one", "");
    let exchanged = of("exchanged", "--replicas 3 --scratchpad 0.2");
    assert_eq!(exchanged["scratchpad"]["exact"], true);
    assert!((loss(&one) - loss(&exchanged)).abs() < 1e-4, "{one} and {exchanged}");
    let averaged = of("averaged", "--replicas 2 --lambda 4 --lookahead 4");
    assert_eq!(averaged["scratchpad"]["exact"], false);
    assert!((loss(&one) - loss(&averaged)).abs() < 0.05, "{one} and {averaged}");
    let stderr = run_failing(2, &format!("{line} --name none --replicas 65"));
    assert!(stderr.contains("replicas: expected 1 to 64, got 65"), "{stderr}");
    let stderr = run_failing(2, &format!("{line} --name none --replicas 2 --lambda 0"));
    assert!(stderr.contains("lambda: expected at least 1 step, got 0"), "{stderr}");
}

#[test]
fn invalid_settings_are_refused_with_the_flag_name() {
    let workshop = Workshop::new(200, 1);
    let config = workshop.config(ArchKind::Dlrm, 8, 100);
    let verify = format!("verify --model-config {config} --format criteo-tsv --data {}", workshop.train);
    let refused = |flags: &str, words: &str| {
        let stderr = run_failing(2, &format!("{verify} {flags}"));
        assert!(stderr.contains(words), "{flags}: {stderr}");
    };
    refused("--scratchpad 3", "scratchpad:");
    refused("--lookahead 0", "lookahead: expected 1 to 21 batches, got 0");
    refused("--lookahead 22", "lookahead: expected 1 to 21 batches, got 22");
    refused("--lr 0", "'0' for '--lr <L>': expected a positive number");
    refused("--counts /nonexistent", "/nonexistent");
    let stderr = run_failing(2, &verify.replace(&workshop.train, "/nonexistent"));
    assert!(stderr.contains("/nonexistent"), "{stderr}");
    let line = format!("{verify} --working-dir /dev/null/nowhere");
    assert!(run_failing(2, &line).contains("--working-dir"));
}
