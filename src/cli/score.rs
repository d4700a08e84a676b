//! `flechette score`: sends the rows of a data file to a server and writes their scores.
//!
//! A thread reads and encodes, a bounded number of requests is in flight, and answers are taken in the
//! order of the file. So memory does not grow with the file, except by the score and label of each labelled
//! row (8 bytes), which an exact AUC needs. Line n of `--out` is the score of line n of the data (without
//! its header), or `nan` if that line was skipped. With `--logits` the logit follows it, after a tab.

mod summary;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use prost::bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::cli::client::{Client, Target, status_text};
use crate::cli::flags::whole;
use crate::cli::runtime::on_this_thread;
use crate::cli::score_file::ScoreFile;
use crate::cli::training_flags::data_path;
use crate::cli::{InputError, output, print};
use crate::dataset::Reader;
use crate::server::proto::PredictResponse;
use crate::types::RawBatch;
use summary::Summary;

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

/// Scores the file and prints a summary.
///
/// # Errors
/// When the server cannot be reached or refuses a request, or a file cannot be read or written.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let summary = on_this_thread(score(&args)).context("runtime")??;
    print(&if args.json { format!("{}\n", summary.json()) } else { summary.text() })
}

fn create_out(out: &Path) -> anyhow::Result<ScoreFile> {
    Ok(ScoreFile::create("--out", out).map_err(|e| output::refused("--out", out, e))?)
}

async fn score(args: &Args) -> anyhow::Result<Summary> {
    let client = Client::connect(&args.target).await?;
    let batch = client.batch(args.batch, DEFAULT_BATCH)?;
    let reader = client.open(&args.target, &args.file)?;
    if let Some(out) = &args.out {
        output::check("--out", out, [&args.file])?;
    }
    let mut out = args.out.as_deref().map(create_out).transpose()?;
    let start = Instant::now();
    let (sender, mut encoded) = mpsc::channel(READ_AHEAD);
    let reading = std::thread::Builder::new().name("read-data".into()).spawn({
        let (client, shape) = (client.clone(), RequestShape { batch, logits: args.logits });
        move || read(&client, reader, shape, &sender)
    });
    let reading = reading.context("the thread that reads the file")?;
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
        out.write(&[], &[], &vec![0; read.skipped_at_end])?;
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

#[cfg(test)]
mod tests;
