//! The quality of models that are trained on real click logs. The data is not in the repository; see
//! `program::real`.

use std::path::PathBuf;

use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind as Preset};
use flechette::trainer::eval::Quality;
use flechette::trainer::optim::{Kind, Optimizer};
use flechette::trainer::{self, ReferenceTrainer};

use crate::program::real;

/// Trains for one epoch with the defaults of `flechette train`, and evaluates.
fn quality(mut reference: ReferenceTrainer, format: Format, files: [&PathBuf; 2]) -> Quality {
    let schema = reference.schema().clone();
    let open = |path: &PathBuf| {
        dataset::open(format, std::slice::from_ref(path), &schema, ReadOptions::default()).unwrap()
    };
    trainer::run_epoch(&mut reference, &mut *open(files[0]), 128, |_| ()).unwrap();
    trainer::evaluate(&schema, &mut *open(files[1]), 4096, |batch, logits| reference.logits(batch, logits))
        .unwrap()
        .unwrap()
}

const ADAGRAD: Optimizer = Optimizer::new(Kind::Adagrad, 0.02);

/// The median test AUC of seeds 0 to 4 on the Criteo sample.
fn criteo_median(kind: Preset) -> Option<f64> {
    let (train, test) = (real("criteo_kaggle_train.tsv.zst")?, real("criteo_kaggle_test.tsv.zst")?);
    let schema: Schema = preset::criteo(kind, 16, 100_000);
    let auc = |seed| {
        let reference = trainer::initialise(&schema, ADAGRAD, seed).unwrap();
        quality(reference, Format::CriteoTsv, [&train, &test]).auc.unwrap()
    };
    let mut aucs: Vec<f64> = (0..5).map(auc).collect();
    aucs.sort_by(f64::total_cmp);
    eprintln!("{}: test AUC {aucs:.4?}", kind.name());
    Some(aucs[2])
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
        let reference = trainer::initialise(&schema, ADAGRAD, 0).unwrap();
        let quality = quality(reference, Format::AvazuCsv, [&train, &test]);
        eprintln!("avazu, {}: {quality:?}", kind.name());
        assert!(quality.auc.unwrap() > 0.70, "{}: {quality:?}", kind.name());
    }
}
