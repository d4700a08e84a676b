//! The processor time of a server for a scrape of `/metrics`, with a cached model of 100 tables, compared
//! with `/healthz`, which is HTTP alone. The server is idle otherwise. Every series has a value, because
//! requests were scored before. Needs Linux, whose `/proc` has the times.
//!
//! `--tables N` (100), `--scrapes N` (200) in a window, `--pairs N` (9), `--json`.

mod harness;

use std::fs;
use std::path::Path;

use harness::program::{Serving, get, output, processor_seconds, program};
use harness::{Options, Sorted, place};

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    let (tables, scrapes) = (options.number("--tables", 100), options.number("--scrapes", 200).max(1));
    let folder = std::env::temp_dir().join(format!("flechette-metrics-page-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let measured = measure(&folder, tables, scrapes, options.pairs.min(9));
    fs::remove_dir_all(&folder)?;
    let Measured { page, metrics, healthz } = measured?;

    let series = page.lines().filter(|line| !line.starts_with('#')).count();
    println!("metrics_page: {}", place());
    println!("{tables} tables, {series} series, {} bytes, {scrapes} scrapes a window", page.len());
    println!("processor time of the server, ms: median (least to most); goal of /metrics: below 5");
    let shown =
        |times: &Sorted| format!("{:.3} ({:.3} to {:.3})", times.at(0.5), times.at(0.0), times.at(1.0));
    println!("/metrics {}", shown(&metrics));
    println!("/healthz {}", shown(&healthz));
    if options.json {
        let figures = |times: &Sorted| [times.at(0.5), times.at(0.0), times.at(1.0)];
        let report = serde_json::json!({
            "bench": "metrics_page", "place": place(), "tables": tables, "series": series,
            "bytes": page.len(), "metrics_ms": figures(&metrics), "healthz_ms": figures(&healthz),
            "goal_ms": 5,
        });
        println!("{report}");
    }
    Ok(())
}

/// Milliseconds for an answer, by window.
struct Measured {
    page: String,
    metrics: Sorted,
    healthz: Sorted,
}

fn measure(folder: &Path, tables: usize, scrapes: usize, pairs: usize) -> anyhow::Result<Measured> {
    let (schema, models) = (folder.join("model.toml"), folder.join("models"));
    let init = format!("init --dataset synthetic --arch dlrm --dim 4 --rows 1000 --tables {tables}");
    fs::write(&schema, output(program(&init))?)?;
    let (schema, models) = (schema.display(), models.display());
    output(program(&format!(
        "train --model-config {schema} --format synthetic --data rows=4096,seed=1 --models {models} --name m"
    )))?;
    let line = format!("serve --models {models} --grpc 127.0.0.1:0 --http 127.0.0.1:0 --cache-mode on");
    let served = Serving::start(program(&line))?;
    let load = "--format synthetic --batch 16 --requests 100 --concurrency 1 --seconds 1 rows=1600,seed=2";
    output(program(&format!("load --addr http://{} --model m {load}", served.grpc)))?;

    let process = served.process.0.id();
    let window = |path: &str| {
        let before = processor_seconds(process)?;
        for _ in 0..scrapes {
            get(served.http, path)?;
        }
        anyhow::Ok(1000.0 * (processor_seconds(process)? - before) / scrapes as f64)
    };
    let (mut metrics, mut healthz) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        metrics.push(window("/metrics")?);
        healthz.push(window("/healthz")?);
    }
    let page = get(served.http, "/metrics")?;
    Ok(Measured { page, metrics: Sorted::of(metrics.into_iter()), healthz: Sorted::of(healthz.into_iter()) })
}
