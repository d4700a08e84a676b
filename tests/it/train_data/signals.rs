//! A signal ends training at a batch: what was trained is saved, and the report says where the run continues.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::interrupting::{
    interrupt_after_a_skipped_line, signal, signal_after_a_skipped_line, start_with_input,
    start_with_input_in, until_a_skipped_line,
};
use super::workshop::{contents, workshop};
use crate::program::{Workshop, flechette, highest_version, run, run_json};
use crate::skip::skip;
use crate::switching::wait;

#[test]
fn a_signal_ends_training_at_a_batch_and_the_model_is_saved() {
    let (workshop, line) = workshop(300);
    let dir = workshop.path("parts");
    fs::create_dir(&dir).unwrap();
    // Two whole batches and a part of the third, which waits for a next file.
    let text = fs::read_to_string(&workshop.train).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    fs::write(format!("{dir}/a"), lines[..100].concat()).unwrap();
    fs::write(format!("{dir}/b"), lines[100..].concat()).unwrap();
    for (name, signal_name) in [("int", "-INT"), ("term", "-TERM")] {
        let mut child = flechette()
            .args(format!("{line} --name {name} --follow {dir}").split_whitespace())
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut report = String::new();
        // The first step has trained all of this file.
        while !report.contains("a: 100 samples, before training on them: ") {
            assert!(log.read_line(&mut report).unwrap() > 0, "{report}");
        }
        signal(&child, signal_name);
        log.read_to_string(&mut report).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(130), "{report}");
        let said = report.lines().filter(|line| line.starts_with("stopped by a signal: wrote ")).count();
        assert!(said == 1 && report.contains("with --resume continues the run"), "{report}");
        let mut json = String::new();
        child.stdout.take().unwrap().read_to_string(&mut json).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["interrupted"], &json["version"]), (&true.into(), &1.into()));
        let steps = json["steps"].as_u64().unwrap() as usize;
        assert!((1..=2).contains(&steps), "{json}");
        let trained = workshop.path("trained.tsv");
        fs::write(&trained, lines[..128 * steps].concat()).unwrap();
        let whole = run_json(&format!("{line} --name {name}-whole --data {trained}"));
        assert_eq!(contents(&workshop, name, 1), contents(&workshop, &format!("{name}-whole"), 1));
        assert_eq!(whole["interrupted"], false);
    }
}

#[test]
fn a_signal_before_the_first_step_writes_nothing_and_says_so() {
    let (workshop, line) = workshop(10);
    let (mut child, stdin) = start_with_input(&format!("{line} --name m --data -"), "");
    let report = interrupt_after_a_skipped_line(&mut child);
    assert!(report.contains("stopped by a signal: no step was taken, so no version was written"), "{report}");
    assert!(!fs::exists(format!("{}/m/1", workshop.models)).unwrap());
    drop(stdin);
}

#[test]
fn a_closed_terminal_ends_training_with_a_version_and_under_nohup_it_does_not_matter() {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Its children could not tell a closed terminal from nohup.
    if ignored.is_none_or(|mask| mask & 1 == 1) {
        return skip("SIGHUP is ignored here, as by nohup");
    }
    let (workshop, line) = workshop(256);
    let text = fs::read_to_string(&workshop.train).unwrap();
    // The terminal and the shell both send a signal.
    let (mut child, stdin) = start_with_input(&format!("{line} --name m --data -"), &text);
    let report = signal_after_a_skipped_line(&mut child, &["-HUP", "-HUP"]);
    drop(stdin);
    assert!(report.contains("stopped by a signal: wrote ") && report.contains("--resume"), "{report}");
    assert!(fs::exists(format!("{}/m/1", workshop.models)).unwrap());
    let ignored = format!("{line} --name ignored --data -");
    let (mut child, stdin) = start_with_input_in("trap '' HUP", &ignored, &text);
    let (_, mut log) = until_a_skipped_line(&mut child);
    signal(&child, "-HUP");
    drop(stdin);
    let mut report = String::new();
    log.read_to_string(&mut report).unwrap();
    assert!(child.wait().unwrap().success() && !report.contains("signal"), "{report}");
}

#[test]
fn a_version_that_the_gate_refuses_is_not_written_at_a_signal_either() {
    let (workshop, line) = workshop(256);
    let text = fs::read_to_string(&workshop.train).unwrap();
    let gate = "--publish-every 1000s --publish-gate logloss=0.001 --gate-samples 200";
    let (mut child, stdin) = start_with_input(&format!("{line} --name m --data - {gate}"), &text);
    let report = interrupt_after_a_skipped_line(&mut child);
    let refused = "stopped by a signal: not published: --publish-gate: log loss of the last 200 samples";
    assert!(report.contains(refused) && report.contains("--resume starts at the beginning"), "{report}");
    assert!(!fs::exists(format!("{}/m/1", workshop.models)).unwrap());
    drop(stdin);
}

#[test]
fn a_signal_whose_version_cannot_be_written_says_why_and_where_the_run_continues() {
    let (workshop, line) = workshop(512);
    let text = fs::read_to_string(&workshop.train).unwrap();
    let line = format!("{line} --name m --data -");
    // Files larger than 4 KiB fail, as on a full disk. Without the signal, such a write is an error.
    let full = "trap '' XFSZ && ulimit -f 8";
    let stopped = |line: &str, text: &str| {
        let (mut child, stdin) = start_with_input_in(full, line, text);
        let report = interrupt_after_a_skipped_line(&mut child);
        drop(stdin);
        assert!(report.contains("stopped by a signal: the last version could not be written: "), "{report}");
        report.trim_end().to_owned()
    };
    let report = stopped(&line, &text);
    assert!(report.ends_with("; the same command with --resume starts at the beginning"), "{report}");
    let latest = || highest_version(Path::new(&workshop.models), "m");
    assert_eq!(latest(), None);
    let half: String = text.split_inclusive('\n').take(256).collect();
    let (mut child, stdin) = start_with_input(&line, &half);
    interrupt_after_a_skipped_line(&mut child);
    drop(stdin);
    assert_eq!(latest(), Some(1));
    let report = stopped(&format!("{line} --resume"), &text);
    assert!(report.ends_with("; the same command with --resume continues from version 1"), "{report}");
    let report = stopped(&format!("{line} --batch 64"), &text);
    assert!(
        report.ends_with(" without --resume starts at the beginning, because version 1 is of another run")
    );
    assert_eq!(latest(), Some(1));
    // Without a signal, too.
    let publishing = format!("{line} --resume --publish-every 1000s");
    let (child, stdin) = start_with_input_in(full, &publishing, &text);
    drop(stdin);
    let ended = child.wait_with_output().unwrap();
    let report = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{report}");
    let last = report.lines().last().unwrap();
    assert!(last.starts_with("error: the last version could not be written: "), "{report}");
    assert!(last.ends_with("; the same command with --resume continues from version 1"), "{report}");
}

#[test]
fn a_signal_during_the_last_validation_leaves_its_quality_out() {
    let (workshop, line) = workshop(256);
    let text = fs::read_to_string(&workshop.valid).unwrap();
    let (train, out) = (&workshop.train, workshop.path("scores"));
    fs::write(&out, "of before").unwrap();
    let line = format!("{line} --name m --data {train} --valid /dev/stdin --valid-out {out}");
    let (mut child, stdin) = start_with_input(&line, &text);
    let report = interrupt_after_a_skipped_line(&mut child);
    let mut json = String::new();
    child.stdout.take().unwrap().read_to_string(&mut json).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["interrupted"], &json["version"], &json["auc"]),
        (&true.into(), &1.into(), &Value::Null)
    );
    assert!(json["epochs"] == 1 && report.contains("trained 256 rows x 1 epoch(s), "), "{json}: {report}");
    let wrote = format!("stopped by a signal: wrote {}/m/1; it was not evaluated", workshop.models);
    assert!(report.contains(&wrote) && !report.contains("--resume"), "{report}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "of before");
    drop(stdin);
}

#[test]
fn a_signal_while_flags_and_data_are_checked_ends_the_run_with_a_line() {
    let workshop = Workshop::new(10, 10);
    let (pipe, Workshop { models, train, .. }) = (workshop.path("model.toml"), &workshop);
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let line =
        format!("train --model-config {pipe} --format criteo-tsv --data {train} --models {models} --name m");
    let child = flechette().args(line.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    // Opened when the command has opened it too. It then waits for the text.
    let text = fs::File::options().write(true).open(&pipe).unwrap();
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    drop(text);
    let report = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{report}");
    assert!(report.contains("stopped by a signal: no step was taken, so no version was written"), "{report}");
}

#[test]
fn a_signal_before_the_first_step_of_a_resumed_run_writes_no_version() {
    let (workshop, line) = workshop(256);
    let text = fs::read_to_string(&workshop.train).unwrap();
    let line = format!("{line} --name m --data -");
    let (mut child, stdin) = start_with_input(&line, &text);
    interrupt_after_a_skipped_line(&mut child);
    drop(stdin);
    let latest = || highest_version(Path::new(&workshop.models), "m");
    assert_eq!(latest(), Some(1));
    // Fewer than are skipped.
    let few: String = text.split_inclusive('\n').take(100).collect();
    let (mut child, stdin) = start_with_input(&format!("{line} --resume"), &few);
    let report = interrupt_after_a_skipped_line(&mut child);
    drop(stdin);
    assert!(report.contains("stopped by a signal: no step was taken since "), "{report}");
    assert_eq!(latest(), Some(1));
}

#[test]
fn a_run_that_waits_for_the_writer_of_a_pipe_publishes_and_ends_at_a_signal() {
    let (workshop, line) = workshop(256);
    let pipe = workshop.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let line = format!("{line} --name m --data {} {pipe} --publish-every 100ms", workshop.train);
    let child = flechette().args(line.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    wait("the first file is in a version", || {
        let versions = run(&format!("versions --models {} --name m --json", workshop.models));
        let versions = String::from_utf8(versions.stdout).unwrap();
        versions.contains("\"samples\": 256") || versions.contains("\"samples\":256")
    });
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let report = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{report}");
}
