use std::collections::BTreeMap;

use super::*;

#[test]
fn every_request_is_counted_once() {
    let mut tally = Tally::new().unwrap();
    let scored = PredictResponse { scores: vec![0.5; 3], version: 2, ..PredictResponse::default() };
    tally.take(Ok(scored), Duration::from_micros(700));
    tally.take(Err(Status::unavailable("gone")), Duration::ZERO);
    tally.take(Err(Status::unavailable("gone again")), Duration::ZERO);
    tally.take(Err(Status::deadline_exceeded("late")), Duration::ZERO);
    assert_eq!((tally.ok, tally.samples, tally.failed(), tally.version), (1, 3, 3, 2));
    assert_eq!(tally.errors, BTreeMap::from([("DEADLINE_EXCEEDED", 1), ("UNAVAILABLE", 2)]));
    assert_eq!(tally.first_error.as_ref().unwrap().message(), "gone");
    assert_eq!((tally.latency_us.len(), tally.latency_us.max()), (1, 700));
}

#[test]
fn a_failed_request_makes_the_command_fail() {
    let mut tally = Tally::new().unwrap();
    tally.take(
        Ok(PredictResponse { scores: vec![0.5], version: 1, ..PredictResponse::default() }),
        Duration::ZERO,
    );
    assert!(tally.result().is_ok());
    tally.take(Err(Status::resource_exhausted("full")), Duration::ZERO);
    let error = tally.result().unwrap_err().to_string();
    assert_eq!(error, "1 of 2 requests failed, the first with RESOURCE_EXHAUSTED: full");
}
