//! The commands of README.md do what it says.

use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::program::highest_version;

/// The first block of commands of a section.
fn commands(section: &str) -> String {
    let readme = include_str!("../../README.md");
    let section = readme.split_once(&format!("\n## {section}\n")).expect("the section").1;
    section.split_once("```sh\n").unwrap().1.split_once("```").unwrap().0.to_owned()
}

/// A port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn train_while_serving_publishes_versions_and_scores_with_one_of_them() {
    let dir = tempfile::tempdir().unwrap();
    symlink(env!("CARGO_BIN_EXE_flechette"), dir.path().join("flechette")).unwrap();
    // As written, except for the port, which other tests use too, and for the time, which depends on them.
    let (grpc, http) = (free_port(), free_port());
    let script = commands("Train while serving");
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
    // The server must not outlive a script that fails.
    let script = format!("trap 'kill $! 2>/dev/null || true' EXIT\n{script}");
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new("timeout")
        .args(["--kill-after=5", "180", "sh", "-e", "-c", &script])
        .current_dir(dir.path())
        .env("PATH", path)
        .env("FLECHETTE_SERVER_GRPC", format!("127.0.0.1:{grpc}"))
        .env("FLECHETTE_SERVER_HTTP", format!("127.0.0.1:{http}"))
        .output()
        .unwrap();
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
