//! Versions that the engine with the cache cannot take over, because a batch does not end. Clients see that
//! of a real server.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::cli::serve::{Serving, Watching};
use crate::config::{Config, Flags};
use crate::engine::tests::{MODEL, World, Writer, begin_batch};
use crate::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::server::inference::{RepositoryIndexRequest, RepositoryModelLoadRequest};
use crate::server::proto::ctr_client::CtrClient;
use crate::server::proto::{FeatureColumn, GetModelRequest, PredictRequest, SetLabelRequest};

/// A server, and its clients.
struct Running {
    serving: Serving,
    http: SocketAddr,
    ctr: CtrClient<Channel>,
    kserve: GrpcInferenceServiceClient<Channel>,
    _watching: Watching,
    /// Declared last, so that the server runs until the thread that watches has ended.
    runtime: tokio::runtime::Runtime,
}

impl Running {
    /// Serves the versions of a world with a cache. `table` is that of the model.
    fn start(world: &World, table: &str) -> Self {
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
        let watching = serving.watch(&server).unwrap();
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

    fn load(&self) -> Result<(), Status> {
        let request = RepositoryModelLoadRequest { model_name: MODEL.into(), ..Default::default() };
        self.runtime.block_on(self.kserve.clone().repository_model_load(request)).map(drop)
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
    world.publish();
    let older = "ready\nolder version: model ctr serves version 1: version 2 is refused: cache: batches ";
    wait("the version is refused", || running.get("/readyz").starts_with(older));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        assert!(running.get("/readyz").starts_with(older), "the reason stays while it is tried again");
        assert_eq!((running.scored_by(0).unwrap(), running.loaded()), (1, vec![1]));
    }
    wait("a version is counted", || running.metric("newer_versions_refused") == 1.0);
    let [(.., state, _), (version, refused, reason)] = &running.index()[..] else { panic!("no two rows") };
    assert_eq!((state.as_str(), version.as_str(), refused.as_str()), ("READY", "2", "UNAVAILABLE"));
    assert!(reason.contains("have not ended for 1 s"), "{reason}");
    assert_eq!(running.scored_by(2).unwrap_err().code(), Code::NotFound);
    let error = running.load().unwrap_err();
    assert!(error.code() == Code::FailedPrecondition && error.message().contains("version 2"), "{error}");
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
    let request =
        SetLabelRequest { model: MODEL.into(), label: "stable".into(), version: 1, ..Default::default() };
    running.runtime.block_on(running.ctr.clone().set_label(request)).unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let scored = [0, 1, 2].map(|version| running.scored_by(version).unwrap());
        assert_eq!((scored, running.loaded()), ([1, 1, 2], vec![1, 2]));
    }
    wait("the switch fails", || running.metric("switches_refused_total") >= 1.0);
    drop(batch);
    wait("the switch succeeds", || running.metric("switches_total") == 1.0);
    let scored = [0, 1, 2].map(|version| running.scored_by(version).unwrap());
    assert_eq!((scored, running.loaded()), ([1, 1, 2], vec![1, 2]));
    assert_eq!(running.get("/readyz"), "ready\n");
}
