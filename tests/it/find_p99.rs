//! `flechette load --find-p99`: the highest rate within a limit of latency.

use serde_json::Value;

use crate::program::{Served, Workshop, run, run_failing};
use crate::switching::wait;
use flechette::schema::preset::ArchKind;

#[test]
fn the_highest_rate_that_passed_is_found_close_below_one_that_failed() {
    let workshop = Workshop::new(500, 300);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    // So that a rate that is too high is refused soon, on a machine of any speed.
    std::fs::write(
        &config,
        "[batcher]\nmax_samples = 64\nqueue_samples = 64\nworkers = 1\n[server]\nmax_samples = 64\n",
    )
    .unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let load = format!(
        "load --addr {} --model dlrm --format criteo-tsv {} --batch 32 --seconds 0.3 --find-p99",
        served.url(),
        workshop.valid
    );
    let output = run(&format!("{load} 2s --json"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["p99_limit_us"], 2_000_000);
    let passes = |window: &&Value| {
        let zero = |key: &str| window[key] == 0;
        zero("failed") && zero("unsent") && window["p99_us"].as_u64().unwrap() <= 2_000_000
    };
    let (passed, failed): (Vec<_>, Vec<_>) = json["windows"].as_array().unwrap().iter().partition(passes);
    let rates = |windows: &[&Value]| -> Vec<f64> {
        windows.iter().map(|window| window["rate"].as_f64().unwrap()).collect()
    };
    let highest = rates(&passed).into_iter().fold(0.0, f64::max);
    // A rate has failed when two windows have failed.
    let mut twice = rates(&failed);
    twice.retain(|rate| rates(&failed).iter().filter(|other| *other == rate).count() == 2);
    let lowest = twice.into_iter().fold(f64::INFINITY, f64::min);
    assert_eq!(json["found"]["rate"], highest, "{json}");
    assert!(highest < lowest && lowest <= 1.05 * highest, "{json}");

    let text = String::from_utf8(run(&format!("{load} 2000ms")).stdout).unwrap();
    assert!(text.contains("p99 within 2s: ") && text.contains("passes") && text.contains("fails"), "{text}");
    assert!(text.lines().all(|line| line.len() <= 100), "{text}");

    let error = run_failing(2, &format!("{load} 20"));
    assert!(error.contains("expected a time from 0.001s to 1000000s, such as 20ms"), "{error}");
    let error = run_failing(2, &format!("{load} 20ms --rate 5"));
    assert!(error.contains("cannot be used with"), "{error}");
}

#[test]
fn a_search_ends_with_the_error_of_a_request_that_failed_for_another_reason_than_load() {
    let workshop = Workshop::new(300, 100);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let line = format!(
        "load --addr {} --model dlrm --format criteo-tsv {} --batch 8 --find-p99 10s --seconds 20",
        served.url(),
        workshop.valid
    );
    let stopping = std::thread::spawn(move || {
        wait("requests are answered", || served.sum("flechette_requests_total", "dlrm") >= 50.0);
        drop(served);
    });
    let error = run_failing(1, &line);
    // On a busy machine, the first one may be a request whose time was over.
    let first = ["UN", "CANCELLED"].map(|code| format!("requests failed, the first with {code}"));
    assert!(first.iter().any(|text| error.contains(text)), "{error}");
    stopping.join().unwrap();
}
