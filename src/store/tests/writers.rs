//! Versions that `write` has returned (acknowledged) survive a killed writer, concurrent writers and a full
//! disk.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::store::{self, Purpose, StoreError};
use crate::types::Version;

use super::Sample;
use crate::skip::skip;

const CHILD: &str = "FLECHETTE_TEST_STORE_CHILD";

/// Asserts that every version opens and holds the sample of the seed in its metadata. Returns the versions.
fn assert_all_good(models: &Path) -> Vec<Version> {
    let versions = store::versions(models, "m").unwrap();
    for &version in &versions {
        let opened = store::open(models, "m", version, Purpose::Serve).unwrap();
        Sample::of(opened.metadata["seed"].parse().unwrap()).assert_is(&opened);
    }
    versions
}

fn leftovers(models: &Path) -> Vec<String> {
    let names =
        fs::read_dir(models.join("m")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

/// Does nothing as a test. The next test runs it in a child process and kills that. It writes versions
/// forever and prints the number of each acknowledged version.
#[test]
fn child_that_writes_versions() {
    let Some(models) = std::env::var_os(CHILD) else { return };
    for seed in 0.. {
        let version = Sample::of(seed).write(Path::new(&models), "m").unwrap();
        println!("\nacknowledged {version}");
    }
}

#[test]
fn every_acknowledged_version_survives_kill_9_of_its_writer() {
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = Vec::new();
    let mut interrupted = 0;
    for round in 0..12_u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::tests::writers::child_that_writes_versions", "--nocapture"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut acknowledge = |line: String| {
            let version = line.strip_prefix("acknowledged ").map(|v| Version(v.parse().unwrap()));
            acknowledged.extend(version);
            version.is_some()
        };
        while !acknowledge(lines.next().expect("the child ended").unwrap()) {}
        // Each round kills the writer after another delay, so at another point of the next few versions.
        thread::sleep(Duration::from_micros(round * 1373 % 9000));
        child.kill().unwrap();
        child.wait().unwrap();
        lines.map_while(Result::ok).for_each(|line| {
            acknowledge(line);
        });
        interrupted += leftovers(dir.path()).len();
        let versions = assert_all_good(dir.path());
        assert!(acknowledged.iter().all(|version| versions.contains(version)));
    }
    eprintln!("{} versions acknowledged, {interrupted} writes interrupted", acknowledged.len());
    let latest = store::open_latest(dir.path(), "m", Purpose::Serve).unwrap();
    assert!(latest.refused.is_empty());
    // The next write removes what the killed writer left.
    Sample::of(0).write(dir.path(), "m").unwrap();
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
}

#[test]
fn concurrent_writers_get_distinct_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let mut numbers: Vec<Version> = thread::scope(|scope| {
        let writers: Vec<_> = (0..4_u64)
            .map(|writer| {
                let models = dir.path();
                scope.spawn(move || {
                    let write = |i| Sample::of(writer * 100 + i).write(models, "m").unwrap();
                    (0..12).map(write).collect::<Vec<_>>()
                })
            })
            .collect();
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    numbers.sort();
    assert_eq!(numbers, (1..=48).map(Version).collect::<Vec<_>>());
    assert_eq!(assert_all_good(dir.path()), numbers);
    assert_eq!(leftovers(dir.path()), Vec::<String>::new());
}

#[test]
fn the_files_of_a_dead_writer_are_removed_and_those_of_a_live_one_are_not() {
    let dir = tempfile::tempdir().unwrap();
    Sample::of(0).write(dir.path(), "m").unwrap();
    let dead = dir.path().join("m/.9.1.0.tmp");
    let live = dir.path().join("m/.9.2.0.tmp");
    for path in [&dead, &live] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("model.toml"), "half").unwrap();
    }
    let stranger = dir.path().join("m/.notes.tmp");
    fs::create_dir(&stranger).unwrap();
    let lock = fs::File::open(&live).unwrap();
    lock.lock().unwrap();
    assert_eq!(Sample::of(1).write(dir.path(), "m").unwrap(), Version(2));
    assert!(!dead.exists());
    assert!(live.join("model.toml").exists());
    drop(lock);
    assert_eq!(Sample::of(2).write(dir.path(), "m").unwrap(), Version(3));
    assert!(!live.exists());
    assert!(stranger.exists());
}

/// A small file system, unmounted when dropped; `None` without the permission to mount.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, options: &str) -> Option<Self> {
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
        mount.ok().filter(|output| output.status.success()).map(|_| Self(at.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_an_error_and_the_old_versions_stay_good() {
    for options in ["size=128k", "nr_inodes=20"] {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::mount(dir.path(), options) else {
            skip("it mounts a small tmpfs, which needs root");
            return;
        };
        let mut written = Vec::new();
        let error = loop {
            match Sample::of(written.len() as u64).write(&disk.0, "m") {
                Ok(version) => written.push(version),
                Err(error) => break error,
            }
            assert!(written.len() < 100, "the disk never fills");
        };
        assert!(!written.is_empty());
        assert!(matches!(error, StoreError::DiskFull { .. }), "{error}");
        assert!(error.to_string().ends_with(": disk full"), "{error}");
        assert_eq!(assert_all_good(&disk.0), written);
        assert_eq!(leftovers(&disk.0), Vec::<String>::new(), "a failed write leaves no files");
    }
}
