//! Clients of the KServe service load and unload models of a running server.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use flechette::schema::preset::ArchKind;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::*;
use flechette::server::proto::SetLabelRequest;
use flechette::server::proto::ctr_client::CtrClient;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::program::{Served, Workshop, highest_version, run, run_failing, run_json};
use crate::serving::channel;
use crate::switching::{looks, publish_all_changed, requests, serves, wait};

const MODEL: &str = "dlrm";

/// A client of a server that runs as a process.
struct Repository {
    runtime: Runtime,
    client: GrpcInferenceServiceClient<Channel>,
}

impl Repository {
    fn of(served: &Served) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let client = GrpcInferenceServiceClient::new(runtime.block_on(channel(served.grpc)));
        Self { runtime, client }
    }

    fn load(&mut self, model: &str) -> Result<(), Status> {
        let request = RepositoryModelLoadRequest { model_name: model.to_owned(), ..Default::default() };
        self.runtime.block_on(self.client.repository_model_load(request)).map(drop)
    }

    fn unload(&mut self, model: &str) -> Result<(), Status> {
        let request = RepositoryModelUnloadRequest { model_name: model.to_owned(), ..Default::default() };
        self.runtime.block_on(self.client.repository_model_unload(request)).map(drop)
    }

    fn ready(&mut self, model: &str) -> bool {
        let request = ModelReadyRequest { name: model.to_owned(), version: String::new() };
        self.runtime.block_on(self.client.model_ready(request)).unwrap().into_inner().ready
    }

    /// Name, version and state of each model.
    fn index(&mut self) -> Vec<[String; 3]> {
        let index = self.runtime.block_on(self.client.repository_index(RepositoryIndexRequest::default()));
        index.unwrap().into_inner().models.into_iter().map(|m| [m.name, m.version, m.state]).collect()
    }

    /// Version and reason of each version of a served model that is refused.
    fn refusals(&mut self) -> Vec<(String, String)> {
        let index = self.runtime.block_on(self.client.repository_index(RepositoryIndexRequest::default()));
        let models = index.unwrap().into_inner().models.into_iter();
        let refused = models.filter(|model| model.state == "UNAVAILABLE" && model.name == MODEL);
        refused.map(|model| (model.version, model.reason)).collect()
    }
}

/// Files of a model that a process has mapped or open.
fn files_in_use(pid: u32, models: &str, model: &str) -> usize {
    let folder = format!("{}/", fs::canonicalize(models).unwrap().join(model).display());
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mapped = maps.lines().filter(|line| line.contains(&folder)).count();
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let open = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    mapped + open.filter(|path| path.starts_with(&folder)).count()
}

fn scores(served: &Served, workshop: &Workshop, model: &str) -> String {
    let out = workshop.path("served.scores");
    served.score(model, &workshop.valid, &format!("--out {out}"));
    fs::read_to_string(out).unwrap()
}

#[test]
fn an_unloaded_model_releases_its_files_and_comes_back_only_when_it_is_loaded() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    workshop.train(ArchKind::Deepfm);
    for cache in ["--cache-mode off", "--cache-mode on --cache-fraction 0.5"] {
        let served = Served::start(&workshop.models, cache);
        let mut repository = Repository::of(&served);
        let before = scores(&served, &workshop, MODEL);
        let in_use = || files_in_use(served.id(), &workshop.models, MODEL);
        assert!(in_use() > 0);
        repository.unload(MODEL).unwrap();
        // A thread that saves hot rows may have them for a moment longer.
        wait("the files are released", || in_use() == 0);
        assert!(!repository.ready(MODEL) && repository.ready("deepfm"));
        assert_eq!(repository.unload(MODEL).unwrap_err().code(), Code::NotFound);
        let index = [["deepfm", "1", "READY"], ["dlrm", "", "UNAVAILABLE"]];
        assert_eq!(repository.index(), index.map(|model| model.map(str::to_owned)));
        looks(&served, &workshop.models, 2);
        assert!(!repository.ready(MODEL));
        let own = fs::read_to_string(workshop.trained_scores(ArchKind::Deepfm)).unwrap();
        assert!(scores(&served, &workshop, "deepfm") == own, "the other model goes on");

        repository.load(MODEL).unwrap();
        assert!(repository.ready(MODEL));
        assert!(scores(&served, &workshop, MODEL) == before);
        assert!(in_use() > 0);
        let requests = served.metric("flechette_requests_total", &["model=\"dlrm\"", "code=\"OK\""]);
        assert!(requests >= 4.0, "counters go on: {requests}");
        served.terminate();
        let (status, log) = served.ended();
        assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
    }
}

#[test]
fn the_command_models_lists_unloads_and_loads() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "--cache-mode off");
    let line = |flags: &str| format!("models --addr {} {flags}", served.url());
    let models = |flags: &str| {
        let output = run(&line(flags));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let listed = "MODEL  VERSION  STATE        REASON\ndlrm         1  READY\n";
    assert_eq!(models(""), listed);
    assert_eq!(models("--unload dlrm"), "dlrm: unloaded\n");
    let row = &run_json(&line("--json"))["models"][0];
    assert_eq!((&row["name"], &row["version"]), (&json!("dlrm"), &Value::Null));
    assert_eq!(row["state"], "UNAVAILABLE");
    assert!(run_failing(2, &line("--unload dlrm")).contains("no model \"dlrm\" is served"));
    assert!(run_failing(2, &line("--load other")).contains("no model \"other\""));
    assert!(run_failing(2, &line("--load dlrm --unload dlrm")).contains("cannot be used with"));
    assert_eq!(models("--load dlrm --json"), "{\"loaded\":\"dlrm\"}\n");
    assert_eq!(models(""), listed);
}

#[test]
fn calls_in_flight_of_an_unloaded_model_are_answered() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    let messages = requests(&workshop);
    let served = Served::start(&workshop.models, "--cache-mode on");
    let mut repository = Repository::of(&served);
    let (stop, good) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|first| {
            let (stop, good, address) = (stop.clone(), good.clone(), served.grpc);
            let message = messages[first].0.clone();
            repository.runtime.spawn(async move {
                let mut client = CtrClient::new(channel(address).await);
                while !stop.load(Ordering::Acquire) {
                    match client.predict(message.clone()).await {
                        Ok(_) => good.fetch_add(1, Ordering::AcqRel),
                        Err(status) => {
                            // While it is loaded again, and before.
                            let expected = [Code::Unavailable, Code::NotFound];
                            assert!(expected.contains(&status.code()), "{status}");
                            0
                        }
                    };
                }
            })
        })
        .collect();
    for _ in 0..10 {
        let before = good.load(Ordering::Acquire);
        wait("calls are answered", || good.load(Ordering::Acquire) > before);
        repository.unload(MODEL).unwrap();
        repository.load(MODEL).unwrap();
    }
    stop.store(true, Ordering::Release);
    for client in clients {
        repository.runtime.block_on(client).unwrap();
    }
}

#[test]
fn a_client_takes_over_versions_and_adds_models_where_the_directory_is_not_watched() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("settings.toml");
    fs::write(&config, "[models]\nwatch_seconds = 0\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let mut repository = Repository::of(&served);
    let version = |served: &Served| served.score(MODEL, &workshop.valid, "")["version"].clone();
    repository.load(MODEL).unwrap();
    assert_eq!(version(&served), 1);
    publish_all_changed(&workshop.models, 2);
    workshop.train(ArchKind::Deepfm);
    let watching = Served::start(&workshop.models, "");
    wait("a server that watches serves both", || {
        serves(&watching, MODEL, 2) && serves(&watching, "deepfm", 1)
    });
    drop(watching);
    assert_eq!(version(&served), 1);
    repository.load(MODEL).unwrap();
    assert_eq!(version(&served), 2);
    assert!(!repository.ready("deepfm"));
    repository.load("deepfm").unwrap();
    let own = fs::read_to_string(workshop.trained_scores(ArchKind::Deepfm)).unwrap();
    assert!(scores(&served, &workshop, "deepfm") == own);

    publish_all_changed(&workshop.models, 3);
    let broken = Path::new(&workshop.models).join(MODEL).join("3/tables/C4.safetensors");
    let whole = fs::read(&broken).unwrap();
    fs::write(&broken, &whole[..whole.len() / 2]).unwrap();
    for _ in 0..2 {
        let status = repository.load(MODEL).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().starts_with("model \"dlrm\": version 3 is refused: "), "{status}");
        assert!(status.message().contains("C4.safetensors"), "{status}");
    }
    assert_eq!(version(&served), 2);
    let refused = repository.refusals();
    let [(version_refused, reason)] = &refused[..] else { panic!("{refused:?}") };
    assert!(version_refused == "3" && reason.contains("C4.safetensors"), "{refused:?}");
    fs::write(&broken, &whole).unwrap();
    repository.load(MODEL).unwrap();
    assert_eq!(version(&served), 3);
    assert_eq!(repository.refusals(), []);
    for name in ["nobody", "", "../models/dlrm", "."] {
        let status = repository.load(name).unwrap_err();
        assert_eq!(status.code(), Code::NotFound, "{status}");
        assert_eq!(status.message(), format!("model: no model {name:?} is in the directory of the models"));
    }
    // Refused, and gone before it is tried again.
    let bad = Path::new(&workshop.models).join("bad");
    fs::create_dir_all(bad.join("1")).unwrap();
    assert_eq!(repository.load("bad").unwrap_err().code(), Code::FailedPrecondition);
    assert!(served.get("/readyz").1.contains("model bad"));
    fs::remove_dir_all(&bad).unwrap();
    fs::write(&config, "[models]\nwatch_seconds = 0\n[models.dlrm]\nlabels = { canary = 1 }\n").unwrap();
    served.signal("-HUP");
    wait("the model is forgotten", || !served.get("/readyz").1.contains("model bad"));
    // A change of settings takes over nothing that no client has asked for.
    let unwanted = Path::new(&workshop.models).join("unwanted");
    let copy =
        Command::new("cp").arg("-r").args([&Path::new(&workshop.models).join(MODEL), &unwanted]).status();
    assert!(copy.unwrap().success());
    publish_all_changed(&workshop.models, 4);
    fs::write(&config, "[models]\nwatch_seconds = 0\n[models.dlrm]\nlabels = { canary = 2 }\n").unwrap();
    served.signal("-HUP");
    wait("the label has another version", || served.get("/status.json").1.contains("\"follows\":2"));
    // Made by the same thread, after it has looked at all models. This one is served already.
    repository.load("deepfm").unwrap();
    assert_eq!(version(&served), 3);
    assert!(!repository.ready("unwanted"));
}

#[test]
fn a_version_with_another_schema_is_served_after_unloading_the_model() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "--cache-mode on");
    let mut repository = Repository::of(&served);
    // Another name for a table, so that the metrics of the tables change too.
    let config = workshop.config(ArchKind::Dlrm, 4, 1000);
    let text = fs::read_to_string(&config).unwrap();
    let (features, tables) = text.split_once("[[tables]]").unwrap();
    let features = features.replace("table = \"C7\"", "table = \"seventh\"");
    let tables = tables.replace("name = \"C7\"", "name = \"seventh\"");
    fs::write(&config, format!("{features}[[tables]]{tables}")).unwrap();
    let Workshop { train, valid, models, .. } = &workshop;
    run_json(&format!(
        "train --model-config {config} --format criteo-tsv --data {train} --models {models} --name {MODEL} \
         --json"
    ));
    let status = repository.load(MODEL).unwrap_err();
    assert!(status.message().contains("not the schema of the served version"), "{status}");
    repository.unload(MODEL).unwrap();
    repository.load(MODEL).unwrap();
    assert_eq!(served.score(MODEL, valid, "")["version"], 2);
    assert!(served.metric("flechette_cache_misses_total", &["table=\"seventh\""]) > 0.0);
}

#[test]
fn a_model_that_is_trained_here_can_be_unloaded_and_comes_back_with_its_newest_version() {
    let workshop = Workshop::new(240, 50);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let Workshop { train, models, valid, .. } = &workshop;
    let served = Served::start(
        models,
        &format!(
            "--train {MODEL}={train} --model-config {config} --format criteo-tsv --batch 8 \
             --publish-every 10steps"
        ),
    );
    let mut repository = Repository::of(&served);
    let shown = |name: &str| served.metric(&format!("flechette_{name}"), &["model=\"dlrm\""]);
    wait("a version is published", || shown("serving_version") > 1.0);
    repository.unload(MODEL).unwrap();
    assert_eq!(shown("serving_version"), 0.0);
    wait("training ends", || shown("training_steps_total") > 0.0 && shown("training_state") == 0.0);
    looks(&served, models, 2);
    assert!(!repository.ready(MODEL));
    repository.load(MODEL).unwrap();
    let newest = highest_version(Path::new(models), MODEL).unwrap();
    assert!(newest > 2);
    assert_eq!(served.score(MODEL, valid, "")["version"], newest);
}

#[test]
fn the_time_of_a_slow_change_is_not_that_of_its_message() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    publish_all_changed(&workshop.models, 2);
    // Every call is slow.
    let served = Served::start_in("export FLECHETTE_LOG_SLOW_SECONDS=0.000001", &workshop.models, "");
    let mut repository = Repository::of(&served);
    repository.unload(MODEL).unwrap();
    repository.load(MODEL).unwrap();
    let label = SetLabelRequest { model: MODEL.into(), label: "old".into(), version: 1, remove: false };
    let mut ctr = CtrClient::new(repository.runtime.block_on(channel(served.grpc)));
    repository.runtime.block_on(ctr.set_label(label)).unwrap();
    served.terminate();
    let (_, log) = served.ended();
    for method in ["RepositoryModelUnload", "RepositoryModelLoad", "SetLabel"] {
        let line = log.lines().find(|line| line.contains("slow request") && line.contains(method));
        assert!(line.expect(&log).contains("stage=\"rest\""), "{line:?}");
    }
}
