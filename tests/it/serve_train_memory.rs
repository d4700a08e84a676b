//! The memory and the open descriptors of `serve --train`, in one version and over hundreds of them.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use flechette::schema::preset::{self, ArchKind, SyntheticShape};

use crate::program::{LAST_VERSION, Served, Workshop, bytes_of};
use crate::serve_train::site::{MODEL, shown, shows, version_at};
use crate::switching::wait;

#[test]
fn a_server_that_trains_takes_the_memory_that_the_pages_state() {
    // A second copy of the rows alone would be past the limit.
    const ROWS: u64 = 1_800_000;
    const TABLES: u64 = 4;
    let workshop = Workshop::new(10, 10);
    let (config, models) = (workshop.path("many_ids.toml"), &workshop.models);
    let shape = SyntheticShape { tables: TABLES as usize, rows: ROWS, dense: 2, multi_hot: Some(64) };
    fs::write(&config, preset::synthetic(ArchKind::Dlrm, 16, shape).to_toml()).unwrap();
    // Rows and Adagrad's state, both f32.
    let bytes = TABLES * ROWS * 16 * 4 * 2;
    // 448,000 ids for each table, so 22 % of the rows change: three times as many as are copied at once.
    let data = "rows=7000,seed=3,skew=uniform,lengths=max";
    let line = format!(
        "--train {MODEL}={data} --model-config {config} --format synthetic --batch 512 \
         --publish-every 20steps"
    );
    let served = Served::start(models, &line);
    let most = Cell::new(0);
    wait("training ends", || {
        most.set(bytes_of(served.id(), "RssAnon").unwrap().max(most.get()));
        shows(&served, "training_state", 0.0)
    });
    let most = most.get();
    assert!(version_at(models) >= 3, "versions were published meanwhile");
    let published = shown(&served, "publish_rows_total") / (TABLES * ROWS) as f64;
    assert!(published > 0.15, "the versions have {published} of the rows");
    let stated = bytes * 115 / 100 + (256 << 20);
    println!("{most} bytes for {bytes} bytes of rows and state; at most {stated} are stated");
    assert!(most <= stated, "{most} bytes, stated {stated}");
    assert!(most >= bytes, "the rows are in memory");
}

/// The open descriptors of a server, and the bytes of its memory without mapped files.
fn descriptors_and_memory(served: &Served) -> [u64; 2] {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", served.id())).unwrap().count();
    [descriptors as u64, bytes_of(served.id(), "RssAnon").unwrap()]
}

/// The least of both until a version of at least this number is served. The least, because a version that is
/// being written or opened takes some for a moment, and a leak takes them for good.
fn least_until(served: &Served, version: u64) -> [u64; 2] {
    let least = Cell::new([u64::MAX; 2]);
    wait("the version is served", || {
        let (now, before) = (descriptors_and_memory(served), least.get());
        least.set([now[0].min(before[0]), now[1].min(before[1])]);
        shown(served, "serving_version") >= version as f64
    });
    least.get()
}

/// Checks that the descriptors and the memory of a server that publishes this many versions stay bounded.
fn stay_bounded_over(versions: u64, more: &str) {
    // Far less than one for each version, and than the dense weights of each, which take 150 KB.
    const MORE: [u64; 2] = [8, 8 << 20];
    let workshop = Workshop::in_memory(10, 10);
    let (config, models) = (workshop.path("small.toml"), &workshop.models);
    let shape = SyntheticShape { tables: 4, rows: 1000, dense: 2, multi_hot: None };
    fs::write(&config, preset::synthetic(ArchKind::Dlrm, 8, shape).to_toml()).unwrap();
    let line = format!(
        "--train {MODEL}=rows=1000000000,seed=3,skew=uniform --model-config {config} --format synthetic \
         --batch 8 --window 1000 --train-threads 1 --publish-every 1steps {LAST_VERSION} {more}"
    );
    // About three deltas follow a full version, so chains begin and end all the time.
    let settings = "export FLECHETTE_VERSIONS_KEEP=1 FLECHETTE_VERSIONS_COMPACT_AT=1.5";
    let served = Served::start_in(settings, models, &line);
    // Until then, memory grows to what it needs.
    least_until(&served, versions / 4);
    let early = least_until(&served, versions / 2);
    least_until(&served, versions * 3 / 4);
    let late = least_until(&served, versions);
    println!("descriptors and memory: {early:?} in the second quarter, {late:?} in the last one");
    assert!((0..2).all(|of| late[of] <= early[of] + MORE[of]), "{early:?}, {late:?}");
    let entries = fs::read_dir(Path::new(models).join(MODEL)).unwrap().flatten();
    let left = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok()).count();
    assert!(left <= 20, "{left} versions stay on disk");
    let switches = served.sum("flechette_switches_total", MODEL);
    assert!(switches >= (versions / 25) as f64, "only {switches} versions were taken over");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
}

#[test]
fn descriptors_and_memory_stay_bounded_over_500_versions_of_a_model_in_memory() {
    stay_bounded_over(500, "");
}

#[test]
fn descriptors_and_memory_stay_bounded_over_300_versions_of_a_model_behind_a_scratchpad() {
    stay_bounded_over(300, "--scratchpad 0.3");
}
