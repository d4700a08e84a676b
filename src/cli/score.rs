//! `flechette score`: sends the rows of a data file to a server and writes their scores.
//!
//! A thread reads and encodes, a bounded number of requests is in flight, and answers are taken in the
//! order of the file. So memory does not grow with the file, except by the score and label of each labelled
//! row (8 bytes), which an exact AUC needs. Line n of `--out` is the score of line n of the data (without
//! its header), or `nan` if that line was skipped. With `--logits` the logit follows it, after a tab.

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

use crate::cli::client::{Client, Target, status_text};
use crate::cli::flags::whole;
use crate::cli::training::data_path;
use crate::cli::{InputError, or_dash, output, print};
use crate::dataset::Reader;
use crate::server::proto::PredictResponse;
use crate::trainer::eval::Quality;
use crate::types::RawBatch;

/// Flags of `score`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    /// File with the rows to score; - is standard input
    #[arg(value_parser = data_path)]
    file: PathBuf,
    /// Samples per request [default: 1024, or the server's limit if that is less]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(1, 1 << 20))]
    batch: Option<u32>,
    /// File for the scores: one per line of the data, nan for a skipped line
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Also writes the logit of each score to the file, after a tab
    #[arg(long, requires = "out")]
    logits: bool,
    /// Prints one line of JSON instead of text
    #[arg(long)]
    json: bool,
}

const DEFAULT_BATCH: usize = 1024;
/// Most requests without an answer.
const IN_FLIGHT: usize = 8;
/// Most encoded requests that wait to be sent.
const READ_AHEAD: usize = 2;
/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most times a request is sent while the server's queue is full, and the waits between two tries.
const TRIES: u32 = 12;
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Significant digits of recorded latencies.
const DIGITS: u8 = 3;

/// Scores the file and prints a summary.
///
/// # Errors
/// When the server cannot be reached or refuses a request, or a file cannot be read or written.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    let summary = runtime.block_on(score(&args))?;
    print(&if args.json { format!("{}\n", summary.json()) } else { summary.text() })
}

async fn score(args: &Args) -> anyhow::Result<Summary> {
    let client = Client::connect(&args.target).await?;
    let batch = client.batch(args.batch, DEFAULT_BATCH)?;
    let reader = client.open(&args.target, &args.file)?;
    if let Some(out) = &args.out {
        output::check("--out", out, [&args.file])?;
    }
    let mut out = args.out.as_deref().map(Output::create).transpose()?;
    let start = Instant::now();
    let (sender, mut encoded) = mpsc::channel(READ_AHEAD);
    let reading = std::thread::spawn({
        let (client, shape) = (client.clone(), RequestShape { batch, logits: args.logits });
        move || read(&client, reader, shape, &sender)
    });
    let mut summary = Summary::new()?;
    let mut in_flight = VecDeque::new();
    loop {
        let next = if in_flight.len() < IN_FLIGHT { encoded.recv().await } else { None };
        if let Some(next) = next {
            in_flight.push_back(send(&client, next?));
        } else if let Some(sent) = in_flight.pop_front() {
            let answer = sent.answer().await.with_context(|| args.target.addr().to_owned())?;
            summary.take(answer, out.as_mut())?;
        } else {
            break;
        }
    }
    summary.seconds = start.elapsed().as_secs_f64();
    let read = reading.join().map_err(|_| anyhow!("the reading thread panicked"))?;
    summary.skipped = read.skipped;
    if summary.rows == 0 {
        return Err(InputError(anyhow!("{}: no samples", args.file.display())).into());
    }
    if let Some(mut out) = out {
        out.write(&PredictResponse::default(), &vec![0; read.skipped_at_end])?;
        out.finish()?;
    }
    Ok(summary)
}

/// An encoded request, and the place of its samples in the file.
struct Encoded {
    message: Bytes,
    rows: Rows,
}

/// What the file has for one request: samples, their labels, and skipped lines.
struct Rows {
    samples: usize,
    labels: Option<Vec<f32>>,
    /// For each skipped line: the number of the request's samples before it.
    skips: Vec<usize>,
}

/// How many lines have no score.
struct Read {
    skipped: u64,
    /// Lines that were skipped after the last sample.
    skipped_at_end: usize,
}

/// What each request has.
#[derive(Clone, Copy)]
struct RequestShape {
    /// Samples of a request.
    batch: usize,
    logits: bool,
}

/// Reads and encodes until the file ends or fails, or the receiver is gone.
fn read(
    client: &Client,
    mut reader: Box<dyn Reader + Send>,
    shape: RequestShape,
    sender: &mpsc::Sender<anyhow::Result<Encoded>>,
) -> Read {
    let mut raw = RawBatch::default();
    let mut skipped_at_end = 0;
    let mut next = || -> anyhow::Result<Option<Encoded>> {
        let samples = reader.read(shape.batch, &mut raw)?;
        let skips = reader.skips().to_vec();
        if samples == 0 {
            skipped_at_end = skips.len();
            return Ok(None);
        }
        let rows = Rows { samples, labels: raw.labels.clone(), skips };
        Ok(Some(Encoded { message: client.encode(&raw, shape.logits)?, rows }))
    };
    while let Some(encoded) = next().transpose() {
        let failed = encoded.is_err();
        if sender.blocking_send(encoded).is_err() || failed {
            break;
        }
    }
    Read { skipped: reader.skipped(), skipped_at_end }
}

/// A request in flight.
struct Sent {
    rows: Rows,
    answer: JoinHandle<Result<(PredictResponse, Duration), Status>>,
}

/// The answer to a request.
struct Answer {
    response: PredictResponse,
    rows: Rows,
    took: Duration,
}

fn send(client: &Client, encoded: Encoded) -> Sent {
    let Encoded { message, rows } = encoded;
    let client = client.clone();
    let answer = tokio::spawn(async move {
        let start = Instant::now();
        let response = predict_with_retries(&client, message).await?;
        Ok((response, start.elapsed()))
    });
    Sent { rows, answer }
}

/// Repeats a request while the server is too busy, with growing waits. The request is within the limits of
/// one request, so `RESOURCE_EXHAUSTED` means a full queue or too many calls in flight.
async fn predict_with_retries(client: &Client, message: Bytes) -> Result<PredictResponse, Status> {
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
        let (response, took) = answer.map_err(|status| anyhow!(status_text(&status)))?;
        let (expected, got) = (self.rows.samples, response.scores.len());
        if expected != got {
            return Err(anyhow!("expected {expected} scores, got {got}"));
        }
        Ok(Answer { response, rows: self.rows, took })
    }
}

/// What is printed at the end.
struct Summary {
    rows: u64,
    skipped: u64,
    seconds: f64,
    requests: u64,
    /// Scores and labels; `None` once a row had no label.
    labelled: Option<(Vec<f32>, Vec<f32>)>,
    /// The versions that computed scores.
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
        let Answer { response, rows, took } = answer;
        if let Some(out) = out {
            out.write(&response, &rows.skips)?;
        }
        self.rows += response.scores.len() as u64;
        self.requests += 1;
        match (&mut self.labelled, rows.labels) {
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
        // Writing to a string cannot fail.
        if let Some(quality) = self.quality() {
            let _ = writeln!(
                text,
                "AUC {}, log loss {:.6}, normalized entropy {}",
                or_dash(quality.auc, 6),
                quality.log_loss,
                or_dash(quality.normalized_entropy, 6),
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

/// The file of scores. It is written under a temporary name and renamed when it is complete. A pipe or a
/// terminal is written directly.
struct Output {
    path: PathBuf,
    temporary: Option<PathBuf>,
    file: BufWriter<File>,
}

impl Output {
    fn create(path: &Path) -> anyhow::Result<Self> {
        let wrong = |e: io::Error| InputError(anyhow!("--out: {}: {e}", path.display()));
        if path.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            let file = File::options().write(true).open(path).map_err(wrong)?;
            return Ok(Self { path: path.to_owned(), temporary: None, file: BufWriter::new(file) });
        }
        // A link stays a link.
        let path = if path.is_symlink() { path.canonicalize().map_err(wrong)? } else { path.to_owned() };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let file = BufWriter::new(File::create(&temporary).map_err(wrong)?);
        Ok(Self { path, temporary: Some(temporary), file })
    }

    /// Writes scores one per line, with their logits if there are any, and a `nan` for each skipped line.
    /// `skips` has, for each skipped line, the number of scores before it.
    fn write(
        &mut self,
        PredictResponse { scores, logits, .. }: &PredictResponse,
        skips: &[usize],
    ) -> anyhow::Result<()> {
        let mut skips = skips.iter().peekable();
        let mut write = || -> io::Result<()> {
            for before in 0..=scores.len() {
                while skips.next_if(|&&skip| skip == before).is_some() {
                    writeln!(self.file, "nan")?;
                }
                match (scores.get(before), logits.get(before)) {
                    (Some(score), Some(logit)) => writeln!(self.file, "{score}\t{logit}")?,
                    (Some(score), None) => writeln!(self.file, "{score}")?,
                    (None, _) => {}
                }
            }
            Ok(())
        };
        write().map_err(|error| output::unwritten("--out", &self.path, error))
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let mut finish = || -> io::Result<()> {
            self.file.flush()?;
            if let Some(temporary) = &self.temporary {
                fs::rename(temporary, &self.path)?;
                self.temporary = None;
            }
            Ok(())
        };
        let finished = finish();
        finished.map_err(|error| output::unwritten("--out", &self.path, error))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // The error that left the file incomplete is reported, so an error of this removal is not.
            let _ = fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests;
