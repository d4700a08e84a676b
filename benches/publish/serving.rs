//! Serving while versions of another process are taken over. They were trained before, so training takes no
//! time of the processor now.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::figures::Figures;
use crate::in_turn;
use crate::program::{BATCH, Bench, MODEL, data};
use crate::server::Server;

/// How long after the begin of a load a version is renamed. The load first encodes its requests.
const RENAMED_AFTER: Duration = Duration::from_millis(500);

/// The shortest window with a version: a server reads its directory every second.
const LEAST_WINDOW: Duration = Duration::from_secs(3);

/// How long the load runs before the first window of the hit rate.
const SETTLE: Duration = Duration::from_secs(3);

/// Samples, for each row of a table, after which about 5 % of the rows have changed.
const SAMPLES_A_ROW: f64 = 0.06;

/// Versions of a model whose version 1 is served.
struct Later {
    /// With about a million rows each.
    large: Vec<PathBuf>,
    /// With about 5 % of all rows each.
    small: Vec<PathBuf>,
}

pub fn measure(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    let models = bench.first_version("models")?;
    let later = train(bench, &models, figures)?;
    let server = Server::start(&models, "")?;
    let rate = server.capacity(bench.every.as_secs())? / 2.0;
    figures.add("half of the capacity, requests/s", "", &[rate]);
    latency(bench, figures, (&server, rate), &later.large)?;
    hit_rates(bench, figures, (&server, rate), &later.small)
}

/// Trains all versions, and puts all but the first aside.
fn train(bench: &Bench, models: &Path, figures: &mut Figures) -> anyhow::Result<Later> {
    let mut rows = Vec::new();
    for i in 0..bench.versions {
        rows.push(train_on(bench, models, &data(BATCH * bench.steps, 100 + i, "uniform"))?);
    }
    figures.add("rows of a large version", "10^6", &rows);
    // The rows that requests use often are the ones that change.
    let mut shares = Vec::new();
    for i in 0..bench.rounds {
        let samples = (bench.rows as f64 * SAMPLES_A_ROW) as usize;
        let rows = train_on(bench, models, &data(samples, 200 + i, "medium"))?;
        shares.push(100.0 * rows / bench.all_rows());
    }
    figures.add("rows of a small version, % of all rows", "5", &shares);

    let aside = bench.path("aside");
    fs::create_dir(&aside)?;
    let mut versions = Vec::new();
    for version in 2..2 + bench.versions + bench.rounds {
        let to = aside.join(version.to_string());
        fs::rename(models.join(MODEL).join(version.to_string()), &to)?;
        versions.push(to);
    }
    let small = versions.split_off(bench.versions);
    Ok(Later { large: versions, small })
}

/// Trains a delta, which is published at the end of the data. Returns its number of rows.
fn train_on(bench: &Bench, models: &Path, data: &str) -> anyhow::Result<f64> {
    let trained = bench.train(models, &format!("--from latest --publish-every 1000000s --data {data}"))?;
    anyhow::ensure!(trained.published.len() == 1, "a run published {} deltas", trained.published.len());
    Ok(trained.published[0].rows)
}

/// Renames a version into place, and waits until it is served. Returns how long that took.
fn publish(bench: &Bench, server: &Server, from: &Path) -> anyhow::Result<Duration> {
    let version = from.file_name().and_then(|name| name.to_str()).context("version")?;
    fs::rename(from, bench.path("models").join(MODEL).join(version))?;
    let begun = Instant::now();
    server.wait_for(version.parse()?)?;
    Ok(begun.elapsed())
}

/// p99 of windows with a version, and of windows at rest, in turn.
fn latency(
    bench: &Bench,
    figures: &mut Figures,
    (server, rate): (&Server, f64),
    versions: &[PathBuf],
) -> anyhow::Result<()> {
    let window = bench.every.max(LEAST_WINDOW);
    let at_rest = || server.p99(rate, window);
    let (mut ratios, mut rest, mut during, mut served) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (i, from) in versions.iter().enumerate() {
        let with_version = || {
            std::thread::scope(|scope| {
                let load = server.open_loop(rate, window);
                let load = scope.spawn(|| load.run());
                sleep(RENAMED_AFTER);
                served.push(publish(bench, server, from)?.as_secs_f64());
                anyhow::ensure!(!load.is_finished(), "a version was served after its window");
                load.join().map_err(|_| anyhow::anyhow!("load panicked"))?
            })
        };
        let (a, b) = in_turn(i, at_rest, with_version)?;
        ratios.push(b / a);
        rest.push(a);
        during.push(b);
    }
    figures.add("p99 while versions are taken over, to p99 at rest", "<= 1.2", &ratios);
    figures.add("p99 at rest, us", "", &rest);
    figures.add("p99 while versions are taken over, us", "", &during);
    figures.add("from the rename of a large version until it is served, s", "", &served);
    Ok(())
}

/// Hit rates in two windows' time before each version, and after it is served.
fn hit_rates(
    bench: &Bench,
    figures: &mut Figures,
    (server, rate): (&Server, f64),
    versions: &[PathBuf],
) -> anyhow::Result<()> {
    let window = 2 * bench.every;
    let count = versions.len() as u32;
    let load = server.open_loop(rate, SETTLE + window * (count + 1) + SETTLE * (count + 1));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| load.run());
        sleep(SETTLE);
        let mut rates = vec![100.0 * server.hit_rate(window)?];
        for from in versions {
            publish(bench, server, from)?;
            rates.push(100.0 * server.hit_rate(window)?);
        }
        anyhow::ensure!(!load.is_finished(), "the load ended before the last window");
        let changes: Vec<f64> = rates.windows(2).map(|two| two[1] - two[0]).collect();
        figures.add("hit rate after a small version less the one before, points", ">= -2", &changes);
        figures.add("hit rate, %", "", &rates);
        Ok(())
    })
}
