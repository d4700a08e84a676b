//! `serve --train`: one process trains a model and serves it. Clients score meanwhile, and no request fails.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use flechette::schema::preset::ArchKind;
use flechette::server::proto::PredictRequest;
use flechette::server::proto::ctr_client::CtrClient;

use crate::program::{
    LAST_VERSION, PATIENT, Served, Workshop, check_listed_versions, highest_version, kills, metrics_page,
    run, run_failing,
};
use crate::serving::channel;
use crate::switching::{answer, requests, wait};
use crate::train_resume::{continuing, last_version};

pub const MODEL: &str = "dlrm";
const PARTS: usize = 8;

/// A flag with which training publishes only its last version.
pub const LAST_ONLY: &str = "--publish-every 3600s";

/// Kills of each kind of run.
const KILLS: usize = 4;

/// A workshop with an empty directory to follow.
pub struct Site {
    pub workshop: Workshop,
    pub incoming: String,
    /// The flags of training, with the `model.toml`.
    flags: String,
}

impl Site {
    pub fn new(rows: u64) -> Self {
        let workshop = Workshop::new(rows, 200);
        let (config, incoming) = (workshop.config(ArchKind::Dlrm, 8, 1000), workshop.path("incoming"));
        fs::create_dir(&incoming).unwrap();
        let flags = format!("--model-config {config} --format criteo-tsv --batch 32");
        Self { workshop, incoming, flags }
    }

    /// Renames one of the parts of the training data into the directory.
    pub fn arrive(&self, part: usize) {
        let text = fs::read_to_string(&self.workshop.train).unwrap();
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        let lines = lines.chunks(lines.len().div_ceil(PARTS)).nth(part).unwrap();
        let path = format!("{}/{part}", self.incoming);
        fs::write(format!("{path}.tmp"), lines.concat()).unwrap();
        fs::rename(format!("{path}.tmp"), path).unwrap();
    }

    fn serve(&self, source: &str, more: &str) -> Served {
        let line = format!("--train {MODEL}={source} {} {LAST_VERSION} {more}", self.flags);
        Served::start_in(PATIENT, &self.workshop.models, &line)
    }

    pub fn follow(&self, more: &str) -> Served {
        self.serve(&self.incoming, &format!("--follow-until {} {more}", PARTS - 1))
    }

    /// The files of the model's last version, which `train` alone must have too.
    fn compare_with_train(&self, data: &str, more: &str) {
        let models = &self.workshop.models;
        let line = format!("train {} {data} {more} --models {models} --name alone", self.flags);
        let output = run(&line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        let (own, alone) = (last_version(&self.workshop, MODEL), last_version(&self.workshop, "alone"));
        let differ: Vec<_> = alone.keys().filter(|file| own.get(*file) != alone.get(*file)).collect();
        let cursor = |name: &str| {
            let version = highest_version(Path::new(models), name).unwrap();
            fs::read_to_string(format!("{models}/{name}/{version}/checkpoint/cursor.json")).unwrap()
        };
        let cursors = [MODEL, "alone"].map(cursor);
        assert!(own == alone, "{differ:?}, files {} and {}: {cursors:?}", own.len(), alone.len());
        assert!(own.len() > 2 * 26, "{own:?}");
        fs::remove_dir_all(Path::new(models).join("alone")).unwrap();
    }

    fn compare_with_train_of_parts(&self, more: &str) {
        let data = format!("--follow {} --follow-until {}", self.incoming, PARTS - 1);
        self.compare_with_train(&data, more);
    }
}

/// Whether the metrics page has this value.
pub fn shows(served: &Served, metric: &str, value: f64) -> bool {
    let label = format!("flechette_{metric}{{model=\"{MODEL}\"}} {value}");
    metrics_page(served.http).lines().any(|line| line == label)
}

pub fn shown(served: &Served, metric: &str) -> f64 {
    served.metric(&format!("flechette_{metric}"), &[&format!("model=\"{MODEL}\"")])
}

fn version_on_disk(site: &Site) -> u64 {
    version_at(&site.workshop.models)
}

pub fn version_at(models: &str) -> u64 {
    highest_version(Path::new(models), MODEL).unwrap()
}

type Answers = BTreeMap<(u64, usize), Vec<f32>>;

/// Sends requests until `stop` is set. Every request must succeed, and no answer may be of an older version
/// than the one before.
async fn score(served: SocketAddr, requests: Vec<PredictRequest>, stop: Arc<AtomicBool>) -> Answers {
    let mut client = CtrClient::new(channel(served).await);
    let (mut answers, mut last) = (Answers::new(), 0);
    for number in (0..requests.len()).cycle() {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let answer = answer(&mut client, requests[number].clone()).await;
        assert!(answer.version >= last, "version {} after {last}", answer.version);
        last = answer.version;
        let first = answers.entry((last, number)).or_insert_with(|| answer.scores.clone());
        assert!(*first == answer.scores, "version {last}, request {number}: two answers");
    }
    answers
}

/// The number of the policy `SCHED_IDLE`, of threads that run only when a processor is free.
const IDLE: u32 = 5;

/// The name and the policy of each thread.
fn policies(served: &Served) -> Vec<(String, u32)> {
    let tasks = fs::read_dir(format!("/proc/{}/task", served.id())).unwrap().flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    let of = |stat: String| {
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        // The fields after the name begin with the third; the policy is the 41st (proc_pid_stat(5)).
        Some((name.to_owned(), rest.split_whitespace().nth(38)?.parse().ok()?))
    };
    stats.filter_map(of).collect()
}

fn scores_follow_the_versions(more: &str) {
    let site = Site::new(1700);
    let served = site.follow(&format!("--publish-every 4steps --train-threads 1 {more}"));
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let messages: Vec<_> = requests(&site.workshop).into_iter().map(|(message, _)| message).collect();
    let clients: Vec<_> =
        (0..2).map(|_| runtime.spawn(score(served.grpc, messages.clone(), stop.clone()))).collect();
    wait("the first version is served", || shown(&served, "serving_version") == 1.0);
    // The process has the rows of training in its memory.
    assert!(shown(&served, "store_ram_bytes") == 0.0 && shown(&served, "store_mapped_bytes") > 0.0);
    for part in 0..PARTS {
        site.arrive(part);
        if part + 1 < PARTS {
            // With a scratchpad some batches wait in the stages for the next file.
            wait("a part is trained", || shown(&served, "training_samples_total") >= 200.0 * part as f64);
            wait("a version is served", || shown(&served, "serving_version") > part as f64);
        }
        if part == 1 {
            let threads = policies(&served);
            let waits = |name: &str| ["train", "publish", "cut-watch"].iter().any(|of| name.starts_with(of));
            assert!(threads.iter().filter(|(name, _)| waits(name)).count() >= 4, "{threads:?}");
            let stages = threads.iter().filter(|(_, policy)| *policy == IDLE).count();
            assert!(stages >= if more.is_empty() { 4 } else { 8 }, "{threads:?}");
            assert!(threads.iter().all(|(name, policy)| !waits(name) || *policy == IDLE), "{threads:?}");
            let serves = |name: &str| {
                ["flechette", "tokio", "watch-models", "open", "compute", "batch"]
                    .iter()
                    .any(|of| name.starts_with(of))
            };
            assert!(threads.iter().any(|(name, _)| serves(name)), "{threads:?}");
            assert!(threads.iter().all(|(name, policy)| !serves(name) || *policy != IDLE), "{threads:?}");
        }
    }
    wait("training ends", || shows(&served, "training_state", 0.0));
    wait("the last version is served", || shown(&served, "serving_version") == version_on_disk(&site) as f64);
    sleep(Duration::from_millis(200));
    stop.store(true, Ordering::Release);
    let mut versions = BTreeMap::new();
    for client in clients {
        for ((version, request), scores) in runtime.block_on(client).unwrap() {
            if request == 0 {
                versions.insert(version, scores);
            }
        }
    }
    assert!(versions.len() >= 4, "{:?}", versions.keys());
    let scores: Vec<_> = versions.values().collect();
    assert!(scores.windows(2).all(|two| two[0] != two[1]), "each version has other scores");

    let page = metrics_page(served.http);
    for metric in ["publish_pause_seconds_count", "publish_seconds_count", "publishes_total"] {
        assert!(shown(&served, metric) >= 5.0, "{metric}: {page}");
    }
    for metric in ["publish_bytes_total", "publish_rows_total", "progressive_log_loss", "progressive_auc"] {
        assert!(shown(&served, metric) > 0.0, "{metric}: {page}");
    }
    assert_eq!(shown(&served, "training_samples_total"), 1700.0);
    assert_eq!(shown(&served, "training_steps_total"), 54.0);
    let age = shown(&served, "freshness_seconds");
    assert!((0.0..3600.0).contains(&age), "{age}");
    let status = served.status();
    let model = &status["models"][0];
    assert!(model["state"] == "ready" && model["training"] == "ended", "{model}");
    for kind in ["loaded", "published", "switched", "training_ended"] {
        let events = status["events"].as_array().unwrap();
        assert!(
            events.iter().any(|event| event["kind"] == kind && event["model"] == MODEL),
            "{kind}: {status}"
        );
    }
    let events: Vec<(String, String)> = status["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|event| [&event["kind"], &event["text"]].map(|text| text.as_str().unwrap().to_owned()).into())
        .collect();
    for (at, (_, text)) in events.iter().enumerate().filter(|(_, (kind, _))| kind == "switched") {
        let version = text.split(' ').take(2).collect::<Vec<_>>().join(" ") + ":";
        let published = |(kind, text): &(String, String)| kind == "published" && text.starts_with(&version);
        assert!(events[at..].iter().any(published), "{version} was taken over before: {events:#?}");
    }
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
    assert!(log.contains("training has ended at the end of the data"), "{log}");
    let published: Vec<&str> = log.lines().filter(|line| line.contains("published model=\"dlrm\"")).collect();
    assert!(!published.is_empty() && log.matches(": published ").count() == published.len(), "{log}");
    for line in published {
        let pause = line.split_once(" pause_ms=").unwrap().1;
        assert!(pause.split_once('.').unwrap().1.len() <= 3, "{line}");
    }
    let of_file = |line: &&str| line.contains("before training on them: AUC");
    assert!(log.lines().filter(of_file).all(|line| line.contains(" model=\"dlrm\"")), "{log}");
    assert!(log.lines().any(|line| of_file(&line)), "{log}");
    site.compare_with_train_of_parts(more);
}

#[test]
fn scores_follow_the_versions_of_a_model_in_memory() {
    scores_follow_the_versions("");
}

#[test]
fn scores_follow_the_versions_of_a_model_behind_a_scratchpad() {
    scores_follow_the_versions("--scratchpad 0.3");
}

#[test]
fn a_signal_publishes_what_was_trained_and_the_next_start_continues() {
    let site = Site::new(1600);
    let rare = "--publish-every 1000s";
    for (stop, parts) in [(3, 0..3), (6, 3..6)] {
        let served = site.follow(rare);
        let before = version_on_disk(&site);
        parts.for_each(|part| site.arrive(part));
        let own = if stop == 3 { 576.0 } else { 600.0 };
        wait("the parts are trained", || shown(&served, "training_samples_total") >= own);
        assert_eq!(version_on_disk(&site), before);
        served.terminate();
        let (status, log) = served.ended();
        assert!(status.success() && log.contains("training has ended at a signal"), "{log}");
        assert_eq!(version_on_disk(&site), before + 1, "{log}");
    }
    let served = site.follow(rare);
    (6..PARTS).for_each(|part| site.arrive(part));
    wait("training ends", || shows(&served, "training_state", 0.0));
    wait("the last version is served", || shown(&served, "serving_version") == version_on_disk(&site) as f64);
    drop(served);
    site.compare_with_train_of_parts("");
}

#[test]
fn a_file_is_trained_once_and_the_server_goes_on() {
    let site = Site::new(500);
    let data = site.workshop.train.clone();
    let served = site.serve(&data, LAST_ONLY);
    wait("training ends", || shows(&served, "training_state", 0.0));
    wait("its version is served", || shown(&served, "serving_version") == 2.0);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    let again = site.serve(&data, "");
    wait("there is nothing to train", || shows(&again, "training_state", 0.0));
    assert_eq!(again.score(MODEL, &site.workshop.valid, "")["version"], 2);
    again.terminate();
    let (status, log) = again.ended();
    assert!(status.success() && log.contains("the run is complete"), "{log}");
    site.compare_with_train(&format!("--data {data}"), "");
    // Another file continues from the last version, and needs no model.toml.
    let more = site.workshop.valid.clone();
    let line = format!("--train {MODEL}={more} --format criteo-tsv");
    let served = Served::start(&site.workshop.models, &line);
    wait("its version is served", || shown(&served, "serving_version") > 3.0);
    drop(served);
    // So does another file of the same name, and a directory.
    let other = site.workshop.path("other");
    fs::create_dir(&other).unwrap();
    let same_name = Path::new(&other).join(Path::new(&more).file_name().unwrap());
    fs::copy(&data, &same_name).unwrap();
    for source in [same_name.to_str().unwrap(), &other] {
        let before = version_on_disk(&site);
        let line = format!("--train {MODEL}={source} --format criteo-tsv --publish-every 100ms");
        let served = Served::start(&site.workshop.models, &line);
        wait("a version of the samples is served", || shown(&served, "serving_version") > before as f64);
    }
}

#[test]
fn when_training_fails_the_server_goes_on_and_ends_with_an_error() {
    let site = Site::new(1600);
    let served = site.follow("--publish-every 2steps --max-malformed 0");
    site.arrive(0);
    wait("a version is served", || shown(&served, "serving_version") > 1.0);
    fs::write(format!("{}/1", site.incoming), "not a sample\n").unwrap();
    wait("training fails", || shows(&served, "training_state", -1.0));
    // Of the samples before the file.
    wait("the last version is served", || shown(&served, "serving_version") == version_on_disk(&site) as f64);
    let version = shown(&served, "serving_version");
    assert_eq!(served.score(MODEL, &site.workshop.valid, "")["version"], version as u64);
    let status = served.status();
    let model = &status["models"][0];
    assert!(model["state"] == "ready" && model["training"] == "failed", "{model}");
    let mut events = status["events"].as_array().unwrap().iter();
    let failed = events.find(|event| event["kind"] == "training_failed").unwrap();
    assert!(failed["text"].as_str().unwrap().contains("incoming/1"), "{failed}");
    assert_eq!(served.get("/readyz").0, 200);
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    assert_eq!(log.matches("training has failed; the last version is served").count(), 1, "{log}");
    assert!(log.contains("error: training has failed: ") && log.contains("incoming/1"), "{log}");
}

#[test]
fn a_version_whose_checkpoint_is_damaged_is_served_and_training_goes_on_from_the_one_before() {
    // Versions published on the way could be complete, or replace the one without damage.
    let site = Site::new(500);
    let data = site.workshop.train.clone();
    let (first, line) = (site.serve(&data, LAST_ONLY), format!("--data {data}"));
    wait("training ends", || shows(&first, "training_state", 0.0));
    first.terminate();
    assert!(first.ended().0.success());
    for file in ["cursor.json", "dense.safetensors", "tables/C1.safetensors"] {
        let version = version_on_disk(&site);
        let path = format!("{}/{MODEL}/{version}/checkpoint/{file}", site.workshop.models);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
        let served = site.serve(&data, LAST_ONLY);
        wait("training ends", || shows(&served, "training_state", 0.0));
        wait("its version is served", || shown(&served, "serving_version") > version as f64);
        served.terminate();
        let (status, log) = served.ended();
        assert!(
            status.success() && log.contains(&format!("loaded model=\"{MODEL}\" version={version}")),
            "{log}"
        );
        assert!(log.lines().any(|line| line.contains("WARN") && line.contains(file)), "{file}: {log}");
        site.compare_with_train(&line, "");
    }
}

/// Kills servers with these flags at random instants. The last one trains to the end, and its version must be
/// that of `train` with the flags `data`.
fn continues_after_kills(site: &Site, source: &str, data: &str, more: &str) {
    let model = Path::new(&site.workshop.models).join(MODEL);
    let more_and_every = format!("--publish-every 3steps {more}");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut killed, mut missed) = (0, 0_usize);
    while killed < kills(KILLS) {
        let served = site.serve(source, &more_and_every);
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // On a fast machine training soon ends, so the next kill comes earlier.
        sleep(Duration::from_millis(random % (400 / (1 + missed as u64))));
        let ended = shows(&served, "training_state", 0.0);
        // Kills it.
        drop(served);
        check_listed_versions(&site.workshop.models, MODEL);
        if ended {
            missed += 1;
            assert!(missed <= 20 + kills(KILLS), "{missed} kills after the end of training, {killed} before");
            fs::remove_dir_all(&model).unwrap();
        } else {
            killed += 1;
        }
    }
    // The last version is good, because all that are listed are.
    let continuing = continuing(&site.workshop.models, MODEL);
    let served = site.serve(source, &more_and_every);
    wait("training ends", || shows(&served, "training_state", 0.0));
    if let Some(words) = continuing {
        wait("training says that it continues", || words.iter().any(|words| served.log().contains(words)));
    }
    drop(served);
    site.compare_with_train(data, more);
    fs::remove_dir_all(&model).unwrap();
}

/// Servers that follow a directory are killed, and continue to the bytes of one run.
fn follows_after_kills(more: &str) {
    let site = Site::new(1600);
    (0..PARTS).for_each(|part| site.arrive(part));
    let followed = format!("--follow {}", site.incoming);
    let more = format!("--follow-until {} {more}", PARTS - 1);
    continues_after_kills(&site, &site.incoming, &followed, &more);
}

#[test]
fn a_server_that_is_killed_while_it_trains_continues_to_the_same_bytes() {
    follows_after_kills("");
}

#[test]
fn a_server_with_a_scratchpad_that_is_killed_while_it_trains_continues_to_the_same_bytes() {
    follows_after_kills("--scratchpad 0.3");
}

/// Servers that train on a file are killed, and continue to the bytes of one run.
fn trains_a_file_after_kills(more: &str) {
    let site = Site::new(800);
    let file = &site.workshop.train;
    continues_after_kills(&site, file, &format!("--data {file}"), more);
}

#[test]
fn a_server_that_is_killed_in_shuffled_epochs_continues_to_the_same_bytes() {
    trains_a_file_after_kills("--epochs 2 --shuffle 300 --data-seed 5");
}

#[test]
fn a_server_with_a_scratchpad_that_is_killed_in_shuffled_epochs_continues_to_the_same_bytes() {
    trains_a_file_after_kills("--epochs 2 --shuffle 300 --scratchpad 0.3");
}

#[test]
fn flags_of_training_that_cannot_be_used_are_refused_by_name() {
    let site = Site::new(10);
    let (models, flags, incoming) = (&site.workshop.models, &site.flags, &site.incoming);
    let line = |more: &str| format!("serve --models {models} --grpc 127.0.0.1:0 --http 127.0.0.1:0 {more}");
    for (more, words) in [
        ("--batch 64".to_owned(), "--train <NAME=SOURCE>"),
        ("--scratchpad 0.5".to_owned(), "--train <NAME=SOURCE>"),
        (format!("--train m={incoming}"), "--format: missing"),
        (format!("--train m {flags}"), "expected NAME=SOURCE"),
        (format!("--train a/b={incoming} {flags}"), "--train: model"),
        (format!("--train m={incoming} --format criteo-tsv"), "--model-config: missing"),
        (format!("--train m={incoming}/none {flags}"), "none"),
        (format!("--train m={incoming}/none {flags} --follow-until 3"), "--follow-until: used only with"),
        (format!("--train m={incoming} --train n={incoming} {flags}"), "--train: given twice"),
        (format!("--train m={incoming} {flags} --epochs 2"), "--epochs: only for data files"),
        (format!("--train m=learn {flags} --shuffle 10"), "--shuffle: only for data files"),
        (format!("--train m=learn {flags} --data-seed 1"), "--data-seed: only for data files"),
    ] {
        let output = run(&line(&more));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{more}: {error}");
    }
    let served = site.follow("");
    let second = run_failing(1, &line(&format!("--train {MODEL}={incoming} {flags}")));
    assert!(second.contains("another process trains \"dlrm\" and publishes"), "{second}");
    served.terminate();
    assert!(served.ended().0.success());
    // Two tables differ. The first one is named.
    let before = version_on_disk(&site);
    let config = fs::read_to_string(site.workshop.config(ArchKind::Dlrm, 8, 1000)).unwrap();
    let differing = site.workshop.path("differing.toml");
    fs::write(&differing, config.replacen("default = \"zeros\"", "default = \"error\"", 2)).unwrap();
    let other =
        format!("--train {MODEL}={incoming} --model-config {differing} --format criteo-tsv --batch 32");
    let schema = run_failing(2, &line(&other));
    let expected = format!(
        "not the schema of version {before}: tables[\"C1\"].default: expected \"zeros\", got \"error\""
    );
    assert!(schema.ends_with(&expected), "{schema}");
    assert_eq!(version_on_disk(&site), before, "nothing was written");
}

#[test]
fn the_quality_of_the_last_samples_is_shown_between_versions_and_printed_at_the_end() {
    let site = Site::new(1600);
    let served = site.follow("--publish-every 1000s");
    site.arrive(0);
    wait("steps are measured", || shown(&served, "progressive_log_loss") > 0.0);
    assert_eq!(version_on_disk(&site), 1);
    drop(served);

    let site = Site::new(500);
    let served = site.serve(&site.workshop.train, "--window 400");
    wait("training ends", || shows(&served, "training_state", 0.0));
    served.terminate();
    let (status, log) = served.ended();
    let printed = "last 400 samples, before training on them: AUC 0.";
    let lines = log.lines().filter(|line| line.contains(printed) && line.contains(" model=\"dlrm\""));
    assert!(status.success() && lines.count() == 1, "{log}");
}

#[test]
fn a_server_whose_model_is_deleted_serves_on_and_publishes_again() {
    let site = Site::new(1600);
    let served = site.follow("--publish-every 4steps");
    site.arrive(0);
    wait("a version is served", || shown(&served, "serving_version") > 1.0);
    let (before, models) = (version_on_disk(&site), Path::new(&site.workshop.models));
    let model = models.join(MODEL);
    // The server may write into the directory meanwhile.
    wait("the model is deleted", || fs::remove_dir_all(&model).is_ok() || !model.exists());
    assert_eq!(served.score(MODEL, &site.workshop.valid, "")["version"], before);
    site.arrive(1);
    wait("a version is published", || highest_version(models, MODEL) > Some(before));
    wait("it is served", || shown(&served, "serving_version") > before as f64);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && log.contains("training has ended at a signal"), "{log}");
    check_listed_versions(&site.workshop.models, MODEL);
}
