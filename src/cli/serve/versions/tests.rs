//! Versions that the engine with the cache cannot take over, because a batch does not end. Clients see that
//! of a real server.

use std::any::Any;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::cli::serve::{Serving, WatchChannel};
use crate::config::{Config, Flags};
use crate::engine::tests::{MODEL, World, Writer, begin_batch, hold_switches};
use crate::predict::Predict;
use crate::server::Server;
use crate::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::server::inference::{
    RepositoryIndexRequest, RepositoryModelLoadRequest, RepositoryModelUnloadRequest,
};
use crate::server::proto::ctr_client::CtrClient;
use crate::server::proto::{FeatureColumn, GetModelRequest, PredictRequest, SetLabelRequest};

/// A server, and its clients.
struct Running {
    serving: Serving,
    http: SocketAddr,
    ctr: CtrClient<Channel>,
    kserve: GrpcInferenceServiceClient<Channel>,
    /// The thread that watches, or what it would get.
    _watching: Box<dyn Any>,
    /// Declared last, so that the server runs until the thread that watches has ended.
    runtime: tokio::runtime::Runtime,
}

impl Running {
    /// Serves the versions of a world with a cache, and watches its directory. `table` is that of the model.
    fn start(world: &World, table: &str) -> Self {
        Self::start_with(world, table, |serving, server| Box::new(serving.watch(server).unwrap()))
    }

    fn start_with(world: &World, table: &str, watch: impl FnOnce(&Serving, &Server) -> Box<dyn Any>) -> Self {
        let text = format!("[models.{MODEL}]\n{table}\n");
        let flags = Flags {
            grpc: Some("127.0.0.1:0".into()),
            http: Some("127.0.0.1:0".into()),
            device: Some("host".into()),
            cache_mode: Some("on".into()),
            ..Flags::default()
        };
        let mut config = Config::resolve(&flags, [], Some(&text)).unwrap();
        config.watch = Some(Duration::from_millis(50));
        let serving = Serving::load(&config, world.models()).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let server = runtime.block_on(serving.bind(&config)).unwrap();
        let watching = watch(&serving, &server);
        let (grpc, http) = (server.grpc_addr(), server.http_addr());
        runtime.spawn(server.run(std::future::pending()));
        let channel = Channel::from_shared(format!("http://{grpc}")).unwrap();
        let channel = runtime.block_on(channel.connect()).unwrap();
        let (ctr, kserve) = (CtrClient::new(channel.clone()), GrpcInferenceServiceClient::new(channel));
        Self { serving, http, ctr, kserve, _watching: watching, runtime }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.http).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    fn metric(&self, name: &str) -> f64 {
        let (page, start) = (self.get("/metrics"), format!("flechette_{name}{{model=\"{MODEL}\"}} "));
        page.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
    }

    /// The version that scores a request for this version; 0: for any.
    fn scored_by(&self, version: u64) -> Result<u64, Status> {
        let column = |name: &str| FeatureColumn { name: name.into(), ids: vec![1], ..Default::default() };
        let request = PredictRequest {
            model: MODEL.into(),
            version,
            samples: 1,
            dense: vec![0.5],
            features: vec![column("user"), column("word")],
            ..PredictRequest::default()
        };
        Ok(self.runtime.block_on(self.ctr.clone().predict(request))?.into_inner().version)
    }

    fn loaded(&self) -> Vec<u64> {
        let request = GetModelRequest { model: MODEL.into() };
        self.runtime.block_on(self.ctr.clone().get_model(request)).unwrap().into_inner().versions
    }

    /// The result of a call that ends in time.
    fn call<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<(), Status> {
        let limited = async { tokio::time::timeout(Duration::from_secs(300), call).await };
        self.runtime.block_on(limited).expect("an answer in time").map(drop)
    }

    fn load(&self, model: &str) -> Result<(), Status> {
        let request = RepositoryModelLoadRequest { model_name: model.into(), ..Default::default() };
        self.call(self.kserve.clone().repository_model_load(request))
    }

    fn unload(&self, model: &str) -> Result<(), Status> {
        let request = RepositoryModelUnloadRequest { model_name: model.into(), ..Default::default() };
        self.call(self.kserve.clone().repository_model_unload(request))
    }

    fn set_label(&self, model: &str, label: &str, version: u64) -> Result<(), Status> {
        let (model, label) = (model.into(), label.into());
        self.call(self.ctr.clone().set_label(SetLabelRequest { model, label, version, remove: false }))
    }

    /// The versions of the index, each with its state and its reason.
    fn index(&self) -> Vec<(String, String, String)> {
        let request = RepositoryIndexRequest::default();
        let index = self.runtime.block_on(self.kserve.clone().repository_index(request)).unwrap();
        index.into_inner().models.into_iter().map(|row| (row.version, row.state, row.reason)).collect()
    }
}

fn wait(what: &str, happened: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < until, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_version_whose_switch_fails_is_refused_and_tried_again() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let running = Running::start(&world, "");
    let engine = running.serving.engines().remove(0);
    let batch = begin_batch(&engine);
    let begun = Instant::now();
    world.publish();
    let older = "ready\nolder version: model ctr serves version 1: version 2 is refused: cache: batches ";
    wait("the version is refused", || running.get("/readyz").starts_with(older));
    wait("the version is tried again", || {
        assert!(running.get("/readyz").starts_with(older), "the reason stays while it is tried again");
        assert_eq!((running.scored_by(0).unwrap(), running.loaded()), (1, vec![1]));
        running.metric("switches_refused_total") >= 2.0
    });
    wait("a version is counted", || running.metric("newer_versions_refused") == 1.0);
    let [(.., state, _), (version, refused, reason)] = &running.index()[..] else { panic!("no two rows") };
    assert_eq!((state.as_str(), version.as_str(), refused.as_str()), ("READY", "2", "UNAVAILABLE"));
    assert!(reason.contains("have not ended for 1 s"), "{reason}");
    assert_eq!(running.scored_by(2).unwrap_err().code(), Code::NotFound);
    let error = running.load(MODEL).unwrap_err();
    assert!(error.message().starts_with("model \"ctr\": version 2 is "), "{error}");
    assert!([Code::FailedPrecondition, Code::DeadlineExceeded].contains(&error.code()), "{error}");
    // Each try waits a second for the batch, and a second passes between two tries.
    let tries = running.metric("switches_refused_total");
    assert!((2.0..=3.0 + begun.elapsed().as_secs_f64() / 2.0).contains(&tries), "{tries}");
    drop(batch);
    wait("the version is taken over", || running.scored_by(0).unwrap() == 2);
    wait("nothing is refused", || running.get("/readyz") == "ready\n");
    assert_eq!((running.metric("newer_versions_refused"), running.loaded()), (0.0, vec![2]));
}

#[test]
fn a_roll_back_whose_switch_fails_keeps_the_engine_of_its_version() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    world.publish();
    let running = Running::start(&world, "versions = \"all\"");
    let engine = running.serving.engines().remove(0);
    wait("both versions are loaded", || running.loaded() == [1, 2]);
    let batch = begin_batch(&engine);
    running.set_label(MODEL, "stable", 1).unwrap();
    wait("the switch fails, and is tried again", || {
        let scored = [0, 1, 2].map(|version| running.scored_by(version).unwrap());
        assert_eq!((scored, running.loaded()), ([1, 1, 2], vec![1, 2]));
        running.metric("switches_refused_total") >= 2.0
    });
    drop(batch);
    wait("the switch succeeds", || running.metric("switches_total") == 1.0);
    let scored = [0, 1, 2].map(|version| running.scored_by(version).unwrap());
    assert_eq!((scored, running.loaded()), ([1, 1, 2], vec![1, 2]));
    assert_eq!(running.get("/readyz"), "ready\n");
}

#[test]
fn a_switch_that_does_not_end_delays_no_other_model() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    world.publish();
    for version in ["1", "2"] {
        world.copy_version(version, "other");
    }
    let running = Running::start(&world, "");
    let engines = running.serving.engines();
    let engine = engines.iter().find(|engine| engine.describe().model == MODEL).unwrap();
    let held = hold_switches(engine);
    world.publish();
    let error = running.load(MODEL).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    let message = error.message();
    assert!(message.starts_with("model \"ctr\": version 3 is still being taken over after "), "{error}");
    assert!(message.contains(" s: a batch that began before does not"), "{error}");
    let error = running.set_label(MODEL, "old", 1).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "it needs a version that is not loaded: {error}");
    running.set_label("other", "old", 1).unwrap();
    running.unload("other").unwrap();
    running.load("other").unwrap();
    world.copy_version("3", "other");
    running.load("other").unwrap();
    wait("the new version of the other model", || {
        running.get("/metrics").contains("flechette_serving_version{model=\"other\"} 3")
    });
    assert_eq!(running.scored_by(0).unwrap(), 2);
    drop(held);
    wait("the version is taken over", || running.scored_by(0).unwrap() == 3);
    running.set_label(MODEL, "old", 1).unwrap();
    assert_eq!(running.get("/readyz"), "ready\n");
}

#[test]
fn a_model_is_unloaded_and_loaded_while_its_switch_does_not_end() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let running = Running::start(&world, "");
    let engine = running.serving.engines().remove(0);
    let held = hold_switches(&engine);
    world.publish();
    assert_eq!(running.load(MODEL).unwrap_err().code(), Code::DeadlineExceeded);
    running.unload(MODEL).unwrap();
    running.load(MODEL).unwrap();
    assert_eq!(running.scored_by(0).unwrap(), 2);
    drop(held);
    assert_eq!(running.scored_by(0).unwrap(), 2);
}

#[test]
fn a_change_that_does_not_begin_in_time_is_not_made() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    // Nobody gets what clients ask for.
    let running = Running::start_with(&world, "", |_, server| {
        let channel = WatchChannel::new();
        channel.open(&server.registry(), world.models());
        Box::new(channel)
    });
    let error = running.unload(MODEL).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    let text = "model \"ctr\": the change has not begun after 5 s and will not be made: ";
    assert!(error.message().starts_with(text), "{error}");
    assert_eq!(running.scored_by(0).unwrap(), 1);
}

#[test]
fn a_named_version_that_is_not_on_disk_is_refused_once_and_served_when_it_appears() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let running = Running::start(&world, "labels = { old = 2 }");
    let missing = "ready\nnot loaded: model ctr: label old: version 2 is refused: ";
    wait("the version is missing", || running.get("/readyz").starts_with(missing));
    let [_, (version, state, reason)] = &running.index()[..] else { panic!("no two rows") };
    assert_eq!((version.as_str(), state.as_str()), ("2", "UNAVAILABLE"));
    assert!(reason.starts_with("label old: version 2 is refused: "), "{reason}");
    let refused = running.metric("switches_refused_total");
    // Many looks.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(running.metric("switches_refused_total"), refused);
    world.publish();
    wait("the version is served", || running.scored_by(2).is_ok_and(|version| version == 2));
    wait("nothing is missing", || running.get("/readyz") == "ready\n");
}

#[test]
fn a_shadow_that_names_a_label_which_the_model_does_not_have_is_shown_until_it_has_it() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let running = Running::start(&world, "shadow = \"old\"");
    let missing = "ready\nnot loaded: model ctr: shadow: the model has no label \"old\"\n";
    wait("the label is missing", || running.get("/readyz") == missing);
    running.set_label(MODEL, "old", 1).unwrap();
    wait("nothing is missing", || running.get("/readyz") == "ready\n");
}

#[test]
fn a_model_whose_labels_are_damaged_is_loaded_when_they_are_repaired() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let running = Running::start(&world, "");
    running.unload(MODEL).unwrap();
    let labels = world.models().join(MODEL).join("state/labels.json");
    fs::create_dir_all(labels.parent().unwrap()).unwrap();
    fs::write(&labels, "{").unwrap();
    assert!(running.load(MODEL).unwrap_err().message().contains("labels.json: damaged"));
    fs::remove_file(&labels).unwrap();
    running.load(MODEL).unwrap();
    assert_eq!(running.scored_by(0).unwrap(), 1);
}

#[test]
fn a_model_is_loaded_with_its_newest_good_version_and_a_bad_one_is_refused_once() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    world.publish();
    fs::write(world.models().join(MODEL).join("2/dense.safetensors"), "damaged").unwrap();
    let running = Running::start(&world, "");
    assert_eq!(running.scored_by(0).unwrap(), 1);
    running.unload(MODEL).unwrap();
    let before = running.metric("switches_refused_total");
    running.load(MODEL).unwrap();
    assert_eq!(running.scored_by(0).unwrap(), 1);
    assert_eq!(running.metric("switches_refused_total"), before + 1.0);
    let [_, (version, state, _)] = &running.index()[..] else { panic!("no two rows") };
    assert_eq!((version.as_str(), state.as_str()), ("2", "UNAVAILABLE"));
}

#[test]
fn a_version_that_is_refused_at_the_start_for_a_reason_that_passes_is_tried_again() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    world.publish();
    world.close_last();
    // As while a process removes it. Its files do not change.
    let version = fs::File::open(world.models().join(MODEL).join("2")).unwrap();
    version.lock().unwrap();
    let running = Running::start(&world, "");
    assert_eq!(running.scored_by(0).unwrap(), 1);
    drop(version);
    wait("the version is served", || running.scored_by(0).unwrap() == 2);
}
