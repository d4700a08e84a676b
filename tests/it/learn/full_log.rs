//! A log that is full: what it has is published, so that it has room again, unless the gate refuses that.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use super::sending::{send_file, workshop};
use crate::program::{LAST_VERSION, Served, Workshop, highest_version};
use crate::switching::wait;

/// A server that trains on a log with room for less than half of the samples.
fn serve_small_log(workshop: &Workshop, flags: &str) -> Served {
    let settings = workshop.path("small.toml");
    fs::write(&settings, "[learn]\nmax_bytes = \"1Mi\"\n").unwrap();
    let flags = format!("--train log=learn --format criteo-tsv {LAST_VERSION} {flags} --config {settings}");
    Served::start(&workshop.models, &flags)
}

/// Sends more samples than the log of a server with these flags has room for.
fn publishes_a_full_log(flags: &str) {
    let (workshop, schema, _) = workshop(5000);
    let served = serve_small_log(&workshop, flags);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, &workshop.train)), 5000);
    served.terminate();
    let (ended, log) = served.ended();
    assert!(ended.success(), "{log}");
    let version = highest_version(Path::new(&workshop.models), "log").unwrap();
    assert!(version > 2, "{version}: {log}");
}

#[test]
fn a_full_log_is_published_although_a_whole_batch_never_comes() {
    publishes_a_full_log("--batch 100000");
}

#[test]
fn a_full_log_is_published_although_the_steps_of_a_version_never_come() {
    publishes_a_full_log("--batch 32 --publish-every 1000steps");
}

#[test]
fn a_full_log_is_published_although_a_whole_batch_never_comes_to_a_scratchpad() {
    publishes_a_full_log("--batch 100000 --scratchpad 0.5");
}

#[test]
fn a_gate_that_keeps_a_log_full_is_reported_with_the_limit() {
    let (workshop, schema, _) = workshop(5000);
    let served = serve_small_log(&workshop, "--batch 32 --publish-every 200ms --publish-gate auc=0.9999");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let latest = || highest_version(Path::new(&workshop.models), "log");
    std::thread::scope(|scope| {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (served, schema, file, runtime) = (&served, &schema, &workshop.train, &runtime);
        let sends = scope.spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    sent = send_file(served, schema, file) => Some(sent),
                    _ = stopped => None,
                }
            })
        });
        let text = "The log of learned samples is full (learn.max_bytes, 1048576 bytes)";
        wait("the status page says what keeps the log full", || served.status().to_string().contains(text));
        let log_loss = || served.metric("flechette_progressive_log_loss", &["model=\"log\""]);
        wait("the quality of what is refused is shown", || log_loss() > 0.0);
        let before = latest();
        sleep(Duration::from_secs(5));
        assert_eq!(latest(), before, "no version may be published");
        drop(stop);
        assert_eq!(sends.join().unwrap(), None, "the log has no room for all samples");
        served.terminate();
    });
    let (_, log) = served.ended();
    let warned = log.lines().filter(|line| line.contains("WARN") && line.contains("learn.max_bytes")).count();
    // Possibly none: of one line of the source, 20 lines are logged in a minute.
    assert!(warned < 9, "{log}");
}
