//! The life of `serve`: what it answers before its models are loaded, models that cannot be loaded, and its
//! end.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::repository_index_response::ModelIndex;
use flechette::server::inference::{ModelMetadataRequest, RepositoryIndexRequest};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{GetModelRequest, PredictRequest};
use flechette::types::Batch;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tonic::Code;

use crate::fake::LIMIT;
use crate::program::{Served, Workshop, flechette, run, run_failing, run_json};
use crate::serving::channel;
use crate::switching::{publish, requests, wait};

/// A trained model, `dlrm`, whose first version cannot be opened until the file is dropped: its directory is
/// locked as if it were being removed. The server waits 10 seconds for that lock.
fn held() -> (Workshop, File) {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let version = File::open(Path::new(&workshop.models).join("dlrm/1")).unwrap();
    version.lock().unwrap();
    (workshop, version)
}

/// The status of a call for a model.
fn call(served: &Served, model: &str) -> Result<(), tonic::Status> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = CtrClient::new(channel(served.grpc).await);
        client.get_model(GetModelRequest { model: model.to_owned() }).await.map(drop)
    })
}

/// Name, version, state and reason of each row of KServe's list of models.
fn index(served: &Served) -> Vec<[String; 4]> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let index = runtime.block_on(async {
        let mut client = GrpcInferenceServiceClient::new(channel(served.grpc).await);
        client.repository_index(RepositoryIndexRequest::default()).await.unwrap().into_inner()
    });
    let row = |row: ModelIndex| [row.name, row.version, row.state, row.reason];
    index.models.into_iter().map(row).collect()
}

fn is_ready(served: &Served) -> bool {
    served.get("/readyz") == (200, "ready\n".to_owned())
}

#[test]
fn a_port_in_use_is_reported_before_a_model_is_loaded() {
    let (workshop, _held) = held();
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = holder.local_addr().unwrap();
    let line = format!("serve --models {} --grpc {busy} --http 127.0.0.1:0", workshop.models);
    let output = run(&line);
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("server.grpc") && log.contains("in use"), "{log}");
    assert!(!log.contains("refused"), "it waited for the model: {log}");
}

#[test]
fn a_server_answers_while_its_models_load_and_says_that_it_is_not_ready() {
    let (workshop, held) = held();
    let served = Served::listening(&workshop.models, "");
    assert_eq!(served.get("/healthz").0, 200);
    assert_eq!(served.get("/readyz"), (503, "loading: model dlrm\n".to_owned()));
    let status = call(&served, "dlrm").unwrap_err();
    assert!(status.code() == Code::Unavailable && status.message().contains("is loading"), "{status}");
    assert_eq!(call(&served, "other").unwrap_err().code(), Code::NotFound);
    let status = served.status();
    assert_eq!(status["not_ready"], "loading: model dlrm");
    let model = &status["models"][0];
    assert_eq!((&model["name"], &model["state"]), (&json!("dlrm"), &json!("loading")), "{model}");
    assert_eq!(index(&served), [["dlrm", "", "LOADING", ""]]);
    drop(held);
    wait("the model is loaded", || is_ready(&served));
    assert_eq!(index(&served), [["dlrm", "1", "READY", ""]]);
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

/// The status of a call with a version or a label of a model.
fn call_of(served: &Served, version: u64, label: &str) -> tonic::Status {
    let label = label.to_owned();
    let request = PredictRequest { model: "dlrm".to_owned(), version, label, ..PredictRequest::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { CtrClient::new(channel(served.grpc).await).predict(request).await.unwrap_err() })
}

#[test]
fn a_version_that_is_still_opened_is_loading_and_the_model_serves_another_one() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    publish(&workshop.models, 2, |_, _, value| value);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[models.dlrm]\nlabels = { old = 1 }\n").unwrap();
    let version = File::open(Path::new(&workshop.models).join("dlrm/1")).unwrap();
    version.lock().unwrap();
    let served = Served::listening(&workshop.models, &format!("--config {config}"));
    wait("version 2 is served", || call(&served, "dlrm").is_ok());
    assert_eq!(served.get("/readyz"), (503, "loading: model dlrm\n".to_owned()));
    for (version, label) in [(1, ""), (0, "old")] {
        let status = call_of(&served, version, label);
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert_eq!(status.message(), "version: model \"dlrm\" is still loading its versions");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let status = runtime.block_on(async {
        let mut client = GrpcInferenceServiceClient::new(channel(served.grpc).await);
        let request = ModelMetadataRequest { name: "dlrm".to_owned(), version: "1".to_owned() };
        client.model_metadata(request).await.unwrap_err()
    });
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    // The request itself is wrong.
    assert_eq!(call_of(&served, 2, "").code(), Code::InvalidArgument);
    drop(version);
    wait("all versions are loaded", || is_ready(&served));
    for (version, label) in [(1, ""), (0, "old")] {
        assert_eq!(call_of(&served, version, label).code(), Code::InvalidArgument);
    }
    assert_eq!(call_of(&served, 3, "").code(), Code::NotFound);
}

#[test]
fn a_model_that_is_added_to_a_running_server_is_loading_and_the_server_stays_ready() {
    let (workshop, held) = held();
    let (dir, away) = (Path::new(&workshop.models).join("dlrm"), workshop.path("away"));
    fs::rename(&dir, &away).unwrap();
    workshop.train(ArchKind::Dcn);
    let served = Served::start(&workshop.models, "");
    assert_eq!(call(&served, "dlrm").unwrap_err().code(), Code::NotFound);
    fs::rename(&away, &dir).unwrap();
    let rows = |version, state| [["dcn", "1", "READY", ""], ["dlrm", version, state, ""]];
    wait("the model loads", || index(&served) == rows("", "LOADING"));
    let status = call(&served, "dlrm").unwrap_err();
    assert!(status.code() == Code::Unavailable && status.message().contains("is loading"), "{status}");
    assert!(is_ready(&served));
    drop(held);
    wait("the model is loaded", || index(&served) == rows("1", "READY"));
    assert!(is_ready(&served));
}

#[test]
fn a_signal_ends_a_server_whose_models_still_load() {
    let (workshop, _held) = held();
    let served = Served::listening(&workshop.models, "");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    assert!(!log.contains("refused"), "it waited for the model: {log}");
}

/// Whether a process catches SIGTERM.
fn catches_sigterm(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (Signal::TERM.as_raw() - 1) & 1 == 1
}

#[test]
fn a_signal_ends_a_server_however_early_it_comes() {
    let workshop = Workshop::new(300, 50);
    fs::create_dir(&workshop.models).unwrap();
    let line = format!("serve --models {} --grpc 127.0.0.1:0 --http 127.0.0.1:0", workshop.models);
    for _ in 0..10 {
        let mut child = flechette().args(line.split(' ')).stderr(Stdio::null()).spawn().unwrap();
        while !catches_sigterm(child.id()) {
            assert!(child.try_wait().unwrap().is_none(), "it has ended");
        }
        // A new process for this would come too late.
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let ended = (0..6000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            child.try_wait().unwrap()
        });
        let _ = child.kill();
        assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    }
}

#[test]
fn a_model_without_a_good_version_is_named_and_the_others_are_served() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    workshop.train(ArchKind::Dcn);
    let manifest = Path::new(&workshop.models).join("dcn/1/MANIFEST.json");
    let away = PathBuf::from(workshop.path("MANIFEST.json"));
    fs::rename(&manifest, &away).unwrap();
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    let (code, text) = served.get("/readyz");
    let lines: Vec<&str> = text.lines().collect();
    assert!(code == 200 && lines.len() == 2 && lines[0] == "ready", "{text}");
    let reason = lines[1].strip_prefix("not served: model dcn: no good version").expect(&text);
    assert!(reason.contains("MANIFEST.json"), "{text}");
    let status = served.status();
    let models = status["models"].as_array().unwrap();
    let dcn = models.iter().find(|model| model["name"] == "dcn").unwrap();
    let reason = dcn["reason"].as_str().unwrap();
    assert!(dcn["state"] == "refused" && reason.contains("MANIFEST.json"), "{dcn}");
    let status = call(&served, "dcn").unwrap_err();
    let unavailable = status.code() == Code::Unavailable;
    assert!(unavailable && status.message().contains("could not be loaded"), "{status}");
    let rows = index(&served);
    let [[name, version, state, why], other] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!([name, version, state].map(String::as_str), ["dcn", "", "UNAVAILABLE"]);
    assert_eq!((why.as_str(), other), (reason, &["dlrm", "1", "READY", ""].map(str::to_owned)));

    fs::rename(&away, &manifest).unwrap();
    wait("the model is served", || is_ready(&served));
    assert_eq!(index(&served), [["dcn", "1", "READY", ""], ["dlrm", "1", "READY", ""]]);
    assert_eq!(served.score("dcn", &workshop.valid, "")["version"], 1);
    served.terminate();
    let (_, log) = served.ended();
    let refused: Vec<_> = log.lines().filter(|line| line.contains("model refused")).collect();
    assert!(refused.len() == 1 && refused[0].contains("model=\"dcn\""), "{log}");
}

#[test]
fn a_directory_that_cannot_be_read_is_named_and_the_models_beside_it_are_served() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let models = Path::new(&workshop.models);
    fs::create_dir(models.join("lost+found")).unwrap();
    // Also root cannot read a link to itself.
    std::os::unix::fs::symlink("loop", models.join("loop")).unwrap();
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    let (code, text) = served.get("/readyz");
    let lines: Vec<&str> = text.lines().collect();
    assert!(code == 200 && lines.len() == 2 && lines[0] == "ready", "{text}");
    assert!(lines[1].starts_with("not served: model loop: ") && lines[1].contains("models/loop"), "{text}");
    let listed = run(&format!("versions --models {} --json", workshop.models));
    let versions: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(versions["models"][0]["name"], "dlrm");
    assert!(String::from_utf8_lossy(&listed.stderr).contains("models/loop"), "{listed:?}");
    assert_eq!(listed.status.code(), Some(2));
    // New versions and new models are still found.
    workshop.train(ArchKind::Dlrm);
    workshop.train(ArchKind::Dcn);
    let ready = [["dcn", "1", "READY"], ["dlrm", "2", "READY"]];
    wait("the new versions are served", || {
        let index = index(&served);
        ready.iter().all(|row| index.iter().any(|found| found[..3] == *row))
    });
}

#[test]
fn a_server_without_a_good_version_of_any_model_is_not_ready_and_waits_for_one() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    fs::remove_file(Path::new(&workshop.models).join("dlrm/1/MANIFEST.json")).unwrap();
    let served = Served::start(&workshop.models, "");
    let (code, text) = served.get("/readyz");
    assert!(code == 503 && text.starts_with("no model is served\nnot served: model dlrm: "), "{text}");
    workshop.train(ArchKind::Dlrm);
    wait("the model is served", || is_ready(&served));
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 2);
}

#[test]
fn a_server_of_an_empty_directory_waits_for_a_model() {
    let workshop = Workshop::new(300, 50);
    fs::create_dir(&workshop.models).unwrap();
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.get("/readyz"), (503, "no model is served\n".to_owned()));
    assert_eq!(served.get("/healthz").0, 200);
    workshop.train(ArchKind::Dlrm);
    wait("the model is served", || is_ready(&served));
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

#[test]
fn a_setting_that_fits_no_model_ends_the_server() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let flags = "--grpc 127.0.0.1:0 --http 127.0.0.1:0 --cache-mode on --cache-bytes 1";
    let error = run_failing(2, &format!("serve --models {} {flags}", workshop.models));
    assert!(error.contains("model \"dlrm\"") && error.contains("cache"), "{error}");
}

#[test]
fn weights_that_are_not_finite_are_refused_with_the_name_of_their_tensor() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let with = |bad: f32| {
        move |file: &str, i: usize, value: f32| if file.starts_with("dense") && i == 3 { bad } else { value }
    };
    publish(&workshop.models, 2, with(f32::NAN));
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    publish(&workshop.models, 3, with(f32::INFINITY));
    wait("it is refused", || served.sum("flechette_switches_refused_total", "dlrm") == 2.0);
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    served.terminate();
    let (_, log) = served.ended();
    for version in ["version=2", "version=3"] {
        let refused = |line: &&str| line.contains("version refused") && line.contains(version);
        let line = log.lines().find(refused).expect(&log);
        assert!(line.contains("tensor \"") && line.contains("expected finite weights"), "{line}");
    }
}

#[test]
fn rows_that_are_not_finite_are_refused_with_their_table_and_number() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let with = |bad: f32| {
        // Rows have 8 elements.
        move |file: &str, i: usize, value: f32| {
            if file.ends_with("C3.safetensors") && i == 13 { bad } else { value }
        }
    };
    publish(&workshop.models, 2, with(f32::NAN));
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    publish(&workshop.models, 3, with(f32::INFINITY));
    wait("it is refused", || served.sum("flechette_switches_refused_total", "dlrm") == 2.0);
    served.terminate();
    let (_, log) = served.ended();
    for version in ["version=2", "version=3"] {
        let refused = |line: &&str| line.contains("version refused") && line.contains(version);
        let line = log.lines().find(refused).expect(&log);
        let words = "C3.safetensors: row 1: element 5: expected a finite number";
        assert!(line.contains(words), "{line}");
    }
}

#[test]
fn clients_that_follow_readyz_lose_no_call_when_another_server_takes_over() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    let settings = "[server]\ndrain_delay_seconds = 10\n[batcher]\ndefault_deadline_ms = 3600000\n";
    fs::write(&config, settings).unwrap();
    let [old, new] = [(); 2].map(|()| Served::start(&workshop.models, &format!("--config {config}")));
    let (grpc, moved, stop) = ([old.grpc, new.grpc], AtomicBool::new(false), AtomicBool::new(false));
    let call = |requests: Vec<(PredictRequest, Batch)>| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut clients = Vec::new();
            for address in grpc {
                clients.push(CtrClient::new(channel(address).await));
            }
            for (calls, (request, _)) in requests.iter().cycle().enumerate() {
                if stop.load(Ordering::SeqCst) {
                    return calls;
                }
                let server = usize::from(moved.load(Ordering::SeqCst));
                let answer = tokio::time::timeout(LIMIT, clients[server].predict(request.clone())).await;
                answer
                    .expect("an answer in time")
                    .unwrap_or_else(|status| panic!("call {calls} of server {server}: {status}"));
            }
            unreachable!("calls do not end")
        })
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3).map(|_| scope.spawn(|| call(requests(&workshop)))).collect();
        std::thread::sleep(Duration::from_millis(300));
        old.terminate();
        while old.get("/readyz").0 == 200 {
            std::thread::sleep(Duration::from_millis(100));
        }
        moved.store(true, Ordering::SeqCst);
        let (status, log) = old.ended();
        assert!(status.success(), "{log}");
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, Ordering::SeqCst);
        let calls: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        println!("{calls} calls");
    });
    assert!(new.sum("flechette_requests_total", "dlrm") > 0.0);
}

#[test]
fn a_server_that_will_drain_serves_on_for_the_delay_but_is_not_ready() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[server]\ndrain_delay_seconds = 15\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let begun = Instant::now();
    served.terminate();
    wait("it is not ready", || served.get("/readyz") == (503, "draining\n".to_owned()));
    // On a new connection.
    served.score("dlrm", &workshop.valid, "");
    let (status, log) = served.ended();
    assert!(status.success() && log.contains("unfinished=0"), "{log}");
    assert!(begun.elapsed() >= Duration::from_secs(15), "{log}");
}

#[test]
fn a_second_signal_ends_a_server_at_once() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[server]\ndrain_delay_seconds = 600\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    served.terminate();
    wait("it is not ready", || served.get("/readyz").0 == 503);
    std::thread::sleep(Duration::from_millis(500));
    served.terminate();
    assert_eq!(served.ended().0.code(), Some(130));
}

#[test]
fn a_signal_to_a_server_and_at_once_to_its_group_is_one_request_to_end() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    served.terminate();
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && log.contains("unfinished=0"), "{status}: {log}");
}

#[test]
fn a_hangup_reloads_the_settings_that_can_change_and_names_the_others() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[models]\nwatch_seconds = 0\n").unwrap();
    let dcn = Path::new(&workshop.models).join("dcn/1");
    fs::create_dir_all(&dcn).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    served.said("model refused; models.watch_seconds is 0, so a client must load it", 1);
    fs::remove_dir_all(dcn.parent().unwrap()).unwrap();
    workshop.train(ArchKind::Dlrm);
    let log = "[log]\nlevel = \"info,h2=off\"\nslow_seconds = 0\n";
    let changed = format!("[models]\nwatch_seconds = 1\n[server]\nmax_samples = 7\n{log}");
    fs::write(&config, &changed).unwrap();
    served.signal("-HUP");
    let version = || served.metric("flechette_serving_version", &["model=\"dlrm\""]);
    wait("the new version is taken over", || version() == 2.0);

    fs::write(&config, "[models]\nwatch_second = 0\n").unwrap();
    served.signal("-HUP");
    workshop.train(ArchKind::Dlrm);
    wait("the directory is still watched", || version() == 3.0);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    for words in [
        "SIGHUP: settings changed changed=\"models.watch_seconds, log.level, log.slow_seconds\"",
        "only a restart applies them settings=\"server.max_samples\"",
        "SIGHUP: the settings are wrong, so nothing changes",
        ":2: unknown key models.watch_second; did you mean models.watch_seconds?",
    ] {
        assert!(log.contains(words), "{words}: {log}");
    }
}

#[test]
fn a_hangup_before_the_settings_are_read_reloads_them_later() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let pipe = workshop.path("settings");
    // The pipe opens when the server reads its settings, and another one in its place when it reloads them.
    let settings = |slow: u32| format!("printf '[log]\\nslow_seconds = {slow}\\n'");
    // The writer must not keep the server's log open: if the server ends, nothing reads the pipe.
    let setup = format!(
        "mkfifo {pipe} {pipe}.next && {{ \
         (exec 2> /dev/null 3> {pipe}; kill -HUP $$; {} >&3; mv {pipe}.next {pipe}; exec 3>&-; \
         {} > {pipe}) & }}",
        settings(1),
        settings(2)
    );
    let served = Served::start_in(&setup, &workshop.models, &format!("--config {pipe}"));
    served.said("SIGHUP: settings changed changed=\"log.slow_seconds\"", 1);
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

#[test]
fn an_unknown_name_is_refused_wherever_it_is_given() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let (models, file) = (&workshop.models, workshop.path("serve.toml"));
    fs::write(&file, "[server]\nmax_sampels = 5\n").unwrap();
    let error = run_failing(2, &format!("serve --models {models} --config {file}"));
    let words = format!("{file}:2: unknown key server.max_sampels; did you mean server.max_samples?");
    assert!(error.contains(&words), "{error}");
    let mut serve = flechette();
    let serve = serve.args(["serve", "--models", models]).env("FLECHETTE_SERVER_MAX_SAMPLE", "5");
    let output = serve.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.contains("FLECHETTE_SERVER_MAX_SAMPLES?"), "{error}");
    let output = run(&format!("serve --model {models}"));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.contains("'--models'"), "{error}");
}

#[test]
fn settings_can_be_checked_and_printed_without_a_server() {
    let workshop = Workshop::new(1, 1);
    let file = workshop.path("serve.toml");
    fs::write(&file, "[server]\nmodels = \"/nowhere\"\nhttp = \"127.0.0.1:1\"\n").unwrap();
    let valid = run(&format!("config check --config {file}"));
    assert!(valid.status.success() && valid.stdout == b"the settings are valid\n", "{valid:?}");
    let valid = run_json(&format!("config check --config {file} --json"));
    assert_eq!(valid, json!({"valid": true, "errors": [], "warnings": []}));
    for (grpc, warns) in [("0.0.0.0:0", true), ("[::]:0", true), ("127.0.0.2:0", false)] {
        let report = run_json(&format!("config check --config {file} --grpc {grpc} --json"));
        let warnings = report["warnings"].as_array().unwrap();
        assert_eq!(warnings.len(), usize::from(warns), "{report}");
        assert!(warnings.iter().all(|text| text.as_str().unwrap().contains("give auth.admin")), "{report}");
    }
    let printed = run(&format!("config print --config {file} --http 127.0.0.1:2 --cache-bytes 1MiB"));
    let printed = String::from_utf8(printed.stdout).unwrap();
    for line in [
        &format!("models = \"/nowhere\"  # file {file}:2"),
        "http = \"127.0.0.1:2\"  # flag --http",
        "bytes = \"1MiB\"  # flag --cache-bytes",
        "level = \"info\"  # default",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line}: {printed}");
    }
    fs::write(&file, "[servers]\n[cache]\nmode = \"maybe\"\n").unwrap();
    let wrong = run(&format!("config check --config {file} --grpc nowhere --json"));
    let report: Value = serde_json::from_slice(&wrong.stdout).unwrap();
    assert_eq!(
        (&report["valid"], report["errors"].as_array().unwrap().len()),
        (&json!(false), 3),
        "{report}"
    );
    let errors = String::from_utf8(wrong.stderr).unwrap();
    let words = ["unknown section servers; did you mean server?", "server.grpc (flag --grpc)", "cache.mode"];
    assert_eq!((wrong.status.code(), errors.lines().count()), (Some(2), 3), "{errors}");
    assert!(
        errors.lines().zip(words).all(|(line, words)| line.starts_with("error: ") && line.contains(words))
    );
}

#[test]
fn the_files_that_the_settings_name_can_be_checked_before_a_server_reads_them() {
    let workshop = Workshop::new(1, 1);
    let [file, tokens] = ["serve.toml", "tokens"].map(|name| workshop.path(name));
    let tls = "[tls]\ncertificate = \"/nowhere/certificate\"\nkey = \"/nowhere/key\"\n";
    fs::write(&file, format!("[server]\nmodels = \"/nowhere\"\n{tls}[auth]\npredict = \"{tokens}\"\n"))
        .unwrap();
    fs::write(&tokens, "short\n").unwrap();
    let check = format!("config check --config {file}");
    assert!(run(&check).status.success(), "they may be on another machine");
    let wrong = run(&format!("{check} --files"));
    let errors = String::from_utf8(wrong.stderr).unwrap();
    assert_eq!((wrong.status.code(), errors.lines().count()), (Some(2), 2), "{errors}");
    assert!(errors.contains("/nowhere/certificate") && errors.contains("auth.predict"), "{errors}");
}
