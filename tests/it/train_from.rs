//! `train --from`: training continues from a version.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::{Workshop, flechette, highest_version, manifest, run, run_failing, run_json};

/// Samples of the first part of the data: a whole number of batches, so that both runs take the same steps.
const FIRST_PART: usize = 4 * 128;

/// A workshop whose data is also cut in two parts. Returns the paths of the parts.
fn cut_workshop() -> (Workshop, [String; 2]) {
    let workshop = Workshop::new(900, 50);
    let text = fs::read_to_string(&workshop.train).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let parts = ["first.tsv", "second.tsv"].map(|name| workshop.path(name));
    fs::write(&parts[0], lines[..FIRST_PART].concat()).unwrap();
    fs::write(&parts[1], lines[FIRST_PART..].concat()).unwrap();
    (workshop, parts)
}

fn train(workshop: &Workshop, name: &str, data: &str, more: &str) -> Value {
    let models = &workshop.models;
    run_json(&format!(
        "train --format criteo-tsv --data {data} --models {models} --name {name} --json {more}"
    ))
}

/// The checksums of all files of a version, and its notes.
fn contents(workshop: &Workshop, name: &str, version: u32) -> Value {
    let mut manifest = manifest(&workshop.models, name, u64::from(version));
    // Where training was, and its quality on the way there, differ between one run and two.
    manifest["quality"].take();
    manifest["files"]["checkpoint/cursor.json"].take();
    manifest
}

#[test]
fn training_in_two_runs_writes_the_bytes_of_one_run_for_every_optimizer_in_memory_and_on_disk() {
    let (workshop, [first, second]) = cut_workshop();
    let config = workshop.config(ArchKind::Deepfm, 4, 300);
    let whole = workshop.train.clone();
    for optimizer in ["sgd", "adagrad", "rowwise_adagrad", "adam"] {
        let fresh = format!("--model-config {config} --optimizer {optimizer}");
        let expected = format!("{optimizer}-whole");
        let steps = train(&workshop, &expected, &whole, &fresh)["steps"].clone();
        for (n, [before, after]) in [
            ["", ""],
            ["", "--scratchpad 0.3"],
            ["--scratchpad 0.3", ""],
            ["--scratchpad 0.3", "--scratchpad 0.5"],
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("{optimizer}-{n}");
            train(&workshop, &name, &first, &format!("{fresh} {before}"));
            let from = ["latest", "1"][n % 2];
            // Without `--model-config` the schema is the version's.
            let config = if n == 0 { format!("--model-config {config}") } else { String::new() };
            let more = format!("--from {from} --optimizer {optimizer} {config} {after}");
            assert_eq!(train(&workshop, &name, &second, &more)["steps"], steps, "{name}");
            assert_eq!(contents(&workshop, &name, 2), contents(&workshop, &expected, 1), "{name}");
        }
    }
}

#[test]
fn rounded_rows_and_another_optimizer_continue_from_rows_and_weights_with_a_warning() {
    let (workshop, [first, second]) = cut_workshop();
    let config = workshop.config(ArchKind::Dlrm, 8, 300);
    train(&workshop, "m", &first, &format!("--model-config {config} --optimizer adagrad"));
    let text = fs::read_to_string(&config).unwrap().replace("element = \"f32\"", "element = \"int8\"");
    let rounded = workshop.path("rounded.toml");
    fs::write(&rounded, text).unwrap();
    train(&workshop, "r", &first, &format!("--model-config {rounded} --optimizer adagrad"));
    for (name, optimizer) in [("m", "sgd"), ("r", "sgd")] {
        let mut written = Vec::new();
        for more in ["", "--scratchpad 0.3"] {
            let models = &workshop.models;
            let output = run(&format!(
                "train --from 1 --format criteo-tsv --data {second} --models {models} --name {name} \
                 --optimizer {optimizer} --json {more}"
            ));
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{stderr}");
            assert!(stderr.contains("from the rows and dense weights only"), "{stderr}");
            let line: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(line["steps"], 4, "the steps of the second part");
            written.push(contents(&workshop, name, line["version"].as_u64().unwrap() as u32));
        }
        assert_eq!(written[0], written[1], "{name}: in memory and on disk");
    }
}

#[test]
fn what_training_cannot_continue_from_is_refused_before_it_begins() {
    let (workshop, [first, second]) = cut_workshop();
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let models = &workshop.models;
    let from = |name: &str, more: &str| {
        let line =
            format!("train --format criteo-tsv --data {second} --models {models} --name {name} {more}");
        run_failing(2, &line)
    };
    assert!(from("none", "--from latest").contains("--from: "));
    train(&workshop, "m", &first, &format!("--model-config {config}"));
    let missing = from("m", "--from 7");
    assert!(missing.contains("--from: ") && missing.contains("m/7: no such directory"), "{missing}");
    let word =
        run(&format!("train --format criteo-tsv --data {second} --models {models} --name m --from newest"));
    assert!(String::from_utf8(word.stderr).unwrap().contains("expected the number of a version, or latest"));
    let neither = run(&format!("train --format criteo-tsv --data {second} --models {models} --name m"));
    assert!(String::from_utf8(neither.stderr).unwrap().contains("--model-config"));

    let other = workshop.path("other.toml");
    let text = fs::read_to_string(&config).unwrap().replacen("default = \"zeros\"", "default = \"error\"", 1);
    fs::write(&other, text).unwrap();
    let differs = from("m", &format!("--from 1 --model-config {other}"));
    let expected = "not the schema of version 1: tables[\"C1\"].default: expected \"zeros\", got \"error\"";
    assert!(differs.contains(expected), "{differs}");

    let damaged = format!("{models}/m/1/dense.safetensors");
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    for version in ["1", "latest"] {
        let error = from("m", &format!("--from {version}"));
        assert!(error.contains("--from: ") && error.contains("dense.safetensors"), "{error}");
    }
    let entries = fs::read_dir(format!("{models}/m")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(entries.filter(|name| name != "state").count(), 1, "nothing was written");
}

#[test]
fn the_steps_of_a_run_that_continues_are_told_from_those_of_the_model() {
    let (workshop, [first, second]) = cut_workshop();
    let config = workshop.config(ArchKind::Dlrm, 8, 300);
    let before = train(&workshop, "m", &first, &format!("--model-config {config}"))["steps"].as_u64();
    let models = &workshop.models;
    let output = run(&format!(
        "train --from latest --format criteo-tsv --data {second} --models {models} --name m --json"
    ));
    let (stderr, all) = (String::from_utf8(output.stderr).unwrap(), before.unwrap() + 4);
    assert!(stderr.contains(&format!(", 4 steps ({all} in all), ")), "{stderr}");
    let line: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(line["steps"], all);
}

/// A run that continues from the latest version and waits for samples on standard input.
fn waiting_run(workshop: &Workshop) -> Child {
    let line =
        format!("train --format criteo-tsv --data - --models {} --name m --from latest", workshop.models);
    let mut command = flechette();
    command.args(line.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    while !line.contains("training continues") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "it has ended");
    }
    child.stderr = Some(log.into_inner());
    child
}

/// Gives the run its samples. Returns the rest of its log.
fn end_of(mut run: Child, data: &str) -> String {
    run.stdin.take().unwrap().write_all(&fs::read(data).unwrap()).unwrap();
    let output = run.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    log
}

#[test]
fn a_run_tells_of_a_version_that_another_one_has_written_meanwhile() {
    let (workshop, [first, second]) = cut_workshop();
    let config = workshop.config(ArchKind::Deepfm, 4, 300);
    train(&workshop, "m", &first, &format!("--model-config {config}"));
    let waiting = waiting_run(&workshop);
    assert_eq!(train(&workshop, "m", &first, "--from latest")["version"], 2);
    let log = end_of(waiting, &second);
    assert!(log.contains("another run has written version 2 meanwhile"), "{log}");
    assert_eq!(highest_version(Path::new(&workshop.models), "m"), Some(3));
    // Without another run, there is nothing to tell.
    let log = end_of(waiting_run(&workshop), &second);
    assert!(!log.contains("another run"), "{log}");
}

#[test]
fn a_run_gives_no_number_of_a_version_that_was_removed_with_the_directory_meanwhile() {
    let (workshop, [first, second]) = cut_workshop();
    let config = workshop.config(ArchKind::Deepfm, 4, 300);
    for more in [format!("--model-config {config}"), "--from latest".to_owned()] {
        train(&workshop, "m", &first, &more);
    }
    let waiting = waiting_run(&workshop);
    fs::remove_dir_all(Path::new(&workshop.models).join("m")).unwrap();
    end_of(waiting, &second);
    assert_eq!(highest_version(Path::new(&workshop.models), "m"), Some(3));
}
