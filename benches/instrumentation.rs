//! What metrics cost at batch 1: two servers of the same model, one of them with `server.metrics = off`,
//! share a core, and get requests of one sample in turn from a closed loop on another core.
//!
//! Requests per second of processor time should say the same as the throughput, but other work on the machine
//! disturbs them less. Needs Linux, whose `/proc` has the times.
//!
//! `--rows N` per table (100,000; 26 tables of dim 16), `--pairs N` (21) of windows of `--window-ms N`
//! (2,000), `--only cache`, `--json`.

mod harness;

use std::path::Path;

use anyhow::Context;
use harness::program::{Serving, output, pinned, processor_seconds, program};
use harness::{Options, Pairs, Report};

const TABLES: usize = 26;

/// Least share of the throughput without metrics.
const GOAL: f64 = 0.99;

fn main() -> anyhow::Result<()> {
    let mut options = Options::read(2000);
    options.pairs = options.number("--pairs", 21);
    let rows = options.number("--rows", 100_000);
    let dir = tempfile::tempdir()?;
    let models = dir.path().join("models");
    let config = dir.path().join("model.toml");
    let init =
        format!("init --dataset synthetic --arch dlrm --dim 16 --rows {rows} --tables {TABLES} --dense 13");
    std::fs::write(&config, output(program(&init))?)?;
    let train = format!("--model-config {} --data rows=4096,seed=1,skew=1.2", config.display());
    let train =
        format!("train --format synthetic --batch 128 --models {} --name m {train}", models.display());
    output(program(&train))?;
    let mut report = Report::new("instrumentation", "requests", "server.metrics = off", &options);
    for (setting, flags) in [("no cache", "--cache-mode off"), ("cache", "--cache-mode on")] {
        if !options.wants(setting) {
            continue;
        }
        let [rates, per_processor] = measure(&options, &models, flags)?;
        report.add(format!("{setting}, throughput"), &rates, Some(GOAL));
        report.add(format!("{setting}, per processor time"), &per_processor, Some(GOAL));
    }
    report.finish();
    Ok(())
}

/// The pairs of requests per second, and per second of the server's processor time.
fn measure(options: &Options, models: &Path, flags: &str) -> anyhow::Result<[Pairs; 2]> {
    let serve = format!("serve --models {} --grpc 127.0.0.1:0 --http 127.0.0.1:0 {flags}", models.display());
    let start = |metrics: &str| {
        let mut command = pinned(0, &serve);
        command.env("FLECHETTE_SERVER_METRICS", metrics);
        Serving::start(command)
    };
    let servers = [start("on")?, start("off")?];
    // Both are warm.
    for served in &servers {
        window(served, options)?;
    }
    let mut windows = [Vec::new(), Vec::new()];
    for pair in 0..options.pairs {
        let first = pair % 2;
        let one = window(&servers[first], options)?;
        let other = window(&servers[1 - first], options)?;
        let [on, off] = if first == 0 { [one, other] } else { [other, one] };
        windows[0].push((on.rate, off.rate));
        windows[1].push((on.per_processor, off.per_processor));
    }
    Ok(windows.map(Pairs::of))
}

struct Window {
    rate: f64,
    per_processor: f64,
}

/// Sends requests of one sample in a closed loop.
fn window(served: &Serving, options: &Options) -> anyhow::Result<Window> {
    let line = format!(
        "load --addr http://{} --model m --format synthetic --batch 1 --requests 2000 --concurrency 8 --json \
         --seconds {} rows=2000,seed=3,skew=1.2",
        served.grpc,
        options.window.as_secs_f64(),
    );
    let process = served.process.0.id();
    let before = processor_seconds(process)?;
    let report: serde_json::Value = serde_json::from_slice(&output(pinned(1, &line))?)?;
    let used = processor_seconds(process)? - before;
    let number = |key: &str| report[key].as_f64().with_context(|| key.to_owned());
    let rate = number("requests_per_s")?;
    Ok(Window { rate, per_processor: rate * options.window.as_secs_f64() / used })
}
