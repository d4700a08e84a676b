//! `flechette score`: line N of the scores belongs to line N of the data, a full queue is waited for, and
//! errors, also those of `load`, have one line.

use std::fs;
use std::process::Stdio;

use flechette::schema::preset::ArchKind;

use crate::closed_pipes::closed;
use crate::program::{Served, Workshop, flechette, run_failing, run_json};

#[test]
fn score_and_load_report_errors_in_one_line_and_leave_no_partial_file() {
    let workshop = Workshop::new(300, 300);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid, out) = (served.url(), &workshop.valid, workshop.path("out"));
    let broken = workshop.path("broken.tsv");
    fs::write(&broken, fs::read_to_string(valid).unwrap() + &"not a sample\n".repeat(200)).unwrap();
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    fs::write(&out, "as it was").unwrap();
    for (code, addr, model, file, more, words) in [
        (1, nobody.as_str(), "dlrm", valid.as_str(), "--json", "cannot connect"),
        (2, "localhost", "dlrm", valid, "--json", "--addr: expected http://HOST:PORT"),
        (2, &url, "none", valid, "--json", "no model \"none\""),
        (2, &url, "dlrm", "/nowhere.tsv", "--json", "/nowhere.tsv"),
        (2, &url, "dlrm", &broken, "--batch=16", "malformed"),
        (2, &url, "dlrm", valid, "--batch=5000", "at most 4096 samples, got 5000"),
    ] {
        let target = format!("--addr {addr} --model {model} --format criteo-tsv {file} {more}");
        let error = run_failing(code, &format!("score --out {out} {target}"));
        assert!(error.contains(words), "{error}");
        if file != broken {
            let error = run_failing(code, &format!("load --seconds 1 --rate 1 {target}"));
            assert!(error.contains(words), "{error}");
        }
    }
    assert_eq!(fs::read_to_string(&out).unwrap(), "as it was");
    let rest = format!("--addr {url} --model dlrm --format criteo-tsv {broken} --max-malformed 200 --json");
    assert_eq!(run_json(&format!("score {rest}"))["skipped"], 200);
    assert_eq!(run_json(&format!("load --seconds 0.1 --rate 10 --batch 16 {rest}"))["failed"], 0);
    let names = fs::read_dir(workshop.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let halves: Vec<_> = names.filter(|name| name.to_str().unwrap().ends_with(".tmp")).collect();
    assert_eq!(halves, Vec::<std::ffi::OsString>::new());
    for (flags, words) in [
        ("--rate 0", "--rate"),
        ("--rate 1 --concurrency 1", "cannot be used with"),
        ("", "required arguments"),
        ("--concurrency 0", "--concurrency"),
        ("--concurrency 1 --batch 400", "fewer samples than one request"),
    ] {
        let line = format!("load --seconds 1 --addr {url} --model dlrm --format criteo-tsv {valid} {flags}");
        let error = run_failing(2, &line);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn score_waits_while_the_queue_is_full() {
    let workshop = Workshop::new(300, 3000);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    // The queue has room for one request, and `score` sends eight at a time.
    let limits = "[server]\nmax_samples = 64\n[batcher]\nmax_samples = 64\nqueue_samples = 64\nworkers = 1\n";
    fs::write(&config, limits).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let out = workshop.path("out");
    let reported = served.score("dlrm", &workshop.valid, &format!("--batch 64 --out {out}"));
    assert_eq!(reported["rows"], 3000);
    assert!(fs::read(&out).unwrap() == fs::read(workshop.trained_scores(ArchKind::Dlrm)).unwrap());
    drop(served);

    fs::write(&config, "[server]\nmax_requests = 1\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let reported = served.score("dlrm", &workshop.valid, "");
    assert_eq!(reported["rows"], 3000);
}

#[test]
fn line_n_of_the_scores_belongs_to_line_n_of_the_data() {
    let workshop = Workshop::new(300, 100);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let valid = fs::read_to_string(&workshop.valid).unwrap();
    let mut lines: Vec<&str> = valid.lines().collect();
    for bad in [1, 7, 8, 9, 103] {
        lines.insert(bad, "not a sample");
    }
    lines.push("nor is this");
    let (broken, out) = (workshop.path("broken.tsv"), workshop.path("out"));
    fs::write(&broken, lines.join("\n")).unwrap();
    for batch in [1, 8, 1000] {
        let reported = served.score("dlrm", &broken, &format!("--out {out} --batch {batch}"));
        assert_eq!((&reported["rows"], &reported["skipped"]), (&100.into(), &6.into()));
        let scores = fs::read_to_string(&out).unwrap();
        assert_eq!(scores.lines().count(), lines.len());
        let trained = fs::read_to_string(workshop.trained_scores(ArchKind::Dlrm)).unwrap();
        let mut trained = trained.lines();
        for (line, score) in lines.iter().zip(scores.lines()) {
            let expected = if line.starts_with('n') { "nan" } else { trained.next().unwrap() };
            assert_eq!(score, expected, "{line}");
        }
    }
}

#[test]
fn a_closed_standard_output_is_no_error_of_score() {
    let workshop = Workshop::new(300, 300);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    let line = format!("score --addr {url} --model dlrm --format criteo-tsv {valid} --out /dev/stdout");
    let mut command = flechette();
    let command = command.args(line.split_whitespace()).stdout(closed()).stderr(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.as_str()), (Some(0), ""));
}
