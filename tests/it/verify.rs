//! `flechette verify`, and training with a scratchpad, by the real program.

use std::fs;

use flechette::schema::preset::Kind;
use serde_json::{Value, json};

use crate::program::{Workshop, real, run, run_failing, run_json};

fn count(verified: &Value, key: &str) -> u64 {
    verified[key].as_u64().unwrap_or_else(|| panic!("{key} of {verified}"))
}

#[test]
fn every_size_policy_and_optimizer_is_equal_with_stages_that_sleep_at_random() {
    let workshop = Workshop::new(3000, 1);
    let config = workshop.config(Kind::Deepfm, 8, 700);
    let verify =
        format!("verify --model-config {config} --format criteo-tsv --data {} --json", workshop.train);
    let mut asked = None;
    for (i, (optimizer, policy)) in
        [("sgd", "lru"), ("adagrad", "lfu"), ("rowwise_adagrad", "random"), ("adam", "optimal")]
            .into_iter()
            .enumerate()
    {
        for (size, batch, steps) in [("min", 64, 3), ("0.02", 64, 12), ("0.1", 300, 9), ("1.0", 300, 9)] {
            let threads = 1 + i;
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
                // What batches ask for is the same under every policy and optimizer.
                assert_eq!(*asked.get_or_insert((hits + fills, fills)), (hits + fills, fills));
            } else {
                assert!(count(&verified, "evictions") > 0, "{verified}");
            }
        }
    }
}

#[test]
fn the_criteo_sample_is_equal() {
    let Some(data) = real("criteo_kaggle_train.tsv.zst") else { return };
    let data = data.display();
    let workshop = Workshop::new(1, 1);
    let config = workshop.config(Kind::Dlrm, 16, 20_000);
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
fn counts_fill_the_scratchpad_with_what_is_asked_for_most() {
    let workshop = Workshop::new(4000, 1);
    let (config, counts) = (workshop.config(Kind::Dlrm, 8, 700), workshop.path("counts"));
    let data = format!("--model-config {config} --format criteo-tsv --data {}", workshop.train);
    run_json(&format!("plan {data} --counts {counts} --json"));
    let verify = format!("verify {data} --json --steps 30 --scratchpad 0.15 --policy lfu");
    let (without, with) = (run_json(&verify), run_json(&format!("{verify} --counts {counts}")));
    assert_eq!((&without["equal"], &with["equal"]), (&json!(true), &json!(true)));
    assert!(count(&with, "fills") < count(&without, "fills"), "{with} and {without}");
}

#[test]
fn a_scratchpad_trains_the_version_that_memory_trains_also_over_epochs_and_in_the_order_of_counts() {
    let workshop = Workshop::new(3000, 500);
    let (config, counts) = (workshop.config(Kind::Deepfm, 8, 700), workshop.path("counts"));
    let Workshop { models, train, valid, .. } = &workshop;
    let data = format!("--model-config {config} --format criteo-tsv --data {train}");
    run_json(&format!("plan {data} --counts {counts} --json"));
    let line = format!(
        "train {data} --valid {valid} --models {models} --epochs 2 --batch 100 --optimizer adam --lr 0.01 --json"
    );
    let of = |name: &str, flags: &str| {
        let trained = run_json(&format!("{line} --name {name} {flags}"));
        let manifest = fs::read(format!("{models}/{name}/1/MANIFEST.json")).unwrap();
        (trained, manifest)
    };
    let (all, expected) = of("all", "");
    assert_eq!(all["scratchpad"], Value::Null);
    let (_, manifest) = of("whole", "--scratchpad 1");
    assert!(manifest == expected, "all rows in the scratchpad");
    for (name, flags) in [
        ("part", "--scratchpad 0.1 --policy optimal --lookahead 2 --buffered 1"),
        ("bytes", "--scratchpad 400Ki --policy random --staging 100Ki"),
        ("least", "--scratchpad min"),
        ("ranked", &format!("--scratchpad 0.1 --policy lfu --counts {counts} --reorder")),
    ] {
        let (trained, manifest) = of(name, flags);
        assert!(manifest == expected, "{flags}");
        assert_eq!((&trained["auc"], &trained["logloss"]), (&all["auc"], &all["logloss"]), "{flags}");
        assert!(count(&trained["scratchpad"], "evictions") > 0, "{trained}");
    }
    // The order is kept, and the next run goes by it.
    let order = format!("{models}/ranked/state/order.safetensors");
    let kept = fs::read(&order).unwrap();
    let again = run_json(&format!("{line} --name ranked --scratchpad 0.1"));
    assert_eq!(again["version"], 2);
    let manifest = fs::read(format!("{models}/ranked/2/MANIFEST.json")).unwrap();
    assert!(manifest == expected && fs::read(&order).unwrap() == kept);
    fs::write(&order, b"spoilt").unwrap();
    let refused = run(&format!("{line} --name ranked --scratchpad 0.1"));
    assert!(!refused.status.success(), "a spoilt order");
}

#[test]
fn what_cannot_be_met_is_refused_by_name() {
    let workshop = Workshop::new(200, 1);
    let config = workshop.config(Kind::Dlrm, 8, 100);
    let verify = format!("verify --model-config {config} --format criteo-tsv --data {}", workshop.train);
    let refused = |flags: &str, words: &str| {
        let said = run_failing(2, &format!("{verify} {flags}"));
        assert!(said.contains(words), "{flags}: {said}");
    };
    refused("--scratchpad 3", "scratchpad:");
    refused("--lookahead 0", "lookahead: expected 1 to 21 batches, got 0");
    refused("--lookahead 22", "lookahead: expected 1 to 21 batches, got 22");
    refused("--lr 0", "--lr: expected a positive number");
    refused("--counts /nonexistent", "/nonexistent");
    let said = run_failing(2, &verify.replace(&workshop.train, "/nonexistent"));
    assert!(said.contains("/nonexistent"), "{said}");
    let line = format!("{verify} --working-dir /dev/null/nowhere");
    assert!(run_failing(2, &line).contains("--working-dir"));
}
