//! `train --learned`: the bytes are those of training on a file, and the run continues, waits and ends at a
//! signal.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::sending::{send_file, trained, workshop};
use super::served::log_of;
use crate::program::{Served, Workshop, flechette, run, run_failing, run_json};
use crate::switching::wait;

#[test]
fn training_on_the_log_writes_the_bytes_of_training_on_a_file() {
    let (workshop, schema, settings) = workshop(1500);
    let Workshop { models, train, .. } = &workshop;
    let served = Served::start(models, &settings);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let line = |name: &str, data: &str| {
        format!(
            "train --from latest --format criteo-tsv --models {models} --name {name} --batch 32 --json {data}"
        )
    };
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 1500);
    let log = log_of(Path::new(models), "log");
    let segments = || {
        let names = fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_str().unwrap().ends_with("fllearn")).count()
    };
    assert!(segments() > 2);
    // The server runs, and keeps the log.
    let report = run_json(&line("log", "--learned --learned-until-end"));
    assert_eq!(report["rows"], 1500);
    run_json(&line("file", &format!("--data {train}")));
    assert_eq!(trained(models, "log", 2), trained(models, "file", 2));
    assert_eq!(segments(), 1, "the samples that a version was trained on are removed");

    // The run continues with the samples after its cursor.
    assert_eq!(runtime.block_on(send_file(&served, &schema, &workshop.valid)), 200);
    let report = run_json(&line("log", "--learned --learned-until-end --resume"));
    assert_eq!(report["rows"], 1700, "of the whole run");
    drop(served);
}

#[test]
fn flags_of_learned_samples_are_checked() {
    let (workshop, _, _) = workshop(10);
    let models = &workshop.models;
    let line = format!("train --from latest --format criteo-tsv --models {models} --name log");
    let error = run_failing(2, &format!("{line} --learned"));
    assert!(error.contains("--learned: ") && error.contains("no samples were sent"), "{error}");
    let error = run_failing(2, &format!("{line} --data {} --learned-until-end", workshop.train));
    assert!(error.contains("--learned-until-end: used only with --learned"), "{error}");
    // Only files have a format.
    let (line, train) = (line.replace("--format criteo-tsv ", ""), &workshop.train);
    let error = run_failing(2, &format!("{line} --learned"));
    assert!(error.contains("no samples were sent"), "{error}");
    let error = run_failing(2, &format!("{line} --learned --valid {train}"));
    assert!(error.contains("--format: missing"), "{error}");
    let error = run_failing(2, &format!("{line} --data {train}"));
    assert!(error.contains("required arguments were not provided"), "{error}");
}

#[test]
fn a_waiting_run_trains_samples_as_they_come_and_ends_at_a_signal() {
    let (workshop, schema, settings) = workshop(300);
    let Workshop { models, train, .. } = &workshop;
    let served = Served::start(models, &settings);
    let line = format!(
        "train --from latest --format criteo-tsv --models {models} --name log --batch 32 --learned \
         --publish-every 50ms"
    );
    let mut child = flechette().args(line.split_whitespace()).spawn().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 300);
    let version = Path::new(models).join("log/2");
    wait("a published version", || version.exists());
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // Without --publish-every the log would fill up.
    let log = workshop.path("warning");
    let line = line.replace("--publish-every 50ms", "");
    let to_file = fs::File::create(&log).unwrap();
    let mut child = flechette().args(line.split_whitespace()).stderr(to_file).spawn().unwrap();
    let warning = "without --publish-every this run writes its only version";
    wait("a warning", || fs::read_to_string(&log).unwrap().contains(warning));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_version_that_was_trained_on_another_log_begins_at_the_first_sample_of_this_one() {
    let (workshop, schema, settings) = workshop(400);
    let Workshop { models, train, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let line = |name: &str, data: &str| {
        format!(
            "train --from latest --format criteo-tsv --models {models} --name {name} --batch 32 --json {data}"
        )
    };
    let log = log_of(Path::new(models), "log");
    for other in [false, true] {
        let served = Served::start(models, &settings);
        // The same samples again, so that only the log's id differs.
        assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
        let output = run(&line("log", "--learned --learned-until-end --resume"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let report = String::from_utf8(output.stdout).unwrap();
        assert!(report.contains("\"rows\":400,"), "{report}");
        let warned = said.matches("was trained on another log: training begins at the first sample").count();
        assert_eq!(warned, usize::from(other), "{said}");
        run_json(&line("file", &format!("--data {train}")));
        drop(served);
        fs::remove_dir_all(&log).unwrap();
    }
    assert_eq!(trained(models, "log", 3), trained(models, "file", 3));
}
