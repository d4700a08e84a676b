//! Servers that are killed while clients send. Every acknowledged sample is in the log, and is trained once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use flechette::cli::client;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::mem::SplitMix64;
use flechette::schema::Schema;
use flechette::server::proto::PredictRequest;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::types::RawBatch;
use tonic::Status;
use tonic::transport::Channel;

use super::sending::{send_file, trained, wait_for_samples, workshop};
use super::served::{labelled, labels, log_of};
use crate::program::{Served, Workshop, check_listed_versions, highest_version, kills, run, run_json};
use crate::serving::channel;
use crate::switching::wait;
use crate::train_resume::last_version;

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
