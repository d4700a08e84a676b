//! The quality of models that are trained on real click logs. The data is not in the repository; see
//! `program::real`.

use std::fs;
use std::path::Path;

use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind as Preset};

use crate::program::{real, run_json};

/// Trains for one epoch with the defaults of `flechette train`, and evaluates.
fn auc(schema: &Schema, seed: u64, format: &str, [train, test]: [&Path; 2]) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let (config, models) = (dir.path().join("model.toml"), dir.path().join("models"));
    fs::write(&config, schema.to_toml()).unwrap();
    let (config, models, train, test) = (config.display(), models.display(), train.display(), test.display());
    let trained = run_json(&format!(
        "train --model-config {config} --format {format} --data {train} --valid {test} --models {models} \
         --name m --seed {seed} --json"
    ));
    trained["auc"].as_f64().unwrap()
}

/// The median test AUC of seeds 0 to 2 on the Criteo sample.
fn criteo_median(kind: Preset) -> Option<f64> {
    let (train, test) = (real("criteo_kaggle_train.tsv.zst")?, real("criteo_kaggle_test.tsv.zst")?);
    let schema = preset::criteo(kind, 16, 100_000);
    let mut aucs: Vec<f64> = (0..3).map(|seed| auc(&schema, seed, "criteo-tsv", [&train, &test])).collect();
    aucs.sort_by(f64::total_cmp);
    eprintln!("{}: test AUC {aucs:.4?}", kind.name());
    Some(aucs[1])
}

#[test]
fn dlrm_learns_criteo_as_well_as_the_reference() {
    if let Some(median) = criteo_median(Preset::Dlrm) {
        assert!(median >= 0.733, "median test AUC {median}");
    }
}

#[test]
fn dcnv2_learns_criteo_as_well_as_the_reference() {
    if let Some(median) = criteo_median(Preset::Dcnv2) {
        assert!(median >= 0.741, "median test AUC {median}");
    }
}

#[test]
fn avazu_without_dense_inputs_is_learnt_to_the_level_of_a_logistic_regression() {
    let (Some(train), Some(test)) = (real("avazu_train.csv.zst"), real("avazu_test.csv.zst")) else { return };
    for kind in [Preset::Dlrm, Preset::Dcnv2] {
        let schema = preset::avazu(kind, 16, 100_000);
        let auc = auc(&schema, 0, "avazu-csv", [&train, &test]);
        eprintln!("avazu, {}: test AUC {auc:.4}", kind.name());
        assert!(auc > 0.70, "{}: {auc}", kind.name());
    }
}
