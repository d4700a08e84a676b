//! Flags of `flechette train` that set the optimizer, and checks that `train` makes before it trains.

use std::fs;

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::{Workshop, run_failing, run_json};

fn train(workshop: &Workshop, config: &str, more: &str) -> String {
    let Workshop { train, models, .. } = workshop;
    format!(
        "train --model-config {config} --format criteo-tsv --data {train} --models {models} --name m {more}"
    )
}

/// The metadata in the manifest of version 1.
fn metadata(workshop: &Workshop) -> Value {
    let text = fs::read_to_string(format!("{}/m/1/MANIFEST.json", workshop.models)).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["metadata"].take()
}

#[test]
fn eps_and_betas_default_to_those_of_pytorch_and_can_be_set() {
    for (flags, expected) in [
        ("adam", serde_json::json!({"eps": "0.00000001", "beta1": "0.9", "beta2": "0.999"})),
        (
            "adam --eps 0.5 --beta1 0.25 --beta2 0",
            serde_json::json!({"eps": "0.5", "beta1": "0.25", "beta2": "0"}),
        ),
        ("adagrad", serde_json::json!({"eps": "0.0000000001"})),
        ("rowwise_adagrad --eps 1e-8", serde_json::json!({"eps": "0.00000001"})),
    ] {
        let workshop = Workshop::new(300, 50);
        let config = workshop.config(ArchKind::Dlrm, 4, 100);
        run_json(&train(&workshop, &config, &format!("--optimizer {flags} --json")));
        let written = metadata(&workshop);
        for key in ["eps", "beta1", "beta2"] {
            assert_eq!(written[key], expected[key], "{flags}: {key}");
        }
    }
}

#[test]
fn numbers_of_the_optimizer_out_of_range_and_those_that_it_does_not_have_are_refused() {
    let workshop = Workshop::new(300, 50);
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    for (flags, words) in [
        ("sgd --lr 1e-50", "--lr: expected a positive f32, got 0.000"),
        ("adam --eps 0", "--eps: expected a positive f32, got 0"),
        ("adam --eps 1e-60", "--eps: expected a positive f32, got 0.000"),
        ("sgd --eps 1e-8", "--eps: not used by sgd"),
        ("adam --beta1 1", "--beta1: expected a number from 0 to below 1, got 1"),
        ("adam --beta2 nan", "--beta2: expected a number from 0 to below 1, got NaN"),
        ("adagrad --beta2 0.9", "--beta2: used only by adam, not by adagrad"),
    ] {
        let error = run_failing(2, &train(&workshop, &config, &format!("--optimizer {flags}")));
        assert!(error.contains(words), "{flags}: {error}");
    }
}

/// With these flags training would diverge and report that, so another error shows that training did not
/// begin.
#[test]
fn a_model_directory_that_cannot_be_written_is_refused_before_training() {
    let workshop = Workshop::new(300, 50);
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    let diverging = "--optimizer sgd --lr 1e30";
    run_failing(1, &train(&workshop, &config, diverging));
    fs::create_dir_all(&workshop.models).unwrap();
    fs::write(format!("{}/m", workshop.models), "a file").unwrap();
    let error = run_failing(2, &train(&workshop, &config, diverging));
    assert!(error.contains("--models: ") && error.contains("not a directory"), "{error}");

    // Not even root can make a directory in /proc.
    let unwritable = Workshop { models: "/proc".to_owned(), ..Workshop::new(300, 50) };
    let error = run_failing(2, &train(&unwritable, &unwritable.config(ArchKind::Dlrm, 4, 100), diverging));
    assert!(error.contains("--models: /proc/m: "), "{error}");
}
