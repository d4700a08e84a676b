//! Serving while versions of another process are taken over. They were trained before, so training takes no
//! time of the processor now.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::figures::Figures;
use crate::harness::program::output;
use crate::in_turn;
use crate::program::{BATCH, Bench, MODEL, data, program};
use crate::server::Server;
use crate::spinner;

/// How long after the first request of a load a version is renamed.
const RENAMED_AFTER: Duration = Duration::from_millis(500);

/// Versions in a window.
const IN_A_WINDOW: usize = 2;

/// More time for the last version of a window: a server reads its directory every second.
const MORE_TIME: Duration = Duration::from_secs(2);

/// How long a window with a full version is: its rows take longer to read.
const FULL_WINDOW: Duration = Duration::from_secs(40);

/// How long the capacity is measured before a pair of windows.
const CAPACITY_SECONDS: u64 = 2;

/// How long clients take all of the processor.
const AT_CAPACITY: Duration = Duration::from_secs(40);

/// The time that a version takes, on average.
const PUBLISHED_IN: Duration = Duration::from_secs(6);

pub fn measure(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    let models = bench.first_version("models")?;
    let versions = train(bench, &models, figures)?;
    let server = Server::start(&models, "")?;
    let rate = server.capacity(bench.every.as_secs())? / 2.0;
    figures.add("half of the capacity, requests/s", "", &[rate]);
    let (first, others) = versions.split_at(bench.versions);
    let (next, last) = others.split_at(bench.rounds);
    latency(bench, figures, &server, first)?;
    hit_rates(bench, figures, (&server, rate), next)?;
    saturated(bench, figures, &server, &last[0])?;
    full(bench, figures, &server, &last[1..])
}

/// How long it takes until a version is served while clients leave the processor no time.
fn saturated(bench: &Bench, figures: &mut Figures, server: &Server, version: &Path) -> anyhow::Result<()> {
    let time = AT_CAPACITY.min(8 * bench.every);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| server.capacity(time.as_secs()));
        server.wait_for_requests()?;
        sleep(RENAMED_AFTER);
        let served = publish(bench, server, version)?.as_secs_f64();
        let during = !load.is_finished();
        load.join().map_err(|_| anyhow::anyhow!("load panicked"))??;
        let what = "from the rename of a version until it is served, at capacity, s";
        figures.add(what, if during { "" } else { "served after the load had ended" }, &[served]);
        Ok(())
    })
}

/// Trains versions of a model after its first one, and puts them aside. The last one is the one before it,
/// with all rows.
fn train(bench: &Bench, models: &Path, figures: &mut Figures) -> anyhow::Result<Vec<PathBuf>> {
    let (mut rows, versions) = (Vec::new(), 2..2 + bench.versions + 1 + bench.rounds);
    for version in versions.clone() {
        // One version, at the end of the data.
        let data = data(BATCH * bench.steps, 100 + version);
        let trained =
            bench.train(models, &format!("--from latest --publish-every 1000000s --data {data}"))?;
        anyhow::ensure!(trained.published.len() == 1, "{} deltas in a run", trained.published.len());
        rows.push(trained.published[0].rows);
    }
    let shares: Vec<f64> = rows.iter().map(|rows| 100.0 * rows / bench.all_rows()).collect();
    output(program(&format!("versions --models {} --name {MODEL} --compact", models.display())))?;
    figures.add("rows of a version", "about 10^6", &rows);
    figures.add("rows of a version, % of all rows", "about 5", &shares);

    let aside = bench.path("aside");
    fs::create_dir(&aside)?;
    let put_aside = |version: usize| {
        let to = aside.join(version.to_string());
        fs::rename(models.join(MODEL).join(version.to_string()), &to)?;
        Ok(to)
    };
    let full = versions.end;
    versions.chain([full]).map(put_aside).collect()
}

/// Renames a version into place, and waits until it is served. Returns how long that took.
fn publish(bench: &Bench, server: &Server, from: &Path) -> anyhow::Result<Duration> {
    let version = from.file_name().and_then(|name| name.to_str()).context("version")?;
    fs::rename(from, bench.path("models").join(MODEL).join(version))?;
    let begun = Instant::now();
    server.wait_for(version.parse()?)?;
    Ok(begun.elapsed())
}

/// A window at rest, one of the same length in which versions are taken over, and one with threads that spin
/// as long instead.
struct Windows {
    rest_us: f64,
    during_us: f64,
    spun_us: f64,
    /// From the rename of each version until it is served.
    served_s: Vec<f64>,
}

impl Windows {
    /// Measures all, the first two in turn. Before, the capacity is measured again: the speed of the machine
    /// drifts, and half of the capacity of a minute ago may be most of it now.
    fn measure(
        bench: &Bench,
        server: &Server,
        time: Duration,
        (round, versions): (usize, &[PathBuf]),
    ) -> anyhow::Result<Self> {
        let rate = server.capacity(CAPACITY_SECONDS)? / 2.0;
        let mut served_s = Vec::new();
        let at_rest = || server.p99(rate, time);
        let with_versions = || {
            meanwhile(server, (rate, time), || {
                for from in versions {
                    let took = publish(bench, server, from)?;
                    served_s.push(took.as_secs_f64());
                    sleep(bench.every.saturating_sub(took));
                }
                Ok(())
            })
        };
        let (rest_us, during_us) = in_turn(round, at_rest, with_versions)?;
        let spun_us = meanwhile(server, (rate, time), || {
            for took in served_s.iter().copied().map(Duration::from_secs_f64) {
                let spinner = spinner::WITH_RESTS.start()?;
                sleep(took);
                drop(spinner);
                sleep(bench.every.saturating_sub(took));
            }
            Ok(())
        })?;
        Ok(Self { rest_us, during_us, spun_us, served_s })
    }

    /// The ratio of each window with versions to another one of its pair.
    fn ratios(pairs: &[Self], to: fn(&Self) -> f64) -> Vec<f64> {
        pairs.iter().map(|pair| pair.during_us / to(pair)).collect()
    }
}

/// p99 of requests at a rate for some time, while something else runs that ends before.
fn meanwhile(
    server: &Server,
    (rate, time): (f64, Duration),
    work: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    std::thread::scope(|scope| {
        let load = server.open_loop(rate, time);
        let load = scope.spawn(|| load.run());
        server.wait_for_requests()?;
        work()?;
        anyhow::ensure!(!load.is_finished(), "the load ended before the work beside it");
        load.join().map_err(|_| anyhow::anyhow!("load panicked"))?
    })
}

/// p99 of windows with versions at an interval, and of windows at rest, in turn.
fn latency(
    bench: &Bench,
    figures: &mut Figures,
    server: &Server,
    versions: &[PathBuf],
) -> anyhow::Result<()> {
    let time = bench.every * IN_A_WINDOW as u32 + bench.every / 2 + MORE_TIME;
    let pairs = versions.chunks(IN_A_WINDOW).enumerate();
    let pairs = pairs.map(|versions| Windows::measure(bench, server, time, versions));
    let pairs = pairs.collect::<anyhow::Result<Vec<_>>>()?;
    let of = |read: fn(&Windows) -> f64| pairs.iter().map(read).collect::<Vec<_>>();
    let served: Vec<_> = pairs.iter().flat_map(|pair| pair.served_s.iter().copied()).collect();
    figures.add(
        "p99 while versions are taken over, to p99 at rest",
        "<= 1.2",
        &Windows::ratios(&pairs, |pair| pair.rest_us),
    );
    figures.add(
        "the same to p99 beside threads that spin",
        "",
        &Windows::ratios(&pairs, |pair| pair.spun_us),
    );
    figures.add("p99 at rest, us", "", &of(|pair| pair.rest_us));
    figures.add("p99 beside threads that spin, us", "", &of(|pair| pair.spun_us));
    figures.add("p99 while versions are taken over, us", "", &of(|pair| pair.during_us));
    figures.add("from the rename of a version until it is served, s", "", &served);
    Ok(())
}

/// The same for a version with all rows. Which of them have changed is not known, so every cached row is
/// compared.
fn full(bench: &Bench, figures: &mut Figures, server: &Server, versions: &[PathBuf]) -> anyhow::Result<()> {
    let time = FULL_WINDOW.min(8 * bench.every);
    let pair = [Windows::measure(bench, server, time, (0, versions))?];
    figures.add(
        "p99 while a full version is taken over, to p99 at rest",
        "",
        &Windows::ratios(&pair, |pair| pair.rest_us),
    );
    figures.add("the same to p99 beside threads that spin", "", &Windows::ratios(&pair, |pair| pair.spun_us));
    let [Windows { during_us, served_s, .. }] = pair;
    figures.add("p99 while a full version is taken over, us", "", &[during_us]);
    figures.add("from the rename of a full version until it is served, s", "", &served_s);
    Ok(())
}

/// Hit rates before the rename of a version, and after it is served.
fn hit_rates(
    bench: &Bench,
    figures: &mut Figures,
    (server, rate): (&Server, f64),
    versions: &[PathBuf],
) -> anyhow::Result<()> {
    let window = 2 * bench.every;
    let count = versions.len() as u32;
    let load = server.open_loop(rate, window * (count + 2) + PUBLISHED_IN * (count + 1));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| load.run());
        server.wait_for_requests()?;
        // The cache gets used to the last version.
        sleep(window);
        let mut rates = vec![100.0 * server.hit_rate(window)?];
        for from in versions {
            publish(bench, server, from)?;
            rates.push(100.0 * server.hit_rate(window)?);
        }
        anyhow::ensure!(!load.is_finished(), "the load ended before the last window");
        let changes: Vec<f64> = rates.windows(2).map(|two| two[1] - two[0]).collect();
        figures.add("hit rate after a version less the one before, points", ">= -2", &changes);
        figures.add("hit rate, %", "", &rates);
        Ok(())
    })
}
