//! A cache under load takes at most `cache.bytes` and the additional memory that docs/cache.md states.

use std::path::Path;

use flechette::schema::preset::{self, ArchKind};
use flechette::trainer::{self, optim};

use crate::program::{Served, Workshop, run};
use crate::switching::wait;

/// Allowed memory of a server with a cache, in addition to `cache.bytes` and to a server without a cache.
const SERVER_EXTRA: u64 = 16 << 20;
/// Bytes for each id of a worker's largest batch.
const BATCH_ID: u64 = 130;

#[test]
fn a_server_with_a_cache_takes_its_bytes_and_what_is_stated_more_than_one_without() {
    let workshop = Workshop::new(1, 20_000);
    let schema = preset::criteo(ArchKind::Dlrm, 16, 60_000);
    let optimizer = optim::Optimizer::new(optim::OptimizerKind::Sgd, 0.02);
    let learner = trainer::initialise(&schema, optimizer, 0).unwrap();
    learner.save(Path::new(&workshop.models), "large").unwrap();
    drop(learner);
    let config = workshop.config(ArchKind::Dlrm, 16, 60_000);
    let (counts, valid) = (workshop.path("counts"), &workshop.valid);
    let line = format!("plan --model-config {config} --format criteo-tsv --data {valid} --counts {counts}");
    assert!(run(&line).status.success());

    let without = peak(&workshop, "mode = \"off\"", |_| ());
    for eviction in ["lru", "lfu"] {
        let bytes = 4 << 20;
        let keys = format!(
            "mode = \"on\"\nbytes = {bytes}\nadmission = \"all\"\nsave_seconds = 1\n\
             eviction = \"{eviction}\"\ncounts = \"{counts}\""
        );
        let saved = Path::new(&workshop.models).join("large/state/hot_rows.flhot");
        let with = peak(&workshop, &keys, |served| {
            wait("rows are evicted", || served.sum("flechette_cache_evictions_total", "large") > 0.0);
            wait("hot rows are saved", || saved.is_file());
        });
        std::fs::remove_file(saved).unwrap();
        let batches = BATCH_ID * (WORKERS * SAMPLES * schema.features.len()) as u64;
        let allowed = without + bytes + SERVER_EXTRA + batches;
        eprintln!("{eviction}: {with} bytes with {bytes} of cache, {without} without");
        assert!(with <= allowed, "{with} bytes with {bytes} of cache, {without} without");
    }
}

#[test]
fn a_setting_far_above_a_small_models_rows_is_not_warned_of() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "--cache-mode on --cache-bytes 50Ti");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("free memory"), "{log}");
}

const WORKERS: usize = 2;
/// Samples per batch.
const SAMPLES: usize = 4096;

/// The peak memory of a server with these settings of section `cache`, which scores the samples twice.
/// `then` is called before the measurement.
fn peak(workshop: &Workshop, keys: &str, then: impl Fn(&Served)) -> u64 {
    let config = workshop.path("serve.toml");
    std::fs::write(&config, format!("[batcher]\nworkers = {WORKERS}\n[cache]\n{keys}\n")).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config} --threads 2"));
    for _ in 0..2 {
        served.score("large", &workshop.valid, &format!("--batch {SAMPLES}"));
    }
    then(&served);
    served.peak_bytes()
}
