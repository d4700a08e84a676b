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
//! * **Search** (`--find-p99`): open loops at several rates, for the highest rate whose p99 stays within a
//!   limit (`find.rs`).
//!
//! Every request that is sent is counted once: as scored, or under the code of its error.

mod find;
mod report;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use prost::bytes::Bytes;
use tokio::sync::Semaphore;
use tonic::Status;

use crate::cli::client::{Client, Target};
use crate::cli::flags::{number, seconds, whole};
use crate::cli::training_flags::data_path;
use crate::cli::{InputError, print_and_end, runtime};
use crate::server::proto::PredictResponse;
use crate::sync::EvenPoisoned;
use crate::types::RawBatch;
use report::{Report, Tally};

/// Flags of `load`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("pace").required(true).args(["rate", "concurrency", "find_p99"]))]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    /// File with the samples of the requests; - is standard input. With --format synthetic a
    /// description, such as rows=100000,seed=1
    #[arg(value_parser = data_path)]
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
    /// Open loop: searches the highest rate at which every request is scored and p99 is within this time,
    /// such as 20ms. It tries several rates, each for --seconds
    #[arg(long, value_name = "TIME", value_parser = seconds(0.001, MAX_SECONDS))]
    find_p99: Option<Duration>,
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

/// Sends the requests and prints the report.
///
/// # Errors
/// When flags or data are wrong, the server cannot be reached, or any request fails.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = runtime::with_threads(cores, || ()).context("threads")?;
    let driver = runtime.block_on(connect(&args))?;
    if let Some(limit) = args.find_p99 {
        return find::run(limit, &args, |pace, seconds| {
            runtime.block_on(drive(&driver, &args, pace, seconds))
        });
    }
    let pace = args.rate.map_or(Pace::Clients(args.concurrency.unwrap_or(1)), Pace::Rate);
    if args.warmup > 0.0 {
        runtime.block_on(drive(&driver, &args, pace, args.warmup))?;
    }
    let report = runtime.block_on(drive(&driver, &args, pace, args.seconds))?;
    let text = if args.json { format!("{}\n", report.json()) } else { report.text() };
    print_and_end(&text, report.tally.result(args.target.addr()))
}

async fn connect(args: &Args) -> anyhow::Result<Arc<Driver>> {
    let first = Client::connect(&args.target).await?;
    let batch = first.batch(Some(args.batch), 0)?;
    let requests = read(args, &first, batch)?;
    let mut clients = vec![first];
    while clients.len() < args.connections as usize {
        clients.push(clients[0].connect_again(&args.target).await?);
    }
    Ok(Arc::new(Driver {
        clients,
        requests,
        next: AtomicUsize::new(0),
        timeout: Duration::from_secs_f64(args.timeout),
    }))
}

/// When requests are sent.
#[derive(Clone, Copy)]
enum Pace {
    /// Open loop: requests per second.
    Rate(f64),
    /// Closed loop: clients.
    Clients(u32),
}

/// Sends requests for some seconds, and waits for the last answer.
async fn drive(driver: &Arc<Driver>, args: &Args, pace: Pace, seconds: f64) -> anyhow::Result<Report> {
    let start = Instant::now();
    let time = Duration::from_secs_f64(seconds);
    let (mode, rate, tally) = match pace {
        Pace::Rate(rate) => {
            let due = Due { rate, count: (seconds * rate).ceil() as u64 };
            ("open", Some(rate), open_loop(driver, due, args.outstanding).await?)
        }
        Pace::Clients(clients) => ("closed", None, closed_loop(driver, start + time, clients).await?),
    };
    // In an open loop, the last request is sent before the end of the time.
    let elapsed = start.elapsed().as_secs_f64().max(seconds);
    let (batch, timeout) = (args.batch, driver.timeout);
    Ok(Report { mode, batch, rate, asked: seconds, seconds: elapsed, timeout, tally })
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
struct Due {
    /// Requests per second.
    rate: f64,
    count: u64,
}

/// Sends each request when it is due. A thread paces them, because the timers of the runtime are too coarse.
async fn open_loop(driver: &Arc<Driver>, due: Due, outstanding: u32) -> anyhow::Result<Tally> {
    let permits = Arc::new(Semaphore::new(outstanding as usize));
    let tally = Arc::new(Mutex::new(Tally::new()?));
    let unsent = Arc::new(AtomicU64::new(0));
    let pacing = {
        let (runtime, driver, permits) = (tokio::runtime::Handle::current(), driver.clone(), permits.clone());
        let (tally, unsent) = (tally.clone(), unsent.clone());
        move || {
            let start = Instant::now();
            for i in 0..due.count {
                let due = start + Duration::from_secs_f64(i as f64 / due.rate);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                let Ok(permit) = permits.clone().try_acquire_owned() else {
                    unsent.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                let (driver, tally) = (driver.clone(), tally.clone());
                runtime.spawn(async move {
                    let answer = driver.send().await;
                    let took = due.elapsed();
                    tally.lock().even_poisoned().take(answer, took);
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
                tally.lock().even_poisoned().take(answer, took);
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
