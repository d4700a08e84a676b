//! `flechette load`: drives a server and tells its throughput and latency.
//!
//! Requests are read from a data file and encoded before the clock starts, then sent round and
//! round.
//!
//! * **Open loop** (`--rate`): request `i` is due at `i / rate`, whatever the answers do, and its latency
//!   counts from that instant. So a server that stalls is charged for everybody who would have come
//!   meanwhile, also where this program itself was late (coordinated omission). A request that is due
//!   while as many as allowed are outstanding is not sent, and is counted as such.
//! * **Closed loop** (`--concurrency`): so many clients each send their next request when the answer to
//!   the one before is there, and latency counts from the send.
//!
//! Every request that was sent is counted once: as a score or under its error's code.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use hdrhistogram::Histogram;
use prost::bytes::Bytes;
use serde_json::json;
use tokio::sync::Semaphore;
use tonic::Status;

use crate::cli::InputError;
use crate::cli::client::{Client, Target, code_name, told};
use crate::dataset::{Format, Labels};
use crate::server::proto::PredictResponse;
use crate::types::RawBatch;

/// Flags of `load`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("pace").required(true).args(["rate", "concurrency"]))]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    #[arg(long, value_name = "F", help = format!("Format of the data: {}", Format::names()))]
    format: Format,
    /// The file has no label column: a line of criteo-tsv has 39 fields
    #[arg(long)]
    unlabelled: bool,
    /// Where the requests' samples come from
    file: PathBuf,
    /// Samples a request
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Open loop: requests a second
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// Closed loop: clients
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    concurrency: Option<u32>,
    /// How long to send
    #[arg(long, value_name = "S")]
    seconds: f64,
    /// How long to send before that without counting
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    warmup: f64,
    /// Connections that the requests are dealt to
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// Different requests that are read from the file, at most
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Open loop: most requests that may await their answer
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    outstanding: u32,
    /// How long one request may take
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    timeout: f64,
    /// Prints one line of JSON and nothing else
    #[arg(long)]
    json: bool,
}

/// Bytes of encoded requests that are kept.
const KEPT_BYTES: usize = 512 << 20;
/// Longest time a flag may give.
const MAX_SECONDS: f64 = 1e6;
/// Highest rate: beyond it the clock is too coarse to be worth it.
const MAX_RATE: f64 = 1e6;
/// A closed-loop client waits so long after an error, lest it do nothing but fail.
const AFTER_ERROR: Duration = Duration::from_millis(5);
/// Decimal digits to which latencies are kept.
const DIGITS: u8 = 3;

/// Drives the server.
///
/// # Errors
/// Flags or data that cannot be used, a server that is not reached, or not one score.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("runtime")?;
    let report = runtime.block_on(load(&args))?;
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        write!(out, "{}", report.text())?;
    }
    out.flush()?;
    match report.tally.first_error {
        Some(status) if report.tally.ok == 0 => Err(anyhow!("no request got a score: {}", told(&status))),
        _ => Ok(()),
    }
}

impl Args {
    fn check(&self) -> Result<(), InputError> {
        let numbers = [
            ("--seconds", self.seconds, 0.001, MAX_SECONDS),
            ("--warmup", self.warmup, 0.0, MAX_SECONDS),
            ("--timeout", self.timeout, 0.001, MAX_SECONDS),
            ("--rate", self.rate.unwrap_or(1.0), 1e-3, MAX_RATE),
        ];
        match numbers.into_iter().find(|(_, got, least, most)| !(least..=most).contains(&got)) {
            Some((flag, got, least, most)) => {
                Err(InputError(anyhow!("{flag}: expected a number from {least} to {most}, got {got}")))
            }
            None => Ok(()),
        }
    }
}

async fn load(args: &Args) -> anyhow::Result<Report> {
    let first = Client::connect(&args.target).await?;
    let batch = first.batch(Some(args.batch), 0)?;
    let requests = read(args, &first, batch)?;
    let mut clients = vec![first];
    while clients.len() < args.connections as usize {
        clients.push(clients[0].beside(&args.target).await?);
    }
    let driver = Arc::new(Driver {
        clients,
        requests,
        next: AtomicUsize::new(0),
        timeout: Duration::from_secs_f64(args.timeout),
    });
    if args.warmup > 0.0 {
        drive(&driver, args, args.warmup).await?;
    }
    drive(&driver, args, args.seconds).await
}

async fn drive(driver: &Arc<Driver>, args: &Args, seconds: f64) -> anyhow::Result<Report> {
    let start = Instant::now();
    let time = Duration::from_secs_f64(seconds);
    let (mode, tally) = match (args.rate, args.concurrency) {
        (Some(rate), _) => ("open", open_loop(driver, Pace { rate, time }, args.outstanding).await?),
        (None, clients) => ("closed", closed_loop(driver, start + time, clients.unwrap_or(1)).await?),
    };
    let batch = args.batch;
    Ok(Report { mode, batch, rate: args.rate, seconds: start.elapsed().as_secs_f64(), tally })
}

/// Encoded requests of `batch` samples. A shorter one at the file's end counts only where it is all
/// there is.
fn read(args: &Args, client: &Client, batch: usize) -> anyhow::Result<Vec<Bytes>> {
    let mut reader = client.open(args.format, &args.file, Labels::unless(args.unlabelled))?;
    let (mut raw, mut requests, mut bytes) = (RawBatch::default(), Vec::new(), 0);
    while requests.len() < args.requests as usize && bytes < KEPT_BYTES {
        let samples = reader.read(batch, &mut raw)?;
        if samples == 0 {
            break;
        }
        if samples == batch {
            let request = client.encode(&raw)?;
            bytes += request.len();
            requests.push(request);
        }
    }
    if requests.is_empty() {
        let file = args.file.display();
        return Err(InputError(anyhow!("{file}: fewer samples than one request of --batch {batch}")).into());
    }
    Ok(requests)
}

/// Connections, and requests to send over them.
struct Driver {
    clients: Vec<Client>,
    requests: Vec<Bytes>,
    next: AtomicUsize,
    timeout: Duration,
}

impl Driver {
    /// Sends the next request over the next connection.
    async fn send(&self) -> Result<PredictResponse, Status> {
        let i = self.next.fetch_add(1, Ordering::Relaxed);
        let request = self.requests[i % self.requests.len()].clone();
        self.clients[i % self.clients.len()].predict(request, self.timeout).await
    }
}

/// When open-loop requests are due.
struct Pace {
    rate: f64,
    time: Duration,
}

/// Sends each request when it is due, from a thread of its own, because a runtime's timers are too
/// coarse to pace by.
async fn open_loop(driver: &Arc<Driver>, pace: Pace, outstanding: u32) -> anyhow::Result<Tally> {
    let places = Arc::new(Semaphore::new(outstanding as usize));
    let tally = Arc::new(Mutex::new(Tally::new()?));
    let unsent = Arc::new(AtomicU64::new(0));
    let pacing = {
        let (runtime, driver, places) = (tokio::runtime::Handle::current(), driver.clone(), places.clone());
        let (tally, unsent) = (tally.clone(), unsent.clone());
        move || {
            let start = Instant::now();
            let count = (pace.time.as_secs_f64() * pace.rate).ceil() as u64;
            for i in 0..count {
                let due = start + Duration::from_secs_f64(i as f64 / pace.rate);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                let Ok(place) = places.clone().try_acquire_owned() else {
                    unsent.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                let (driver, tally) = (driver.clone(), tally.clone());
                runtime.spawn(async move {
                    let answer = driver.send().await;
                    let took = due.elapsed();
                    tally.lock().unwrap_or_else(PoisonError::into_inner).take(answer, took);
                    drop(place);
                });
            }
        }
    };
    tokio::task::spawn_blocking(pacing).await.context("the pacing thread")?;
    // All places are free when every answer is counted.
    let all = places.acquire_many(outstanding).await;
    drop(all.context("the outstanding requests")?);
    let tally = Tally::taken(&tally)?;
    Ok(Tally { unsent: unsent.load(Ordering::Relaxed), ..tally })
}

async fn closed_loop(driver: &Arc<Driver>, until: Instant, clients: u32) -> anyhow::Result<Tally> {
    let tally = Arc::new(Mutex::new(Tally::new()?));
    let mut tasks = Vec::new();
    for _ in 0..clients {
        let (driver, tally) = (driver.clone(), tally.clone());
        tasks.push(tokio::spawn(async move {
            while Instant::now() < until {
                let start = Instant::now();
                let answer = driver.send().await;
                let (failed, took) = (answer.is_err(), start.elapsed());
                tally.lock().unwrap_or_else(PoisonError::into_inner).take(answer, took);
                if failed {
                    tokio::time::sleep(AFTER_ERROR).await;
                }
            }
        }));
    }
    for task in tasks {
        task.await.context("a client")?;
    }
    Tally::taken(&tally)
}

/// What became of requests.
struct Tally {
    ok: u64,
    samples: u64,
    absent: u64,
    version: u64,
    errors: BTreeMap<&'static str, u64>,
    first_error: Option<Status>,
    /// Open loop: requests that were due while too many were outstanding.
    unsent: u64,
    /// Of requests that got scores.
    latency_us: Histogram<u64>,
}

impl Tally {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            ok: 0,
            samples: 0,
            absent: 0,
            version: 0,
            errors: BTreeMap::new(),
            first_error: None,
            unsent: 0,
            latency_us: Histogram::new(DIGITS)?,
        })
    }

    fn take(&mut self, answer: Result<PredictResponse, Status>, took: Duration) {
        match answer {
            Ok(response) => {
                self.ok += 1;
                self.samples += response.scores.len() as u64;
                self.absent += response.absent.iter().map(|absent| absent.count).sum::<u64>();
                self.version = self.version.max(response.version);
                // A histogram that grows by itself takes every value.
                let _ = self.latency_us.record(took.as_micros() as u64);
            }
            Err(status) => {
                *self.errors.entry(code_name(status.code())).or_default() += 1;
                self.first_error.get_or_insert(status);
            }
        }
    }

    /// What was counted, when nobody counts any more.
    fn taken(tally: &Mutex<Self>) -> anyhow::Result<Self> {
        let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::replace(&mut tally, Self::new()?))
    }

    fn failed(&self) -> u64 {
        self.errors.values().sum()
    }
}

/// Everything that is told at the end.
struct Report {
    mode: &'static str,
    batch: u32,
    rate: Option<f64>,
    /// From the first request to the last answer.
    seconds: f64,
    tally: Tally,
}

impl Report {
    fn us(&self, quantile: f64) -> u64 {
        self.tally.latency_us.value_at_quantile(quantile)
    }

    fn json(&self) -> serde_json::Value {
        let tally = &self.tally;
        json!({
            "mode": self.mode,
            "batch": self.batch,
            "rate": self.rate,
            "seconds": self.seconds,
            "sent": tally.ok + tally.failed(),
            "ok": tally.ok,
            "errors": tally.errors,
            "failed": tally.failed(),
            "unsent": tally.unsent,
            "requests_per_s": tally.ok as f64 / self.seconds,
            "samples_per_s": tally.samples as f64 / self.seconds,
            "rows": tally.samples,
            "absent": tally.absent,
            "version": tally.version,
            "p50_us": self.us(0.5),
            "p90_us": self.us(0.9),
            "p99_us": self.us(0.99),
            "p999_us": self.us(0.999),
            "max_us": tally.latency_us.max(),
        })
    }

    fn text(&self) -> String {
        let tally = &self.tally;
        let mut text = format!(
            "{} loop, {:.1} s: {} sent, {} scored, {} failed\n",
            self.mode,
            self.seconds,
            tally.ok + tally.failed(),
            tally.ok,
            tally.failed(),
        );
        // Writing to a string cannot fail.
        for (code, count) in &tally.errors {
            let _ = writeln!(text, "  {code} {count}");
        }
        if let Some(status) = &tally.first_error {
            let _ = writeln!(text, "  the first: {}", told(status));
        }
        if tally.unsent > 0 {
            let unsent = tally.unsent;
            let _ = writeln!(
                text,
                "{unsent} requests were due but not sent, because --outstanding were under way: \
                 the server does not keep up, and the latencies below leave them out"
            );
        }
        let (requests, samples) = (tally.ok as f64 / self.seconds, tally.samples as f64 / self.seconds);
        let _ = writeln!(text, "{requests:.1} requests/s, {samples:.0} samples/s, version {}", tally.version);
        let from = if self.rate.is_some() { "the intended send" } else { "the send" };
        let _ = writeln!(
            text,
            "latency from {from}: p50 {} us, p90 {} us, p99 {} us, p99.9 {} us, max {} us",
            self.us(0.5),
            self.us(0.9),
            self.us(0.99),
            self.us(0.999),
            tally.latency_us.max(),
        );
        text
    }
}

#[cfg(test)]
mod tests;
