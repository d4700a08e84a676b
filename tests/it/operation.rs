//! The real program: damaged versions, wrong settings, a drain under load, many clients, and the errors of
//! `score` and `load`.

use std::error::Error as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use flechette::cli::client;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::preset::{self, ArchKind};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::types::RawBatch;
use serde_json::{Value, json};
use tonic::Code;

use crate::closed_pipes::closed;
use crate::program::{PATIENT, Served, Workshop, flechette, metrics_page, run, run_failing, run_json};
use crate::serving::channel;
use crate::switching::wait;
use crate::train_data::signal;

fn version_dir(models: &str, name: &str, version: u64) -> PathBuf {
    Path::new(models).join(name).join(version.to_string())
}

/// Changes a file of a version. The file is read-only, so it is replaced.
fn replace(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_version_whose_checkpoint_is_damaged_is_served_and_listed_as_one_that_cannot_be_continued() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let models = &workshop.models;
    let listed =
        || run_json(&format!("versions --models {models} --json"))["models"][0]["versions"][0].clone();
    assert_eq!(listed()["training_refused"], Value::Null);
    let damaged = version_dir(models, "dlrm", 1).join("checkpoint/tables/C4.safetensors");
    replace(&damaged, |bytes| *bytes.last_mut().unwrap() ^= 1);
    let one = listed();
    assert_eq!(one["good"], true);
    assert!(one["training_refused"].as_str().unwrap().contains("C4.safetensors: corrupt"), "{one}");
    let table = String::from_utf8(run(&format!("versions --models {models}")).stdout).unwrap();
    assert!(table.contains("training cannot continue from it: "), "{table}");
    let served = Served::start(models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

#[test]
fn damaged_versions_are_named_and_the_last_good_one_serves() {
    let workshop = Workshop::new(300, 50);
    for version in 1..=3 {
        assert_eq!(workshop.train(ArchKind::Dlrm)["version"], version);
    }
    let models = &workshop.models;
    let truncated = version_dir(models, "dlrm", 3).join("tables/C4.safetensors");
    replace(&truncated, |bytes| bytes.truncate(bytes.len() / 2));
    let corrupt = version_dir(models, "dlrm", 2).join("dense.safetensors");
    replace(&corrupt, |bytes| *bytes.last_mut().unwrap() ^= 1);
    let listed = |flags: &str| {
        let listed = run_json(&format!("versions --models {models} --json {flags}"));
        let versions = listed["models"][0]["versions"].as_array().unwrap();
        versions.iter().map(|one| (one["good"].clone(), one["bytes"].clone())).collect::<Vec<_>>()
    };
    let (checked, quick) = (listed(""), listed("--quick"));
    for (good, (checked, quick)) in [true, false, false].into_iter().zip(checked.into_iter().zip(quick)) {
        assert_eq!((checked.0, quick.0), (good.into(), Value::Null));
        assert!(checked.1.as_u64() > Some(0) && checked.1 == quick.1);
    }

    let served = Served::start(models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    assert_eq!(served.metric("flechette_newer_versions_refused", &[]), 2.0);
    assert_eq!(served.metric("flechette_switches_refused_total", &[]), 2.0);
    let (code, text) = served.get("/readyz");
    let older = "ready\nolder version: model dlrm serves version 1: version 2 is refused: ";
    assert!(code == 200 && text.starts_with(older) && text.contains("; version 3 is refused: "), "{text}");
    let status = served.status();
    let kinds: Vec<_> = status["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["loaded", "refused", "refused"], "{status}");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success());
    for (version, path, fault) in [(3, &truncated, "truncated"), (2, &corrupt, "corrupt")] {
        let of_version = |line: &&str| line.contains(&format!("version={version}"));
        assert_eq!(log.lines().filter(of_version).count(), 1, "{log}");
        let line = log.lines().find(of_version).unwrap();
        assert!(line.contains("version refused") && line.contains(fault), "{line}");
        assert!(line.contains(path.to_str().unwrap()), "{line}");
    }
}

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
    let (used, capacity) = (metric("cache_used_bytes"), metric("cache_capacity_bytes"));
    assert!(0.0 < used && used <= capacity, "{used} of {capacity} bytes");
    for histogram in ["lookup_seconds", "dense_seconds"] {
        assert!(metric(&format!("{histogram}_count")) > 0.0, "{histogram}");
        assert!(metric(&format!("{histogram}_sum")) > 0.0, "{histogram}");
    }
}

/// Whether the client library failed a call that the server never accepted. Either the call was not sent
/// before the connection closed, or its stream id is above the last that the draining server accepts (RFC
/// 9113, section 6.8). Such a status has a source; a status from the server has none.
fn not_taken_by_the_server(status: &tonic::Status) -> bool {
    let sources = std::iter::successors(status.source(), |&error| error.source());
    let past_the_last = |error: &h2::Error| {
        error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR)
    };
    let unsent = status.code() == Code::Cancelled && status.source().is_some();
    unsent || sources.filter_map(|error| error.downcast_ref()).any(past_the_last)
}

#[test]
fn a_drain_under_load_loses_no_request_and_exits_with_0() {
    let workshop = Workshop::new(500, 64);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start_in(PATIENT, &workshop.models, "");
    let schema = preset::criteo(ArchKind::Dlrm, 8, 1000);
    let mut raw = RawBatch::default();
    let valid = [PathBuf::from(&workshop.valid)];
    let mut reader = dataset::open(Format::CriteoTsv, &valid, &schema, ReadOptions::default()).unwrap();
    reader.read(64, &mut raw).unwrap();
    let request = client::request("dlrm", &schema, &raw);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let scored: usize = runtime.block_on(async {
        let mut clients = Vec::new();
        for _ in 0..16 {
            let (mut ctr, request) = (CtrClient::new(channel(served.grpc).await), request.clone());
            clients.push(tokio::spawn(async move {
                for scored in 0.. {
                    match ctr.predict(request.clone()).await {
                        Ok(answer) => assert_eq!(answer.into_inner().scores.len(), 64),
                        Err(status) => {
                            let unsent = not_taken_by_the_server(&status);
                            assert!(unsent || status.code() == Code::Unavailable, "{status:?}");
                            assert!(!status.message().is_empty());
                            return scored;
                        }
                    }
                }
                unreachable!("the server never ended")
            }));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        served.terminate();
        let mut scored = 0;
        for client in clients {
            scored += client.await.unwrap();
        }
        scored
    });
    let (status, log) = served.ended();
    assert!(status.success(), "{status}: {log}");
    assert!(scored > 0);
    assert!(log.contains("stopped") && log.contains("unfinished=0"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}

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
fn no_request_of_500_clients_is_lost() {
    let workshop = Workshop::new(500, 200);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    let output = run(&format!(
        "load --addr {url} --model dlrm --format criteo-tsv {valid} --batch 2 --concurrency 500 \
         --connections 500 --seconds 3 --timeout 60 --json"
    ));
    let reported: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |key: &str| reported[key].as_u64().unwrap_or_else(|| panic!("{key}: {reported}"));
    assert_eq!(number("sent"), number("ok") + number("failed"));
    assert!(number("ok") >= 500, "{reported}");
    // The time limit of a request is a minute.
    assert_eq!(reported["goodput_per_s"], reported["requests_per_s"], "{reported}");
    assert_eq!(number("rows"), 2 * number("ok"));
    assert_eq!(output.status.code(), Some(i32::from(number("failed") > 0)), "{reported}");
    let errors = reported["errors"].as_object().unwrap();
    assert!(errors.keys().all(|code| code == "RESOURCE_EXHAUSTED"), "{reported}");
    // The server also counts the GetModel call.
    let counted = served.metric("flechette_requests_total", &["model=\"dlrm\"", "code=\"OK\""]);
    assert_eq!(counted as u64, number("ok") + 1);
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
fn score_and_load_report_errors_in_one_line_and_leave_no_partial_file() {
    let workshop = Workshop::new(300, 300);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid, out) = (served.url(), &workshop.valid, workshop.path("out"));
    let broken = workshop.path("broken.tsv");
    fs::write(&broken, fs::read_to_string(valid).unwrap() + &"not a sample\n".repeat(200)).unwrap();
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    fs::write(&out, "as it was").unwrap();
    for (code, addr, model, file, more, words) in [
        (1, nobody.as_str(), "dlrm", valid.as_str(), "--json", "cannot connect"),
        (2, "localhost", "dlrm", valid, "--json", "--addr: expected http://HOST:PORT"),
        (2, &url, "none", valid, "--json", "no model \"none\""),
        (2, &url, "dlrm", "/nowhere.tsv", "--json", "/nowhere.tsv"),
        (2, &url, "dlrm", &broken, "--batch=16", "malformed"),
        (2, &url, "dlrm", valid, "--batch=5000", "at most 4096 samples, got 5000"),
    ] {
        let target = format!("--addr {addr} --model {model} --format criteo-tsv {file} {more}");
        let error = run_failing(code, &format!("score --out {out} {target}"));
        assert!(error.contains(words), "{error}");
        if file != broken {
            let error = run_failing(code, &format!("load --seconds 1 --rate 1 {target}"));
            assert!(error.contains(words), "{error}");
        }
    }
    assert_eq!(fs::read_to_string(&out).unwrap(), "as it was");
    let rest = format!("--addr {url} --model dlrm --format criteo-tsv {broken} --max-malformed 200 --json");
    assert_eq!(run_json(&format!("score {rest}"))["skipped"], 200);
    assert_eq!(run_json(&format!("load --seconds 0.1 --rate 10 --batch 16 {rest}"))["failed"], 0);
    let names = fs::read_dir(workshop.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let halves: Vec<_> = names.filter(|name| name.to_str().unwrap().ends_with(".tmp")).collect();
    assert_eq!(halves, Vec::<std::ffi::OsString>::new());
    for (flags, words) in [
        ("--rate 0", "--rate"),
        ("--rate 1 --concurrency 1", "cannot be used with"),
        ("", "required arguments"),
        ("--concurrency 0", "--concurrency"),
        ("--concurrency 1 --batch 400", "fewer samples than one request"),
    ] {
        let line = format!("load --seconds 1 --addr {url} --model dlrm --format criteo-tsv {valid} {flags}");
        let error = run_failing(2, &line);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn score_waits_while_the_queue_is_full() {
    let workshop = Workshop::new(300, 3000);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    // The queue has room for one request, and `score` sends eight at a time.
    let limits = "[server]\nmax_samples = 64\n[batcher]\nmax_samples = 64\nqueue_samples = 64\nworkers = 1\n";
    fs::write(&config, limits).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let out = workshop.path("out");
    let reported = served.score("dlrm", &workshop.valid, &format!("--batch 64 --out {out}"));
    assert_eq!(reported["rows"], 3000);
    assert!(fs::read(&out).unwrap() == fs::read(workshop.trained_scores(ArchKind::Dlrm)).unwrap());
    drop(served);

    fs::write(&config, "[server]\nmax_requests = 1\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let reported = served.score("dlrm", &workshop.valid, "");
    assert_eq!(reported["rows"], 3000);
}

#[test]
fn line_n_of_the_scores_belongs_to_line_n_of_the_data() {
    let workshop = Workshop::new(300, 100);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let valid = fs::read_to_string(&workshop.valid).unwrap();
    let mut lines: Vec<&str> = valid.lines().collect();
    for bad in [1, 7, 8, 9, 103] {
        lines.insert(bad, "not a sample");
    }
    lines.push("nor is this");
    let (broken, out) = (workshop.path("broken.tsv"), workshop.path("out"));
    fs::write(&broken, lines.join("\n")).unwrap();
    for batch in [1, 8, 1000] {
        let reported = served.score("dlrm", &broken, &format!("--out {out} --batch {batch}"));
        assert_eq!((&reported["rows"], &reported["skipped"]), (&100.into(), &6.into()));
        let scores = fs::read_to_string(&out).unwrap();
        assert_eq!(scores.lines().count(), lines.len());
        let trained = fs::read_to_string(workshop.trained_scores(ArchKind::Dlrm)).unwrap();
        let mut trained = trained.lines();
        for (line, score) in lines.iter().zip(scores.lines()) {
            let expected = if line.starts_with('n') { "nan" } else { trained.next().unwrap() };
            assert_eq!(score, expected, "{line}");
        }
    }
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

#[test]
fn a_closed_standard_output_is_no_error_of_score() {
    let workshop = Workshop::new(300, 300);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    let line = format!("score --addr {url} --model dlrm --format criteo-tsv {valid} --out /dev/stdout");
    let mut command = flechette();
    let command = command.args(line.split_whitespace()).stdout(closed()).stderr(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.as_str()), (Some(0), ""));
}
