//! A running server takes over new versions and new models, with and without a cache. Clients score
//! meanwhile, and no request fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use flechette::cli::client;
use flechette::cli::serve::Serving;
use flechette::config::{Config, Flags};
use flechette::dataset::{self, Format, ReadOptions};
use flechette::predict::Predict;
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{PredictRequest, PredictResponse};
use flechette::types::{Batch, RawBatch};
use tonic::transport::Channel;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

use crate::fake::LIMIT;
use crate::program::{
    PATIENT, Served, Workshop, flechette, highest_version, manifest, metrics_page, run_json, seconds,
};
use crate::serving::channel;
use crate::train_data::interrupting::signal;

pub const MODEL: &str = "dlrm";
const CLIENTS: usize = 4;
const REQUESTS: usize = 8;

pub fn folder(models: &str, model: &str, version: u64) -> PathBuf {
    Path::new(models).join(model).join(version.to_string())
}

/// Waits until something has happened. Panics if it never does.
pub fn wait(what: &str, happened: impl Fn() -> bool) {
    // The limit is far above what anything takes.
    for _ in 0..6000 {
        if happened() {
            return;
        }
        sleep(Duration::from_millis(50));
    }
    panic!("never happened: {what}");
}

/// Waits until the server has looked at all of its models this many times, from begin to end.
pub fn looks(served: &Served, models: &str, times: usize) {
    let name = |look: usize| format!("look{look}");
    let refused = |look: usize| served.get("/readyz").1.contains(&format!("model {}: ", name(look)));
    for look in 0..times {
        fs::create_dir_all(folder(models, &name(look), 1)).unwrap();
        wait("a model without files is refused", || refused(look));
    }
    (0..times).for_each(|look| fs::remove_dir_all(Path::new(models).join(name(look))).unwrap());
    // The first look may have begun before this function did, so this one is needed too.
    wait("the models without files are forgotten", || !(0..times).any(refused));
}

/// The lines of a log about refused versions of [`MODEL`].
fn refusals(log: &str) -> Vec<&str> {
    let model = format!("model=\"{MODEL}\"");
    log.lines().filter(|line| line.contains("version refused") && line.contains(&model)).collect()
}

pub fn serves(served: &Served, model: &str, version: u64) -> bool {
    served.metric("flechette_serving_version", &[&format!("model=\"{model}\"")]) == version as f64
}

fn counted(served: &Served, what: &str) -> f64 {
    served.sum(&format!("flechette_{what}"), MODEL)
}

/// Writes a version as [`prepare`] does, and gives it its name.
pub fn publish(models: &str, version: u64, change: impl Fn(&str, usize, f32) -> f32) {
    fs::rename(prepare(models, version, change), folder(models, MODEL, version)).unwrap();
}

/// Writes a version under a name that servers ignore. Its files differ from those of version 1 in the numbers
/// that `change` changes. It gets the name of the file, the position of the number in the file's data, and
/// the number.
fn prepare(models: &str, version: u64, change: impl Fn(&str, usize, f32) -> f32) -> PathBuf {
    let from = folder(models, MODEL, 1);
    let temporary = Path::new(models).join(MODEL).join(format!(".{version}.test.tmp"));
    fs::create_dir_all(temporary.join("tables")).unwrap();
    fs::copy(from.join("model.toml"), temporary.join("model.toml")).unwrap();
    let mut manifest = fs::read_to_string(from.join("MANIFEST.json")).unwrap();
    let tables = fs::read_dir(from.join("tables")).unwrap().map(|entry| entry.unwrap().file_name());
    let tables = tables.map(|name| format!("tables/{}", name.to_str().unwrap()));
    for file in tables.chain(["dense.safetensors".to_owned()]) {
        let before = fs::read(from.join(&file)).unwrap();
        let mut bytes = before.clone();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (i, number) in bytes[8 + header..].chunks_exact_mut(4).enumerate() {
            let value = f32::from_le_bytes(number.try_into().unwrap());
            number.copy_from_slice(&change(&file, i, value).to_le_bytes());
        }
        let hex = |bytes: &[u8]| format!("{:032x}", xxh3_128(bytes));
        manifest = manifest.replace(&hex(&before), &hex(&bytes));
        fs::write(temporary.join(&file), bytes).unwrap();
    }
    // The manifest's own checksum is computed with zeros in its place.
    let place = manifest.rfind("\"xxh3_128\": \"").unwrap() + "\"xxh3_128\": \"".len();
    manifest.replace_range(place..place + 32, &"0".repeat(32));
    let own = format!("{:032x}", xxh3_128(manifest.as_bytes()));
    manifest.replace_range(place..place + 32, &own);
    fs::write(temporary.join("MANIFEST.json"), manifest).unwrap();
    temporary
}

/// Writes a version in which every number of every row and of the dense weights is another function of the
/// version.
pub fn publish_all_changed(models: &str, version: u64) {
    publish(models, version, changed_all(version));
}

fn changed_all(version: u64) -> impl Fn(&str, usize, f32) -> f32 {
    move |file, i, value| {
        let random = xxh3_64_with_seed(&(i as u64).to_le_bytes(), version ^ file.len() as u64) % 1024;
        value * 0.5 + random as f32 / 4096.0
    }
}

/// Some requests and their batches.
pub fn requests(workshop: &Workshop) -> Vec<(PredictRequest, Batch)> {
    let schema: Schema = preset::criteo(ArchKind::Dlrm, 8, 1000);
    let files = [PathBuf::from(&workshop.valid)];
    let mut reader = dataset::open(Format::CriteoTsv, &files, &schema, ReadOptions::default()).unwrap();
    let mut one = || {
        let (mut raw, mut batch) = (RawBatch::default(), Batch::default());
        reader.read(16, &mut raw).unwrap();
        schema.encode(&raw, &mut batch).unwrap();
        (client::request(MODEL, &schema, &raw), batch)
    };
    (0..REQUESTS).map(|_| one()).collect()
}

pub type Answers = BTreeMap<(u64, usize), Vec<u32>>;

pub fn bits(scores: &[f32]) -> Vec<u32> {
    scores.iter().map(|score| score.to_bits()).collect()
}

/// Sends requests until `stop` is set. Returns the answers by version and request. Every request must
/// succeed, and answers of one version to one request must be equal.
/// The answer of a server to which no request may be lost, and which may not refuse any.
pub async fn answer(client: &mut CtrClient<Channel>, request: PredictRequest) -> PredictResponse {
    let answer = tokio::time::timeout(LIMIT, client.predict(request)).await.expect("an answer in time");
    answer.expect("no request fails").into_inner()
}

async fn score(
    served: std::net::SocketAddr,
    requests: Vec<PredictRequest>,
    stop: Arc<AtomicBool>,
) -> Answers {
    let mut client = CtrClient::new(channel(served).await);
    let mut answers = Answers::new();
    for number in (0..requests.len()).cycle() {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let answer = answer(&mut client, requests[number].clone()).await;
        let scores = bits(&answer.scores);
        let first = answers.entry((answer.version, number)).or_insert_with(|| scores.clone());
        assert!(*first == scores, "version {}, request {number}: two answers", answer.version);
    }
    answers
}

/// The scores of a version, computed in this process from mapped tables without a cache.
pub fn expected(models: &str, version: u64, batches: &[Batch]) -> Vec<Vec<u32>> {
    let alone = tempfile::tempdir().unwrap();
    fs::create_dir(alone.path().join(MODEL)).unwrap();
    // A delta needs the versions before it.
    for link in (1..=version).map(|link| folder(models, MODEL, link)).filter(|link| link.exists()) {
        let to = alone.path().join(MODEL).join(link.file_name().unwrap());
        std::os::unix::fs::symlink(link, to).unwrap();
    }
    let flags = Flags {
        device: Some("host".into()),
        cache_mode: Some("off".into()),
        store_memory: Some("mapped".into()),
        ..Flags::default()
    };
    let serving = Serving::load(&Config::resolve(&flags, [], None).unwrap(), alone.path()).unwrap();
    let engine = serving.engines().remove(0);
    let scores = |batch: &Batch| {
        let scores = engine.predict(batch).unwrap();
        assert_eq!(scores.version.0, version);
        bits(&scores.probabilities)
    };
    batches.iter().map(scores).collect()
}

/// How long versions are published while clients score; more with FLECHETTE_TEST_SECONDS.
pub fn published_for() -> Duration {
    seconds("FLECHETTE_TEST_SECONDS", 5)
}

/// Publishes full versions in which every number changes, until some time has passed.
pub fn publish_full_versions(workshop: &Workshop, served: &Served) {
    let (begun, models) = (Instant::now(), &workshop.models);
    for version in 2.. {
        if version > 6 && begun.elapsed() >= published_for() {
            return;
        }
        publish_all_changed(models, version);
        wait("a version is taken over", || serves(served, MODEL, version));
    }
}

/// Trains on from version 1 in another process, which publishes deltas and now and then a full version.
pub fn publish_by_training(workshop: &Workshop, served: &Served) {
    let Workshop { models, train, .. } = workshop;
    let line = format!(
        "train --from latest --models {models} --name {MODEL} --format criteo-tsv --data {train} --batch 8 \
         --epochs 1000000 --publish-every 150ms"
    );
    let mut trainer = flechette();
    // Every version stays, so that answers can be compared with each.
    trainer.args(line.split_whitespace()).env("FLECHETTE_VERSIONS_KEEP", "100000");
    let mut trainer = trainer.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    sleep(published_for());
    // Versions are opened at a low priority, so they wait for the tests beside this one.
    wait("four versions are taken over", || counted(served, "switches_total") >= 4.0);
    signal(&trainer, "-INT");
    assert_eq!(trainer.wait().unwrap().code(), Some(130));
}

/// Clients score while `publish` publishes versions. Every answer is that of the version that it names.
/// Returns the number of versions that have answered.
pub fn check_every_answer(grpc: std::net::SocketAddr, workshop: &Workshop, publish: impl FnOnce()) -> usize {
    let models = &workshop.models;
    let (messages, batches): (Vec<_>, Vec<_>) = requests(workshop).into_iter().unzip();
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let clients: Vec<_> =
        (0..CLIENTS).map(|_| runtime.spawn(score(grpc, messages.clone(), stop.clone()))).collect();
    publish();
    // The answers of the last version.
    sleep(Duration::from_millis(200));
    stop.store(true, Ordering::Release);
    let mut versions = BTreeSet::new();
    let mut oracles = BTreeMap::new();
    let mut answers = 0;
    for client in clients {
        for ((version, request), scores) in runtime.block_on(client).unwrap() {
            answers += 1;
            versions.insert(version);
            let oracle = oracles.entry(version).or_insert_with(|| expected(models, version, &batches));
            assert!(oracle[request] == scores, "version {version}, request {request}");
        }
    }
    println!("{answers} different answers of {} versions", versions.len());
    versions.len()
}

pub fn every_answer_is_of_the_version_that_it_names(flags: &str, publish: fn(&Workshop, &Served)) {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start_in(PATIENT, &workshop.models, flags);
    let versions = check_every_answer(served.grpc, &workshop, || {
        publish(&workshop, &served);
        let last = highest_version(Path::new(&workshop.models), MODEL).unwrap();
        wait("the last version is taken over", || serves(&served, MODEL, last));
    });
    assert!(versions >= 4, "{flags}: {versions}");
    assert!(counted(&served, "switches_total") >= 3.0);
    if flags.contains("on") {
        assert!(counted(&served, "switch_rows_carried_total") > 0.0);
    }
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
}

const CACHE_OFF: &str = "--cache-mode off --store-memory ram";
const CACHE_ON: &str = "--cache-mode on --cache-fraction 0.01";

#[test]
fn every_answer_is_of_the_version_that_it_names_without_a_cache() {
    every_answer_is_of_the_version_that_it_names(CACHE_OFF, publish_full_versions);
}

#[test]
fn every_answer_is_of_the_version_that_it_names_with_a_cache_of_one_percent() {
    every_answer_is_of_the_version_that_it_names(CACHE_ON, publish_full_versions);
}

#[test]
fn every_answer_is_of_the_version_that_it_names_while_a_trainer_publishes_deltas() {
    every_answer_is_of_the_version_that_it_names(CACHE_OFF, publish_by_training);
}

#[test]
fn every_answer_is_of_the_version_that_it_names_while_cached_rows_change_by_deltas() {
    every_answer_is_of_the_version_that_it_names(CACHE_ON, publish_by_training);
}

#[test]
fn a_refused_version_is_reported_once_and_lower_good_ones_are_taken_over() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let models = &workshop.models;
    let served = Served::start(models, "--cache-mode on");
    let temporary = prepare(models, 3, changed_all(3));
    let whole = fs::read(temporary.join("tables/C4.safetensors")).unwrap();
    fs::write(temporary.join("tables/C4.safetensors"), &whole[..whole.len() / 2]).unwrap();
    fs::rename(temporary, folder(models, MODEL, 3)).unwrap();
    let broken = folder(models, MODEL, 3).join("tables/C4.safetensors");
    wait("the version is refused", || counted(&served, "switches_refused_total") == 1.0);
    publish_all_changed(models, 2);
    wait("the lower version is taken over", || serves(&served, MODEL, 2));
    assert_eq!(served.score(MODEL, &workshop.valid, "")["version"], 2);
    looks(&served, models, 2);
    assert_eq!(counted(&served, "switches_refused_total"), 1.0, "it is not tried again");
    assert_eq!(counted(&served, "newer_versions_refused"), 1.0);
    let (code, text) = served.get("/readyz");
    let older = "ready\nolder version: model dlrm serves version 2: version 3 is refused: ";
    assert!(code == 200 && text.starts_with(older) && text.contains("C4.safetensors"), "{text}");
    let model = &served.status()["models"][0];
    let refused = model["newer_refused"][0].as_str().unwrap();
    assert!(model["serving"] == 2 && refused.starts_with("version 3 is refused: "), "{model}");
    fs::write(&broken, &whole).unwrap();
    wait("the repaired version is taken over", || serves(&served, MODEL, 3));
    wait("no version is refused", || counted(&served, "newer_versions_refused") == 0.0);
    assert_eq!(served.get("/readyz"), (200, "ready\n".to_owned()));
    let page = metrics_page(served.http);
    assert!(page.contains("flechette_serving_version_age_seconds{model=\"dlrm\"}"), "{page}");
    served.terminate();
    let (_, log) = served.ended();
    let lines = refusals(&log);
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("truncated") && lines[0].contains("C4.safetensors"), "{}", lines[0]);
    assert!(log.contains("version taken over"), "{log}");
}

/// Trains on from the version before this one, and publishes a delta.
pub fn publish_delta(Workshop { models, valid, .. }: &Workshop, version: u64) {
    let line = format!(
        "train --from latest --models {models} --name {MODEL} --format criteo-tsv --data {valid} \
         --publish-every 1000steps"
    );
    // A small model has large deltas.
    let mut train = flechette();
    train.args(line.split_whitespace()).env("FLECHETTE_VERSIONS_COMPACT_AT", "100");
    assert!(train.status().unwrap().success());
    assert_eq!(manifest(models, MODEL, version)["base"]["version"], version - 1, "it must be a delta");
}

#[test]
fn a_delta_that_was_refused_for_its_base_is_served_when_the_base_appears_or_is_repaired() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let Workshop { models, valid, .. } = &workshop;
    let away = |version: u64| workshop.path(&version.to_string());
    [2, 3].into_iter().for_each(|version| publish_delta(&workshop, version));
    for version in [2, 3] {
        fs::rename(folder(models, MODEL, version), away(version)).unwrap();
    }

    let served = Served::start(models, "--cache-mode on");
    fs::rename(away(3), folder(models, MODEL, 3)).unwrap();
    let older = "ready\nolder version: model dlrm serves version 1: version 3 is refused: ";
    wait("the delta is refused", || {
        let text = served.get("/readyz").1;
        text.starts_with(older) && text.contains("its base, version 2")
    });
    looks(&served, models, 2);
    assert_eq!(counted(&served, "switches_refused_total"), 1.0, "it is not tried again");
    fs::rename(away(2), folder(models, MODEL, 2)).unwrap();
    wait("the delta is taken over", || serves(&served, MODEL, 3));
    assert_eq!(served.score(MODEL, valid, "")["version"], 3);
    wait("no version is refused", || served.get("/readyz").1 == "ready\n");
    served.terminate();
    let (_, log) = served.ended();
    assert_eq!(refusals(&log).len(), 1, "{log}");

    // The base is damaged when the server starts.
    let (table, aside) = (folder(models, MODEL, 2).join("tables/C4.safetensors"), workshop.path("C4"));
    fs::rename(&table, &aside).unwrap();
    let served = Served::start(models, "--cache-mode on");
    wait("the server starts", || serves(&served, MODEL, 1));
    looks(&served, models, 2);
    assert_eq!(counted(&served, "switches_refused_total"), 2.0, "neither is tried again");
    fs::rename(&aside, &table).unwrap();
    wait("the delta is taken over", || serves(&served, MODEL, 3));
    served.terminate();
    let (_, log) = served.ended();
    assert_eq!(refusals(&log).len(), 2, "{log}");
}

#[test]
fn a_new_model_is_served_and_one_that_disappears_goes_on() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let own = fs::read_to_string(workshop.trained_scores(ArchKind::Dlrm)).unwrap();
    workshop.train(ArchKind::Deepfm);
    wait("the new model is served", || serves(&served, "deepfm", 1));
    let out = workshop.path("served.scores");
    assert_eq!(served.score("deepfm", &workshop.valid, &format!("--out {out}"))["version"], 1);
    let deepfm = fs::read_to_string(workshop.trained_scores(ArchKind::Deepfm)).unwrap();
    assert!(fs::read_to_string(&out).unwrap() == deepfm);

    let (here, away) = (Path::new(&workshop.models).join(MODEL), workshop.path("away"));
    fs::rename(&here, &away).unwrap();
    looks(&served, &workshop.models, 2);
    served.score(MODEL, &workshop.valid, &format!("--out {out}"));
    assert!(fs::read_to_string(&out).unwrap() == own, "the loaded version goes on");
    fs::rename(&away, &here).unwrap();
    publish_all_changed(&workshop.models, 2);
    wait("the version after the return is taken over", || serves(&served, MODEL, 2));
    fs::rename(here.join("2"), &away).unwrap();
    looks(&served, &workshop.models, 2);
    assert!(serves(&served, MODEL, 2), "the loaded version goes on");
    // Another version gets the number.
    fs::rename(here.join("1"), here.join("2")).unwrap();
    looks(&served, &workshop.models, 2);
    assert!(serves(&served, MODEL, 2), "the loaded version goes on");
    served.terminate();
    let (_, log) = served.ended();
    assert_eq!(log.matches("model unreadable").count(), 1, "{log}");
    let gone: Vec<_> = log.lines().filter(|line| line.contains("version no longer on disk")).collect();
    assert!(gone.len() == 1 && gone[0].contains("dlrm") && gone[0].contains("version=2"), "{log}");
    assert_eq!(log.matches("another version has its number on disk").count(), 1, "{log}");
    assert!(log.contains("new model served"), "{log}");
}

#[test]
fn a_version_with_another_schema_waits_for_a_restart() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    // The same name with another dim.
    let (config, Workshop { train, valid, models, .. }) =
        (workshop.config(ArchKind::Dlrm, 4, 1000), &workshop);
    run_json(&format!(
        "train --model-config {config} --format criteo-tsv --data {train} --valid {valid} --models {models} \
         --name {MODEL} --json"
    ));
    wait("the version is refused", || counted(&served, "switches_refused_total") == 1.0);
    assert_eq!(served.score(MODEL, valid, "")["version"], 1);
    served.terminate();
    let (_, log) = served.ended();
    assert!(
        log.contains("not the schema of the served version: ")
            && log.contains("serves it if stable names it"),
        "{log}"
    );
    let served = Served::start(models, "");
    assert_eq!(served.score(MODEL, valid, "")["version"], 2);
}
