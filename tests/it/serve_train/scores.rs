//! Clients score while a model is trained: no request fails, and the answers follow the versions.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use flechette::server::proto::PredictRequest;
use flechette::server::proto::ctr_client::CtrClient;

use super::site::{MODEL, PARTS, Site, shown, shows, version_on_disk};
use crate::program::{Served, metrics_page};
use crate::serving::channel;
use crate::switching::{answer, requests, wait};

type Answers = BTreeMap<(u64, usize), Vec<f32>>;

/// How long a client waits between two requests. Training has the time that requests leave.
const PAUSE: Duration = Duration::from_millis(2);

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
        tokio::time::sleep(PAUSE).await;
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
