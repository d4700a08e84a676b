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
    assert_eq!((tally.ok, tally.samples, tally.failed()), (1, 3, 3));
    assert_eq!(tally.versions, [2].into());
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
    assert!(tally.result("http://a:1").is_ok());
    tally.take(Err(Status::resource_exhausted("full")), Duration::ZERO);
    let error = tally.result("http://a:1").unwrap_err().to_string();
    assert_eq!(error, "http://a:1: 1 of 2 requests failed, the first with RESOURCE_EXHAUSTED: full");
}

/// A tally of scored requests with these latencies.
fn scored_after(millis: &[u64]) -> Tally {
    let mut tally = Tally::new().unwrap();
    for &millis in millis {
        let scored = PredictResponse { scores: vec![0.5], version: 1, ..PredictResponse::default() };
        tally.take(Ok(scored), Duration::from_millis(millis));
    }
    tally
}

#[test]
fn scored_requests_within_a_time_are_counted_and_failed_ones_never() {
    let mut tally = scored_after(&[0, 10, 100, 110, 5000]);
    tally.take(Err(Status::deadline_exceeded("late")), Duration::from_millis(1));
    let counts = [0, 9, 10, 99, 100, 4000, 6000].map(|millis| tally.within(Duration::from_millis(millis)));
    assert_eq!(counts, [1, 1, 2, 2, 3, 4, 5]);
    assert_eq!(Tally::new().unwrap().within(Duration::from_secs(1)), 0);
}

/// A report of 30 requests that were asked to be sent for 2 seconds, and of which 20 were scored in time. The
/// last answer came after 4 seconds.
fn report(rate: Option<f64>) -> Report {
    let tally = scored_after(&[[50; 20].as_slice(), &[2000; 10]].concat());
    let (mode, timeout) = ("some", Duration::from_secs(1));
    Report { mode, batch: 1, rate, asked: 2.0, seconds: 4.0, timeout, tally }
}

#[test]
fn the_goodput_of_an_open_loop_is_by_the_time_that_was_asked_for_and_that_of_a_closed_loop_by_the_whole() {
    for (rate, goodput) in [(Some(15.0), 10.0), (None, 5.0)] {
        let report = report(rate);
        assert_eq!((report.goodput_per_s(), report.requests_per_s()), (goodput, 7.5));
        assert_eq!(report.json()["goodput_per_s"], goodput);
    }
}

#[test]
fn the_text_of_a_report_has_the_goodput_also_if_no_request_failed() {
    let text = report(Some(15.0)).text();
    assert!(text.contains("\ngoodput: 10.0 requests/s were scored within --timeout\n"), "{text}");
}
