//! The program as a child process: `train` to its end, or until it is stopped, and the lines of its log.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;

use crate::harness::program::{Running, output};
use crate::harness::{self, Options};

/// The name of the model.
pub const MODEL: &str = "m";

/// Samples of a step.
pub const BATCH: usize = 128;

/// Synthetic data that does not end during a measurement.
pub const ENDLESS: usize = 1_000_000_000_000;

const TABLES: usize = 26;

/// The exponent of FLECHE's generated data, of requests and of training beside a server.
const SKEW: f64 = 1.2;

/// The same of training at full speed without a server. With it, about 800,000 rows change in 5 seconds.
/// With [`SKEW`] they do in 2, and versions come early, because their rows take the most memory allowed.
const STEADY_SKEW: f64 = 1.3;

/// The settings of the bench, and its directory.
pub struct Bench {
    dir: tempfile::TempDir,
    /// Rows of a table.
    pub rows: usize,
    /// Steps between two of the versions that are trained before they are taken over.
    pub steps: usize,
    /// How many of them.
    pub versions: usize,
    /// The time between two versions.
    pub every: Duration,
    pub rounds: usize,
    /// How long a round trains.
    pub window: Duration,
}

impl std::fmt::Debug for Bench {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rows, steps, versions, every, rounds, window, .. } = self;
        write!(
            f,
            "{TABLES} tables of {rows} rows, {versions} versions of {steps} steps, every {every:?}, \
             {rounds} rounds, windows of {window:?}"
        )
    }
}

impl Bench {
    /// Reads the flags, and writes the `model.toml`.
    pub fn new(options: &Options) -> anyhow::Result<Self> {
        let seconds = |flag, default| Duration::from_secs(options.number(flag, default) as u64);
        let bench = Self {
            dir: tempfile::tempdir()?,
            rows: options.number("--rows", 700_000),
            steps: options.number("--steps", 2800),
            versions: options.number("--versions", 6).max(1),
            every: seconds("--every", 5),
            rounds: options.number("--rounds", 3).max(1),
            window: seconds("--seconds", 12),
        };
        let rows = bench.rows;
        let line = format!(
            "init --dataset synthetic --arch dlrm --dim 16 --rows {rows} --tables {TABLES} --dense 13"
        );
        fs::write(bench.path("model.toml"), output(program(&line))?)?;
        Ok(bench)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The rows of all tables.
    pub fn all_rows(&self) -> f64 {
        (self.rows * TABLES) as f64
    }

    /// A directory of models whose only version is version 1 of another one. The files are linked.
    pub fn first_version(&self, name: &str) -> anyhow::Result<PathBuf> {
        let from = self.base()?.join(MODEL).join("1");
        let models = self.path(name);
        link(&from, &models.join(MODEL).join("1"))?;
        Ok(models)
    }

    /// The directory of a model that was trained for a few steps, as version 1.
    fn base(&self) -> anyhow::Result<PathBuf> {
        let models = self.path("base");
        if !models.exists() {
            let config = self.path("model.toml");
            let data = data(BATCH * 8, 1);
            self.train(&models, &format!("--model-config {} --data {data}", config.display()))?;
        }
        Ok(models)
    }

    /// Trains to the end of the data.
    pub fn train(&self, models: &Path, flags: &str) -> anyhow::Result<Trained> {
        let mut command = train(models, flags);
        let output = command.output()?;
        let log = String::from_utf8(output.stderr)?;
        anyhow::ensure!(output.status.success(), "{command:?}: {log}");
        log.lines().for_each(|line| show_trouble("train", line));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let samples_per_s = report["samples_per_s"].as_f64().context("samples_per_s")?;
        let published = log.lines().filter_map(Published::read).collect();
        Ok(Trained { samples_per_s, published })
    }
}

/// A `train` that has ended.
pub struct Trained {
    pub samples_per_s: f64,
    pub published: Vec<Published>,
}

/// A line of the log about a delta.
pub struct Published {
    pub steps: f64,
    pub rows: f64,
    pub pause_ms: f64,
    pub took_ms: f64,
}

impl Published {
    /// `None` for other lines. A run's first version has all rows, unless it continues from a version;
    /// training waits for it, so it is left out.
    pub fn read(line: &str) -> Option<Self> {
        let [steps, rows, pause_ms, took_ms] =
            ["steps=", "rows=", "pause_ms=", "took_ms="].map(|key| number(line, key));
        let delta = line.contains("published") && line.contains("kind=\"delta\"");
        delta.then_some(Self { steps: steps?, rows: rows?, pause_ms: pause_ms?, took_ms: took_ms? })
    }
}

/// Starts a `train`, which writes its log to a file.
pub fn start_train(models: &Path, flags: &str, log: &Path) -> anyhow::Result<Running> {
    let mut command = train(models, flags);
    let child = command.stdout(Stdio::null()).stderr(File::create(log)?).spawn()?;
    Ok(Running(child))
}

fn train(models: &Path, flags: &str) -> Command {
    program(&format!(
        "train --format synthetic --batch {BATCH} --models {} --name {MODEL} --json {flags}",
        models.display()
    ))
}

/// The program with a command line. Every version that continues another one is a delta.
pub fn program(line: &str) -> Command {
    let mut command = harness::program::program(line);
    command.env("FLECHETTE_VERSIONS_COMPACT_AT", "100");
    command
}

/// Synthetic samples, as the name of their "file". Requests and training data have one distribution.
pub fn data(samples: usize, seed: usize) -> String {
    generated(samples, seed, SKEW)
}

/// The same with fewer distinct ids.
pub fn steady_data(samples: usize, seed: usize) -> String {
    generated(samples, seed, STEADY_SKEW)
}

fn generated(samples: usize, seed: usize, skew: f64) -> String {
    format!("rows={samples},seed={seed},skew={skew}")
}

/// The number after `key` in a line of the log.
pub fn number(line: &str, key: &str) -> Option<f64> {
    line.split_once(&format!(" {key}"))?.1.split(' ').next()?.parse().ok()
}

/// Repeats warnings and errors, which no run should have.
pub fn show_trouble(who: &str, line: &str) {
    if ["WARN", "ERROR", "panicked"].iter().any(|word| line.contains(word)) {
        eprintln!("{who}: {line}");
    }
}

/// Links all files of a directory into a new one.
fn link(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, from) = entry.map(|entry| (entry.file_name(), entry.path()))?;
        let to = to.join(entry);
        if from.is_dir() { link(&from, &to)? } else { fs::hard_link(&from, &to)? }
    }
    Ok(())
}
