//! `flechette load`: sends requests to a server for some time, and reports throughput and latency.
//!
//! Requests are read from a data file and encoded before the clock starts, and then sent again and again.
//!
//! * **Open loop** (`--rate`): request `i` is due at `i / rate`, whether answers arrive or not, and its
//!   latency counts from that instant. So a stall of the server or of the load generator adds to the latency
//!   of every request that is due during the stall, which avoids coordinated omission. A request that is due
//!   while `--outstanding` requests have no answer is not sent, and is counted as unsent.
//! * **Closed loop** (`--concurrency`): each client sends its next request when it has the answer to its last
//!   one, and latency counts from the send.
//!
//! Every request that is sent is counted once: as scored, or under the code of its error.

use std::collections::BTreeMap;
use std::fmt::Write as _;
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

use crate::cli::client::{Client, Target, status_text};
use crate::cli::flags::{number, whole};
use crate::cli::{InputError, print};
use crate::metrics::code_name;
use crate::server::proto::PredictResponse;
use crate::types::RawBatch;

/// Flags of `load`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("pace").required(true).args(["rate", "concurrency"]))]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    /// File with the samples of the requests
    file: PathBuf,
    /// Samples per request
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = whole::<u32>(1, 1 << 20))]
    batch: u32,
    /// Open loop: requests per second
    #[arg(long, value_name = "R", value_parser = number(0.001, MAX_RATE))]
    rate: Option<f64>,
    /// Closed loop: number of clients
    #[arg(long, value_name = "C", value_parser = whole::<u32>(1, 100_000))]
    concurrency: Option<u32>,
    /// How long to send and measure requests, in seconds
    #[arg(long, value_name = "S", value_parser = number(0.001, MAX_SECONDS))]
    seconds: f64,
    /// How long to send requests before the measurement, in seconds
    #[arg(long, value_name = "S", default_value_t = 0.0, value_parser = number(0.0, MAX_SECONDS))]
    warmup: f64,
    /// Connections to the server; requests use them in turn
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole::<u32>(1, 10_000))]
    connections: u32,
    /// Most requests to read from the file; they are sent again and again
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = whole::<u32>(1, 1_000_000))]
    requests: u32,
    /// Open loop: most requests without an answer; while they wait, due requests are not sent
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = whole::<u32>(1, 1_000_000))]
    outstanding: u32,
    /// Time limit of one request, in seconds
    #[arg(long, value_name = "S", default_value_t = 10.0, value_parser = number(0.001, MAX_SECONDS))]
    timeout: f64,
    /// Prints one line of JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Most bytes of all encoded requests.
const REQUEST_BYTES: usize = 512 << 20;
const MAX_SECONDS: f64 = 1e6;
/// At higher rates requests would be due less than 1 us apart, and latencies have a resolution of 1 us.
const MAX_RATE: f64 = 1e6;
/// A closed-loop client waits this long after an error, so that it does not fail in a busy loop.
const AFTER_ERROR: Duration = Duration::from_millis(5);
/// Significant digits of recorded latencies.
const DIGITS: u8 = 3;

/// Sends the requests and prints the report.
///
/// # Errors
/// When flags or data are wrong, the server cannot be reached, or any request fails.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("runtime")?;
    let report = runtime.block_on(load(&args))?;
    print(&if args.json { format!("{}\n", report.json()) } else { report.text() })?;
    report.tally.result()
}

async fn load(args: &Args) -> anyhow::Result<Report> {
    let first = Client::connect(&args.target).await?;
    let batch = first.batch(Some(args.batch), 0)?;
    let requests = read(args, &first, batch)?;
    let mut clients = vec![first];
    while clients.len() < args.connections as usize {
        clients.push(clients[0].connect_again(&args.target).await?);
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
    let within = driver.timeout;
    let (mode, tally) = match (args.rate, args.concurrency) {
        (Some(rate), _) => ("open", open_loop(driver, Pace { rate, time }, args.outstanding).await?),
        (None, clients) => ("closed", closed_loop(driver, start + time, clients.unwrap_or(1)).await?),
    };
    let (batch, goodput) = (args.batch, tally.within(within) as f64 / seconds);
    Ok(Report { mode, batch, rate: args.rate, seconds: start.elapsed().as_secs_f64(), goodput, tally })
}

/// Reads and encodes requests of `batch` samples each. A last request with fewer samples is left out.
fn read(args: &Args, client: &Client, batch: usize) -> anyhow::Result<Vec<Bytes>> {
    let mut reader = client.open(&args.target, &args.file)?;
    let (mut raw, mut requests, mut bytes) = (RawBatch::default(), Vec::new(), 0);
    while requests.len() < args.requests as usize && bytes < REQUEST_BYTES {
        let samples = reader.read(batch, &mut raw)?;
        if samples == 0 {
            break;
        }
        if samples == batch {
            let request = client.encode(&raw, false)?;
            bytes += request.len();
            requests.push(request);
        }
    }
    if requests.is_empty() {
        let file = args.file.display();
        return Err(
            InputError(anyhow!("{file}: fewer samples than one request has (--batch {batch})")).into()
        );
    }
    Ok(requests)
}

/// Connections, and the requests that are sent over them in turn.
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

/// Sends each request when it is due. A thread paces them, because the timers of the runtime are too coarse.
async fn open_loop(driver: &Arc<Driver>, pace: Pace, outstanding: u32) -> anyhow::Result<Tally> {
    let permits = Arc::new(Semaphore::new(outstanding as usize));
    let tally = Arc::new(Mutex::new(Tally::new()?));
    let unsent = Arc::new(AtomicU64::new(0));
    let pacing = {
        let (runtime, driver, permits) = (tokio::runtime::Handle::current(), driver.clone(), permits.clone());
        let (tally, unsent) = (tally.clone(), unsent.clone());
        move || {
            let start = Instant::now();
            let count = (pace.time.as_secs_f64() * pace.rate).ceil() as u64;
            for i in 0..count {
                let due = start + Duration::from_secs_f64(i as f64 / pace.rate);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                let Ok(permit) = permits.clone().try_acquire_owned() else {
                    unsent.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                let (driver, tally) = (driver.clone(), tally.clone());
                runtime.spawn(async move {
                    let answer = driver.send().await;
                    let took = due.elapsed();
                    tally.lock().unwrap_or_else(PoisonError::into_inner).take(answer, took);
                    drop(permit);
                });
            }
        }
    };
    tokio::task::spawn_blocking(pacing).await.context("the pacing thread")?;
    // Waits for all answers: every request without an answer holds a permit.
    let all = permits.acquire_many(outstanding).await;
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

/// How requests ended.
struct Tally {
    ok: u64,
    samples: u64,
    absent: u64,
    version: u64,
    errors: BTreeMap<&'static str, u64>,
    first_error: Option<Status>,
    /// Open loop: requests that were due while too many had no answer.
    unsent: u64,
    /// Latencies of scored requests.
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
                // A histogram that resizes itself accepts every value.
                let _ = self.latency_us.record(took.as_micros() as u64);
            }
            Err(status) => {
                *self.errors.entry(code_name(status.code() as i32)).or_default() += 1;
                self.first_error.get_or_insert(status);
            }
        }
    }

    /// Takes the counts out. All requests must have ended.
    fn taken(tally: &Mutex<Self>) -> anyhow::Result<Self> {
        let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::replace(&mut tally, Self::new()?))
    }

    /// Scored requests whose latency was at most this long.
    fn within(&self, time: Duration) -> u64 {
        self.latency_us.count_between(0, time.as_micros() as u64)
    }

    fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    /// An error if any request failed.
    fn result(&self) -> anyhow::Result<()> {
        let Some(first) = &self.first_error else { return Ok(()) };
        let (failed, sent) = (self.failed(), self.ok + self.failed());
        Err(anyhow!("{failed} of {sent} requests failed, the first with {}", status_text(first)))
    }
}

/// What is printed at the end.
struct Report {
    mode: &'static str,
    batch: u32,
    rate: Option<f64>,
    /// Time from the first request to the last answer.
    seconds: f64,
    /// Scored requests per second of sending whose latency was at most `--timeout`.
    goodput: f64,
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
            "goodput_per_s": self.goodput,
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
            let _ = writeln!(text, "  the first: {}", status_text(status));
        }
        if tally.unsent > 0 {
            let unsent = tally.unsent;
            let _ = writeln!(
                text,
                "{unsent} requests were due but not sent, because --outstanding requests had no answer: \
                 the server is too slow for this rate, and the latencies do not include them"
            );
        }
        let (requests, samples) = (tally.ok as f64 / self.seconds, tally.samples as f64 / self.seconds);
        let _ = writeln!(text, "{requests:.1} requests/s, {samples:.0} samples/s, version {}", tally.version);
        if tally.failed() > 0 {
            let _ = writeln!(text, "goodput: {:.1} requests/s were scored within --timeout", self.goodput);
        }
        let from = if self.rate.is_some() { "the due time" } else { "the send" };
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
