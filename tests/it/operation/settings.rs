//! What settings of metrics, log, ports, device and cache do, and how wrong ones are reported.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use flechette::schema::preset::ArchKind;
use serde_json::{Value, json};

use crate::program::{Served, Workshop, flechette, metrics_page, run_failing, run_json};
use crate::train_data::interrupting::signal;

#[test]
fn without_metrics_a_server_scores_and_its_pages_say_so() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[server]\nmetrics = \"off\"").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let got = workshop.path("got.csv");
    served.score("dlrm", &workshop.valid, &format!("--out {got}"));
    assert_eq!(fs::read(got).unwrap(), fs::read(workshop.trained_scores(ArchKind::Dlrm)).unwrap());
    for path in ["/metrics", "/", "/status.json"] {
        let expected = (404, "metrics are not kept: server.metrics is off\n".to_owned());
        assert_eq!(served.get(path), expected, "{path}");
    }
    assert_eq!(served.get("/healthz").0, 200);
    assert_eq!(served.get("/readyz"), (200, "ready\n".to_owned()));
    served.terminate();
    assert!(served.ended().0.success());
}

/// The log of a server that scores one request, with a setting of the log.
fn log_with(name: &str, value: &str) -> Vec<String> {
    let workshop = Workshop::new(300, 16);
    workshop.train(ArchKind::Dlrm);
    let ports = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let mut serve = flechette();
    serve.args(["serve", "--models", &workshop.models]).args(ports).env(name, value);
    let mut serve = serve.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(serve.stderr.take().unwrap()).lines().map(Result::unwrap);
    let (mut log, mut grpc) = (Vec::new(), None);
    while !log.last().is_some_and(|line: &String| line.contains("serving")) {
        let line = lines.next().expect("it serves");
        let ports =
            line.split_once("listening on ").map(|(_, ports)| ports.split(' ').next().unwrap().to_owned());
        grpc = grpc.or(ports);
        log.push(line);
    }
    let (addr, valid) = (grpc.unwrap(), &workshop.valid);
    run_json(&format!("score --addr http://{addr} --model dlrm --format criteo-tsv {valid} --json"));
    signal(&serve, "-TERM");
    log.extend(lines);
    assert!(serve.wait().unwrap().success());
    log
}

#[test]
fn the_log_has_an_object_on_each_line_if_its_format_is_json() {
    let log = log_with("FLECHETTE_LOG_FORMAT", "json");
    let lines: Vec<Value> = log.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let serving = lines.iter().find(|line| line["message"] == "serving").unwrap();
    assert_eq!((&serving["level"], &serving["models"]), (&json!("INFO"), &json!(1)), "{serving}");
    for message in ["loaded", "tables opened"] {
        let line = lines.iter().find(|line| line["message"] == message).unwrap();
        assert_eq!(line["version"], json!(1), "{line}");
    }
}

#[test]
fn the_log_at_debug_has_a_line_for_each_request_and_none_for_each_frame() {
    let log = log_with("FLECHETTE_LOG_LEVEL", "debug");
    let request = |line: &&String| line.contains("request model=\"dlrm\"") && line.contains("code=Ok");
    assert_eq!(log.iter().filter(request).count(), 1, "{log:#?}");
    assert!(log.iter().all(|line| !line.contains("h2::") && !line.contains("hyper")), "{log:#?}");
}

#[test]
fn serve_reports_wrong_settings_in_one_line() {
    let workshop = Workshop::new(1, 1);
    fs::create_dir(&workshop.models).unwrap();
    let missing = workshop.path("nowhere");
    let error = run_failing(2, &format!("serve --models {missing}"));
    assert!(error.contains(&missing) && error.contains("no such directory"), "{error}");

    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = holder.local_addr().unwrap().to_string();
    for (flag, other, key) in [("--grpc", "--http", "server.grpc"), ("--http", "--grpc", "server.http")] {
        let models = &workshop.models;
        let error = run_failing(1, &format!("serve --models {models} {flag} {busy} {other} 127.0.0.1:0"));
        assert!(error.contains(key) && error.contains(&busy) && error.contains("in use"), "{error}");
    }
}

#[test]
fn cuda_without_a_gpu_is_refused_in_one_line() {
    let workshop = Workshop::new(1, 1);
    fs::create_dir(&workshop.models).unwrap();
    let error = run_failing(
        2,
        &format!("serve --models {} --device cuda --grpc 127.0.0.1:0 --http 127.0.0.1:0", workshop.models),
    );
    assert!(error.contains("cuda"), "{error}");
}

#[test]
fn auto_keeps_the_cache_off_if_tables_fit_in_memory_and_warns_of_a_size_without_effect() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    for (flags, warned) in [("", false), ("--cache-fraction 0.5", true)] {
        let served = Served::start(&workshop.models, flags);
        served.score("dlrm", &workshop.valid, "");
        let page = metrics_page(served.http);
        assert!(!page.contains("\nflechette_cache_"), "a series of a cache that is not there:\n{page}");
        served.terminate();
        let (_, log) = served.ended();
        assert_eq!(log.contains("cache.mode auto means off, because"), warned, "{log}");
    }
}

#[test]
fn the_metrics_page_shows_the_use_of_the_cache() {
    let workshop = Workshop::new(300, 3000);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "--cache-mode on --cache-fraction 0.02");
    let metric = |name: &str| served.metric(&format!("flechette_{name}"), &["model=\"dlrm\""]);
    let evicted = || {
        let tables = (1..=26).map(|table| format!("table=\"C{table}\""));
        tables.map(|table| served.metric("flechette_cache_evictions_total", &[&table])).sum::<f64>()
    };
    for _ in 0..200 {
        served.score("dlrm", &workshop.valid, "--batch 64");
        if evicted() > 0.0 {
            break;
        }
    }
    assert!(evicted() > 0.0);
    let [used, pool, capacity] =
        ["used", "pool", "capacity"].map(|bytes| metric(&format!("cache_{bytes}_bytes")));
    assert!(0.0 < used && used <= pool && pool < capacity, "{used} of {pool} in {capacity} bytes");
    let (entries, most) = (metric("cache_entries"), metric("cache_entries_max"));
    assert!(0.0 < entries && entries <= metric("cache_inserted_total") && 0.0 < most, "{entries} of {most}");
    for histogram in ["lookup_seconds", "dense_seconds"] {
        assert!(metric(&format!("{histogram}_count")) > 0.0, "{histogram}");
        assert!(metric(&format!("{histogram}_sum")) > 0.0, "{histogram}");
    }
}
