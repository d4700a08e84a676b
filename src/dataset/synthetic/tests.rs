//! Synthetic data: calibrated, reproducible, and with labels that follow the truth.

use proptest::prelude::*;

use super::*;
use crate::dataset::{Format, ReadOptions, open as open_data};
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::types::Batch;

fn shape(multi_hot: Option<u32>) -> SyntheticShape {
    SyntheticShape { tables: 6, rows: 500, dense: 3, multi_hot }
}

/// Every sample of a description, encoded, with the labels.
fn all(schema: &Schema, text: &str, chunk: usize) -> (Batch, Vec<f32>) {
    let mut reader = open_data(Format::Synthetic, &[text.into()], schema, ReadOptions::default()).unwrap();
    let (mut raw, mut part) = (RawBatch::default(), Batch::default());
    let (mut batch, mut labels) = (Batch::empty(schema.features.len()), Vec::new());
    while reader.read(chunk, &mut raw).unwrap() > 0 {
        assert!(raw.samples <= chunk);
        schema.encode(&raw, &mut part).unwrap();
        batch.append(&part);
        labels.extend(raw.labels.as_ref().unwrap());
    }
    (batch, labels)
}

/// The share of pairs of a clicked and an unclicked sample in which the clicked one has the higher
/// probability.
fn auc(probabilities: &[f64], labels: &[f32]) -> f64 {
    let mut order: Vec<usize> = (0..labels.len()).collect();
    order.sort_by(|&a, &b| probabilities[a].total_cmp(&probabilities[b]));
    let (mut below, mut pairs) = (0.0, 0.0);
    for i in order {
        if labels[i] == 1.0 {
            pairs += below;
        } else {
            below += 1.0;
        }
    }
    pairs / (below * (labels.len() as f64 - below))
}

#[test]
fn labels_follow_the_truth() {
    let schema = preset::synthetic(ArchKind::Dlrm, 4, shape(Some(4)));
    let (batch, labels) = all(&schema, "rows=40000,seed=3,skew=medium,truth=8", 1000);
    let truth = Truth::new(&schema, 8);
    let known: Vec<f64> = (0..batch.samples).map(|s| truth.probability(&batch, s)).collect();
    for decile in 0..10 {
        let range = decile as f64 / 10.0..(decile + 1) as f64 / 10.0;
        let inside: Vec<usize> = (0..labels.len()).filter(|&s| range.contains(&known[s])).collect();
        if inside.len() < 500 {
            continue;
        }
        let mean =
            |of: &dyn Fn(usize) -> f64| inside.iter().map(|&s| of(s)).sum::<f64>() / inside.len() as f64;
        let (clicked, promised) = (mean(&|s| f64::from(labels[s])), mean(&|s| known[s]));
        // Four standard deviations of the mean of as many fair coin flips.
        let bound = 4.0 * (0.25 / inside.len() as f64).sqrt();
        assert!((clicked - promised).abs() < bound, "{range:?}: {clicked} against {promised}");
    }
    let best = auc(&known, &labels);
    assert!((0.7..0.95).contains(&best), "Bayes AUC {best}");
    let other = Truth::new(&schema, 9);
    let wrong: Vec<f64> = (0..batch.samples).map(|s| other.probability(&batch, s)).collect();
    assert!(auc(&wrong, &labels) < best - 0.1);
}

#[test]
fn another_seed_gives_other_samples_of_the_same_truth() {
    let schema = preset::synthetic(ArchKind::Dcn, 4, shape(None));
    let (one, _) = all(&schema, "rows=20000,seed=1,skew=high", 512);
    let (two, labels) = all(&schema, "rows=20000,seed=2,skew=high", 512);
    assert_ne!(one.features[0].ids, two.features[0].ids);
    let hottest = |batch: &Batch| {
        let mut counts = vec![0; 500];
        batch.features[0].ids.iter().for_each(|&id| counts[id as usize] += 1);
        (0..500).max_by_key(|&id| counts[id])
    };
    assert_eq!(hottest(&one), hottest(&two));
    let truth = Truth::new(&schema, 0);
    let known: Vec<f64> = (0..two.samples).map(|s| truth.probability(&two, s)).collect();
    assert!(auc(&known, &labels) > 0.6);
}

#[test]
fn hot_ids_have_the_share_of_their_named_skew() {
    let schema = preset::synthetic(ArchKind::Dcn, 4, SyntheticShape { rows: 1000, ..shape(None) });
    for (name, share) in [("low", 0.085), ("medium", 0.3), ("high", 0.8)] {
        let (batch, _) = all(&schema, &format!("rows=100000,skew={name}"), 4096);
        let mut counts = vec![0u32; 1000];
        batch.features[2].ids.iter().for_each(|&id| counts[id as usize] += 1);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let got = f64::from(counts[..20].iter().sum::<u32>()) / 100_000.0;
        assert!((got - share).abs() < 0.02, "{name}: {got}");
    }
}

#[test]
fn lengths_are_as_described_and_dense_values_fit_their_transform() {
    let schema = preset::synthetic(ArchKind::Dcn, 4, shape(Some(5)));
    let lengths = |text: &str| {
        let (batch, _) = all(&schema, text, 100);
        batch.features[1].offsets.windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>()
    };
    assert!(lengths("rows=300,lengths=max").iter().all(|&n| n == 5));
    assert!(lengths("rows=300,lengths=2").iter().all(|&n| n == 2));
    let mut uniform = lengths("rows=300");
    uniform.sort_unstable();
    uniform.dedup();
    assert_eq!(uniform, [0, 1, 2, 3, 4, 5]);
    let criteo = preset::criteo(ArchKind::Dlrm, 4, 100);
    let (batch, _) = all(&criteo, "rows=2000", 100);
    let mean = batch.dense.iter().sum::<f32>() / batch.dense.len() as f32;
    assert!((1.5..2.5).contains(&mean), "{mean}");
}

#[test]
fn several_descriptions_are_read_one_after_the_other() {
    let schema = preset::synthetic(ArchKind::Dcn, 4, shape(None));
    let paths = ["rows=10,seed=1".into(), "rows=0".into(), "rows=5,seed=2".into()];
    let mut reader = open_data(Format::Synthetic, &paths, &schema, ReadOptions::default()).unwrap();
    let mut raw = RawBatch::default();
    assert_eq!(reader.read(12, &mut raw).unwrap(), 12);
    assert_eq!(reader.read(12, &mut raw).unwrap(), 3);
    assert_eq!(reader.read(12, &mut raw).unwrap(), 0);
}

#[test]
fn a_wrong_description_is_refused_with_its_reason() {
    let schema = preset::synthetic(ArchKind::Dcn, 4, shape(None));
    for (text, reason) in [
        ("rows", "expected key=value"),
        ("seed=1", "rows is missing"),
        ("rows=x", "rows: expected a whole number, got \"x\""),
        ("rows=1,rows=2", "rows occurs twice"),
        ("rows=1,colour=red", "unknown key \"colour\""),
        ("rows=1,skew=steep", "skew: expected uniform, low"),
        ("rows=1,lengths=-1", "lengths: expected"),
    ] {
        let refused = open_data(Format::Synthetic, &[text.into()], &schema, ReadOptions::default());
        let message = refused.err().unwrap().to_string();
        assert!(message.contains(reason), "{text}: {message}");
    }
}

proptest! {
    #[test]
    fn samples_do_not_depend_on_the_batch_size(
        seed: u64, chunk in 1..70usize, max in prop::option::of(1..6u32),
    ) {
        let schema = preset::synthetic(ArchKind::Deepfm, 4, shape(max));
        let text = format!("rows=60,seed={seed},skew=1.1");
        prop_assert_eq!(all(&schema, &text, chunk), all(&schema, &text, 60));
    }
}
