//! What `train` trains on: epochs and validation, shuffling, followed directories, standard input; and how a
//! signal ends it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::{
    Workshop, flechette, flechette_in, highest_version, manifest, run, run_failing, run_json,
};
use crate::skip::skip;
use crate::switching::wait;

/// A workshop, and the command that trains in it.
fn workshop(rows: u64) -> (Workshop, String) {
    let workshop = Workshop::new(rows, 200);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let models = &workshop.models;
    let line = format!("train --model-config {config} --format criteo-tsv --models {models} --json");
    (workshop, line)
}

/// The checksums of all files of a version, and its notes.
fn contents(workshop: &Workshop, name: &str, version: u64) -> Value {
    let mut manifest = manifest(&workshop.models, name, version);
    // Two ways to train the same bytes have other places in their data and qualities on the way.
    manifest["quality"].take();
    manifest["files"]["checkpoint/cursor.json"].take();
    manifest
}

/// Makes a directory. Returns the paths and the contents of ten files, which are the data in parts.
pub fn parts(workshop: &Workshop, dir: &str) -> Vec<(String, Vec<u8>)> {
    fs::create_dir(dir).unwrap();
    let text = fs::read_to_string(&workshop.train).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let part = |(n, lines): (usize, &[&str])| (format!("{dir}/{n:02}"), lines.concat().into_bytes());
    lines.chunks(lines.len().div_ceil(10)).enumerate().map(part).collect()
}

#[test]
fn every_epoch_is_validated_and_training_stops_early_or_keeps_the_best_version() {
    let (workshop, line) = workshop(700);
    let Workshop { train, valid, .. } = &workshop;
    for (name, more) in [("memory", ""), ("disk", "--scratchpad 0.3")] {
        let line =
            format!("{line} --data {train} --valid {valid} --epochs 6 --lr 0.03 --optimizer adam {more}");
        let every = run(&format!("{line} --name {name}"));
        let (report, json) =
            (String::from_utf8(every.stderr).unwrap(), String::from_utf8(every.stdout).unwrap());
        let json: Value = serde_json::from_str(&json).unwrap();
        for epoch in 1..=6 {
            assert!(report.contains(&format!("epoch {epoch} of 6: validation: 200 rows, AUC ")), "{report}");
        }
        let losses: Vec<f64> =
            json["validations"].as_array().unwrap().iter().map(|v| v["logloss"].as_f64().unwrap()).collect();
        assert_eq!(losses.len(), 6);
        // f32 rows are not rounded, so the written version is as good as the model in training.
        assert_eq!(losses[5], json["logloss"].as_f64().unwrap());
        let best = (0..6).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap();
        assert!(best < 4, "the model must overfit for this test: {losses:?}");

        let kept = run_json(&format!("{line} --name {name}-best --save-best --early-stop 2"));
        assert_eq!(kept["epochs"], best as u64 + 3, "{losses:?}");
        assert_eq!(
            (&kept["best_epoch"], &kept["logloss"]),
            (&(best as u64 + 1).into(), &losses[best].into())
        );
        let version = kept["version"].as_u64().unwrap();
        let left = fs::read_dir(format!("{}/{name}-best", workshop.models)).unwrap();
        let left = left.filter(|entry| entry.as_ref().unwrap().file_name() != "state").count();
        assert_eq!(left, 1, "those of earlier best epochs are removed");
        // A run that goes on after its best version has the same best version.
        let resumed = run_json(&format!("{line} --name {name}-best --save-best --early-stop 2 --resume"));
        assert_eq!((&resumed["version"], &resumed["best_epoch"]), (&kept["version"], &kept["best_epoch"]));
        assert_eq!(resumed["logloss"], kept["logloss"]);
        // With versions on the way, others follow that of the best epoch, so it is written again.
        let kept = run_json(&format!(
            "{line} --name {name}-on-the-way --save-best --early-stop 2 --publish-every 1steps"
        ));
        assert_eq!(
            (&kept["best_epoch"], &kept["logloss"]),
            (&(best as u64 + 1).into(), &losses[best].into())
        );
        let latest = highest_version(Path::new(&workshop.models), &format!("{name}-on-the-way")).unwrap();
        assert_eq!(kept["version"], latest);
        assert_eq!(
            contents(&workshop, &format!("{name}-on-the-way"), latest),
            contents(&workshop, &format!("{name}-best"), version)
        );
        let until_best = line.replace("--epochs 6", &format!("--epochs {}", best + 1));
        run_json(&format!("{until_best} --name {name}-until"));
        assert_eq!(
            contents(&workshop, &format!("{name}-best"), version),
            contents(&workshop, &format!("{name}-until"), 1)
        );
    }
    assert_eq!(contents(&workshop, "memory", 1), contents(&workshop, "disk", 1));
}

#[test]
fn held_out_samples_are_not_trained_and_shuffles_depend_on_the_seed_alone() {
    let (workshop, line) = workshop(800);
    let line = format!("{line} --data {}", workshop.train);
    let held_out = run_json(&format!("{line} --name ratio --valid-ratio 0.25"));
    let (trained, valid) = (held_out["rows"].as_u64().unwrap(), held_out["valid_rows"].as_u64().unwrap());
    assert_eq!(trained + valid, 800);
    assert!((120..280).contains(&valid), "{valid}");
    let progressive = &held_out["progressive"];
    assert_eq!(progressive["samples"], trained);
    assert!(progressive["auc"].is_f64() && progressive["calibration"].is_f64(), "{progressive}");
    for (name, seed) in [("one", 5), ("same", 5), ("other", 6)] {
        run_json(&format!("{line} --name {name} --shuffle 300 --data-seed {seed} --epochs 2"));
    }
    let [one, same, other] = ["one", "same", "other"].map(|name| contents(&workshop, name, 1));
    assert!(one == same && one != other);
}

#[test]
fn a_followed_directory_trains_the_bytes_of_one_run_over_its_files() {
    let (workshop, line) = workshop(1000);
    let dir = workshop.path("parts");
    let parts = parts(&workshop, &dir);
    let follow = format!("{line} --name follow --follow {dir} --follow-until 09");
    let mut child = flechette().args(follow.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    let reader = BufReader::new(child.stderr.take().unwrap());
    let mut lines = reader.lines().map(Result::unwrap);
    let mut report = String::new();
    for (n, (path, text)) in parts.iter().enumerate() {
        fs::write(format!("{path}.tmp"), text).unwrap();
        fs::rename(format!("{path}.tmp"), path).unwrap();
        if n == 4 {
            // Once a later file was trained, a file with a lower name is late.
            let trained = |line: &String| line.starts_with("02: 100 samples, before training on them: AUC ");
            let seen: Vec<String> = lines.by_ref().take_while(|line| !trained(line)).collect();
            report += &seen.join("\n");
            fs::write(format!("{dir}/001"), text).unwrap();
        }
    }
    report += &lines.collect::<Vec<_>>().join("\n");
    assert!(child.wait().unwrap().success(), "{report}");
    assert_eq!(report.matches("001: appeared after").count(), 1, "{report}");
    for n in [0, 1, 3, 4, 5, 9] {
        assert!(report.contains(&format!("0{n}: 100 samples, before training on them: AUC ")), "{report}");
    }
    let files: Vec<&str> = parts.iter().map(|(path, _)| path.as_str()).collect();
    run_json(&format!("{line} --name list --data {}", files.join(" ")));
    run_json(&format!("{line} --name whole --data {}", workshop.train));
    assert_eq!(contents(&workshop, "follow", 1), contents(&workshop, "list", 1));
    assert_eq!(contents(&workshop, "follow", 1), contents(&workshop, "whole", 1));
}

#[test]
fn standard_input_is_trained_as_a_file_is() {
    let (workshop, line) = workshop(500);
    let text = fs::read(&workshop.train).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    run_json(&format!("{line} --name file --data {}", workshop.train));
    for (name, text) in [("plain", text), ("gzip", gzip.finish().unwrap())] {
        let mut child = flechette()
            .args(format!("{line} --name {name} --data -").split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&text).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(contents(&workshop, name, 1), contents(&workshop, "file", 1));
    }
}

pub fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

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

/// Waits for the report of a malformed line, which shows that training has begun, and interrupts it. Returns
/// its log.
pub fn interrupt_after_a_skipped_line(child: &mut Child) -> String {
    signal_after_a_skipped_line(child, &["-INT"])
}

/// Waits for the report of a malformed line. Returns the log so far, and its rest.
fn until_a_skipped_line(child: &mut Child) -> (String, BufReader<ChildStderr>) {
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut report = String::new();
    while !report.contains("skipped") {
        assert!(log.read_line(&mut report).unwrap() > 0, "{report}");
    }
    (report, log)
}

/// As [`interrupt_after_a_skipped_line`], with these signals.
fn signal_after_a_skipped_line(child: &mut Child, signals: &[&str]) -> String {
    let (mut report, mut log) = until_a_skipped_line(child);
    signals.iter().for_each(|name| signal(child, name));
    log.read_to_string(&mut report).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{report}");
    report
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

/// Starts `train` with standard input as a file, which has a text and then a malformed line.
fn start_with_input(line: &str, text: &str) -> (Child, ChildStdin) {
    start_with_input_in("true", line, text)
}

/// As [`start_with_input`], in a shell that ran `setup`.
fn start_with_input_in(setup: &str, line: &str, text: &str) -> (Child, ChildStdin) {
    let mut child = flechette_in(setup, line);
    let child = child.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(text.as_bytes()).unwrap();
    stdin.write_all(b"not a sample\n").unwrap();
    (child, stdin)
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
fn only_a_version_at_the_end_of_an_epoch_has_the_quality_of_its_validation() {
    let (workshop, line) = workshop(700);
    let Workshop { train, valid, models, .. } = &workshop;
    let json = run_json(&format!(
        "{line} --name m --data {train} --valid {valid} --epochs 2 --batch 16 --publish-every 1steps"
    ));
    let last = json["version"].as_u64().unwrap();
    for version in 1..=last {
        let dir = format!("{models}/m/{version}");
        // Retention removes the first ones.
        let Ok(cursor) = fs::read_to_string(format!("{dir}/checkpoint/cursor.json")) else { continue };
        let cursor: Value = serde_json::from_str(&cursor).unwrap();
        let quality = &manifest(models, "m", version)["quality"];
        let validated = quality["valid_log_loss"].is_f64() && quality["valid_auc"].is_f64();
        if cursor["samples"] == 0 {
            assert!(version == last && cursor["epoch"] == 3 && validated, "{cursor}: {quality}");
            assert_eq!(quality["valid_log_loss"], json["validations"][1]["logloss"]);
        } else {
            assert!(quality["valid_log_loss"].is_null() && !validated, "{cursor}: {quality}");
            assert!(quality["progressive_log_loss"].is_f64(), "{quality}");
        }
    }
}

#[test]
fn the_speed_that_is_reported_is_that_of_all_epochs() {
    let (workshop, line) = workshop(300);
    let json = run_json(&format!("{line} --name m --data {} --epochs 3", workshop.train));
    let samples = json["samples_per_s"].as_f64().unwrap() * json["seconds"].as_f64().unwrap();
    assert!((samples - 900.0).abs() < 0.01, "{json}");
}

#[test]
fn the_scores_of_a_file_with_malformed_lines_stay_in_its_lines() {
    let (workshop, line) = workshop(100);
    let (train, valid, out) = (&workshop.train, workshop.path("spoiled"), workshop.path("scores"));
    let good = fs::read_to_string(&workshop.valid).unwrap();
    let scores = |valid: &str, name: &str| {
        run_json(&format!("{line} --name {name} --data {train} --valid {valid} --valid-out {out}"));
        let text = fs::read_to_string(&out).unwrap();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = scores(&workshop.valid, "good");
    // At the beginning, in the middle and at the end.
    let mut lines: Vec<&str> = good.lines().collect();
    let bad = [0, 70, 71, 203];
    bad.iter().for_each(|&at| lines.insert(at, "not a sample"));
    fs::write(&valid, lines.join("\n")).unwrap();
    let spoiled = scores(&valid, "spoiled");
    assert_eq!(spoiled.len(), lines.len());
    let is_nan: Vec<usize> = (0..spoiled.len()).filter(|&at| spoiled[at] == "nan").collect();
    assert_eq!(is_nan, bad);
    assert!(spoiled.iter().filter(|score| *score != "nan").eq(&expected));
}

#[test]
fn flags_of_the_data_that_cannot_be_used_are_refused_by_name() {
    let (workshop, line) = workshop(10);
    let Workshop { train, valid, .. } = &workshop;
    let file = format!("{line} --name m --data {train}");
    for (more, words) in [
        ("--early-stop 1", "--valid"),
        ("--save-best", "--valid"),
        ("--valid-ratio 1", "expected a number above 0 and below 1"),
        ("--shuffle 1", "expected a whole number from 2"),
        ("--follow-until x", "--follow"),
        ("--lr-decay cubic --lr-decay-steps 1", "expected linear, cosine or poly2"),
        ("--lr-decay linear", "--lr-decay-steps"),
        ("--lr-end 0.1", "--lr-decay"),
    ] {
        let output = run(&format!("{file} {more}"));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{more}: {error}");
    }
    let start = format!("{file} --lr-warmup 9 --lr-decay linear --lr-decay-steps 1 --lr-decay-start 8");
    assert!(run_failing(2, &start).contains("--lr-decay-start: expected at least --lr-warmup, 9, got 8"));
    let twice = run_failing(2, &format!("{line} --name m --data /dev/null --epochs 2"));
    assert!(twice.contains("--epochs: --data must be read twice, but /dev/null is a pipe"), "{twice}");
    let ratio = run_failing(2, &format!("{line} --name m --data /dev/null --valid-ratio 0.1"));
    assert!(ratio.contains("--valid-ratio: "), "{ratio}");
    let dir = run_failing(2, &format!("{line} --name m --follow {valid}"));
    assert!(dir.contains("--follow: ") && dir.contains("not a directory"), "{dir}");
    let both = run(&format!("{file} --follow {}", workshop.models));
    assert!(String::from_utf8(both.stderr).unwrap().contains("cannot be used with"));
}

#[test]
fn a_schedule_of_the_learning_rate_changes_trained_bytes_alike_in_memory_and_on_disk() {
    let (workshop, line) = workshop(600);
    let line = format!("{line} --data {}", workshop.train);
    let schedule = "--lr-warmup 2 --lr-decay poly2 --lr-decay-start 3 --lr-decay-steps 2 --lr-end 0.001";
    for (name, more) in [("constant", ""), ("memory", schedule), ("disk", schedule)] {
        let disk = if name == "disk" { "--scratchpad 0.3" } else { "" };
        run_json(&format!("{line} --name {name} {more} {disk}"));
    }
    let [constant, memory, disk] = ["constant", "memory", "disk"].map(|name| contents(&workshop, name, 1));
    assert!(memory == disk && memory != constant);
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
