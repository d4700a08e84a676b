//! `flechette load` counts latency from when a request was due, accounts for every request, and fails if
//! requests fail.

use std::process::Stdio;
use std::time::Duration;

use flechette::schema::preset::ArchKind;
use serde_json::json;

use crate::program::{Served, Workshop, flechette, run_json};
use crate::switching::wait;

#[test]
fn open_loop_latency_counts_from_when_a_request_was_due() {
    let workshop = Workshop::new(500, 64);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    let line = format!(
        "load --addr {url} --model dlrm --format criteo-tsv {valid} --batch 1 --rate 100 --seconds 8 \
         --timeout 60 --json"
    );
    let mut load = flechette().args(line.split_whitespace()).stdout(Stdio::piped()).spawn().unwrap();
    let scored = || served.sum("flechette_requests_total", "dlrm");
    while scored() < 20.0 {
        assert!(load.try_wait().unwrap().is_none(), "load ended before it was stopped");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Stops `load` for two seconds. 200 of its 800 requests are due in that time, most of them at least half
    // a second before `load` continues.
    let signal = |name: &str| {
        let sent = std::process::Command::new("kill").args([name, &load.id().to_string()]).status().unwrap();
        assert!(sent.success());
    };
    signal("-STOP");
    std::thread::sleep(Duration::from_secs(2));
    signal("-CONT");
    let output = load.wait_with_output().unwrap();
    let reported: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&reported["sent"], &reported["ok"]), (&json!(800), &json!(800)), "{reported}");
    // This holds on a machine of any speed, because these requests waited while `load` was stopped.
    assert!(reported["p90_us"].as_u64().unwrap() >= 400_000, "{reported}");
}

#[test]
fn an_open_loop_accounts_for_every_request_that_was_due() {
    let workshop = Workshop::new(300, 300);
    workshop.train(ArchKind::Dcn);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    let load = |flags: &str| {
        run_json(&format!("load --addr {url} --model dcn --format criteo-tsv {valid} --json {flags}"))
    };
    let reported = load("--batch 16 --rate 200 --seconds 1 --warmup 0.1 --timeout 60");
    assert_eq!(
        (&reported["sent"], &reported["unsent"], &reported["ok"]),
        (&200.into(), &0.into(), &200.into()),
        "{reported}"
    );
    assert_eq!((&reported["rows"], &reported["mode"]), (&3200.into(), &"open".into()));
    assert_eq!(reported["goodput_per_s"], 200.0, "all were due in one second: {reported}");
    let crowded = load("--batch 300 --rate 20000 --seconds 1 --outstanding 2");
    let number = |key: &str| crowded[key].as_u64().unwrap();
    assert_eq!(number("sent") + number("unsent"), 20_000);
    assert!(number("unsent") > 0 && number("ok") > 0, "{crowded}");
}

#[test]
fn load_fails_and_counts_if_requests_fail() {
    let workshop = Workshop::new(300, 100);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    // The server stops while requests are being sent, so the later ones fail.
    let line = format!(
        "load --addr {url} --model dlrm --format criteo-tsv {valid} --batch 8 --concurrency 2 --seconds 15 \
         --json"
    );
    let mut load = flechette();
    let load = load.args(line.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let load = load.spawn().unwrap();
    wait("requests are answered", || served.sum("flechette_requests_total", "dlrm") >= 20.0);
    served.terminate();
    served.ended();
    let output = load.wait_with_output().unwrap();
    let (reported, error): (serde_json::Value, _) =
        (serde_json::from_slice(&output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1), "{error}");
    let (failed, sent) = (&reported["failed"], &reported["sent"]);
    let failed = format!("error: {url}: {failed} of {sent} requests failed, the first with ");
    assert!(error.starts_with(&failed) && reported["failed"] != 0, "{error}");
}
