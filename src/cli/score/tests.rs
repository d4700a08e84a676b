use std::fs;

use super::*;
use crate::server::proto::AbsentIds;

#[test]
fn a_summary_is_the_sum_of_its_answers() {
    let mut summary = Summary::new().unwrap();
    for (score, label, us) in [(0.75, 1.0, 40), (0.25, 0.0, 90_000)] {
        let absent = vec![AbsentIds { feature: "C1".into(), count: 2 }];
        let response =
            PredictResponse { scores: vec![score], version: 3, absent, ..PredictResponse::default() };
        let took = Duration::from_micros(us);
        let rows = Rows { samples: 1, labels: Some(vec![label]), skips: vec![] };
        summary.take(Answer { response, rows, took }, None).unwrap();
    }
    summary.seconds = 2.0;
    let json = summary.json();
    let whole = |key: &str| json[key].as_u64().unwrap();
    assert_eq!((whole("rows"), whole("requests"), whole("version"), whole("absent")), (2, 2, 3, 4));
    assert_eq!((json["auc"].as_f64(), json["samples_per_s"].as_f64()), (Some(1.0), Some(1.0)));
    assert_eq!(whole("p50_us"), 40);
    assert!(whole("max_us") >= 90_000, "{json}");

    let response = PredictResponse { scores: vec![0.5], version: 3, ..PredictResponse::default() };
    let rows = Rows { samples: 1, labels: None, skips: vec![] };
    let unlabelled = Answer { response, rows, took: Duration::ZERO };
    summary.take(unlabelled, None).unwrap();
    assert!(summary.json()["auc"].is_null() && summary.json()["logloss"].is_null());
}

fn scored(scores: &[f32]) -> PredictResponse {
    PredictResponse { scores: scores.to_vec(), ..PredictResponse::default() }
}

#[test]
fn the_file_of_scores_appears_when_it_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scores");
    let mut out = ScoreFile::create(&path).unwrap();
    out.write(&scored(&[0.1, 1e-9, 0.333_333_34]), &[]).unwrap();
    assert!(!path.exists());
    out.finish().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text, "0.1\n0.000000001\n0.33333334\n");
    let mut unfinished = ScoreFile::create(&path).unwrap();
    unfinished.write(&scored(&[0.9]), &[]).unwrap();
    drop(unfinished);
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_skipped_line_keeps_its_place_among_the_scores() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scores");
    let mut out = ScoreFile::create(&path).unwrap();
    out.write(&scored(&[0.5, 0.25]), &[0, 1, 1]).unwrap();
    out.write(&PredictResponse { logits: vec![-2.5], ..scored(&[0.75]) }, &[1]).unwrap();
    out.write(&scored(&[]), &[0, 0]).unwrap();
    out.finish().unwrap();
    let lines = "nan 0.5 nan nan 0.25 0.75\t-2.5 nan nan nan ".replace(' ', "\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), lines);
}
