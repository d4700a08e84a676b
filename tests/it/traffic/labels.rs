//! Labels name a version or the latest: they are set, kept over restarts, refused, and protect versions from
//! retention.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use flechette::schema::preset::ArchKind;
use flechette::server::proto::SetLabelRequest;
use serde_json::{Value, json};
use tonic::{Code, Request, Status};

use super::world::{MODEL, World, publish_other};
use crate::program::{Workshop, flechette, run, run_failing};
use crate::switching::wait;

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
    assert_eq!(client.label("stable none"), "stable: 4 (latest)\n");
    assert_eq!(client.label("stable 2"), "stable: 2\n");
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
    let both = SetLabelRequest { model: MODEL.into(), label: "stable".into(), version: 1, remove: true };
    refused(client.change(both), Code::InvalidArgument, "version: expected 0 to remove a label, got 1");
    refused(client.set_label("Stable", 1), Code::InvalidArgument, "expected 1 to 32 lowercase letters");
    let request =
        SetLabelRequest { model: "nobody".into(), label: "stable".into(), ..SetLabelRequest::default() };
    refused(client.change(request.clone()), Code::NotFound, "no model \"nobody\"");
    // The log must not have all of it either.
    let long = client.change(SetLabelRequest { model: "m".repeat(100_000), ..request }).unwrap_err();
    assert!(long.code() == Code::NotFound && long.message().len() < 200, "{long}");
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
