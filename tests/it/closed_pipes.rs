//! Commands that write to pipes and to standard output, whose readers may end before them.

use std::fs::{self, File};
use std::io::{self, PipeWriter};
use std::process::{Command, Stdio};

use flechette::schema::preset::ArchKind;

use crate::demo;
use crate::program::{Served, Workshop, flechette, highest_version};

/// A pipe without a reader.
pub fn closed() -> PipeWriter {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    writer
}

#[test]
fn training_writes_its_version_and_its_report_when_nobody_reads_its_messages() {
    let workshop = Workshop::new(300, 50);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let Workshop { train, models, .. } = &workshop;
    let line = format!(
        "train --model-config {config} --format criteo-tsv --data {train} --epochs 2 --models {models} \
         --name m --json"
    );
    let mut command = flechette();
    command.args(line.split_whitespace()).stdout(Stdio::piped()).stderr(closed());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert!(String::from_utf8(output.stdout).unwrap().contains("\"version\":1"));
    assert_eq!(highest_version(models.as_ref(), "m"), Some(1));
}

#[test]
fn scores_that_nobody_reads_to_the_end_are_an_error() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let pipe = workshop.path("scores");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (url, valid) = (served.url(), &workshop.valid);
    let line = format!("score --addr {url} --model dlrm --format criteo-tsv {valid} --out {pipe}");
    let child = flechette().args(line.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    // Opening waits for the program. The scores come later.
    drop(File::open(&pipe).unwrap());
    let output = child.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && log.contains("Broken pipe"), "{:?}: {log}", output.status);
}

#[test]
fn what_is_printed_follows_the_scores_in_a_file_that_is_standard_output() {
    let workshop = Workshop::new(300, 50);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let Workshop { train, valid, models, .. } = &workshop;
    let line = format!(
        "train --model-config {config} --format criteo-tsv --data {train} --valid {valid} \
         --valid-out /dev/stdout --models {models} --name m --json"
    );
    let path = workshop.path("printed");
    let mut command = flechette();
    command.args(line.split_whitespace()).stdout(File::create(&path).unwrap());
    assert!(command.status().unwrap().success());
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let (printed, scores) = lines.split_last().unwrap();
    assert_eq!(scores.len(), 50);
    assert!(scores.iter().all(|score| (0.0..=1.0).contains(&score.parse::<f32>().unwrap())), "{text}");
    assert!(printed.contains("\"version\":1"), "{printed}");
}

#[test]
fn a_demo_whose_reader_ends_early_succeeds_and_leaves_no_files() {
    let _alone = demo::alone();
    let scratch = tempfile::tempdir().unwrap();
    let mut command = flechette();
    command.args(["demo", "--once", "--rows", "1000"]).env("TMPDIR", scratch.path());
    let output = command.stdout(closed()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn a_failure_is_one_also_if_nobody_reads_the_result() {
    let mut command = flechette();
    command.args(["config", "check", "--json"]).env("FLECHETTE_CACHE_BYTES", "many").stdout(closed());
    assert_eq!(command.status().unwrap().code(), Some(2));
}
