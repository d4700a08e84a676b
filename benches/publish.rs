//! What publishing costs, with the real program: `train --publish-every` in one process, `serve` in another.
//!
//! - Training: samples per second with versions published at an interval, compared with none; the longest
//!   wait of a step for each version (pause), compared with the mean time of a step.
//! - Serving: p99 at half of the capacity while deltas of about a million rows appear, compared with p99
//!   before; the share of lookups that hit the cache before and after; the time from the rename of a version
//!   to the first metric that says it is served. The deltas were trained before, and are renamed into place
//!   one by one.
//!
//! `--rows N` per table (100,000; 26 tables of dim 16), `--steps N` between two versions (400, of 128
//! samples), `--versions N` (5), `--every S` seconds between versions (5), `--rounds N` of training (3),
//! `--json`.

mod harness;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use harness::{Options, Sorted};
use serde_json::{Value, json};

const MODEL: &str = "m";
const BATCH: usize = 128;

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    let bench = Bench::new(&options)?;
    let (training, serving) = (bench.training()?, bench.serving()?);
    let result = json!({
        "bench": "publish", "place": harness::place(), "load": harness::load(), "rows": bench.rows,
        "training": training, "serving": serving,
    });
    if options.value("--json").is_some() || std::env::args().any(|arg| arg == "--json") {
        println!("{result}");
    } else {
        println!("{result:#}");
    }
    Ok(())
}

struct Bench {
    dir: tempfile::TempDir,
    rows: usize,
    steps: usize,
    versions: usize,
    every: Duration,
    rounds: usize,
}

impl Bench {
    fn new(options: &Options) -> anyhow::Result<Self> {
        let bench = Self {
            dir: tempfile::tempdir()?,
            rows: options.number("--rows", 100_000),
            steps: options.number("--steps", 400),
            versions: options.number("--versions", 5),
            every: Duration::from_secs(options.number("--every", 5) as u64),
            rounds: options.number("--rounds", 3),
        };
        let rows = bench.rows;
        let flags =
            format!("init --dataset synthetic --arch dlrm --dim 16 --rows {rows} --tables 26 --dense 13");
        let output = program(&flags).output()?;
        anyhow::ensure!(output.status.success(), "init: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(bench.path("model.toml"), output.stdout)?;
        Ok(bench)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Trains, and returns the JSON at the end and the lines of the log.
    fn train(&self, models: &str, samples: usize, more: &str) -> anyhow::Result<(Value, String)> {
        let (config, models) = (self.path("model.toml"), self.path(models));
        let line = format!(
            "train --model-config {} --format synthetic --data rows={samples},seed=1,skew=uniform \
             --batch {BATCH} --models {} --name {MODEL} --json {more}",
            config.display(),
            models.display()
        );
        // Every version but the first is a delta.
        let output = program(&line).env("FLECHETTE_VERSIONS_COMPACT_AT", "100").output()?;
        let log = String::from_utf8(output.stderr)?;
        anyhow::ensure!(output.status.success(), "{line}: {log}");
        Ok((serde_json::from_slice(&output.stdout)?, log))
    }

    fn training(&self) -> anyhow::Result<Value> {
        let samples = BATCH * self.steps * self.versions;
        let (mut ratios, mut pauses, mut took, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 0..self.rounds {
            let rate = |json: &Value| json["samples_per_s"].as_f64().unwrap_or(f64::NAN);
            let every = format!("--publish-every {}s", self.every.as_secs());
            let with = || self.train(&format!("with-{round}"), samples, &every);
            let without = || self.train(&format!("without-{round}"), samples, "");
            // The order changes, because the machine's speed drifts.
            let ((with, log), (without, _)) = if round % 2 == 0 {
                let first = with()?;
                (first, without()?)
            } else {
                let first = without()?;
                (with()?, first)
            };
            // The first version has all rows, and training waits for it by design.
            for line in log.lines().filter(|line| line.contains("kind=\"delta\"")) {
                pauses.push(number(line, "pause_ms=")?);
                took.push(number(line, "took_ms=")?);
            }
            ratios.push(rate(&with) / rate(&without));
            rates.push(rate(&without));
            for name in ["with", "without"] {
                fs::remove_dir_all(self.path(&format!("{name}-{round}")))?;
            }
        }
        let step_ms = 1e3 * BATCH as f64 / Sorted::of(rates.into_iter()).at(0.5);
        let (pauses, took) = (Sorted::of(pauses.into_iter()), Sorted::of(took.into_iter()));
        let ratios = Sorted::of(ratios.into_iter());
        Ok(json!({
            "throughput_ratio": [ratios.at(0.0), ratios.at(0.5), ratios.at(1.0)], "step_ms": step_ms,
            "pause_ms_p50": pauses.at(0.5), "pause_ms_p99": pauses.at(0.99),
            "pause_in_steps_p99": pauses.at(0.99) / step_ms,
            "cut_to_published_ms": [took.at(0.5), took.at(0.99)],
        }))
    }

    fn serving(&self) -> anyhow::Result<Value> {
        let samples = BATCH * self.steps * (self.versions + 1);
        self.train("models", samples, &format!("--publish-every {}steps", self.steps))?;
        let model = self.path("models").join(MODEL);
        let aside = self.path("aside");
        fs::create_dir(&aside)?;
        let mut later = Vec::new();
        for version in 2.. {
            let from = model.join(version.to_string());
            if !from.is_dir() {
                break;
            }
            let to = aside.join(version.to_string());
            fs::rename(from, &to)?;
            later.push(to);
        }
        anyhow::ensure!(!later.is_empty(), "training published one version only");
        let server = Server::start(&self.path("models"))?;
        let closed = server.load("--concurrency 8 --seconds 5 --warmup 2")?;
        let rate = closed["requests_per_s"].as_f64().context("requests_per_s")? / 2.0;
        let seconds = self.every.as_secs() * later.len() as u64;
        let flags = format!("--rate {rate:.0} --seconds {seconds}");
        let (before, hits_before) = server.hits(|| server.load(&flags))?;
        let (during, hits_after) = server.hits(|| {
            std::thread::scope(|scope| {
                let load = scope.spawn(|| server.load(&flags));
                let fresh = later.iter().map(|from| {
                    let begun = Instant::now();
                    let version = from.file_name().and_then(|name| name.to_str()).context("version")?;
                    fs::rename(from, model.join(version))?;
                    let fresh = server.serves(version.parse()?)?;
                    std::thread::sleep(self.every.saturating_sub(begun.elapsed()));
                    Ok(fresh.as_secs_f64())
                });
                let fresh = fresh.collect::<anyhow::Result<Vec<f64>>>()?;
                let load = load.join().map_err(|_| anyhow::anyhow!("load panicked"))??;
                Ok((load, fresh))
            })
        })?;
        let (during, fresh) = during;
        let p99 =
            |json: &Value| json["latency_us"]["p99"].as_f64().or(json["p99_us"].as_f64()).unwrap_or(f64::NAN);
        let fresh = Sorted::of(fresh.into_iter());
        Ok(json!({
            "rate": rate, "p99_us_at_rest": p99(&before), "p99_us_while_published": p99(&during),
            "p99_ratio": p99(&during) / p99(&before), "hit_rate_before": hits_before,
            "hit_rate_while_published": hits_after,
            "renamed_to_served_s": [fresh.at(0.5), fresh.at(1.0)], "versions": later.len(),
            "at_rest": before, "while_published": during,
        }))
    }
}

/// The program with a command line.
fn program(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flechette"));
    command.args(line.split_whitespace());
    command
}

/// The number after `key` in a line of the log.
fn number(line: &str, key: &str) -> anyhow::Result<f64> {
    let text = line.split_once(key).context("the line has no such number")?.1;
    Ok(text.split(' ').next().unwrap_or_default().parse()?)
}

/// `serve`, killed when dropped.
struct Server {
    child: Child,
    grpc: SocketAddr,
    http: SocketAddr,
}

impl Server {
    fn start(models: &Path) -> anyhow::Result<Self> {
        let line = format!(
            "serve --models {} --grpc 127.0.0.1:0 --http 127.0.0.1:0 --cache-mode on --cache-fraction 0.1",
            models.display()
        );
        let mut child = program(&line).stderr(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(child.stderr.take().context("stderr")?).lines();
        let line = lines.by_ref().find(|line| line.as_ref().is_ok_and(|line| line.contains("grpc=")));
        let line = line.context("serve has ended")??;
        let address = |key: &str| -> anyhow::Result<SocketAddr> {
            let text = line.split_once(key).context("address")?.1;
            Ok(text.split(' ').next().unwrap_or_default().parse()?)
        };
        let (grpc, http) = (address("grpc=")?, address("http=")?);
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self { child, grpc, http })
    }

    fn load(&self, flags: &str) -> anyhow::Result<Value> {
        let line = format!(
            "load --addr http://{} --model {MODEL} --format synthetic --batch 16 --json {flags} \
             rows=20000,seed=9,skew=medium",
            self.grpc
        );
        let output = program(&line).output()?;
        anyhow::ensure!(output.status.success(), "load: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn metrics(&self) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.http)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    }

    /// The sum of a metric over its labels.
    fn sum(&self, name: &str) -> anyhow::Result<f64> {
        let page = self.metrics()?;
        let values = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        Ok(values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// Runs `work`, and also returns the share of its lookups that hit the cache.
    fn hits<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, f64)> {
        let counts = || {
            anyhow::Ok((self.sum("flechette_cache_hits_total")?, self.sum("flechette_cache_misses_total")?))
        };
        let before = counts()?;
        let done = work()?;
        let after = counts()?;
        let (hits, misses) = (after.0 - before.0, after.1 - before.1);
        Ok((done, hits / (hits + misses)))
    }

    /// How long it takes until this version is served.
    fn serves(&self, version: u64) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        while self.sum("flechette_model_version")? != version as f64 {
            anyhow::ensure!(begun.elapsed() < Duration::from_secs(60), "version {version} is not served");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(begun.elapsed())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
