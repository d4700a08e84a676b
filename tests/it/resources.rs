//! Memory and disk use of the program.

use std::fs;
use std::path::Path;
use std::process::Command;

use flechette::schema::preset::{self, ArchKind};
use flechette::store;
use flechette::trainer::{self, optim};
use flechette::types::Version;

use crate::program::{Served, Workshop, run, run_failing, run_measured};
use crate::skip::skip;

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
    let optimizer = optim::Optimizer::new(optim::Kind::Adagrad, 0.02);
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
        run_measured(&line)
    };
    let (once, repeated) = (peak(&workshop.train), peak(&repeated));
    eprintln!("peak memory: {once} bytes once, {repeated} bytes a hundred times");
    assert!(repeated <= once + (16 << 20), "{once} and {repeated}");
}

#[test]
fn a_full_disk_stops_train_in_one_line_and_leaves_the_older_versions_good() {
    let disk = tempfile::tempdir().unwrap();
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(disk.path()).output();
    if !mount.is_ok_and(|mount| mount.status.success()) {
        skip("it mounts a small tmpfs, which needs root");
        return;
    }
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
    let _ = Command::new("umount").arg("--lazy").arg(disk.path()).status();
    assert!(error.ends_with(": disk full"), "{error}");
    assert!(good && written > 0, "{written} written");
    assert_eq!(versions, (1..=written).map(Version).collect::<Vec<_>>());
}
