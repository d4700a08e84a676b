//! Learned samples: clients send them to a server, a trainer trains on them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use flechette::cli::client;
use flechette::config::LearnConfig;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::mem::SplitMix64;
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind};
use flechette::server::Learning;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{LearnRequest, LearnResponse, PredictRequest};
use flechette::types::RawBatch;
use tonic::transport::Channel;
use tonic::{Code, Status};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::program::{
    LAST_VERSION, Served, Workshop, check_listed_versions, flechette, highest_version, kills, run,
    run_failing, run_json,
};
use crate::serving::{Running, channel, request};
use crate::switching::wait;
use crate::train_resume::last_version;

/// A server whose models take samples, or only those in `only`.
pub async fn learning(models: &Path, config: LearnConfig, only: &[&str]) -> Running {
    let only = only.iter().map(|&name| name.to_owned()).collect();
    let learning = Learning { models: models.to_owned(), config, only };
    Running::start_with(|parts| parts.learning = Some(learning)).await
}

pub const CONFIG: LearnConfig = LearnConfig { enabled: true, max_bytes: 1 << 20, segment_bytes: 4096 };

/// The samples of a Predict request, with labels.
pub fn labelled(request: PredictRequest, label: f32) -> LearnRequest {
    let PredictRequest { model, samples, dense, features, .. } = request;
    LearnRequest { model, samples, dense, features, labels: vec![label; samples as usize], dense_order: 0 }
}

async fn learn(running: &Running, request: LearnRequest) -> Result<LearnResponse, Status> {
    running.client.clone().learn(request).await.map(|answer| answer.into_inner())
}

fn log_of(models: &Path, name: &str) -> PathBuf {
    models.join(name).join("state/learn")
}

/// The labels of all samples of a log, from the documented format.
fn labels(log: &Path) -> Vec<f32> {
    let mut files: Vec<PathBuf> = fs::read_dir(log).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "fllearn"));
    files.sort();
    let mut labels = Vec::new();
    for file in files {
        let bytes = fs::read(&file).unwrap();
        assert_eq!(&bytes[..8], b"FLLEARNS");
        let mut at = 36;
        while at < bytes.len() {
            let number = |from: usize| u32::from_le_bytes(bytes[at + from..][..4].try_into().unwrap());
            let (length, samples) = (number(0) as usize, number(4) as usize);
            let sum = u64::from_le_bytes(bytes[at + 16..][..8].try_into().unwrap());
            let summed = [&bytes[at..at + 16], &bytes[at + 24..][..length]].concat();
            assert_eq!(xxh3_64_with_seed(&summed, at as u64), sum, "{} at {at}", file.display());
            labels.extend((0..samples).map(|s| f32::from_bits(number(24 + 4 * s))));
            at += 24 + length;
        }
    }
    labels
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_are_stored_in_order_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let running = learning(dir.path(), CONFIG, &[]).await;
    let mut last = (String::new(), 0);
    for n in 0..20u64 {
        let answer = learn(&running, labelled(request(7, n).0, n as f32 / 64.0)).await.unwrap();
        assert_eq!(answer.samples, 7);
        let expected = if answer.segment == last.0 { last.1 + 7 } else { 7 };
        assert_eq!(answer.position, expected);
        assert!(answer.segment >= last.0);
        last = (answer.segment, answer.position);
    }
    assert!(last.0.as_str() > "0000000001.fllearn");
    running.until_metric("flechette_learn_samples_total{model=\"ads\"} 140").await;
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 20").await;
    let expected: Vec<f32> = (0..140).map(|n| (n / 7) as f32 / 64.0).collect();
    assert_eq!(labels(&log_of(dir.path(), "ads")), expected);
    assert!(running.stop().await.unwrap().unwrap().unfinished == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_samples_are_refused_with_the_field_and_nothing_is_stored() {
    type Change = fn(&mut LearnRequest);
    let cases: [(Change, Code, &str); 12] = [
        (|r| r.labels.clear(), Code::InvalidArgument, "labels: expected 3 labels, one per sample, got 0"),
        (|r| r.labels.push(0.0), Code::InvalidArgument, "labels: expected 3 labels, one per sample, got 4"),
        (
            |r| r.labels[1] = f32::NAN,
            Code::InvalidArgument,
            "labels: sample 1: expected a number from 0 to 1, got NaN",
        ),
        (
            |r| r.labels[2] = 1.5,
            Code::InvalidArgument,
            "labels: sample 2: expected a number from 0 to 1, got 1.5",
        ),
        (
            |r| r.labels[0] = -1.0,
            Code::InvalidArgument,
            "labels: sample 0: expected a number from 0 to 1, got -1",
        ),
        (|r| r.model = "none".into(), Code::NotFound, "model: no model \"none\" is served here"),
        (|r| r.features[0].name = "x".into(), Code::InvalidArgument, "features: unknown feature \"x\""),
        (|r| drop(r.features.pop()), Code::InvalidArgument, "features: \"strict\" is missing"),
        (|r| r.dense[0] = f32::INFINITY, Code::InvalidArgument, "expected a finite number, got inf"),
        // It can be scored, but it would end the training.
        (
            |r| r.dense[2] = 3e38,
            Code::InvalidArgument,
            "sample 1: 300000000000000000000000000000000000000 is too large to train on",
        ),
        (|r| r.samples = 65, Code::ResourceExhausted, "samples: limit 64 (server.max_samples), got 65"),
        (|r| r.samples = 0, Code::InvalidArgument, "expected"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let running = learning(dir.path(), CONFIG, &[]).await;
    for (change, code, text) in cases {
        let mut message = labelled(request(3, 1).0, 1.0);
        change(&mut message);
        let status = learn(&running, message).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(text), "{status}");
    }
    assert!(labels(&log_of(dir.path(), "ads")).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_takes_samples_only_if_it_is_told_to_and_a_full_log_names_its_limit() {
    let off = LearnConfig { enabled: false, ..CONFIG };
    let dir = tempfile::tempdir().unwrap();
    let running = learning(dir.path(), off, &["other"]).await;
    let status = learn(&running, labelled(request(1, 1).0, 1.0)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.message(), "learn.enabled: model \"ads\" takes no samples here");
    assert!(!dir.path().join("ads").exists());

    let running = learning(dir.path(), LearnConfig { max_bytes: 10_000, ..off }, &["ads"]).await;
    let mut stored = 0;
    let status = loop {
        match learn(&running, labelled(request(10, 1).0, 1.0)).await {
            Ok(answer) => stored += answer.samples as usize,
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("limit 10000 bytes (learn.max_bytes)"), "{status}");
    assert!(stored > 100);
    running.until_metric("flechette_learn_refused_total{model=\"ads\"} 10").await;
    assert_eq!(labels(&log_of(dir.path(), "ads")).len(), stored);
}

/// A workshop with the same model under two names, and the settings of a server that takes samples.
fn workshop(rows: u64) -> (Workshop, Schema, String) {
    let workshop = Workshop::new(rows, 200);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let Workshop { models, valid, .. } = &workshop;
    run_json(&format!(
        "train --model-config {config} --format criteo-tsv --data {valid} --models {models} --name file \
         --json"
    ));
    let copied = Command::new("cp").args(["-r", "file", "log"]).current_dir(models).status().unwrap();
    assert!(copied.success());
    let settings = workshop.path("settings.toml");
    fs::write(&settings, "[learn]\nenabled = \"on\"\nsegment_bytes = \"64Ki\"\n").unwrap();
    (workshop, preset::criteo(ArchKind::Dlrm, 4, 300), format!("--config {settings}"))
}

/// Sends the samples of a file one request after the other, from 1 to 50 samples each. A request that a full
/// log refuses is sent again until the log has room.
async fn send_file(served: &Served, schema: &Schema, file: &str) -> usize {
    let options = ReadOptions::default();
    let mut reader = dataset::open(Format::CriteoTsv, &[file.into()], schema, options).unwrap();
    let mut ctr = CtrClient::new(channel(served.grpc).await);
    let (mut raw, mut sent) = (RawBatch::default(), 0);
    while reader.read(1 + sent % 50, &mut raw).unwrap() > 0 {
        let mut message = labelled(client::request("log", schema, &raw), 0.0);
        message.labels = raw.labels.clone().unwrap();
        // Ids and strings take turns.
        if sent.is_multiple_of(2) {
            for (column, feature) in message.features.iter_mut().zip(&schema.features) {
                let strings = std::mem::take(&mut column.strings);
                let hash = feature.hash.unwrap();
                column.ids = strings.iter().map(|s| xxh3_64_with_seed(s, hash.seed) % hash.modulus).collect();
            }
        }
        let began = Instant::now();
        let stored = loop {
            match ctr.learn(message.clone()).await {
                Err(status) if status.code() == Code::ResourceExhausted => {
                    assert!(began.elapsed() < LIMIT, "{sent} samples were sent: {status}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                stored => break stored.unwrap().into_inner().samples,
            }
        };
        assert_eq!(stored as usize, raw.samples);
        sent += raw.samples;
    }
    sent
}

/// How long a full log may take until it has room.
const LIMIT: Duration = Duration::from_secs(400);

/// The trained files of a version.
fn trained(models: &str, name: &str, version: u64) -> Vec<Vec<u8>> {
    let version = Path::new(models).join(name).join(version.to_string());
    let mut paths: Vec<_> =
        fs::read_dir(version.join("tables")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.push(version.join("dense.safetensors"));
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

#[test]
fn training_on_the_log_writes_the_bytes_of_training_on_a_file() {
    let (workshop, schema, settings) = workshop(1500);
    let Workshop { models, train, .. } = &workshop;
    let served = Served::start(models, &settings);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let line = |name: &str, data: &str| {
        format!(
            "train --from latest --format criteo-tsv --models {models} --name {name} --batch 32 --json {data}"
        )
    };
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 1500);
    let log = log_of(Path::new(models), "log");
    let segments = || {
        let names = fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_str().unwrap().ends_with("fllearn")).count()
    };
    assert!(segments() > 2);
    // The server runs, and keeps the log.
    let report = run_json(&line("log", "--learned --learned-until-end"));
    assert_eq!(report["rows"], 1500);
    run_json(&line("file", &format!("--data {train}")));
    assert_eq!(trained(models, "log", 2), trained(models, "file", 2));
    assert_eq!(segments(), 1, "the samples that a version was trained on are removed");

    // The run continues with the samples after its cursor.
    assert_eq!(runtime.block_on(send_file(&served, &schema, &workshop.valid)), 200);
    let report = run_json(&line("log", "--learned --learned-until-end --resume"));
    assert_eq!(report["rows"], 1700, "of the whole run");
    drop(served);
}

/// Waits until the highest version of the model on disk was trained with this many samples.
fn wait_for_samples(models: &str, samples: u64) {
    wait("the learned samples are in a version", || {
        let listed = run_json(&format!("versions --models {models} --name log --json"));
        let versions = listed["models"][0]["versions"].as_array().unwrap();
        versions.last().unwrap()["samples"] == samples
    });
}

#[test]
fn a_server_trains_on_what_clients_send_to_it_also_after_a_kill() {
    let (workshop, schema, _) = workshop(1500);
    let Workshop { models, train, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let served = || {
        let flags = "--train log=learn --batch 32 --publish-every 200ms";
        Served::start(models, flags)
    };
    let killed = served();
    // 200 samples were trained before.
    assert_eq!(runtime.block_on(send_file(&killed, &schema, train)), 1500);
    wait_for_samples(models, 200 + 1500 / 32 * 32);
    // Without a warning.
    drop(killed);

    let served = served();
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait_for_samples(models, 200 + 1700 / 32 * 32);
    let version = highest_version(Path::new(models), "log").unwrap();
    wait("the server takes the version over", || {
        served.metric("flechette_serving_version", &["model=\"log\""]) == version as f64
    });
    let both = workshop.path("both.tsv");
    let whole = [fs::read(train).unwrap(), fs::read(valid).unwrap()].concat();
    let lines = whole.split_inclusive(|&byte| byte == b'\n').take(1700 / 32 * 32);
    fs::write(&both, lines.flatten().copied().collect::<Vec<u8>>()).unwrap();
    run_json(&format!(
        "train --from latest --format criteo-tsv --data {both} --models {models} --name file --batch 32 \
         --json"
    ));
    drop(served);
    let full = run(&format!("versions --models {models} --name log --compact"));
    assert!(full.status.success(), "{}", String::from_utf8_lossy(&full.stderr));
    let version = highest_version(Path::new(models), "log").unwrap();
    assert_eq!(trained(models, "log", version), trained(models, "file", 2));
}

/// Kills of each kind of run.
const KILLS: usize = 4;

/// Samples of a request. Requests do not end where batches end.
const SAMPLES: usize = 12;

/// A client that sends requests one after the other, each until it is acknowledged.
struct Client {
    messages: Vec<PredictRequest>,
    log: PathBuf,
    /// A directory with links to all segments of the log, also to those that a trainer has removed.
    kept: PathBuf,
    /// How often each request was sent. The last one is not acknowledged yet.
    sent: Vec<usize>,
}

impl Client {
    fn new(workshop: &Workshop, schema: &Schema) -> Self {
        let (file, options) = (&workshop.train, ReadOptions::default());
        let mut reader = dataset::open(Format::CriteoTsv, &[file.into()], schema, options).unwrap();
        let (mut raw, mut messages) = (RawBatch::default(), Vec::new());
        while reader.read(SAMPLES, &mut raw).unwrap() > 0 {
            assert_eq!(raw.samples, SAMPLES);
            messages.push(client::request("log", schema, &raw));
        }
        let (log, kept) = (log_of(Path::new(&workshop.models), "log"), workshop.path("kept").into());
        fs::create_dir(&kept).unwrap();
        Self { messages, log, kept, sent: vec![0] }
    }

    /// Sends the last request. When it is acknowledged, there is a next one.
    async fn send(&mut self, ctr: &mut CtrClient<Channel>) -> Result<(), Status> {
        let request = self.sent.len() - 1;
        self.sent[request] += 1;
        let message = self.messages[request % self.messages.len()].clone();
        let answer = ctr.learn(labelled(message, Self::label(request))).await?.into_inner();
        self.keep(&answer.segment);
        self.sent.push(0);
        Ok(())
    }

    /// A label that no other request has.
    fn label(request: usize) -> f32 {
        request as f32 / (1 << 24) as f32
    }

    /// Links the last segment. No trainer removes it.
    fn keep_last(&self) {
        let names = fs::read_dir(&self.log).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        if let Some(last) = names.filter(|name| name.ends_with(".fllearn")).max() {
            self.keep(&last);
        }
    }

    fn keep(&self, segment: &str) {
        let kept = self.kept.join(segment);
        if !kept.exists() {
            fs::hard_link(self.log.join(segment), kept).unwrap();
        }
    }

    /// Asserts that the log has every request in order, once for each time that it can have been stored.
    fn check_log(&self, found: &[f32]) {
        let mut stored = found.chunk_by(|one, next| one == next);
        for (request, &sent) in self.sent[..self.sent.len() - 1].iter().enumerate() {
            let samples = stored.next().unwrap_or_default();
            assert!(samples.first() == Some(&Self::label(request)), "request {request}: {samples:?}");
            let times = samples.len() / SAMPLES;
            assert!(samples.len().is_multiple_of(SAMPLES) && times <= sent, "{times} times, sent {sent}");
        }
        assert_eq!(stored.next(), None);
    }
}

/// Kills servers that train with these flags on what a client sends, at random instants. The last version
/// must be that of a run over the same log that is not killed.
fn trains_the_log_after_kills(more: &str) {
    let (workshop, schema, settings) = workshop(1500);
    let models = &workshop.models;
    let flags = "--train log=learn --format criteo-tsv --batch 32 --publish-every 20ms";
    let serve = || Served::start(models, &format!("{flags} {more} {settings}"));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let connect = |served: &Served| CtrClient::new(runtime.block_on(channel(served.grpc)));
    let mut client = Client::new(&workshop, &schema);
    let mut random = SplitMix64::new(16);
    for _ in 0..kills(KILLS) {
        let served = serve();
        client.keep_last();
        let mut ctr = connect(&served);
        let sending = runtime.spawn(async move {
            while client.send(&mut ctr).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            client
        });
        sleep(Duration::from_millis(random.next_u64() % 400));
        // Kills it.
        drop(served);
        client = runtime.block_on(sending).unwrap();
        check_listed_versions(models, "log");
    }
    let served = serve();
    client.keep_last();
    let mut ctr = connect(&served);
    let found = loop {
        runtime.block_on(client.send(&mut ctr)).unwrap();
        let found = labels(&client.kept);
        // The log ends with a whole batch.
        if found.len().is_multiple_of(32) {
            break found;
        }
    };
    client.check_log(&found);
    wait_for_samples(models, 200 + found.len() as u64);
    drop(served);

    let whole = log_of(Path::new(models), "file");
    // The server has made it.
    fs::remove_dir_all(&whole).unwrap();
    fs::rename(&client.kept, &whole).unwrap();
    for file in ["id", "durable"] {
        fs::copy(client.log.join(file), whole.join(file)).unwrap();
    }
    let report = run_json(&format!(
        "train --from latest --models {models} --name file --batch 32 --json --learned --learned-until-end \
         {more}"
    ));
    assert_eq!(report["rows"], found.len());
    let [log, file] = ["log", "file"].map(|name| last_version(&workshop, name));
    let differ: Vec<_> = file.keys().filter(|path| log.get(*path) != file.get(*path)).collect();
    assert!(log == file, "{differ:?}, files {} and {}", log.len(), file.len());
}

#[test]
fn a_server_that_is_killed_while_clients_send_trains_every_sample_of_the_log_once() {
    trains_the_log_after_kills("");
}

#[test]
fn a_server_with_a_scratchpad_that_is_killed_trains_every_sample_of_the_log_once() {
    trains_the_log_after_kills("--scratchpad 0.3");
}

#[test]
fn flags_of_learned_samples_are_checked() {
    let (workshop, _, _) = workshop(10);
    let models = &workshop.models;
    let line = format!("train --from latest --format criteo-tsv --models {models} --name log");
    let error = run_failing(2, &format!("{line} --learned"));
    assert!(error.contains("--learned: ") && error.contains("no samples were sent"), "{error}");
    let error = run_failing(2, &format!("{line} --data {} --learned-until-end", workshop.train));
    assert!(error.contains("--learned-until-end: used only with --learned"), "{error}");
    // Only files have a format.
    let (line, train) = (line.replace("--format criteo-tsv ", ""), &workshop.train);
    let error = run_failing(2, &format!("{line} --learned"));
    assert!(error.contains("no samples were sent"), "{error}");
    let error = run_failing(2, &format!("{line} --learned --valid {train}"));
    assert!(error.contains("--format: missing"), "{error}");
    let error = run_failing(2, &format!("{line} --data {train}"));
    assert!(error.contains("required arguments were not provided"), "{error}");
}

#[test]
fn every_acknowledged_sample_is_in_the_log_after_kills() {
    let (workshop, schema, settings) = workshop(10);
    let mut reader =
        dataset::open(Format::CriteoTsv, &[(&workshop.train).into()], &schema, ReadOptions::default())
            .unwrap();
    let mut raw = RawBatch::default();
    reader.read(1, &mut raw).unwrap();
    let message = Arc::new(client::request("log", &schema, &raw));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let log = log_of(Path::new(&workshop.models), "log");
    let (mut acked, mut next) = (Vec::new(), 1);
    for round in 0..4 {
        let served = Served::start(&workshop.models, &settings);
        let found = labels(&log);
        assert!(acked.iter().all(|label| found.contains(label)), "round {round}");
        let answered = Arc::new(Mutex::new(Vec::new()));
        let clients: Vec<_> = (0..8u32)
            .map(|client| {
                let (address, message, answered) = (served.grpc, message.clone(), answered.clone());
                runtime.spawn(async move {
                    let mut ctr = CtrClient::new(channel(address).await);
                    for n in 0.. {
                        // A label that no other request has.
                        let label = (next + n * 8 + client) as f32 / (1 << 24) as f32;
                        if ctr.learn(labelled((*message).clone(), label)).await.is_err() {
                            return n;
                        }
                        answered.lock().unwrap().push(label);
                    }
                    0
                })
            })
            .collect();
        let enough = 20 + 30 * round;
        crate::switching::wait("enough answers", || answered.lock().unwrap().len() >= enough);
        // Dropping the server kills it.
        drop(served);
        let most = clients.into_iter().map(|client| runtime.block_on(client).unwrap()).max().unwrap();
        next += 8 * (most + 1);
        acked.append(&mut answered.lock().unwrap());
    }
    let served = Served::start(&workshop.models, &settings);
    let mut found = labels(&log);
    assert!(acked.iter().all(|label| found.contains(label)));
    found.sort_by(f32::total_cmp);
    assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "a sample is in the log twice");
    served.terminate();
    assert!(served.ended().0.success());
}

#[test]
fn a_waiting_run_trains_samples_as_they_come_and_ends_at_a_signal() {
    let (workshop, schema, settings) = workshop(300);
    let Workshop { models, train, .. } = &workshop;
    let served = Served::start(models, &settings);
    let line = format!(
        "train --from latest --format criteo-tsv --models {models} --name log --batch 32 --learned \
         --publish-every 50ms"
    );
    let mut child = flechette().args(line.split_whitespace()).spawn().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 300);
    let version = Path::new(models).join("log/2");
    wait("a published version", || version.exists());
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // Without --publish-every the log would fill up.
    let log = workshop.path("warning");
    let line = line.replace("--publish-every 50ms", "");
    let to_file = fs::File::create(&log).unwrap();
    let mut child = flechette().args(line.split_whitespace()).stderr(to_file).spawn().unwrap();
    let warning = "without --publish-every this run writes its only version";
    wait("a warning", || fs::read_to_string(&log).unwrap().contains(warning));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_version_that_was_trained_on_another_log_begins_at_the_first_sample_of_this_one() {
    let (workshop, schema, settings) = workshop(400);
    let Workshop { models, train, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let line = |name: &str, data: &str| {
        format!(
            "train --from latest --format criteo-tsv --models {models} --name {name} --batch 32 --json {data}"
        )
    };
    let log = log_of(Path::new(models), "log");
    for other in [false, true] {
        let served = Served::start(models, &settings);
        // The same samples again, so that only the log's id differs.
        assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
        let output = run(&line("log", "--learned --learned-until-end --resume"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let report = String::from_utf8(output.stdout).unwrap();
        assert!(report.contains("\"rows\":400,"), "{report}");
        let warned = said.matches("was trained on another log: training begins at the first sample").count();
        assert_eq!(warned, usize::from(other), "{said}");
        run_json(&line("file", &format!("--data {train}")));
        drop(served);
        fs::remove_dir_all(&log).unwrap();
    }
    assert_eq!(trained(models, "log", 3), trained(models, "file", 3));
}

#[test]
fn a_log_that_cannot_be_opened_keeps_no_model_from_being_served_and_is_tried_again() {
    let (workshop, _, settings) = workshop(100);
    let models = Path::new(&workshop.models);
    let log = log_of(models, "log");
    fs::create_dir_all(&log).unwrap();
    let lock = fs::File::create(log.join("lock")).unwrap();
    lock.lock().unwrap();
    let served = Served::start(&workshop.models, &settings);
    assert_eq!(served.score("log", &workshop.valid, "")["version"], 1);
    let line = "no learned samples: model log: ";
    let (code, text) = served.get("/readyz");
    assert!(code == 200 && text.contains(line), "{text}");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let learn = || {
        let message = LearnRequest { model: "log".to_owned(), samples: 1, ..LearnRequest::default() };
        runtime.block_on(async { CtrClient::new(channel(served.grpc).await).learn(message).await })
    };
    let status = learn().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("another process writes this log"), "{status}");
    drop(lock);
    wait("the log is open", || !served.get("/readyz").1.contains(line));
    // Now the message is checked.
    assert_eq!(learn().unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn a_damaged_log_fails_the_training_in_a_server_and_not_the_server() {
    let (workshop, schema, settings) = workshop(100);
    let Workshop { models, train, .. } = &workshop;
    let served = Served::start(models, &settings);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 100);
    drop(served);
    let segment = log_of(Path::new(models), "log").join("0000000001.fllearn");
    let mut bytes = fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let served = Served::start(models, "--train log=learn --batch 32");
    assert_eq!(served.score("log", &workshop.valid, "")["version"], 1);
    wait("the training has failed", || served.metric("flechette_training_state", &["model=\"log\""]) == -1.0);
    assert!(served.get("/readyz").1.contains("no learned samples: model log: "));
    served.terminate();
    let (ended, log) = served.ended();
    assert!(ended.code() == Some(1) && log.contains("0000000001.fllearn: damaged"), "{log}");
}

/// A server that was sent 1,600 samples, which take several segments, and has trained on them.
struct SmallSegments {
    workshop: Workshop,
    schema: Schema,
    flags: String,
    served: Served,
    log: PathBuf,
}

impl SmallSegments {
    fn train() -> Self {
        let (workshop, schema, _) = workshop(400);
        let Workshop { models, train, .. } = &workshop;
        let settings = workshop.path("segments.toml");
        fs::write(&settings, "[learn]\nsegment_bytes = \"64Ki\"\n").unwrap();
        let flags = format!("--train log=learn --batch 32 --publish-every 1steps --config {settings}");
        let served = Served::start(models, &flags);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        for _ in 0..4 {
            assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
        }
        wait_for_samples(models, 200 + 1600);
        let log = log_of(Path::new(models), "log");
        Self { workshop, schema, flags, served, log }
    }
}

#[test]
fn training_goes_on_from_an_older_version_when_the_last_one_was_deleted() {
    let SmallSegments { workshop, schema, flags, served, log } = SmallSegments::train();
    let Workshop { models, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    wait("the first samples are removed", || !log.join("0000000001.fllearn").exists());
    drop(served);
    let last = highest_version(Path::new(models), "log").unwrap();
    let path = |version: u64| Path::new(models).join("log").join(version.to_string());
    // The first version was trained on a file.
    let mut left = (2..=last).filter(|version| path(*version).exists());
    let oldest = left.next().unwrap();
    left.for_each(|version| fs::remove_dir_all(path(version)).unwrap());
    let cursor = fs::read(path(oldest).join("checkpoint/cursor.json")).unwrap();
    let cursor: serde_json::Value = serde_json::from_slice(&cursor).unwrap();
    let segment = cursor["file"]["name"].as_str().expect("a version that was trained on the log");
    assert!(!log.join(segment).exists(), "{segment} was removed with a later version");
    let served = Served::start(models, &flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait("the new samples are in a version", || {
        served.metric("flechette_serving_version", &["model=\"log\""]) > oldest as f64
    });
    assert_eq!(served.metric("flechette_training_state", &["model=\"log\""]), 1.0);
    served.terminate();
    let (_, said) = served.ended();
    let warning = "is missing, but a later segment exists: training begins at the first sample of the log";
    assert!(said.contains(warning), "{said}");
}

#[test]
fn samples_that_a_killed_process_trained_on_and_did_not_remove_are_removed_at_the_next_start() {
    let SmallSegments { workshop, flags, served, log, .. } = SmallSegments::train();
    let models = &workshop.models;
    let segment = |number: u64| log.join(format!("{number:010}.fllearn"));
    let left = || (1..100).filter(|number| segment(*number).exists()).collect::<Vec<_>>();
    wait("all samples but those of the last file are removed", || left().len() == 1);
    drop(served);
    let last = left()[0];
    assert!(last > 1);
    fs::copy(segment(last), segment(last - 1)).unwrap();
    // There is nothing to train on, so no version is published.
    let served = Served::start(models, &flags);
    wait("the file is removed", || left() == [last]);
    wait("training goes on", || served.metric("flechette_training_state", &["model=\"log\""]) == 1.0);
}

/// A server that trains on a log with room for less than half of the samples.
fn serve_small_log(workshop: &Workshop, flags: &str) -> Served {
    let settings = workshop.path("small.toml");
    fs::write(&settings, "[learn]\nmax_bytes = \"1Mi\"\n").unwrap();
    let flags = format!("--train log=learn --format criteo-tsv {LAST_VERSION} {flags} --config {settings}");
    Served::start(&workshop.models, &flags)
}

/// Sends more samples than the log of a server with these flags has room for.
fn publishes_a_full_log(flags: &str) {
    let (workshop, schema, _) = workshop(5000);
    let served = serve_small_log(&workshop, flags);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, &workshop.train)), 5000);
    served.terminate();
    let (ended, log) = served.ended();
    assert!(ended.success(), "{log}");
    let version = highest_version(Path::new(&workshop.models), "log").unwrap();
    assert!(version > 2, "{version}: {log}");
}

#[test]
fn a_full_log_is_published_although_a_whole_batch_never_comes() {
    publishes_a_full_log("--batch 100000");
}

#[test]
fn a_full_log_is_published_although_the_steps_of_a_version_never_come() {
    publishes_a_full_log("--batch 32 --publish-every 1000steps");
}

#[test]
fn a_full_log_is_published_although_a_whole_batch_never_comes_to_a_scratchpad() {
    publishes_a_full_log("--batch 100000 --scratchpad 0.5");
}

#[test]
fn a_gate_that_keeps_a_log_full_is_reported_with_the_limit() {
    let (workshop, schema, _) = workshop(5000);
    let served = serve_small_log(&workshop, "--batch 32 --publish-every 200ms --publish-gate auc=0.9999");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let latest = || highest_version(Path::new(&workshop.models), "log");
    std::thread::scope(|scope| {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (served, schema, file, runtime) = (&served, &schema, &workshop.train, &runtime);
        let sends = scope.spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    sent = send_file(served, schema, file) => Some(sent),
                    _ = stopped => None,
                }
            })
        });
        let text = "The log of learned samples is full (learn.max_bytes, 1048576 bytes)";
        wait("the status page says what keeps the log full", || served.status().to_string().contains(text));
        let log_loss = || served.metric("flechette_progressive_log_loss", &["model=\"log\""]);
        wait("the quality of what is refused is shown", || log_loss() > 0.0);
        let before = latest();
        sleep(Duration::from_secs(5));
        assert_eq!(latest(), before, "no version may be published");
        drop(stop);
        assert_eq!(sends.join().unwrap(), None, "the log has no room for all samples");
        served.terminate();
    });
    let (_, log) = served.ended();
    let warned = log.lines().filter(|line| line.contains("WARN") && line.contains("learn.max_bytes")).count();
    // Possibly none: of one line of the source, 20 lines are logged in a minute.
    assert!(warned < 9, "{log}");
}

#[test]
fn a_log_whose_end_was_forgotten_by_a_power_failure_is_not_trained_again() {
    let (workshop, schema, _) = workshop(400);
    let Workshop { models, train, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let flags = &format!("--train log=learn --batch 32 --publish-every 200ms {LAST_VERSION}");
    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    // It is never synced, so a power failure leaves an old one.
    let durable = log_of(Path::new(models), "log").join("durable");
    let old = fs::read(&durable).unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
    // 200 samples were trained before.
    wait_for_samples(models, 200 + 600 / 32 * 32);
    drop(served);
    assert_ne!(fs::read(&durable).unwrap(), old);
    fs::write(&durable, old).unwrap();

    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait_for_samples(models, 200 + 800);
    served.terminate();
    let (ended, said) = served.ended();
    assert!(ended.success() && !said.contains("training begins at the first sample"), "{said}");
    wait_for_samples(models, 200 + 800);
}

#[test]
fn a_server_whose_model_is_deleted_acknowledges_only_samples_that_it_trains_on() {
    let (workshop, schema, _) = workshop(400);
    let Workshop { models, train, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let flags = &format!("--train log=learn --batch 32 --publish-every 200ms {LAST_VERSION}");
    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
    // 200 samples were trained before.
    wait_for_samples(models, 200 + 400 / 32 * 32);
    let (model, newest) = (Path::new(models).join("log"), || highest_version(Path::new(models), "log"));
    let before = newest();
    // The server may write into the directory meanwhile.
    wait("the model is deleted", || fs::remove_dir_all(&model).is_ok() || !model.exists());

    let mut reader =
        dataset::open(Format::CriteoTsv, &[valid.into()], &schema, ReadOptions::default()).unwrap();
    let mut raw = RawBatch::default();
    reader.read(8, &mut raw).unwrap();
    let message = labelled(client::request("log", &schema, &raw), 0.5);
    let ctr = CtrClient::new(runtime.block_on(channel(served.grpc)));
    wait("samples are stored", || runtime.block_on(ctr.clone().learn(message.clone())).is_ok());
    assert_eq!(labels(&log_of(Path::new(models), "log")), [0.5; 8]);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait("a version is published", || newest() > before);
    wait_for_samples(models, 200 + 608);
    let version = newest().unwrap() as f64;
    wait("it is served", || served.metric("flechette_serving_version", &["model=\"log\""]) == version);
    drop(served);

    // The cursor is one of the new log.
    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
    wait_for_samples(models, 200 + 1008 / 32 * 32);
    served.terminate();
    let (ended, said) = served.ended();
    assert!(ended.success() && !said.contains("training begins at the first sample"), "{said}");
}
