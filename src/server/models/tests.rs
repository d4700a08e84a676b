use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::*;
use crate::batcher::Terms;
use crate::config::{MAX_LABELS, STABLE};
use crate::fake::{Fake, batcher_config};
use crate::predict::{Description, PredictError};
use crate::server::convert::Inputs;
use crate::server::traffic::RequestOptions;
use crate::types::{Batch, Jagged, Scores, VersionSelector};

/// A model that serves version 2, and a further engine for it.
fn served() -> (Models, Arc<Fake>) {
    served_with(None)
}

fn served_with(learning: Option<Learning>) -> (Models, Arc<Fake>) {
    let metrics = Arc::new(Metrics::new().unwrap());
    let batchers = Batchers { common: batcher_config(), models: BTreeMap::new() };
    let models = Models::new(metrics, batchers, 100, learning);
    let version_2 = || {
        let fake = Fake::new();
        fake.version.store(2, Ordering::SeqCst);
        fake
    };
    models.add(version_2()).unwrap();
    models.set_labels(NAME, Labels::default());
    (models, version_2())
}

const NAME: &str = "ads";

fn label(label: &str, target: Option<VersionSelector>) -> LabelChange<'_> {
    LabelChange { label, target }
}

fn sample() -> Batch {
    let mut batch = Batch { samples: 1, dense: vec![0.5, 0.5], ..Batch::empty(3) };
    batch.features.iter_mut().for_each(|column| Jagged::push(column, &[1]));
    batch
}

/// Waits until something has happened. Panics if it never does.
fn wait(what: &str, happened: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < until, "never happened: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The main engine takes over version 4, and another one serves version 2.
fn leaves_version_2(secondary: Arc<Fake>) -> LoadedVersions {
    LoadedVersions {
        secondary: vec![secondary],
        main: Version(4),
        latest: Version(4),
        traffic: TrafficConfig::default(),
        shadow: None,
        refused: RefusedVersions::default(),
    }
}

#[test]
fn the_main_engine_leaves_a_version_when_also_the_calls_before_the_last_label_are_answered() {
    let (models, secondary) = served();
    // A call that has found the main engine for version 2.
    let call = models.get(NAME).unwrap();
    let stable = Some(VersionSelector::Version(Version(2)));
    assert_eq!(models.set_label(NAME, label("stable", stable)).unwrap(), Some(Version(2)));
    thread::scope(|scope| {
        let leaves = scope.spawn(|| models.set_versions(NAME, leaves_version_2(secondary)).unwrap());
        wait("later calls find version 4", || models.get(NAME).unwrap().main_version() == Version(4));
        thread::sleep(Duration::from_millis(50));
        assert!(!leaves.is_finished(), "the call is not answered");
        drop(call);
        leaves.join().unwrap();
    });
    assert_eq!(models.get(NAME).unwrap().main_version(), Version(4));
}

#[test]
fn new_settings_share_out_requests_as_far_as_versions_are_loaded() {
    let (models, secondary) = served();
    let named = |label: &str, version| (label.to_owned(), VersionSelector::Version(Version(version)));
    let traffic = |canary_share, labels: &[(String, VersionSelector)]| TrafficConfig {
        canary_share,
        labels: labels.iter().cloned().collect(),
        ..TrafficConfig::default()
    };
    let first = traffic(1.0, &[named("stable", 2), named("canary", 4)]);
    let leaves = |traffic| LoadedVersions { traffic, ..leaves_version_2(secondary.clone()) };
    models.set_versions(NAME, leaves(first.clone())).unwrap();
    let share = || models.get(NAME).unwrap().parts().traffic.canary_share;
    let stable = || models.get(NAME).unwrap().labels().unwrap().stable();
    assert_eq!(share(), 1.0);
    models.set_traffic(NAME, &TrafficConfig { canary_share: 0.0, ..first.clone() });
    assert_eq!(share(), 0.0);
    models.set_traffic(NAME, &traffic(0.0, &[named("stable", 9)]));
    assert_eq!(stable(), VersionSelector::Version(Version(2)), "version 9 is not loaded");
    // A label that names no loaded version does not keep another one from changing.
    let gone = named("old", 9);
    models.set_versions(NAME, leaves(traffic(1.0, &[named("stable", 2), gone.clone()]))).unwrap();
    models.set_traffic(NAME, &traffic(1.0, &[named("stable", 2), named("canary", 2), gone]));
    assert_eq!(models.get(NAME).unwrap().labels().unwrap().settings.get("canary"), Some(&named("", 2).1));
    models.set_traffic("other", &first);
}

#[test]
fn a_model_ends_when_also_the_calls_before_the_last_label_are_answered() {
    let (models, _) = served();
    let call = models.get(NAME).unwrap();
    models.set_label(NAME, label("old", Some(VersionSelector::Version(Version(2))))).unwrap();
    thread::scope(|scope| {
        let removed = scope.spawn(|| models.remove(NAME));
        wait("later calls find no model", || models.get(NAME).is_none());
        thread::sleep(Duration::from_millis(50));
        assert!(!removed.is_finished(), "the call is not answered");
        drop(call);
        assert!(removed.join().unwrap());
    });
    assert!(models.get(NAME).is_none());
}

#[test]
fn labels_hold_and_change_while_the_disk_does_not_answer() {
    let (models, _) = served();
    let target = Some(VersionSelector::Version(Version(2)));
    let labels = || models.get(NAME).unwrap().labels().unwrap().clone();
    models.set_label(NAME, label("old", target)).unwrap();
    let kept = models.keep_labels(NAME, |kept| {
        assert!(kept.set.contains_key("old"));
        // A roll-back meanwhile.
        models.set_label(NAME, label("stable", target)).unwrap();
        assert_eq!(labels().stable(), VersionSelector::Version(Version(2)));
        Ok(())
    });
    assert!(kept.unwrap().is_some());
    let kept = models.keep_labels(NAME, |_| Err("disk gone".to_owned()));
    assert_eq!(kept.unwrap_err(), "disk gone");
    assert_eq!(labels().stable(), VersionSelector::Version(Version(2)), "it holds all the same");
    let kept = models.keep_labels(NAME, |kept| {
        assert_eq!(kept.set.len(), 2);
        Ok(())
    });
    assert!(kept.unwrap().is_some());
}

#[test]
fn the_labels_of_a_model_that_was_unloaded_are_not_kept_as_those_of_the_next_one() {
    let (models, again) = served();
    let before = models.labelled(NAME).unwrap();
    models.set_label(NAME, label("old", Some(VersionSelector::Version(Version(2))))).unwrap();
    assert!(Arc::ptr_eq(&models.labelled(NAME).unwrap(), &before));
    assert!(models.remove(NAME));
    let nothing = || models.keep_labels(NAME, |_| panic!("there are no labels")).unwrap().is_none();
    assert!(nothing(), "the model is not served");
    models.add(again).unwrap();
    assert!(nothing() && models.labelled(NAME).is_none(), "its labels were not read");
    models.set_labels(NAME, Labels::default());
    let kept = models.keep_labels(NAME, |_| Ok(())).unwrap();
    assert!(kept.is_some_and(|kept| !Arc::ptr_eq(&kept, &before)));
}

#[test]
fn the_labels_of_the_settings_can_be_rolled_back_also_beyond_the_limit() {
    let (models, _) = served();
    let target = VersionSelector::Version(Version(2));
    let settings = (0..MAX_LABELS).map(|label| (format!("l{label}"), target)).collect();
    models.set_labels(NAME, Labels { settings, ..Labels::default() });
    assert_eq!(models.set_label(NAME, label("stable", Some(target))).unwrap(), Some(Version(2)));
    assert_eq!(models.set_label(NAME, label("l0", Some(target))).unwrap(), Some(Version(2)));
    assert_eq!(models.set_label(NAME, label("stable", None)).unwrap(), Some(Version(2)));
    let error = models.set_label(NAME, label("more", Some(target))).unwrap_err();
    assert!(matches!(error, NotChanged::Label(LabelError::TooMany)), "{error}");
    let error = models.set_label(NAME, label("more", None)).unwrap_err();
    assert!(error.to_string().starts_with("no label more; its labels are: l0, l1, "), "{error}");
}

#[test]
fn a_label_that_is_not_shown_any_more_exports_0() {
    let (models, _) = served();
    let exported = |label: &str| {
        let (page, labels) = (models.metrics.render(), format!("label=\"{label}\""));
        let is_it = |line: &&str| line.starts_with("flechette_label_version{") && line.contains(&labels);
        page.lines().find(is_it).unwrap().rsplit_once(' ').unwrap().1.to_owned()
    };
    let target = VersionSelector::Version(Version(2));
    models.set_label(NAME, label("old", Some(target))).unwrap();
    assert_eq!(["stable", "old"].map(exported), ["2", "2"]);
    models.set_label(NAME, label("old", None)).unwrap();
    assert_eq!(["stable", "old"].map(exported), ["2", "0"]);
    let settings = BTreeMap::from([("canary".to_owned(), target), ("old".to_owned(), target)]);
    models.set_labels(NAME, Labels { settings, ..Labels::default() });
    assert_eq!(["stable", "canary", "old"].map(exported), ["2", "2", "2"]);
    let settings = BTreeMap::from([("canary".to_owned(), target)]);
    models.set_labels(NAME, Labels { settings, ..Labels::default() });
    assert_eq!(["stable", "canary", "old"].map(exported), ["2", "2", "0"]);
}

#[test]
fn a_model_whose_call_is_stuck_can_be_unloaded_and_loaded_again() {
    // Its log of samples must not stay locked.
    let folder = tempfile::tempdir().unwrap();
    let config = LearnConfig { enabled: true, max_bytes: 1 << 20, segment_bytes: 1 << 18 };
    let learning = Learning { models: folder.path().to_owned(), config, only: Vec::new() };
    let (models, _) = served_with(Some(learning));
    let stuck = Fake::new();
    stuck.hold();
    models.remove(NAME);
    models.add(stuck.clone()).unwrap();
    let ticket = models.get(NAME).unwrap().main().batcher.submit(sample(), Terms::default()).unwrap();
    wait("the call begins", || stuck.begun() == 1);
    assert!(models.remove(NAME));
    models.add(Fake::new()).unwrap();
    assert!(models.get(NAME).is_some());
    stuck.release();
    drop(ticket);
}

/// A model that tells the name of the thread that releases it.
struct Released(Arc<Fake>, mpsc::Sender<Option<String>>);

impl Predict for Released {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        self.0.predict(batch)
    }

    fn describe(&self) -> Description {
        self.0.describe()
    }

    fn ready(&self) -> bool {
        true
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        let _ = self.1.send(thread::current().name().map(str::to_owned));
    }
}

#[test]
fn the_memory_of_a_model_is_not_released_by_the_thread_that_ends_its_last_call() {
    let (models, _) = served();
    models.remove(NAME);
    let (release, released) = mpsc::channel();
    models.add(Arc::new(Released(Fake::new(), release))).unwrap();
    let call = models.get(NAME).unwrap();
    let ticket = call.main().batcher.submit(sample(), Terms::default()).unwrap();
    assert!(models.remove(NAME));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let ended = runtime.spawn(async move {
        drop(call);
        drop(ticket);
    });
    runtime.block_on(ended).unwrap();
    let thread = released.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(thread.as_deref(), Some("end-engines"));
}

/// A version that cannot score.
struct Broken(Arc<Fake>);

impl Predict for Broken {
    fn predict(&self, _: &Batch) -> Result<Scores, PredictError> {
        Err(PredictError::Store("disk gone".to_owned()))
    }

    fn describe(&self) -> Description {
        Description { version: Version(3), ..self.0.describe() }
    }

    fn ready(&self) -> bool {
        true
    }
}

#[test]
fn a_request_for_a_label_that_ends_without_scores_is_counted_as_failed() {
    let (models, fake) = served();
    let pinned = label(STABLE, Some(VersionSelector::Version(Version(2))));
    models.set_label(NAME, pinned).unwrap();
    let value = |series: &str| {
        let series = format!("flechette_label_{series}{{model=\"ads\",label=\"stable\"}} ");
        let page = models.metrics.render();
        page.lines().find_map(|line| line.strip_prefix(&series)?.parse::<f64>().ok()).unwrap()
    };
    let (model, options) = (models.get(NAME).unwrap(), RequestOptions::default());
    let queue = || {
        let encode = |_: &Inputs, batch: &mut Batch| {
            *batch = sample();
            Ok(())
        };
        model.queue(&options, encode).unwrap()
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { model.scores(queue()).await }).unwrap();
    let counts = || ["requests_total", "request_seconds_count", "failures_total"].map(value);
    assert_eq!(counts(), [1.0, 1.0, 0.0]);
    // As at its deadline, or when its client ends the call.
    drop(queue());
    assert_eq!(counts(), [2.0, 1.0, 1.0]);
    drop(fake);
}

#[test]
fn a_request_that_the_shadow_cannot_score_is_answered_and_counted() {
    let (models, fake) = served();
    let loaded = LoadedVersions {
        secondary: Vec::new(),
        main: Version(2),
        latest: Version(3),
        traffic: TrafficConfig { shadow_share: 1.0, ..TrafficConfig::default() },
        shadow: Some(Arc::new(Broken(fake))),
        refused: RefusedVersions::default(),
    };
    models.set_versions(NAME, loaded).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let model = models.get(NAME).unwrap();
        let options = RequestOptions {
            id: "",
            version: None,
            label: String::new(),
            logits: false,
            terms: Terms::default(),
        };
        let encode = |_: &Inputs, batch: &mut Batch| {
            *batch = sample();
            Ok(())
        };
        let (scores, _) = model.scores(model.queue(&options, encode).unwrap()).await.unwrap();
        assert_eq!(scores.version, Version(2));
    });
    let counted = || models.metrics.render().contains("flechette_shadow_failed_total{model=\"ads\"} 1");
    wait("the failure of the shadow is counted", counted);
}
