//! `serve` as a child process, and `load` against it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;

use crate::harness::program::{Running, Serving, get, output};
use crate::program::{MODEL, Published, data, number, program, show_trouble};

/// Samples of a request.
const REQUEST: usize = 16;

/// The metric of answered requests.
const REQUESTS: &str = "flechette_requests_total";

/// Different requests of a load, which are sent again when all were sent.
const MOST_REQUESTS: usize = 40_000;

/// How long a version may take until it is served, or a load until it begins.
const PATIENCE: Duration = Duration::from_secs(60);

/// `serve`, killed when dropped.
pub struct Server {
    _process: Running,
    grpc: SocketAddr,
    http: SocketAddr,
    log: Arc<Mutex<Log>>,
    /// Each load has other samples.
    seed: AtomicUsize,
}

/// What the log has said.
#[derive(Default)]
pub struct Log {
    pub taken: Vec<Taken>,
    pub published: Vec<Published>,
}

/// A version that was taken over.
pub struct Taken {
    version: u64,
    /// The time since its cut, by the server's own gauge.
    pub data_age_s: f64,
}

impl Server {
    /// Starts a server with a cache, and waits until it serves.
    pub fn start(models: &Path, flags: &str) -> anyhow::Result<Self> {
        let line = format!(
            "serve --models {} --grpc 127.0.0.1:0 --http 127.0.0.1:0 --cache-mode on --cache-fraction 0.1 \
             {flags}",
            models.display()
        );
        let Serving { process, grpc, http, log: lines } = Serving::start(program(&line))?;
        let log = Arc::<Mutex<Log>>::default();
        let of_thread = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                read_line(&line, http, &of_thread);
            }
        });
        Ok(Self { _process: process, grpc, http, log, seed: AtomicUsize::new(9) })
    }

    /// Requests per second of 8 clients in a closed loop. Also fills the cache.
    pub fn capacity(&self, seconds: u64) -> anyhow::Result<f64> {
        let flags = format!("--concurrency 8 --seconds {seconds} --warmup 2");
        let report = load(self.grpc, &flags, MOST_REQUESTS / 2, self.next_seed())?;
        report["requests_per_s"].as_f64().context("requests_per_s")
    }

    /// p99 in microseconds at a rate.
    pub fn p99(&self, rate: f64, time: Duration) -> anyhow::Result<f64> {
        self.open_loop(rate, time).run()
    }

    /// Requests at a rate, which another thread may send.
    pub fn open_loop(&self, rate: f64, time: Duration) -> OpenLoop {
        OpenLoop { grpc: self.grpc, rate, time, seed: self.next_seed() }
    }

    fn next_seed(&self) -> usize {
        self.seed.fetch_add(1, Ordering::Relaxed)
    }

    /// The sum of a metric over its labels.
    pub fn sum(&self, name: &str) -> anyhow::Result<f64> {
        Ok(sum(&metrics(self.http)?, name))
    }

    /// The share of lookups that hit the cache during some time.
    pub fn hit_rate(&self, time: Duration) -> anyhow::Result<f64> {
        let counts = || {
            let page = metrics(self.http)?;
            anyhow::Ok((sum(&page, "flechette_cache_hits_total"), sum(&page, "flechette_cache_misses_total")))
        };
        let before = counts()?;
        sleep(time);
        let after = counts()?;
        let (hits, misses) = (after.0 - before.0, after.1 - before.1);
        anyhow::ensure!(hits + misses > 0.0, "no rows were looked up");
        Ok(hits / (hits + misses))
    }

    /// Waits until requests arrive. A load first encodes its requests.
    pub fn wait_for_requests(&self) -> anyhow::Result<()> {
        let (before, begun) = (self.sum(REQUESTS)?, Instant::now());
        while self.sum(REQUESTS)? == before {
            anyhow::ensure!(begun.elapsed() < PATIENCE, "no requests arrive");
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until a version is served.
    pub fn wait_for(&self, version: u64) -> anyhow::Result<()> {
        let begun = Instant::now();
        while !self.log(|log| log.taken.iter().any(|taken| taken.version >= version)) {
            anyhow::ensure!(begun.elapsed() < PATIENCE, "version {version} is not served");
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Reads what the log has said.
    pub fn log<T>(&self, read: impl FnOnce(&Log) -> T) -> T {
        read(&self.log.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Requests that are due at a rate.
pub struct OpenLoop {
    grpc: SocketAddr,
    rate: f64,
    time: Duration,
    seed: usize,
}

impl OpenLoop {
    /// Sends the requests. Returns p99 in microseconds, from the due time of each.
    pub fn run(self) -> anyhow::Result<f64> {
        let Self { grpc, rate, time, seed } = self;
        let seconds = time.as_secs_f64();
        let flags = format!("--rate {rate:.0} --seconds {seconds}");
        let requests = ((rate * seconds).ceil() as usize).min(MOST_REQUESTS);
        let report = load(grpc, &flags, requests, seed)?;
        anyhow::ensure!(report["unsent"] == 0, "the server is too slow for {rate:.0} requests/s");
        report["p99_us"].as_f64().context("p99_us")
    }
}

fn read_line(line: &str, http: SocketAddr, log: &Mutex<Log>) {
    show_trouble("serve", line);
    let version = number(line, "version=").filter(|_| line.contains("version taken over"));
    // The line is written when batches use the version. So the gauge, read now, is the time since the cut.
    let taken = version.and_then(|version| {
        let data_age_s = sum(&metrics(http).ok()?, "flechette_freshness_seconds");
        Some(Taken { version: version as u64, data_age_s })
    });
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    log.taken.extend(taken);
    log.published.extend(Published::read(line));
}

fn load(grpc: SocketAddr, flags: &str, requests: usize, seed: usize) -> anyhow::Result<Value> {
    let data = data(requests * REQUEST, seed);
    let line = format!(
        "load --addr http://{grpc} --model {MODEL} --format synthetic --batch {REQUEST} \
         --requests {requests} --json {flags} {data}"
    );
    Ok(serde_json::from_slice(&output(program(&line))?)?)
}

fn metrics(http: SocketAddr) -> anyhow::Result<String> {
    get(http, "/metrics")
}

fn sum(page: &str, name: &str) -> f64 {
    let values = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
