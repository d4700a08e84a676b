//! All kinds of clients at once, good and bad, while versions are published and settings are read again.
//! Every good request gets exactly one answer, which is that of the version it names, and memory stays flat.
//! If the machine is so busy that the server refuses calls because of overload, they are sent again.
//!
//! It runs for 10 s, or for as long as FLECHETTE_TEST_MIXED_SECONDS says. Memory is only compared in a run
//! of a minute or more.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;
use flechette::server::inference::RepositoryModelLoadRequest;
use flechette::server::inference::RepositoryModelUnloadRequest;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient as Kserve;
use flechette::server::proto::PredictRequest;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::predict_stream_response::Result as StreamResult;
use flechette::types::Batch;
use prost::Message;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::attacks::http2::{connect, frame, head_of};
use crate::kserve::messages::{raw, typed};
use crate::program::{Served, Workshop, bytes_of, seconds};
use crate::serving::channel;
use crate::switching::{Answers, MODEL, bits, expected, folder, publish_all_changed, requests, serves, wait};

/// The mean memory of the first and of the last third of the time after the warm-up may differ by this share,
/// or by so many bytes: the tables of a version take about a megabyte, and at a given instant there is one
/// version, or there are two.
const FLAT: f64 = 0.02;
const ROOM: f64 = 1.5e6;

/// A call that has no answer after this time has lost it. It is far above what a call takes.
const LOST: Duration = Duration::from_secs(120);

/// The first part of the run, before memory is watched.
const WARM_UP: f64 = 0.25;

/// A deterministic stream of choices for one client.
struct Choice(u64);

impl Choice {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    async fn pause(&mut self, most_millis: usize) {
        tokio::time::sleep(Duration::from_millis(self.below(most_millis) as u64)).await;
    }
}

/// What all clients share.
#[derive(Clone)]
struct Load {
    grpc: SocketAddr,
    requests: Arc<Vec<PredictRequest>>,
    stop: Arc<AtomicBool>,
    /// How often bad clients did what they do.
    done: Arc<AtomicU64>,
    /// How often a call was refused because of overload.
    refused: Arc<AtomicU64>,
}

impl Load {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn did(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    fn request(&self, choice: &mut Choice) -> PredictRequest {
        self.requests[choice.below(self.requests.len())].clone()
    }
}

/// Whether a call is to be sent again, after a moment.
async fn again(load: &Load, status: &Status) -> bool {
    let again = status.code() == Code::ResourceExhausted;
    if again {
        load.refused.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    again
}

/// The answer to a call, which must come.
async fn answered<T>(call: impl Future<Output = T>) -> T {
    timeout(LOST, call).await.unwrap_or_else(|_| panic!("an answer is lost: none came in {LOST:?}"))
}

/// Sends single requests.
async fn score_alone(load: Load) -> Answers {
    let mut client = CtrClient::new(channel(load.grpc).await);
    let mut answers = Answers::new();
    for number in (0..load.requests.len()).cycle() {
        if load.stopped() {
            break;
        }
        match answered(client.predict(load.requests[number].clone())).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                add(&mut answers, answer.version, number, bits(&answer.scores));
            }
            Err(status) => assert!(again(&load, &status).await, "{status}"),
        }
    }
    answers
}

/// Adds an answer, which must be equal to earlier ones of its version.
fn add(answers: &mut Answers, version: u64, number: usize, scores: Vec<u32>) {
    let first = answers.entry((version, number)).or_insert_with(|| scores.clone());
    assert!(*first == scores, "version {version}, request {number}: two answers");
}

/// Sends requests in streams of 40.
async fn score_in_streams(load: Load) -> Answers {
    let mut client = CtrClient::new(channel(load.grpc).await);
    let mut answers = Answers::new();
    while !load.stopped() {
        let messages: Vec<_> = load.requests.iter().cycle().take(40).cloned().collect();
        let stream = answered(client.predict_stream(tokio_stream::iter(messages))).await;
        let mut stream = stream.unwrap().into_inner();
        for number in 0..40 {
            let answer = answered(stream.message()).await.unwrap().expect("an answer for each request");
            match answer.result.unwrap() {
                StreamResult::Response(response) => {
                    add(&mut answers, response.version, number % load.requests.len(), bits(&response.scores));
                }
                StreamResult::Error(error) => {
                    let status = Status::new(Code::from(error.code), error.message);
                    assert!(again(&load, &status).await, "{status}");
                }
            }
        }
        assert!(answered(stream.message()).await.unwrap().is_none(), "one answer for each request");
    }
    answers
}

/// Sends requests by KServe, typed and raw.
async fn score_by_kserve(load: Load) -> Answers {
    let mut client = Kserve::new(channel(load.grpc).await);
    let mut answers = Answers::new();
    for number in (0..load.requests.len()).cycle() {
        if load.stopped() {
            return answers;
        }
        let message = typed(&load.requests[number]);
        let response = match answered(client.model_infer(raw(message))).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                assert!(again(&load, &status).await, "{status}");
                continue;
            }
        };
        let scores = response.raw_output_contents[0].chunks(4);
        let scores = scores.map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect();
        add(&mut answers, response.model_version.parse().unwrap(), number, scores);
    }
    answers
}

/// Drops calls after a moment, most before their answer.
async fn cancel(load: Load) {
    let (client, mut choice) = (CtrClient::new(channel(load.grpc).await), Choice(1));
    while !load.stopped() {
        let calls: Vec<_> = (0..20)
            .map(|_| {
                let (mut client, message) = (client.clone(), load.request(&mut choice));
                tokio::spawn(async move { client.predict(message).await.map(drop) })
            })
            .collect();
        choice.pause(8).await;
        calls.iter().for_each(JoinHandle::abort);
        load.did();
        choice.pause(100).await;
    }
}

/// Sends messages with wrong bytes. None may break the server, and those that are no messages are refused.
async fn send_rubbish(load: Load) {
    let mut choice = Choice(2);
    while !load.stopped() {
        let mut connection = connect(load.grpc, 65_535).await;
        for _ in 0..20 {
            let mut bytes = load.request(&mut choice).encode_to_vec();
            for _ in 0..=choice.below(8) {
                let at = choice.below(bytes.len());
                bytes[at] = choice.below(256) as u8;
            }
            bytes.truncate(bytes.len() - choice.below(2) * choice.below(40));
            let path =
                ["flechette.v1.Ctr/Predict", "inference.GRPCInferenceService/ModelInfer"][choice.below(2)];
            let (answer, mut body) = connection.send_request(head_of(path), false).unwrap();
            body.send_data(frame(&bytes), true).unwrap();
            assert_eq!(answered(answer).await.unwrap().status(), 200);
            connection = connection.ready().await.unwrap();
            load.did();
        }
    }
}

/// Sends requests that are decoded, but wrong.
async fn send_wrong_requests(load: Load) {
    let (mut client, mut choice) = (CtrClient::new(channel(load.grpc).await), Choice(3));
    while !load.stopped() {
        let mut message = load.request(&mut choice);
        let code = match choice.below(4) {
            0 => (message.model = "none".to_owned(), Code::NotFound).1,
            1 => (message.dense[0] = f32::NAN, Code::InvalidArgument).1,
            2 => (message.features.clear(), Code::InvalidArgument).1,
            _ => (message.version = u64::MAX, Code::NotFound).1,
        };
        let status = answered(client.predict(message)).await.expect_err("it is wrong");
        assert!(status.code() == code || again(&load, &status).await, "{status}");
        load.did();
        choice.pause(5).await;
    }
}

/// Opens calls and reads their headers, but never their messages.
async fn open_and_read_nothing(load: &Load, choice: &mut Choice) -> Result<(), h2::Error> {
    let mut connection = connect(load.grpc, 0).await;
    let mut answers = Vec::new();
    for _ in 0..20 {
        let (answer, mut body) = connection.send_request(head_of("flechette.v1.Ctr/Predict"), false)?;
        body.send_data(frame(&load.request(choice).encode_to_vec()), true)?;
        answers.push(answer.await?);
        connection = connection.ready().await?;
    }
    // The server has a limit of one second. Half of the connections are dropped before.
    tokio::time::sleep(Duration::from_millis(500 + 1000 * choice.below(2) as u64)).await;
    Ok(())
}

async fn read_nothing(load: Load) {
    let mut choice = Choice(4);
    while !load.stopped() {
        // An error means that the server has closed the connection already.
        let _ = answered(open_and_read_nothing(&load, &mut choice)).await;
        load.did();
    }
}

/// Reads answers in pieces of eight bytes, with pauses. An answer takes less than the second that the server
/// allows, or more.
async fn read_in_drips(load: &Load, choice: &mut Choice) -> Result<(), h2::Error> {
    let mut connection = connect(load.grpc, 8).await;
    let most_millis = [10, 200][choice.below(2)];
    for _ in 0..4 {
        let (answer, mut body) = connection.send_request(head_of("flechette.v1.Ctr/Predict"), false)?;
        body.send_data(frame(&load.request(choice).encode_to_vec()), true)?;
        let mut answer = answer.await?.into_body();
        while let Some(piece) = answer.data().await {
            let bytes = piece?.len();
            choice.pause(most_millis).await;
            // The server may send as many bytes again.
            answer.flow_control().release_capacity(bytes)?;
        }
        connection = connection.ready().await?;
    }
    Ok(())
}

async fn read_slowly(load: Load) {
    let mut choice = Choice(7);
    while !load.stopped() {
        // An error means that the server has closed the connection.
        let _ = answered(read_in_drips(&load, &mut choice)).await;
        load.did();
    }
}

/// Opens connections and drops them in the midst of the preface, the headers or a message.
async fn drop_connections(load: Load) {
    let mut choice = Choice(5);
    while !load.stopped() {
        match choice.below(3) {
            0 => {
                let mut stream = TcpStream::connect(load.grpc).await.unwrap();
                stream.write_all(&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..1 + choice.below(23)]).await.unwrap();
                choice.pause(20).await;
            }
            _ => {
                let mut connection = connect(load.grpc, 65_535).await;
                let head = head_of("flechette.v1.Ctr/Predict");
                let (_answer, mut body) = connection.send_request(head, false).unwrap();
                let bytes = frame(&load.request(&mut choice).encode_to_vec());
                body.send_data(bytes.slice(..choice.below(bytes.len())), false).unwrap();
                choice.pause(20).await;
            }
        }
        load.did();
    }
}

/// Loads and unloads another model.
async fn load_and_unload(load: Load) {
    let (mut client, mut choice) = (Kserve::new(channel(load.grpc).await), Choice(6));
    let model_name = "deepfm".to_owned();
    while !load.stopped() {
        let request = RepositoryModelUnloadRequest { model_name: model_name.clone(), ..Default::default() };
        answered(client.repository_model_unload(request)).await.unwrap();
        choice.pause(300).await;
        let request = RepositoryModelLoadRequest { model_name: model_name.clone(), ..Default::default() };
        answered(client.repository_model_load(request)).await.unwrap();
        load.did();
        choice.pause(300).await;
    }
}

fn run_for() -> Duration {
    seconds("FLECHETTE_TEST_MIXED_SECONDS", 10)
}

const SETTINGS: &str = "[server]\nbody_seconds = 1\nwrite_seconds = 1\nhandshake_seconds = 10\n\
                        [models]\nwatch_seconds = 1\n[batcher]\nmax_delay_us = ";

/// What happened to a server in a run.
struct Changes {
    /// The right scores of every version.
    scores: BTreeMap<u64, Vec<Vec<u32>>>,
    /// Samples of the server's memory after the warm-up.
    memory: Vec<f64>,
}

/// Every second, publishes a version, removes an old one, and has the settings read again.
fn change(workshop: &Workshop, served: &Served, settings: &str, batches: &[Batch]) -> Changes {
    let Workshop { models, .. } = workshop;
    let (begun, mut memory) = (Instant::now(), Vec::new());
    let mut scores = BTreeMap::from([(1, expected(models, 1, batches))]);
    for version in 2.. {
        if begun.elapsed() >= run_for() {
            return Changes { scores, memory };
        }
        let second = Instant::now();
        publish_all_changed(models, version);
        scores.insert(version, expected(models, version, batches));
        // The first one is the pattern of the others.
        if version > 3 {
            fs::remove_dir_all(folder(models, MODEL, version - 2)).unwrap();
        }
        fs::write(settings, format!("{SETTINGS}{}\n", version % 7 * 100)).unwrap();
        served.signal("-HUP");
        wait("a version is taken over", || serves(served, MODEL, version));
        std::thread::sleep(Duration::from_secs(1).saturating_sub(second.elapsed()));
        if begun.elapsed() >= run_for().mul_f64(WARM_UP) {
            memory.push(bytes_of(served.id(), "RssAnon").unwrap() as f64);
        }
    }
    unreachable!("versions do not end");
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn check_memory(memory: &[f64]) {
    let third = memory.len() / 3;
    let (first, last) = (mean(&memory[..third]), mean(&memory[memory.len() - third..]));
    println!("memory: {:.2} MB in the first third, {:.2} MB in the last one", first / 1e6, last / 1e6);
    assert!((last - first).abs() <= ROOM.max(FLAT * first), "memory is not flat: {memory:?}");
}

#[test]
fn mixed_load_gets_right_answers_and_memory_stays_flat() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    workshop.train(ArchKind::Deepfm);
    let (messages, batches): (Vec<_>, Vec<_>) = requests(&workshop).into_iter().unzip();
    let settings = workshop.path("flechette.toml");
    fs::write(&settings, format!("{SETTINGS}0\n")).unwrap();
    let flags = format!("--config {settings} --cache-mode on --cache-fraction 0.05");
    let served = Served::start(&workshop.models, &flags);
    let runtime = Runtime::new().unwrap();
    let load = Load {
        grpc: served.grpc,
        requests: Arc::new(messages),
        stop: Arc::default(),
        done: Arc::default(),
        refused: Arc::default(),
    };
    let good: Vec<JoinHandle<Answers>> = vec![
        runtime.spawn(score_alone(load.clone())),
        runtime.spawn(score_alone(load.clone())),
        runtime.spawn(score_in_streams(load.clone())),
        runtime.spawn(score_by_kserve(load.clone())),
    ];
    let bad: Vec<JoinHandle<()>> = vec![
        runtime.spawn(cancel(load.clone())),
        runtime.spawn(send_rubbish(load.clone())),
        runtime.spawn(send_wrong_requests(load.clone())),
        runtime.spawn(read_nothing(load.clone())),
        runtime.spawn(read_slowly(load.clone())),
        runtime.spawn(drop_connections(load.clone())),
        runtime.spawn(load_and_unload(load.clone())),
    ];
    let Changes { scores: right, memory } = change(&workshop, &served, &settings, &batches);
    load.stop.store(true, Ordering::Release);
    bad.into_iter().for_each(|client| runtime.block_on(client).unwrap());
    let (mut versions, mut compared) = (BTreeSet::new(), 0);
    for client in good {
        let answers = runtime.block_on(client).unwrap();
        // Calls may be refused under overload, but not all calls of a client.
        let answered: BTreeSet<u64> = answers.keys().map(|(version, _)| *version).collect();
        assert!(2 * answered.len() >= right.len(), "{answered:?} of {} versions", right.len());
        for ((version, request), scores) in answers {
            compared += 1;
            versions.insert(version);
            assert!(right[&version][request] == scores, "version {version}, request {request}");
        }
    }
    let [done, refused] = [&load.done, &load.refused].map(|count| count.load(Ordering::Relaxed));
    let (versions, all) = (versions.len(), right.len());
    println!(
        "{compared} different answers of {versions} versions of {all}; {done} bad acts, {refused} refusals"
    );
    if run_for() >= Duration::from_secs(60) {
        check_memory(&memory);
    }
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("panicked"), "{log}");
}
