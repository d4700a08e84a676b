//! A server listens and answers before its models are loaded, and says that they are loading.

use std::fs::{self, File};
use std::path::Path;

use flechette::schema::preset::ArchKind;
use flechette::server::inference::ModelMetadataRequest;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::proto::PredictRequest;
use flechette::server::proto::ctr_client::CtrClient;
use serde_json::json;
use tonic::Code;

use super::readiness::{call, index, is_ready};
use crate::program::{Served, Workshop, run};
use crate::serving::channel;
use crate::switching::{publish, wait};

/// A trained model, `dlrm`, whose first version cannot be opened until the file is dropped: its directory is
/// locked as if it were being removed. The server waits 10 seconds for that lock.
fn held() -> (Workshop, File) {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let version = File::open(Path::new(&workshop.models).join("dlrm/1")).unwrap();
    version.lock().unwrap();
    (workshop, version)
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
