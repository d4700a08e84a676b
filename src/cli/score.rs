//! `flechette score`: sends the rows of a data file to a server and writes their scores.
//!
//! A thread reads and encodes; a bounded number of requests is in flight; answers are taken in the
//! order of the file. Memory does not grow with the file, save by the 8 bytes that each labelled row
//! costs, because an exact AUC needs all scores.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use hdrhistogram::Histogram;
use prost::bytes::Bytes;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::cli::InputError;
use crate::cli::client::{Client, Target, told};
use crate::dataset::{Format, Labels, Reader};
use crate::server::proto::PredictResponse;
use crate::trainer::eval::Quality;
use crate::types::RawBatch;

/// Flags of `score`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    #[arg(long, value_name = "F", help = format!("Format of the data: {}", Format::names()))]
    format: Format,
    /// The file has no label column: a line of criteo-tsv has 39 fields
    #[arg(long)]
    unlabelled: bool,
    /// The rows to score
    file: PathBuf,
    /// Samples a request [default: 1024, or the server's limit if that is less]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Writes the scores here, one a line
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Prints one line of JSON and nothing else
    #[arg(long)]
    json: bool,
}

const DEFAULT_BATCH: usize = 1024;
/// Requests that may await their answer.
const IN_FLIGHT: usize = 8;
/// Encoded requests that may wait to be sent.
const READ_AHEAD: usize = 2;
/// How long one request may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often a full queue is tried, and how long the first and the longest wait between tries are.
const TRIES: u32 = 12;
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Decimal digits to which latencies are kept.
const DIGITS: u8 = 3;

/// Scores the file.
///
/// # Errors
/// A server that is not reached or that refuses, and a file that cannot be read or written.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    let summary = runtime.block_on(score(&args))?;
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", summary.json())?;
    } else {
        write!(out, "{}", summary.text())?;
    }
    Ok(out.flush()?)
}

async fn score(args: &Args) -> anyhow::Result<Summary> {
    let client = Client::connect(&args.target).await?;
    let batch = client.batch(args.batch, DEFAULT_BATCH)?;
    let reader = client.open(args.format, &args.file, Labels::unless(args.unlabelled))?;
    let mut out = args.out.as_deref().map(Output::create).transpose()?;
    let start = Instant::now();
    let (sender, mut encoded) = mpsc::channel(READ_AHEAD);
    let reading = std::thread::spawn({
        let client = client.clone();
        move || read(&client, reader, batch, &sender)
    });
    let mut summary = Summary::new()?;
    let mut in_flight = VecDeque::new();
    loop {
        let next = if in_flight.len() < IN_FLIGHT { encoded.recv().await } else { None };
        if let Some(next) = next {
            in_flight.push_back(send(&client, next?));
        } else if let Some(sent) = in_flight.pop_front() {
            summary.take(sent.answer().await?, out.as_mut())?;
        } else {
            break;
        }
    }
    summary.seconds = start.elapsed().as_secs_f64();
    summary.skipped = reading.join().map_err(|_| anyhow!("the reading thread panicked"))?;
    if summary.rows == 0 {
        return Err(InputError(anyhow!("{}: no samples", args.file.display())).into());
    }
    if let Some(out) = out {
        out.finish()?;
    }
    Ok(summary)
}

/// A request and the labels of its samples.
struct Encoded {
    samples: usize,
    message: Bytes,
    labels: Option<Vec<f32>>,
}

/// Reads and encodes until the file ends, fails, or nobody takes any more. Gives the lines skipped.
fn read(
    client: &Client,
    mut reader: Box<dyn Reader + Send>,
    batch: usize,
    sender: &mpsc::Sender<anyhow::Result<Encoded>>,
) -> u64 {
    let mut raw = RawBatch::default();
    let mut next = || -> anyhow::Result<Option<Encoded>> {
        let samples = reader.read(batch, &mut raw)?;
        if samples == 0 {
            return Ok(None);
        }
        Ok(Some(Encoded { samples, message: client.encode(&raw)?, labels: raw.labels.clone() }))
    };
    while let Some(encoded) = next().transpose() {
        let failed = encoded.is_err();
        if sender.blocking_send(encoded).is_err() || failed {
            break;
        }
    }
    reader.skipped()
}

/// A request on its way.
struct Sent {
    samples: usize,
    labels: Option<Vec<f32>>,
    answer: JoinHandle<Result<(PredictResponse, Duration), Status>>,
}

/// What came back for a request.
struct Answer {
    response: PredictResponse,
    labels: Option<Vec<f32>>,
    took: Duration,
}

fn send(client: &Client, encoded: Encoded) -> Sent {
    let Encoded { samples, message, labels } = encoded;
    let client = client.clone();
    let answer = tokio::spawn(async move {
        let start = Instant::now();
        let response = predict_patiently(&client, message).await?;
        Ok((response, start.elapsed()))
    });
    Sent { samples, labels, answer }
}

/// Asks again, ever more slowly, while the server's queue is full. The request is within the limits
/// that the server told, so nothing else of it can be exhausted.
async fn predict_patiently(client: &Client, message: Bytes) -> Result<PredictResponse, Status> {
    let mut wait = FIRST_WAIT;
    for _ in 1..TRIES {
        match client.predict(message.clone(), TIMEOUT).await {
            Err(status) if status.code() == Code::ResourceExhausted => {}
            other => return other,
        }
        tokio::time::sleep(wait).await;
        wait = (2 * wait).min(LONGEST_WAIT);
    }
    client.predict(message, TIMEOUT).await
}

impl Sent {
    async fn answer(self) -> anyhow::Result<Answer> {
        let answer = self.answer.await.context("the sending task")?;
        let (response, took) = answer.map_err(|status| anyhow!("server: {}", told(&status)))?;
        let (expected, got) = (self.samples, response.scores.len());
        if expected != got {
            return Err(anyhow!("server: expected {expected} scores, got {got}"));
        }
        Ok(Answer { response, labels: self.labels, took })
    }
}

/// Everything that is told at the end.
struct Summary {
    rows: u64,
    skipped: u64,
    seconds: f64,
    requests: u64,
    /// Scores and labels, while every row has a label.
    labelled: Option<(Vec<f32>, Vec<f32>)>,
    /// The versions that scored.
    versions: Vec<u64>,
    absent: BTreeMap<String, u64>,
    latency_us: Histogram<u64>,
}

impl Summary {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            rows: 0,
            skipped: 0,
            seconds: 0.0,
            requests: 0,
            labelled: Some((Vec::new(), Vec::new())),
            versions: Vec::new(),
            absent: BTreeMap::new(),
            latency_us: Histogram::new(DIGITS)?,
        })
    }

    fn take(&mut self, answer: Answer, out: Option<&mut Output>) -> anyhow::Result<()> {
        let Answer { response, labels, took } = answer;
        if let Some(out) = out {
            out.write(&response.scores)?;
        }
        self.rows += response.scores.len() as u64;
        self.requests += 1;
        match (&mut self.labelled, labels) {
            (Some((scores, known)), Some(labels)) => {
                scores.extend_from_slice(&response.scores);
                known.extend_from_slice(&labels);
            }
            _ => self.labelled = None,
        }
        if !self.versions.contains(&response.version) {
            self.versions.push(response.version);
        }
        for absent in response.absent {
            *self.absent.entry(absent.feature).or_default() += absent.count;
        }
        self.latency_us.record(took.as_micros() as u64)?;
        Ok(())
    }

    fn quality(&self) -> Option<Quality> {
        self.labelled.as_ref().map(|(scores, labels)| Quality::of(scores, labels))
    }

    fn json(&self) -> serde_json::Value {
        let quality = self.quality();
        let us = |quantile| self.latency_us.value_at_quantile(quantile);
        json!({
            "rows": self.rows,
            "skipped": self.skipped,
            "auc": quality.and_then(|q| q.auc),
            "logloss": quality.map(|q| q.log_loss),
            "normalized_entropy": quality.and_then(|q| q.normalized_entropy),
            "infinite_losses": quality.map(|q| q.infinite),
            "samples_per_s": self.rows as f64 / self.seconds,
            "seconds": self.seconds,
            "requests": self.requests,
            "version": self.versions.last(),
            "versions": self.versions,
            "absent": self.absent.values().sum::<u64>(),
            "absent_by_feature": self.absent,
            "p50_us": us(0.5),
            "p90_us": us(0.9),
            "p99_us": us(0.99),
            "max_us": self.latency_us.max(),
        })
    }

    fn text(&self) -> String {
        let versions: Vec<String> = self.versions.iter().map(u64::to_string).collect();
        let mut text = format!(
            "{} rows, {:.0} rows/s, version {}, {} lines skipped\n",
            self.rows,
            self.rows as f64 / self.seconds,
            versions.join(" and "),
            self.skipped,
        );
        let shown = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.6}"));
        // Writing to a string cannot fail.
        if let Some(quality) = self.quality() {
            let _ = writeln!(
                text,
                "AUC {}, log loss {:.6}, normalized entropy {}",
                shown(quality.auc),
                quality.log_loss,
                shown(quality.normalized_entropy),
            );
            if quality.infinite > 0 {
                let count = quality.infinite;
                let _ = writeln!(
                    text,
                    "{count} rows have an infinite loss: a score of exactly 0 or 1, and the other label"
                );
            }
        }
        let us = |quantile| self.latency_us.value_at_quantile(quantile);
        let _ = writeln!(
            text,
            "{} requests, {IN_FLIGHT} in flight: p50 {} us, p90 {} us, p99 {} us, max {} us",
            self.requests,
            us(0.5),
            us(0.9),
            us(0.99),
            self.latency_us.max(),
        );
        let absent: u64 = self.absent.values().sum();
        let _ =
            writeln!(text, "{absent} absent ids{}", if absent > 0 { ", which took a default:" } else { "" });
        for (feature, count) in &self.absent {
            let _ = writeln!(text, "  {feature} {count}");
        }
        text
    }
}

/// The file of scores: written beside its name and renamed when it is whole. What is there and no
/// regular file (a pipe, a terminal) is written straight.
struct Output {
    path: PathBuf,
    atomic_write: Option<PathBuf>,
    file: BufWriter<File>,
}

impl Output {
    fn create(path: &Path) -> anyhow::Result<Self> {
        let wrong = |e: io::Error| InputError(anyhow!("--out: {}: {e}", path.display()));
        if path.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            let file = File::options().write(true).open(path).map_err(wrong)?;
            return Ok(Self { path: path.to_owned(), atomic_write: None, file: BufWriter::new(file) });
        }
        let name = path.file_name().filter(|_| !path.is_dir());
        let name = name.ok_or_else(|| InputError(anyhow!("--out: {}: not a file", path.display())))?;
        let atomic_write =
            path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
        let file = BufWriter::new(File::create(&atomic_write).map_err(wrong)?);
        Ok(Self { path: path.to_owned(), atomic_write: Some(atomic_write), file })
    }

    fn write(&mut self, scores: &[f32]) -> anyhow::Result<()> {
        let written = scores.iter().try_for_each(|score| writeln!(self.file, "{score}"));
        written.with_context(|| format!("--out: {}", self.path.display()))
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let mut finish = || -> io::Result<()> {
            self.file.flush()?;
            if let Some(atomic_write) = &self.atomic_write {
                fs::rename(atomic_write, &self.path)?;
                self.atomic_write = None;
            }
            Ok(())
        };
        finish().with_context(|| format!("--out: {}", self.path.display()))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(atomic_write) = &self.atomic_write {
            // Unfinished; there is nobody left to tell when it cannot be removed.
            let _ = fs::remove_file(atomic_write);
        }
    }
}

#[cfg(test)]
mod tests;
