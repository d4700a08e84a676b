use super::*;
use crate::server::proto::AbsentIds;

#[test]
fn a_summary_adds_up_its_answers() {
    let mut summary = Summary::new().unwrap();
    for (score, label, us) in [(0.75, 1.0, 40), (0.25, 0.0, 90_000)] {
        let absent = vec![AbsentIds { feature: "C1".into(), count: 2 }];
        let response = PredictResponse { scores: vec![score], version: 3, absent };
        let took = Duration::from_micros(us);
        summary.take(Answer { response, labels: Some(vec![label]), took }, None).unwrap();
    }
    summary.seconds = 2.0;
    let json = summary.json();
    let whole = |key: &str| json[key].as_u64().unwrap();
    assert_eq!((whole("rows"), whole("requests"), whole("version"), whole("absent")), (2, 2, 3, 4));
    assert_eq!((json["auc"].as_f64(), json["samples_per_s"].as_f64()), (Some(1.0), Some(1.0)));
    assert_eq!(whole("p50_us"), 40);
    assert!(whole("max_us") >= 90_000, "{json}");

    let response = PredictResponse { scores: vec![0.5], version: 3, absent: vec![] };
    let unlabelled = Answer { response, labels: None, took: Duration::ZERO };
    summary.take(unlabelled, None).unwrap();
    assert!(summary.json()["auc"].is_null() && summary.json()["logloss"].is_null());
}

#[test]
fn scores_appear_under_their_name_only_when_all_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scores");
    let mut out = Output::create(&path).unwrap();
    out.write(&[0.1, 1e-9, 0.333_333_34]).unwrap();
    assert!(!path.exists());
    out.finish().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text, "0.1\n0.000000001\n0.33333334\n");
    let mut unfinished = Output::create(&path).unwrap();
    unfinished.write(&[0.9]).unwrap();
    drop(unfinished);
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(Output::create(dir.path()).is_err());
}
