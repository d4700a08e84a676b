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
