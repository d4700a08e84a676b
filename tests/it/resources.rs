//! Memory and disk use of the program.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use flechette::schema::preset::{self, ArchKind};
use flechette::store;
use flechette::trainer::{self, optim};
use flechette::types::Version;

use crate::following::Running;
use crate::program::{
    Served, Workshop, check_listed_versions, flechette, highest_version, run, run_failing, run_measured,
};
use crate::skip::skip;
use crate::switching::wait;
use crate::train_data::workshop::parts;
use crate::train_resume::{last_version, last_version_in};

#[test]
fn serve_takes_no_more_memory_than_the_rows_and_512_mib() {
    let (small, large) = (serve_memory(1000), serve_memory(60_000));
    for Memory { rows, peak } in [&small, &large] {
        assert!(*peak <= rows + (512 << 20), "{peak} bytes for {rows} bytes of rows");
    }
    // The version also has optimizer state, as large as the rows. The server never reads it, so it must not
    // be in memory, except for a few pages that the kernel reads ahead.
    let grown = large.peak - small.peak;
    let allowed = large.rows - small.rows + (32 << 20);
    assert!(grown <= allowed, "{grown} bytes more for {} bytes of rows more", large.rows - small.rows);
}

/// The bytes of a model's rows, and the peak memory of its server.
struct Memory {
    rows: u64,
    peak: u64,
}

/// Serves a model whose optimizer state is as large as its rows, cache off, and scores with it.
fn serve_memory(table_rows: u64) -> Memory {
    let workshop = Workshop::new(1, 20_000);
    let schema = preset::criteo(ArchKind::Dlrm, 16, table_rows);
    let optimizer = optim::Optimizer::new(optim::OptimizerKind::Adagrad, 0.02);
    let reference = trainer::initialise(&schema, optimizer, 0).unwrap();
    reference.save(Path::new(&workshop.models), "large").unwrap();
    drop(reference);
    let served = Served::start(&workshop.models, "--cache-mode off --threads 2");
    served.score("large", &workshop.valid, "--batch 4096");
    let rows = schema.tables.iter().map(|table| table.rows * table.dim as u64 * 4).sum();
    Memory { rows, peak: served.peak_bytes() }
}

#[test]
fn training_on_a_hundred_times_the_data_takes_the_same_memory() {
    let workshop = Workshop::new(1000, 1);
    let once = fs::read(&workshop.train).unwrap();
    let repeated = workshop.path("repeated.tsv");
    fs::write(&repeated, once.repeat(100)).unwrap();
    let config = workshop.config(ArchKind::Dlrm, 4, 1000);
    let peak = |data: &str| {
        let models = &workshop.models;
        let line = format!(
            "train --model-config {config} --format criteo-tsv --data {data} --models {models} --name m \
             --batch 64 --threads 2"
        );
        run_measured(&line).peak
    };
    let (once, repeated) = (peak(&workshop.train), peak(&repeated));
    eprintln!("peak memory: {once} bytes once, {repeated} bytes a hundred times");
    assert!(repeated <= once + (16 << 20), "{once} and {repeated}");
}

/// Room on a full disk for the first files of a version, but not for all of its dense weights.
const LEFT_BYTES: u64 = 200 << 10;

/// A file system in memory of limited size. It is unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Reports the test as skipped and returns `None` if the system refuses the mount.
    fn mount(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(dir.path()).output();
        if !mount.is_ok_and(|mount| mount.status.success()) {
            skip("it mounts a small tmpfs, which needs root");
            return None;
        }
        Some(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Lets a file take the free room, except for at most [`LEFT_BYTES`].
    fn fill(&self) {
        let mut filler = fs::File::options().create(true).append(true).open(self.filler()).unwrap();
        let bytes = || fs::metadata(self.filler()).unwrap().len();
        let before = bytes();
        while filler.write(&[1; 64 << 10]).is_ok_and(|bytes| bytes > 0) {}
        let after = bytes();
        filler.set_len(after - LEFT_BYTES.min(after - before)).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// Follows files on a disk that another file fills up, until a version is not published. Then the run is
/// killed, the file is removed, and the run continues.
fn fill_the_disk_of_a_run(workshop: &Workshop, disk: &SmallDisk, more: &str) {
    let (dir, config) = (workshop.path("incoming"), workshop.config(ArchKind::Dlrm, 4, 300));
    let parts = parts(workshop, &dir);
    let arrive = |some: &[(String, Vec<u8>)]| {
        for (path, bytes) in some {
            fs::write(format!("{path}.tmp"), bytes).unwrap();
            fs::rename(format!("{path}.tmp"), path).unwrap();
        }
    };
    let line = |models: &str| {
        format!(
            "train --model-config {config} --format criteo-tsv --models {models} --name m --batch 32 \
             --threads 1 --follow {dir} --follow-until 09 --publish-every 3steps {more}"
        )
    };
    let models = disk.path().to_str().unwrap();
    arrive(&parts[..5]);
    // No version is removed, which would make room.
    let mut train = flechette();
    train.args(line(models).split_whitespace()).env("FLECHETTE_VERSIONS_KEEP", "1000");
    let train = Running::spawn(&mut train);
    wait("a version is published", || highest_version(disk.path(), "m").is_some());
    disk.fill();
    arrive(&parts[5..7]);
    wait("a version is not published", || {
        // A write that failed has given its room back.
        disk.fill();
        let refused = |line: String| line.contains("not published: ") && line.contains(": disk full");
        train.log.try_iter().any(refused)
    });
    // Kills it.
    drop(train);
    check_listed_versions(models, "m");
    fs::remove_file(disk.filler()).unwrap();
    arrive(&parts[7..]);
    let resumed = run(&format!("{} --resume", line(models)));
    let log = String::from_utf8(resumed.stderr).unwrap();
    assert!(resumed.status.success() && log.contains("the run continues"), "{log}");
    check_listed_versions(models, "m");
    let entries = fs::read_dir(disk.path().join("m")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let others: Vec<_> = names.filter(|name| name != "state" && name.parse::<u64>().is_err()).collect();
    assert!(others.is_empty(), "files of unfinished versions stay: {others:?}");

    let whole = run(&line(&workshop.models));
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let (found, expected) = (last_version_in(models, "m"), last_version(workshop, "m"));
    let differ: Vec<_> = expected.keys().filter(|file| found.get(*file) != expected.get(*file)).collect();
    assert!(found == expected, "{differ:?}, files {} and {}", found.len(), expected.len());
    assert!(expected.contains_key("checkpoint/cursor.json") && expected.len() > 2 * 26, "{expected:?}");
}

#[test]
fn a_run_whose_disk_filled_up_while_it_published_continues_to_the_bytes_of_one_run() {
    let Some(disk) = SmallDisk::mount("32m") else { return };
    let workshop = Workshop::new(1000, 1);
    fill_the_disk_of_a_run(&workshop, &disk, "");
}

#[test]
fn a_run_with_a_scratchpad_whose_disk_filled_up_continues_to_the_bytes_of_one_run() {
    let Some(disk) = SmallDisk::mount("32m") else { return };
    let workshop = Workshop::new(1000, 1);
    // Rows that are evicted must find room.
    let working = workshop.path("working");
    fs::create_dir(&working).unwrap();
    fill_the_disk_of_a_run(&workshop, &disk, &format!("--scratchpad 0.3 --working-dir {working}"));
}

#[test]
fn a_server_whose_disk_fills_up_in_shuffled_epochs_serves_on_and_continues_to_the_bytes_of_one_run() {
    let Some(disk) = SmallDisk::mount("32m") else { return };
    let workshop = Workshop::new(6000, 100);
    let (models, data) = (disk.path().to_str().unwrap(), &workshop.train);
    let flags = format!(
        "--model-config {} --format criteo-tsv --batch 32 --shuffle 500 --data-seed 3 --epochs 2 \
         --publish-every 30steps",
        workshop.config(ArchKind::Dlrm, 4, 300)
    );
    let start = || Served::start(models, &format!("--train m={data} {flags}"));
    let served = start();
    // Training may be at its end otherwise before the disk is full.
    served.signal("-STOP");
    disk.fill();
    served.signal("-CONT");
    wait("a version is not published", || {
        // A version that is removed gives its room back, and so does a write that failed.
        disk.fill();
        served.log().lines().any(|line| line.contains("not published: ") && line.contains(": disk full"))
    });
    let scored = served.score("m", &workshop.valid, "");
    assert_eq!(scored["version"], highest_version(disk.path(), "m").unwrap(), "{}", served.log());
    assert_eq!(served.metric("flechette_training_state", &["model=\"m\""]), 1.0);
    // Kills it.
    drop(served);
    check_listed_versions(models, "m");
    fs::remove_file(disk.filler()).unwrap();
    let served = start();
    served.said("the run continues", 1);
    wait("training ends", || served.metric("flechette_training_state", &["model=\"m\""]) == 0.0);
    served.terminate();
    assert!(served.ended().0.success());
    let whole = run(&format!("train --data {data} {flags} --models {} --name m", workshop.models));
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    assert!(last_version_in(models, "m") == last_version(&workshop, "m"));
}

#[test]
fn a_server_whose_disk_is_full_at_the_start_of_training_serves_what_is_there() {
    let Some(disk) = SmallDisk::mount("8m,nr_inodes=400") else { return };
    let workshop = Workshop::new(200, 1);
    let (config, models) = (workshop.config(ArchKind::Dlrm, 4, 100), disk.path().to_str().unwrap());
    let data = &workshop.train;
    let line =
        format!("train --model-config {config} --format criteo-tsv --data {data} --models {models} --name m");
    assert!(run(&line).status.success());
    fs::remove_dir_all(disk.path().join("m/state")).unwrap();
    // A file without bytes takes one of the limited number of files.
    let filled =
        (0..).map(|n| disk.path().join(format!(".{n}"))).take_while(|path| fs::write(path, "").is_ok());
    assert!(filled.count() > 100);
    for (source, file) in [("learn", "m/state"), (data, "m/state/trainer.lock")] {
        let served = Served::start(models, &format!("--train m={source} --format criteo-tsv"));
        assert_eq!(served.score("m", &workshop.valid, "")["version"], 1);
        wait("training has failed", || served.metric("flechette_training_state", &["model=\"m\""]) == -1.0);
        served.terminate();
        let (status, log) = served.ended();
        assert_eq!(status.code(), Some(1), "{log}");
        let last = log.lines().last().unwrap();
        assert!(last.contains("training has failed") && last.contains(file), "{log}");
        assert!(last.ends_with(": disk full"), "{log}");
    }
}

#[test]
fn a_full_disk_stops_train_in_one_line_and_leaves_the_older_versions_good() {
    let Some(disk) = SmallDisk::mount("4m") else { return };
    let workshop = Workshop::new(200, 1);
    let config = workshop.config(ArchKind::Dlrm, 4, 500);
    let (models, data) = (disk.path().display(), &workshop.train);
    let line =
        format!("train --model-config {config} --format criteo-tsv --data {data} --models {models} --name m");
    let mut written = 0;
    while written < 50 && run(&line).status.success() {
        written += 1;
    }
    let error = run_failing(1, &line);
    let versions = fs::read_dir(disk.path().join("m")).unwrap();
    let versions = versions.filter_map(|file| file.unwrap().file_name().to_str()?.parse().ok());
    let mut versions: Vec<_> = versions.map(Version).collect();
    versions.sort();
    let opened: Vec<_> = versions
        .iter()
        .map(|&version| store::open(disk.path(), "m", version, store::Purpose::Serve))
        .collect();
    let good = opened.iter().all(Result::is_ok);
    drop(opened);
    assert!(error.ends_with(": disk full"), "{error}");
    assert!(good && written > 0, "{written} written");
    assert_eq!(versions, (1..=written).map(Version).collect::<Vec<_>>());
}
