//! `serve --train`, and `train` beside `serve`: what training costs the requests, and how old the served
//! version is when it is taken over.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::figures::Figures;
use crate::in_turn;
use crate::program::{BATCH, Bench, ENDLESS, MODEL, Published, data, start_train};
use crate::server::Server;
use crate::spinner;

/// How often `train` publishes for a server in another process.
const ACROSS: Duration = Duration::from_secs(1);

/// How long a server may take until it trains.
const PATIENCE: Duration = Duration::from_secs(60);

/// A window of `serve --train`.
struct Beside {
    p99_us: f64,
    samples_per_s: f64,
    ages: Vec<f64>,
    rows: Vec<f64>,
}

pub fn measure(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    latency(bench, figures)?;
    across(bench, figures)
}

fn latency(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    let models = bench.first_version("alone")?;
    let (mut rates, mut alones, mut spun, mut besides) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.rounds {
        // The capacity is measured again before each pair, because the speed of the machine drifts.
        let rate = Server::start(&models, "")?.capacity(bench.every.as_secs())? / 2.0;
        let alone = || {
            let server = Server::start(&models, "")?;
            server.p99(rate, bench.every)?;
            let alone = server.p99(rate, bench.window)?;
            let _spinner = spinner::ALWAYS.start()?;
            Ok((alone, server.p99(rate, bench.window)?))
        };
        let ((alone, beside_spinner), beside) = in_turn(round, alone, || beside(bench, rate, round))?;
        rates.push(rate);
        alones.push(alone);
        spun.push(beside_spinner);
        besides.push(beside);
    }
    let to = |of: &[f64]| -> Vec<f64> {
        besides.iter().zip(of).map(|(beside, p99_us)| beside.p99_us / p99_us).collect()
    };
    let of = |read: fn(&Beside) -> f64| besides.iter().map(read).collect::<Vec<_>>();
    let all = |read: fn(&Beside) -> &Vec<f64>| besides.iter().flat_map(read).copied().collect::<Vec<_>>();
    figures.add("half of the capacity of version 1, requests/s", "", &rates);
    figures.add("p99 of serve --train, to serve of the same version", "<= 1.5", &to(&alones));
    figures.add("the same to serve beside threads that spin", "", &to(&spun));
    figures.add("p99 of serve, us", "", &alones);
    figures.add("p99 of serve beside threads that spin, us", "", &spun);
    figures.add("p99 of serve --train, us", "", &of(|beside| beside.p99_us));
    figures.add("samples/s of serve --train", "", &of(|beside| beside.samples_per_s));
    figures.add("rows of a version of serve --train", "", &all(|beside| &beside.rows));
    figures.add("from the cut until served, one process, s", "p99 < 2", &all(|beside| &beside.ages));
    Ok(())
}

/// Serves and trains from version 1, at full speed.
fn beside(bench: &Bench, rate: f64, round: usize) -> anyhow::Result<Beside> {
    let name = format!("beside-{round}");
    let models = bench.first_version(&name)?;
    let flags = format!(
        "--train {MODEL}={} --format synthetic --batch {BATCH} --publish-every {}s",
        data(ENDLESS, 10 + round),
        bench.every.as_secs()
    );
    let server = Server::start(&models, &flags)?;
    let samples = || server.sum("flechette_training_samples_total");
    let begun = Instant::now();
    while samples()? == 0.0 {
        anyhow::ensure!(begun.elapsed() < PATIENCE, "training does not begin");
        sleep(Duration::from_millis(20));
    }
    server.p99(rate, bench.every)?;
    let (before, begun) = (samples()?, Instant::now());
    let p99_us = server.p99(rate, bench.window)?;
    let samples_per_s = (samples()? - before) / begun.elapsed().as_secs_f64();
    let beside = server.log(|log| Beside {
        p99_us,
        samples_per_s,
        ages: log.taken.iter().map(|taken| taken.data_age_s).collect(),
        rows: log.published.iter().map(|delta| delta.rows).collect(),
    });
    drop(server);
    fs::remove_dir_all(models)?;
    Ok(beside)
}

/// Trains at full speed in another process. The server gets no requests.
fn across(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    let models = bench.first_version("across")?;
    let server = Server::start(&models, "")?;
    let (log, data) = (bench.path("across.log"), data(ENDLESS, 3));
    let flags = format!("--from latest --publish-every {}s --data {data}", ACROSS.as_secs());
    let trainer = start_train(&models, &flags, &log)?;
    sleep(bench.window + bench.window / 2);
    let ages = server.log(|log| log.taken.iter().map(|taken| taken.data_age_s).collect::<Vec<_>>());
    drop(trainer);
    let published: Vec<_> = fs::read_to_string(log)?.lines().filter_map(Published::read).collect();
    let of = |read: fn(&Published) -> f64| published.iter().map(read).collect::<Vec<_>>();
    figures.add("rows of a version of train, every second", "", &of(|delta| delta.rows));
    figures.add("from the cut until written, s", "", &of(|delta| delta.took_ms / 1e3));
    figures.add("from the cut until served, two processes, s", "p99 < 5", &ages);
    Ok(())
}
