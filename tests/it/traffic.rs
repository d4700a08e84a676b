//! Several versions of a model in one server: by number, by label, by share, and as a shadow.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use flechette::schema::preset::ArchKind;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::{
    InferParameter, ModelInferRequest, ModelMetadataRequest, ModelReadyRequest, ModelStatistics,
    ModelStatisticsRequest, RepositoryIndexRequest, RepositoryModelLoadRequest, RepositoryModelUnloadRequest,
};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{PredictRequest, SetLabelRequest};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::kserve::typed;
use crate::program::{PATIENT, Served, Workshop, flechette, run, run_failing};
use crate::serving::channel;
use crate::switching::{answer, bits, expected, publish, publish_delta, requests, wait};

const MODEL: &str = "dlrm";

/// A model with the versions 1 to `versions`, which have different scores, and some requests for it.
struct World {
    workshop: Workshop,
    requests: Vec<PredictRequest>,
    /// The scores of each version when it is served alone, by request.
    scores: BTreeMap<u64, Vec<Vec<u32>>>,
}

impl World {
    fn new(versions: u64) -> Self {
        Self::publish(versions, |workshop, version| publish_other(&workshop.models, version))
    }

    fn publish(versions: u64, publish: impl Fn(&Workshop, u64)) -> Self {
        let workshop = Workshop::new(300, 400);
        workshop.train(ArchKind::Dlrm);
        (2..=versions).for_each(|version| publish(&workshop, version));
        let (requests, batches): (Vec<_>, Vec<_>) = requests(&workshop).into_iter().unzip();
        let alone = |version| (version, expected(&workshop.models, version, &batches));
        let scores: BTreeMap<_, _> = (1..=versions).map(alone).collect();
        for request in 0..requests.len() {
            let different: BTreeSet<_> = scores.values().map(|alone| &alone[request]).collect();
            assert_eq!(different.len() as u64, versions, "all versions have different scores");
        }
        Self { workshop, requests, scores }
    }

    /// Starts a server with a table of the model.
    fn serve(&self, table: &str, flags: &str) -> Client {
        self.serve_in("true", table, flags)
    }

    /// As [`Self::serve`], in a shell that runs `setup` before.
    fn serve_in(&self, setup: &str, table: &str, flags: &str) -> Client {
        let flags = format!("--config {} {flags}", self.configure(table));
        Client::of(Served::start_in(setup, &self.workshop.models, &flags))
    }

    fn configure(&self, table: &str) -> String {
        let config = self.workshop.path("traffic.toml");
        fs::write(&config, format!("[models.{MODEL}]\n{table}\n")).unwrap();
        config
    }

    /// Which version has these scores for this request.
    fn version_of(&self, request: usize, scores: &[f32]) -> u64 {
        let scores = bits(scores);
        let found = self.scores.iter().find(|(_, alone)| alone[request] == scores);
        *found.expect("the scores of a version that is served alone").0
    }
}

/// Publishes a version whose numbers are all a little different from those of version 1.
fn publish_other(models: &str, version: u64) {
    publish(models, version, |file, i, value| {
        let random = xxh3_64_with_seed(&(i as u64).to_le_bytes(), version ^ file.len() as u64) % 1024;
        value * 0.9 + (random as f32 - 512.0) / 16384.0
    });
}

/// A server and a client of it.
struct Client {
    served: Served,
    runtime: Runtime,
    ctr: CtrClient<Channel>,
    kserve: GrpcInferenceServiceClient<Channel>,
}

impl Client {
    fn of(served: Served) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let channel = runtime.block_on(channel(served.grpc));
        let (ctr, kserve) = (CtrClient::new(channel.clone()), GrpcInferenceServiceClient::new(channel));
        Self { served, runtime, ctr, kserve }
    }

    fn predict(&self, request: PredictRequest) -> Result<(u64, Vec<f32>), Status> {
        let mut ctr = self.ctr.clone();
        let answer = self.runtime.block_on(ctr.predict(request))?.into_inner();
        Ok((answer.version, answer.scores))
    }

    /// The version that scores a request, which must have the scores that it has alone.
    fn scored_by(&self, world: &World, change: impl FnOnce(&mut PredictRequest)) -> Result<u64, Status> {
        let mut request = world.requests[0].clone();
        change(&mut request);
        let (version, scores) = self.predict(request)?;
        assert_eq!(world.version_of(0, &scores), version);
        Ok(version)
    }

    fn by_label(&self, world: &World, label: &str) -> Result<u64, Status> {
        self.scored_by(world, |request| request.label = label.to_owned())
    }

    fn set_label(&self, label: &str, version: u64) -> Result<u64, Status> {
        let (model, label) = (MODEL.to_owned(), label.to_owned());
        self.change(SetLabelRequest { model, label, version, remove: false })
    }

    fn remove_label(&self, label: &str) -> Result<u64, Status> {
        let (model, label) = (MODEL.to_owned(), label.to_owned());
        self.change(SetLabelRequest { model, label, version: 0, remove: true })
    }

    fn change(&self, request: SetLabelRequest) -> Result<u64, Status> {
        let mut ctr = self.ctr.clone();
        Ok(self.runtime.block_on(ctr.set_label(request))?.into_inner().version)
    }

    /// The output of `flechette label`.
    fn label(&self, rest: &str) -> String {
        let output = run(&format!("label --addr {} {MODEL} {rest}", self.served.url()));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The loaded versions.
    fn loaded(&self) -> String {
        self.label("").lines().last().unwrap().strip_prefix("loaded: ").unwrap().to_owned()
    }

    fn metric(&self, name: &str, label: &str) -> f64 {
        self.served.metric(&format!("flechette_{name}"), &["model=\"dlrm\"", label])
    }

    fn ends_well(self) {
        self.served.terminate();
        let (status, log) = self.served.ended();
        assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
        assert!(!log.contains("not ended after"), "a change waits in vain:\n{log}");
    }
}

#[test]
fn every_loaded_version_has_the_scores_that_it_has_alone() {
    let world = World::new(4);
    for flags in ["--cache-mode off", "--cache-mode on --cache-fraction 0.1"] {
        let client = world.serve("versions = \"all\"", flags);
        for version in [4, 1, 3, 2, 1, 4] {
            for (number, request) in world.requests.iter().enumerate() {
                let request = PredictRequest { version, ..request.clone() };
                let (by, scores) = client.predict(request).unwrap();
                assert_eq!((by, world.version_of(number, &scores)), (version, version));
            }
        }
        assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 4, "stable is the latest");
        let status = client.scored_by(&world, |request| request.version = 9).unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(status.message(), "version: model \"dlrm\" serves version 1, 2, 3, 4, got 9");
        client.ends_well();
    }
}

#[test]
fn a_policy_says_which_versions_are_loaded_and_follows_new_ones_and_new_settings() {
    let world = World::new(4);
    let client = world.serve("versions = \"latest 2\"", "");
    assert_eq!(client.loaded(), "3, 4");
    publish_other(&world.workshop.models, 5);
    wait("the new version is loaded", || client.loaded() == "4, 5");
    assert_eq!(
        client.predict(PredictRequest { version: 3, ..world.requests[0].clone() }).unwrap_err().code(),
        Code::NotFound
    );
    for (table, loaded) in [
        ("versions = [1, 3]", "1, 3"),
        ("versions = \"latest\"", "5"),
        ("versions = \"latest\"\nlabels = { canary = 2 }", "2, 5"),
        ("versions = \"all\"", "1, 2, 3, 4, 5"),
        ("versions = \"latest 3\"\nlabels = { stable = 1 }", "1, 3, 4, 5"),
    ] {
        world.configure(table);
        client.served.signal("-HUP");
        wait(table, || client.loaded() == loaded);
        for version in loaded.split(", ").map(|version| version.parse().unwrap()) {
            let request = PredictRequest { version, ..world.requests[0].clone() };
            assert_eq!(client.predict(request).unwrap().0, version);
        }
    }
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    world.configure("versions = [1, 9]");
    client.served.signal("-HUP");
    wait("the missing version is shown", || {
        client.served.get("/readyz").1.contains("not loaded: model dlrm: version 9")
    });
    assert_eq!((client.served.get("/readyz").0, client.loaded()), (200, "1".to_owned()));
    client.ends_well();
}

#[test]
fn a_label_names_a_version_or_the_latest_and_survives_new_versions_and_a_restart() {
    let world = World::new(3);
    let client = world.serve("labels = { canary = \"latest\" }", "--cache-mode on --cache-fraction 0.1");
    assert_eq!(client.label(""), "canary: 3 (latest)\nstable: 3 (latest)\nloaded: 3\n");
    assert_eq!(client.label("old 1"), "old: 1\n");
    assert_eq!(client.label(""), "canary: 3 (latest)\nold: 1\nstable: 3 (latest)\nloaded: 1, 3\n");
    let latest = json!({"version": 3, "latest": true});
    let old = json!({"version": 1, "latest": false});
    let all = json!({"labels": {"canary": latest, "old": old, "stable": latest}, "loaded": [1, 3]});
    let listed: Value = serde_json::from_str(&client.label("--json")).unwrap();
    assert_eq!(listed, all);
    let set: Value = serde_json::from_str(&client.label("old 1 --json")).unwrap();
    assert_eq!(set, json!({"labels": {"old": old}}));
    assert_eq!(client.by_label(&world, "old").unwrap(), 1);
    assert_eq!(client.set_label("stable", 2).unwrap(), 2);
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 2);
    assert_eq!(client.by_label(&world, "canary").unwrap(), 3);
    publish_other(&world.workshop.models, 4);
    wait("the new version is loaded", || client.loaded() == "1, 2, 4");
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 2);
    let listed = run(&format!("versions --models {} --name {MODEL}", world.workshop.models));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let served: Vec<&str> = listed.lines().skip(2).filter(|line| line.contains(" yes  yes ")).collect();
    assert!(served.len() == 3 && served[0].contains(" old ") && served[1].contains(" stable "), "{listed}");
    client.ends_well();

    let client = world.serve("", "");
    assert_eq!(client.label(""), "old: 1\nstable: 2\nloaded: 1, 2, 4\n");
    assert_eq!(client.remove_label("old").unwrap(), 0);
    wait("the version is unloaded", || client.loaded() == "2, 4");
    assert_eq!(client.label("stable latest"), "stable: 4 (latest)\n");
    wait("the old version is unloaded", || client.label("") == "stable: 4 (latest)\nloaded: 4\n");
    publish_other(&world.workshop.models, 5);
    wait("stable follows again", || client.predict(world.requests[0].clone()).unwrap().0 == 5);
    client.ends_well();
}

/// A roll-back must work also where nothing can be written.
#[test]
fn a_version_that_only_the_settings_name_outlives_retention_while_the_server_is_down() {
    let world = World::new(1);
    let Workshop { models, train, .. } = &world.workshop;
    world.serve("labels = { stable = 1 }", "").ends_well();
    let config = world.workshop.config(ArchKind::Dlrm, 8, 1000);
    let line = format!(
        "train --model-config {config} --format criteo-tsv --data {train} --models {models} --name {MODEL} \
         --publish-every 1000steps"
    );
    for _ in 0..2 {
        let mut trainer = flechette();
        trainer.args(line.split_whitespace()).env("FLECHETTE_VERSIONS_KEEP", "1");
        assert!(trainer.output().unwrap().status.success());
    }
    let versions = [1, 2, 3].map(|version| Path::new(models).join(MODEL).join(version.to_string()).is_dir());
    assert_eq!(versions, [true, false, true]);
    let client = world.serve("labels = { stable = 1 }", "");
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    client.ends_well();
    // Nothing names it any more.
    world.serve("", "").ends_well();
    let mut trainer = flechette();
    trainer.args(line.split_whitespace()).env("FLECHETTE_VERSIONS_KEEP", "1");
    assert!(trainer.output().unwrap().status.success());
    assert!(!Path::new(models).join(MODEL).join("1").exists());
}

#[test]
fn cached_rows_are_those_of_the_version_after_roll_backs_over_deltas_with_and_without_pointers() {
    let world = World::publish(3, publish_delta);
    for pointers in ["0", "0.5"] {
        let settings = format!("export FLECHETTE_CACHE_ADMISSION=all FLECHETTE_CACHE_POINTERS={pointers}");
        let flags = "--cache-mode on --cache-fraction 0.9";
        let client = Client::of(Served::start_in(&settings, &world.workshop.models, flags));
        for stable in [3, 1, 3, 2, 3, 1, 2, 1] {
            assert_eq!(client.set_label("stable", stable).unwrap(), stable);
            // The second time, most rows are cached.
            for (number, request) in
                world.requests.iter().enumerate().chain(world.requests.iter().enumerate())
            {
                let (version, scores) = client.predict(request.clone()).unwrap();
                assert_eq!(version, stable, "pointers {pointers}");
                let scored_by = world.version_of(number, &scores);
                assert_eq!(scored_by, stable, "pointers {pointers}");
            }
        }
        client.ends_well();
        fs::remove_file(Path::new(&world.workshop.models).join(MODEL).join("state/labels.json")).unwrap();
    }
}

#[test]
fn a_roll_back_to_an_earlier_version_of_the_served_chain_reads_no_table() {
    let world = World::publish(3, publish_delta);
    for memory in ["ram", "mapped"] {
        let settings = format!("export FLECHETTE_STORE_MEMORY={memory}");
        let client = Client::of(Served::start_in(&settings, &world.workshop.models, ""));
        let bytes = || ["ram", "mapped"].map(|place| client.metric(&format!("store_{place}_bytes"), ""));
        let before = bytes();
        // Damage that only reading the tables would find.
        let model = Path::new(&world.workshop.models).join(MODEL);
        let tables = |version| model.join(format!("{version}/tables"));
        let away = |version| PathBuf::from(world.workshop.path(&format!("tables-{version}")));
        for version in 1..4 {
            fs::rename(tables(version), away(version)).unwrap();
            fs::create_dir(tables(version)).unwrap();
            for table in fs::read_dir(away(version)).unwrap().map(Result::unwrap) {
                let zeros = vec![0; table.metadata().unwrap().len() as usize];
                fs::write(tables(version).join(table.file_name()), zeros).unwrap();
            }
        }
        for stable in [2, 1, 3, 1] {
            assert_eq!(client.set_label("stable", stable).unwrap(), stable);
            for (number, request) in world.requests.iter().enumerate() {
                let (version, scores) = client.predict(request.clone()).unwrap();
                assert_eq!((version, world.version_of(number, &scores)), (stable, stable));
            }
            let now = bytes();
            assert!(now.iter().zip(&before).all(|(now, before)| now <= before), "{now:?}, {before:?}");
        }
        for version in 1..4 {
            fs::remove_dir_all(tables(version)).unwrap();
            fs::rename(away(version), tables(version)).unwrap();
        }
        client.ends_well();
        fs::remove_file(model.join("state/labels.json")).unwrap();
    }
}

#[test]
fn a_label_that_cannot_be_kept_counts_until_a_restart() {
    let world = World::new(2);
    let client = world.serve("", "");
    let file = Path::new(&world.workshop.models).join(MODEL).join("state/labels.json");
    fs::create_dir_all(file.join("in the way")).unwrap();
    let output = run(&format!("label --addr {} {MODEL} stable 1", client.served.url()));
    let warning = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{warning}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "stable: 1\n");
    let lost = "warning: the change is lost at a restart of the server: ";
    assert!(warning.starts_with(lost) && warning.contains("labels.json"), "{warning}");
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    publish_other(&world.workshop.models, 3);
    wait("a new version is loaded", || client.loaded() == "1, 3");
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    fs::remove_dir_all(&file).unwrap();
    let output = run(&format!("label --addr {} {MODEL} stable 1", client.served.url()));
    assert!(output.status.success() && output.stderr.is_empty(), "what can be kept again has no warning");
    client.ends_well();
    let client = world.serve("", "");
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    client.ends_well();
}

#[test]
fn a_label_whose_call_has_ended_before_its_version_was_loaded_survives_a_restart() {
    let world = World::new(2);
    let client = world.serve("", "");
    let dir = Path::new(&world.workshop.models).join(MODEL);
    // The version cannot be opened, as if it were being removed. The server waits 10 seconds for this lock.
    let version = File::open(dir.join("1")).unwrap();
    version.lock().unwrap();
    let (model, label) = (MODEL.to_owned(), "stable".to_owned());
    let mut request = Request::new(SetLabelRequest { model, label, version: 1, remove: false });
    // Half of that: the server must begin to wait before, and go on for a while after it.
    request.set_timeout(Duration::from_secs(5));
    let status = client.runtime.block_on(client.ctr.clone().set_label(request)).unwrap_err();
    // Which of them depends on who sees the deadline first.
    assert!([Code::Cancelled, Code::DeadlineExceeded].contains(&status.code()), "{status}");
    drop(version);
    wait("the label is set", || client.scored_by(&world, |_| {}).unwrap() == 1);
    wait("the label is kept", || dir.join("state/labels.json").exists());
    client.ends_well();
    let client = world.serve("", "");
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    client.ends_well();
}

#[test]
fn wrong_labels_and_versions_are_refused_and_change_nothing() {
    let world = World::new(2);
    let client = world.serve("labels = { canary = 1 }", "");
    let before = client.label("");
    let refused = |status: Result<u64, Status>, code, text: &str| {
        let status = status.unwrap_err();
        assert!(status.code() == code && status.message().contains(text), "{status}");
    };
    refused(client.by_label(&world, "blue"), Code::NotFound, "has the labels canary, stable, got \"blue\"");
    let both = client.scored_by(&world, |request| (request.version, request.label) = (1, "stable".into()));
    refused(both, Code::InvalidArgument, "expected a version or a label, got both");
    refused(client.set_label("stable", 9), Code::FailedPrecondition, "version 9 is refused: ");
    refused(client.set_label("Stable", 1), Code::InvalidArgument, "expected 1 to 32 lowercase letters");
    let request =
        SetLabelRequest { model: "nobody".into(), label: "stable".into(), ..SetLabelRequest::default() };
    refused(client.change(request), Code::NotFound, "no model \"nobody\"");
    for label in 0..14 {
        client.set_label(&format!("l{label}"), 1).unwrap();
    }
    refused(client.set_label("more", 1), Code::FailedPrecondition, "16 labels, which is the limit");
    (0..14).for_each(|label| assert_eq!(client.remove_label(&format!("l{label}")).unwrap(), 0));
    assert_eq!(client.label(""), before);
    let url = client.served.url();
    let text = run_failing(2, &format!("label --addr {url} {MODEL} stable newest"));
    assert!(
        text.contains("VERSION: expected the number of a version, latest or none, got \"newest\""),
        "{text}"
    );
    let text = run_failing(2, &format!("label --addr {url} {MODEL} stable 9"));
    assert!(text.contains("version 9 is refused"), "{text}");
    client.ends_well();
}

/// Clients score without a break until `stop` is set. Returns how many requests each version has scored. No
/// request may fail, and each must have the scores of its version.
fn score_until(
    world: &Arc<World>,
    address: SocketAddr,
    runtime: &Runtime,
    stop: &Arc<AtomicBool>,
) -> Vec<tokio::task::JoinHandle<BTreeMap<u64, usize>>> {
    let client = |first: usize| {
        let (world, stop) = (world.clone(), stop.clone());
        runtime.spawn(async move {
            let mut client = CtrClient::new(channel(address).await);
            let mut seen = BTreeMap::new();
            for number in (0..world.requests.len()).cycle().skip(first) {
                if stop.load(Ordering::Acquire) && !seen.is_empty() {
                    break;
                }
                let mut request = world.requests[number].clone();
                // Every kind of request that names no number.
                request.label = ["", "stable", "old"][(number + first) % 3].to_owned();
                let old = request.label == "old";
                let answer = answer(&mut client, request).await;
                assert!(!old || answer.version == 2, "{}", answer.version);
                assert_eq!(world.version_of(number, &answer.scores), answer.version);
                *seen.entry(answer.version).or_default() += 1;
            }
            seen
        })
    };
    (0..4).map(client).collect()
}

#[test]
fn no_request_fails_while_stable_goes_back_and_forth() {
    let world = Arc::new(World::new(4));
    let latest_2 = "versions = \"latest 2\"";
    for (flags, table) in [
        ("--cache-mode off", latest_2),
        ("--cache-mode on --cache-fraction 0.1", latest_2),
        // The main engine goes back from version 3 to 1 while it computes the parts of requests.
        ("--cache-mode off", "batcher = { max_samples = 1 }"),
    ] {
        let client = world.serve_in(PATIENT, &format!("{table}\nlabels = {{ old = 2 }}"), flags);
        let stop = Arc::new(AtomicBool::new(false));
        let clients = score_until(&world, client.served.grpc, &client.runtime, &stop);
        for round in 0..3 {
            for version in [3, 1, 2, 4] {
                let begun = std::time::Instant::now();
                assert_eq!(client.set_label("stable", version).unwrap(), version);
                println!("{flags}, {table}: round {round}: stable {version} after {:?}", begun.elapsed());
                for _ in 0..20 {
                    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), version, "the next request");
                }
            }
        }
        stop.store(true, Ordering::Release);
        let seen: Vec<_> = clients.into_iter().map(|seen| client.runtime.block_on(seen).unwrap()).collect();
        assert!(seen.iter().all(|seen| seen.len() == 4), "{seen:?}");
        client.ends_well();
    }
}

#[test]
fn a_share_of_the_requests_is_the_canarys_and_every_user_stays_on_one_side() {
    let world = World::new(2);
    let table = |sticky: &str| {
        format!("labels = {{ stable = 1, canary = 2 }}\ncanary_share = 0.3\nsticky = \"{sticky}\"")
    };
    let client = world.serve(&table("request_id"), "");
    for (flags, version) in
        [("--model-label canary", 2), ("--model-label stable", 1), ("--model-version 2", 2)]
    {
        let scored = client.served.score(MODEL, &world.workshop.valid, flags);
        assert_eq!(scored["versions"], serde_json::json!([version]), "{flags}");
    }
    for (flags, words) in [
        ("--model-label other", "--model-label: the model has no label \"other\""),
        ("--model-version 9", "--model-version: 9 is not loaded, only 1, 2"),
    ] {
        let data = format!("--model {MODEL} --format criteo-tsv {} {flags}", world.workshop.valid);
        let error = run_failing(2, &format!("score --addr {} {data}", client.served.url()));
        assert!(error.contains(words), "{error}");
    }
    let by = |id: &str| client.scored_by(&world, |request| request.request_id = id.to_owned()).unwrap();
    let users: Vec<u64> = (0..400).map(|user| by(&format!("user-{user}"))).collect();
    let canaries = |versions: &[u64]| versions.iter().filter(|version| **version == 2).count();
    // 120 are expected, with a standard deviation of 9.2.
    assert!(canaries(&users).abs_diff(120) < 46, "{}", canaries(&users));
    assert!((0..400).step_by(7).all(|user| by(&format!("user-{user}")) == users[user]));
    let without: Vec<u64> = (0..400).map(|_| by("")).collect();
    assert!(canaries(&without).abs_diff(120) < 46, "{}", canaries(&without));
    let counted = |label: &str| client.metric("label_requests_total", &format!("label=\"{label}\""));
    let both = canaries(&users) + canaries(&without);
    assert!(counted("canary") >= both as f64 && counted("stable") + counted("canary") >= 800.0);
    assert_eq!(client.metric("label_version", "label=\"canary\""), 2.0);
    for label in ["canary", "stable"] {
        let only = format!("label=\"{label}\"");
        assert_eq!(client.metric("label_request_seconds_count", &only), counted(label), "{label}");
        assert_eq!(client.metric("label_failures_total", &only), 0.0, "{label}");
    }

    world.configure(&table("feature:C3"));
    client.served.signal("-HUP");
    let by_feature = |user: u64, id: &str| {
        let mut request = world.requests[0].clone();
        let column = request.features.iter_mut().find(|column| column.name == "C3").unwrap();
        column.strings.iter_mut().for_each(|string| *string = format!("{user:08x}").into());
        request.request_id = id.to_owned();
        client.predict(request).unwrap().0
    };
    wait("the feature decides", || (0..20).all(|id| by_feature(1, &id.to_string()) == by_feature(1, "")));
    let users: Vec<u64> = (0..400).map(|user| by_feature(user, &user.to_string())).collect();
    assert!(canaries(&users).abs_diff(120) < 46, "{}", canaries(&users));
    assert!((0..400).step_by(7).all(|user| by_feature(user as u64, "other") == users[user]));
    client.ends_well();
}

#[test]
fn a_shadow_records_the_difference_and_leaves_the_answers_alone() {
    let world = World::new(2);
    let client = world.serve("labels = { stable = 1 }\nshadow = \"latest\"\nshadow_share = 1", "");
    let (mut sum, mut largest, mut samples) = (0.0, 0.0f64, 0);
    for (number, request) in world.requests.iter().enumerate() {
        let (version, scores) = client.predict(request.clone()).unwrap();
        assert_eq!(version, 1);
        let other = world.scores[&2][number].iter().map(|bits| f32::from_bits(*bits));
        for difference in scores.iter().zip(other).map(|(own, other)| f64::from((own - other).abs())) {
            (sum, largest, samples) = (sum + difference, largest.max(difference), samples + 1);
        }
        // So that no request is dropped.
        let count = || client.metric("shadow_difference_count", "");
        wait("the shadow has scored", || count() == f64::from(samples));
    }
    assert!((client.metric("shadow_difference_sum", "") - sum).abs() < 1e-4 && largest > 0.0);
    assert!((client.metric("shadow_difference_max", "") - largest).abs() < 1e-6);
    assert_eq!(client.metric("shadow_dropped_total", "") + client.metric("shadow_failed_total", ""), 0.0);
    assert_eq!(
        client.metric("batch_samples_sum", ""),
        f64::from(samples),
        "the shadow's batches are not counted"
    );
    let request = PredictRequest { version: 2, ..world.requests[0].clone() };
    assert_eq!(client.predict(request).unwrap().0, 2);
    sleep(Duration::from_millis(300));
    assert_eq!(
        client.metric("shadow_difference_count", ""),
        f64::from(samples),
        "it is not compared with itself"
    );
    client.ends_well();
}

#[test]
fn a_shadow_that_cannot_keep_up_drops_requests_and_no_request_fails() {
    let world = Arc::new(World::new(2));
    let client = world.serve("labels = { stable = 1, old = 2 }\nshadow = 2\nshadow_share = 1", "");
    let stop = Arc::new(AtomicBool::new(false));
    // Eight clients take all processors, so the shadow, which needs a free one, falls behind.
    let mut clients = score_until(&world, client.served.grpc, &client.runtime, &stop);
    clients.extend(score_until(&world, client.served.grpc, &client.runtime, &stop));
    let done = |name| client.metric(name, "");
    wait("requests are dropped", || done("shadow_dropped_total") > 0.0);
    stop.store(true, Ordering::Release);
    for seen in clients {
        assert!(client.runtime.block_on(seen).unwrap().values().sum::<usize>() > 0);
    }
    wait("the shadow scores again", || done("shadow_difference_count") > 0.0);
    assert_eq!(done("shadow_failed_total"), 0.0);
    client.ends_well();
}

#[test]
fn kserve_lists_all_loaded_versions() {
    let world = World::new(3);
    let mut client = world.serve("versions = \"latest 2\"", "");
    client.scored_by(&world, |request| request.version = 2).unwrap();
    let (runtime, kserve) = (&client.runtime, &mut client.kserve);
    let request = ModelMetadataRequest { name: MODEL.to_owned(), version: "2".to_owned() };
    let metadata = runtime.block_on(kserve.model_metadata(request)).unwrap().into_inner();
    assert_eq!(metadata.versions, ["2", "3"]);
    let request = ModelMetadataRequest { name: MODEL.to_owned(), version: "1".to_owned() };
    assert_eq!(runtime.block_on(kserve.model_metadata(request)).unwrap_err().code(), Code::NotFound);
    let index = runtime.block_on(kserve.repository_index(RepositoryIndexRequest::default()));
    let index = index.unwrap().into_inner().models;
    let rows: Vec<_> = index.iter().map(|row| (row.version.as_str(), row.state.as_str())).collect();
    assert_eq!(rows, [("2", "READY"), ("3", "READY")]);
    let request = ModelStatisticsRequest { name: MODEL.to_owned(), version: String::new() };
    let statistics = runtime.block_on(kserve.model_statistics(request)).unwrap().into_inner().model_stats;
    let rows: Vec<_> = statistics.iter().map(|row| (row.version.as_str(), row.inference_count)).collect();
    assert_eq!(rows, [("2", 16), ("3", 0)]);
    let mut ready = |version: &str| {
        let request = ModelReadyRequest { name: MODEL.to_owned(), version: version.to_owned() };
        runtime.block_on(kserve.model_ready(request)).unwrap().into_inner().ready
    };
    assert!(ready("2") && ready("3") && ready("") && !ready("1"));
    client.ends_well();
}

#[test]
fn statistics_count_a_wrong_request_for_the_version_that_it_is_for() {
    let world = World::new(2);
    let mut client = world.serve("versions = \"latest 2\"\nlabels = { old = 1 }", "");
    for (version, label) in [(1, ""), (0, "old"), (2, ""), (1, "")] {
        let mut request = world.requests[0].clone();
        (request.version, request.label) = (version, label.to_owned());
        request.dense.pop();
        assert_eq!(client.predict(request).unwrap_err().code(), Code::InvalidArgument);
    }
    let request = ModelStatisticsRequest { name: MODEL.to_owned(), version: String::new() };
    let statistics = client.runtime.block_on(client.kserve.model_statistics(request)).unwrap().into_inner();
    let failed = |row: &ModelStatistics| row.inference_stats.and_then(|stats| stats.fail).unwrap().count;
    let rows: Vec<_> = statistics.model_stats.iter().map(|row| (row.version.as_str(), failed(row))).collect();
    assert_eq!(rows, [("1", 3), ("2", 1)]);
    client.ends_well();
}

#[test]
fn a_kserve_request_names_a_version_or_a_label_and_its_id_is_the_key() {
    let world = World::new(2);
    let client = world.serve("labels = { stable = 1, canary = 2 }\ncanary_share = 0.3", "");
    let infer = |change: &dyn Fn(&mut ModelInferRequest)| {
        let mut request = typed(&world.requests[0]);
        change(&mut request);
        let mut kserve = client.kserve.clone();
        let answer = client.runtime.block_on(kserve.model_infer(request))?.into_inner();
        let scores = &answer.outputs[0].contents.as_ref().unwrap().fp32_contents;
        let version: u64 = answer.model_version.parse().unwrap();
        assert_eq!(world.version_of(0, scores), version);
        Ok::<u64, Status>(version)
    };
    let label = |choice: ParameterChoice| {
        let label = InferParameter { parameter_choice: Some(choice) };
        infer(&|request| drop(request.parameters.insert("label".to_owned(), label.clone())))
    };
    for (version, name) in [(1, "stable"), (2, "canary")] {
        assert_eq!(infer(&|request| request.model_version = version.to_string()).unwrap(), version);
        assert_eq!(label(ParameterChoice::StringParam(name.to_owned())).unwrap(), version);
    }
    let wrong = label(ParameterChoice::Int64Param(2)).unwrap_err();
    assert_eq!(
        (wrong.code(), wrong.message()),
        (Code::InvalidArgument, "parameters: label: expected a string")
    );
    for user in 0..40 {
        let by_kserve = infer(&|request| request.id = format!("user-{user}")).unwrap();
        let native = client.scored_by(&world, |request| request.request_id = format!("user-{user}")).unwrap();
        assert_eq!(by_kserve, native, "both protocols have one hash");
    }
    client.ends_well();
}

/// Mapped regions, open files and threads of a process.
#[cfg(target_os = "linux")]
fn held(pid: u32) -> [usize; 3] {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let files = maps.lines().filter(|line| line.contains("/models/")).count();
    [files, count("fd"), count("task")]
}

/// A cache with room for nearly all rows, which takes a row at its first miss. So every round uses much of
/// its memory, and a cache that is not freed shows in the memory of the process.
#[cfg(target_os = "linux")]
const FULL_CACHE: [&str; 2] = ["[cache]\nadmission = \"all\"", "--cache-mode on --cache-fraction 0.9"];

/// The most that the memory of a server may grow in 60 to 100 rounds. The weights, the tables and the cache
/// of a version take several hundred kilobytes each.
#[cfg(target_os = "linux")]
const GROWTH: u64 = 3 << 20;

/// Runs a round 100 times, and then 100 times more, which must not take more memory, mappings, files or
/// threads. Before, the threads share ever more of the allocator's arenas: memory grows by a half in the
/// first 150 rounds, and not at all after 500. A round leaves one version loaded.
#[cfg(target_os = "linux")]
fn a_hundred_rounds_give_everything_back(client: &Client, mut round: impl FnMut(u64)) {
    let pid = client.served.id();
    (0..100).for_each(&mut round);
    wait("one version is loaded", || client.loaded() == "3");
    sleep(Duration::from_millis(500));
    let before = held(pid);
    let memory: Vec<u64> = (0..100)
        .map(|number| {
            round(number);
            crate::program::bytes_of(pid, "RssAnon").unwrap()
        })
        .collect();
    // An idle thread may end meanwhile.
    wait("everything is given back", || held(pid).iter().zip(before).all(|(now, before)| *now <= before));
    // What is being freed, and huge pages, make single values larger.
    let (first, last) = (memory[..20].iter().max().unwrap(), memory[80..].iter().min().unwrap());
    let grown = last.saturating_sub(*first);
    println!("{before:?} before and after, memory grew by {grown} bytes from {first}");
    assert!(grown < GROWTH, "{grown}: {memory:?}");
}

/// Sends all requests, which the stable version scores.
#[cfg(target_os = "linux")]
fn score_all(client: &Client, world: &World) {
    for (number, request) in world.requests.iter().enumerate() {
        let (version, scores) = client.predict(request.clone()).unwrap();
        assert_eq!((version, world.version_of(number, &scores)), (3, 3));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_hundred_loads_and_unloads_of_versions_give_everything_back() {
    let world = World::new(3);
    let [table, flags] = FULL_CACHE;
    let client = world.serve(table, flags);
    a_hundred_rounds_give_everything_back(&client, |round| {
        let version = 1 + round % 2;
        let label = if round % 10 < 8 { "other" } else { "stable" };
        client.set_label(label, version).unwrap();
        assert_eq!(client.by_label(&world, label).unwrap(), version);
        client.remove_label(label).unwrap();
        score_all(&client, &world);
    });
    client.ends_well();
}

#[cfg(target_os = "linux")]
#[test]
fn a_hundred_loads_and_unloads_of_a_model_give_everything_back() {
    let world = World::new(3);
    let [table, flags] = FULL_CACHE;
    let client = world.serve(table, flags);
    a_hundred_rounds_give_everything_back(&client, |_| {
        let mut kserve = client.kserve.clone();
        let model_name = MODEL.to_owned();
        let unload = RepositoryModelUnloadRequest { model_name, ..RepositoryModelUnloadRequest::default() };
        client.runtime.block_on(kserve.repository_model_unload(unload)).unwrap();
        let model_name = MODEL.to_owned();
        let load = RepositoryModelLoadRequest { model_name, ..RepositoryModelLoadRequest::default() };
        client.runtime.block_on(kserve.repository_model_load(load)).unwrap();
        score_all(&client, &world);
    });
    client.ends_well();
}

#[test]
fn a_model_whose_stable_version_is_gone_is_not_served_with_another_one_until_the_label_is_set() {
    let world = World::new(2);
    let state = Path::new(&world.workshop.models).join(MODEL).join("state");
    fs::create_dir_all(&state).unwrap();
    fs::write(state.join("labels.json"), "{\"stable\": 7}").unwrap();
    let labels: Vec<_> = (0..16).map(|label| format!("l{label} = 1")).collect();
    let client = world.serve(&format!("labels = {{ {} }}", labels.join(", ")), "");
    let (code, page) = client.served.get("/readyz");
    assert!(code == 503 && page.contains("label stable names version 7"), "{page}");
    assert_eq!(client.predict(world.requests[0].clone()).unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.set_label("stable", 8).unwrap_err().code(), Code::FailedPrecondition);
    let unknown = client.remove_label("blue").unwrap_err();
    assert!(unknown.message().contains("no label blue; its labels are: l0, l1, "), "{unknown}");
    let too_many = client.set_label("more", 1).unwrap_err();
    assert!(too_many.message().contains("16 labels, which is the limit"), "{too_many}");
    assert_eq!(client.set_label("stable", 1).unwrap(), 1);
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    assert_eq!(fs::read_to_string(state.join("labels.json")).unwrap(), "{\n  \"stable\": 1\n}\n");
    client.ends_well();
}
