//! The commands of README.md, docs/security.md and docs/your-data.md do what these pages say.

use std::fs;
use std::iter::repeat_with;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU16, Ordering};

use flechette::schema::preset::ArchKind;

use crate::program::{Workshop, highest_version, manifest};
use crate::python::python;
use crate::skip::{skip, skip_part};

/// The first block of commands of a section.
fn commands(page: &str, section: &str) -> String {
    block(page, section, "sh")
}

/// The first block of a section in this language.
fn block(page: &str, section: &str, language: &str) -> String {
    let section = page.split_once(&format!("\n## {section}\n")).expect("the section").1;
    section.split_once(&format!("```{language}\n")).unwrap().1.split_once("```").unwrap().0.to_owned()
}

/// A port that is free now, and that no other test is given. The kernel gives ports from 32,768 on to sockets
/// that ask for any port, as those of the tests beside this one do all the time: a port below stays free.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test programs that run side by side begin at different ports.
    let first = (std::process::id() % 100) as u16 * 100;
    let ports = repeat_with(|| 20_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000);
    ports.take(12_000).find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok()).expect("a free port")
}

/// Runs a script in a directory, with a server on these ports.
fn run_script(dir: &Path, script: &str, (grpc, http): (u16, u16)) -> Output {
    symlink(env!("CARGO_BIN_EXE_flechette"), dir.join("flechette")).unwrap();
    // The server must not outlive a script that fails.
    let script = format!("trap 'kill $! 2>/dev/null || true' EXIT\n{script}");
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
    Command::new("timeout")
        .args(["--kill-after=5", "180", "sh", "-e", "-c", &script])
        .current_dir(dir)
        .env("PATH", path)
        .env("FLECHETTE_SERVER_GRPC", format!("127.0.0.1:{grpc}"))
        .env("FLECHETTE_SERVER_HTTP", format!("127.0.0.1:{http}"))
        .output()
        .unwrap()
}

#[test]
fn the_first_example_trains_serves_and_scores_in_an_empty_directory() {
    let dir = tempfile::tempdir().unwrap();
    // As written, except for the port and for the time, which depends on other tests.
    let (grpc, http) = (free_port(), free_port());
    let script = commands(include_str!("../../README.md"), "Train, serve, score");
    let counts = [":8001 ", "sleep 2\n"].map(|text| script.matches(text).count());
    assert_eq!(counts, [1, 1]);
    let waits = format!(
        "for n in $(seq 120); do flechette score --addr http://127.0.0.1:{grpc} --model ctr \
         --format criteo-tsv demo/test.tsv >/dev/null 2>&1 && break; sleep 0.5; done\n"
    );
    let script = script.replace(":8001 ", &format!(":{grpc} ")).replace("sleep 2\n", &waits);
    let output = run_script(dir.path(), &script, (grpc, http));
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{log}");
    let scored = out.lines().filter(|line| line.contains("20000 rows, ") && line.contains(" version 1"));
    assert_eq!(scored.count(), 2, "by the demo and by the section: {out}{log}");
    assert_eq!(fs::read_to_string(dir.path().join("scores.txt")).unwrap().lines().count(), 20_000);
}

#[test]
fn train_while_serving_publishes_versions_and_scores_with_one_of_them() {
    let dir = tempfile::tempdir().unwrap();
    // As written, except for the port, which other tests use too, and for the time, which depends on them.
    let (grpc, http) = (free_port(), free_port());
    let script = commands(include_str!("../../README.md"), "Train while serving");
    assert_eq!(script.matches("flechette score ").count(), 1);
    let script =
        script.replace("flechette score ", &format!("flechette score --addr http://127.0.0.1:{grpc} "));
    let score = format!("flechette score --addr http://127.0.0.1:{grpc} --model ctr --format criteo-tsv");
    let waits = format!(
        "for n in $(seq 120); do \
         {score} demo/test.tsv 2>&1 | grep -q 'version [2-9]' && break; sleep 0.5; done"
    );
    assert_eq!(script.matches("sleep 15\n").count(), 1);
    let script = script.replace("sleep 15", &waits);
    let output = run_script(dir.path(), &script, (grpc, http));
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{log}");
    let listed = out.rsplit_once("\nctr\n").unwrap_or_else(|| panic!("{out}{log}")).1;
    assert!(listed.contains(" full ") && listed.contains(" yes  yes "), "{listed}");
    let scored =
        listed.lines().find(|line| line.contains(" rows/s, version ")).unwrap_or_else(|| panic!("{out}"));
    let version: u64 =
        scored.split("version ").nth(1).unwrap().split([',', ' ']).next().unwrap().parse().unwrap();
    assert!(version > 1, "{scored}");
    assert!(highest_version(&dir.path().join("live"), "ctr").unwrap() >= version);
    assert!(log.contains("training has ended"), "{log}");
}

#[test]
fn the_example_of_security_makes_certificates_and_tokens_with_which_a_client_is_served() {
    for program in ["openssl", "curl"] {
        if Command::new(program).arg("version").output().is_err() {
            return skip(&format!("{program} is not installed"));
        }
    }
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let dir = workshop.dir.path();
    fs::create_dir(dir.join("demo")).unwrap();
    symlink(&workshop.valid, dir.join("demo/test.tsv")).unwrap();
    let (grpc, http) = (free_port(), free_port());
    let script = commands(include_str!("../../docs/security.md"), "An example");
    let counts = [":8001", ":8002", "--model ctr"].map(|text| script.matches(text).count());
    assert_eq!(counts, [1, 2, 1]);
    let script = script.replace(":8001", &format!(":{grpc}")).replace(":8002", &format!(":{http}"));
    let output = run_script(dir, &script.replace("--model ctr", "--model dlrm"), (grpc, http));
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{log}");
    let served = out.strip_prefix("ready\n").unwrap_or_else(|| panic!("{out}{log}"));
    for words in [" rows/s, version ", "flechette_tls_certificate_expiry_seconds ", "code=\"OK\"}"] {
        assert!(served.contains(words), "{words}: {out}{log}");
    }
}

/// The numbers in the lines of a file.
fn numbers(path: &Path, column: usize) -> Vec<f32> {
    let text = fs::read_to_string(path).unwrap();
    let number = |line: &str| line.rsplit(',').nth(column).unwrap().parse().ok();
    text.lines().filter_map(number).collect()
}

#[test]
fn own_data_is_trained_served_and_scored_by_the_commands_of_its_page() {
    let page = include_str!("../../docs/your-data.md");
    let dir = tempfile::tempdir().unwrap();
    let (grpc, http) = (free_port(), free_port());
    // As written, except for the port and for the time, which depends on other tests. Python scores before
    // the server ends.
    let sections = ["A small file", "Train, serve, score", "Without a header"];
    let script = sections.map(|section| commands(page, section)).concat();
    let counts = ["flechette score ", "sleep 2\n", "kill $! "].map(|text| script.matches(text).count());
    assert_eq!(counts, [1, 1, 1]);
    let score = format!("flechette score --addr http://127.0.0.1:{grpc} ");
    let waits = format!(
        "for n in $(seq 120); do {score} --model shop --format csv --label clicked test.csv \
         >/dev/null 2>&1 && break; sleep 0.5; done\n"
    );
    let script = script.replace("flechette score ", &score).replace("sleep 2\n", &waits);
    let python = python();
    let script = match &python {
        Err(_) => script,
        Ok(python) => {
            let program = block(page, "From Python", "python").replace(":8001", &format!(":{grpc}"));
            let client = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/python/src");
            let scores = format!("PYTHONPATH={client} {python} - <<'END'\n{program}END\nkill $! ");
            script.replace("kill $! ", &scores)
        }
    };
    let output = run_script(dir.path(), &script, (grpc, http));
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{log}");
    for words in ["trained 5000 rows x 1 epoch(s)", "0 lines skipped", "wrote models/no_header/1"] {
        assert!(log.contains(words), "{words}: {out}{log}");
    }
    let auc = out.split_once("\nAUC ").unwrap_or_else(|| panic!("{out}{log}")).1.split(',').next().unwrap();
    assert!(auc.parse::<f32>().unwrap() > 0.55, "{out}");
    let scores = numbers(&dir.path().join("scores.txt"), 0);
    assert_eq!(scores.len(), 1000);
    let checksums = |name| manifest(dir.path().join("models").to_str().unwrap(), name, 1)["files"].clone();
    let [with, without] = ["shop", "no_header"].map(checksums);
    assert_eq!(with["tables/shop.safetensors"], without["tables/shop.safetensors"]);
    assert!(with["tables/shop.safetensors"].is_object(), "{with}");
    match python {
        Ok(_) => assert_eq!(numbers(&dir.path().join("scored.csv"), 0), scores),
        Err(reason) => skip_part(&reason),
    }
}
