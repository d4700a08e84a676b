//! `flechette demo`: the whole product in half a minute.
//!
//! It generates click logs in the format of Criteo, and then prints and runs the commands that a user would
//! run. The server runs in this process and caches 10 % of the rows.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use clap::Parser;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::cli::flags::whole;
use crate::cli::serve::{self, Serving, Watching};
use crate::cli::train::interrupt;
use crate::cli::{Cli, InputError, print, run as run_cli};
use crate::config::{Config, Flags};
use crate::dataset::synthetic::write_criteo_tsv;
use crate::engine::Engine;
use crate::schema::preset::{self, ArchKind};
use crate::server::{ServerError, terminated};

/// Flags of `demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Stops the server and exits at the end; without this flag the server runs until Ctrl-C
    #[arg(long)]
    once: bool,
    /// Rows to train on
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = whole::<u64>(1000, 100_000_000))]
    rows: u64,
    /// Directory for data and model, which are kept [default: a temporary directory that is removed]
    #[arg(long, value_name = "DIR", visible_alias = "keep")]
    dir: Option<PathBuf>,
}

const MODEL: &str = "demo";
/// What the demo writes into its directory.
const FILES: [&str; 5] = ["train.tsv", "test.tsv", "model.toml", "models", "scores.txt"];
/// A file in each directory of a demo.
const MARK: &str = ".flechette-demo";
const TEST_ROWS: u64 = 20_000;
/// Rows of each of the 26 tables.
const TABLE_ROWS: u64 = 50_000;
const DIM: usize = 16;
const SHOWN_SCORES: usize = 5;

/// Runs the demo.
///
/// # Errors
/// When the directory cannot be written, or a command fails.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let kept = args.dir.is_some();
    let dir = args
        .dir
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("flechette-demo-{}", std::process::id())));
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    claim(&dir)?;
    let shown = show(&args, &dir);
    if !kept {
        fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    }
    shown
}

/// Marks the directory as one of the demo, so that it replaces no files of anybody else.
fn claim(dir: &Path) -> anyhow::Result<()> {
    let mark = dir.join(MARK);
    let taken = FILES.iter().map(|name| dir.join(name)).find(|path| path.exists());
    if let Some(path) = taken.filter(|_| !mark.exists()) {
        let why = "exists already, and is not of a demo";
        return Err(InputError(anyhow!("--dir: {} {why}", path.display())).into());
    }
    fs::write(&mark, "").with_context(|| mark.display().to_string())
}

fn show(args: &Args, dir: &Path) -> anyhow::Result<()> {
    let [train, test, schema, models, scores] = FILES.map(|name| dir.join(name));
    say(&format!("generating {} + {TEST_ROWS} rows of click logs in {}", args.rows, dir.display()))?;
    // Two seeds of the same distribution: one to train on, one to test on.
    write_data(&train, args.rows, 1)?;
    write_data(&test, TEST_ROWS, 2)?;

    let init = format!("flechette init --dataset criteo --arch dlrm --dim {DIM} --rows {TABLE_ROWS}");
    say(&format!("{init} > {}", schema.display()))?;
    fs::write(&schema, preset::criteo(ArchKind::Dlrm, DIM, TABLE_ROWS).to_toml())?;
    let shared = ["--format", "criteo-tsv"];
    command(
        &["train", "--model-config", text(&schema)?, "--data", text(&train)?, "--valid", text(&test)?],
        &[&shared[..], &["--models", text(&models)?, "--name", MODEL]].concat(),
    )?;

    let server = Running::start(&models)?;
    let at_signal = server.ends_at_signal(args.dir.is_none().then(|| dir.to_owned()));
    let addr = format!("http://{}", server.grpc);
    let target = ["--addr", addr.as_str(), "--model", MODEL, text(&test)?];
    command(&["score", "--out", text(&scores)?], &[&shared[..], &target].concat())?;
    print(&format!("first scores: {}\n", first_scores(&scores)?))?;
    let load = ["load", "--batch", "16", "--concurrency", "4", "--seconds", "3"];
    command(&load, &[&shared[..], &target].concat())?;
    server.print_hits()?;

    if !args.once {
        let (grpc, http) = (server.grpc, server.http);
        say(&format!("serving: gRPC {grpc}, http://{http}/ and http://{http}/metrics"))?;
        print("stop it with Ctrl-C\n")?;
        at_signal.abort();
        server.wait_for_signal()?;
    }
    server.end()
}

/// The server of the demo, in the background.
struct Running {
    runtime: Runtime,
    engine: Arc<Engine>,
    grpc: SocketAddr,
    http: SocketAddr,
    stop: Arc<Notify>,
    server: JoinHandle<anyhow::Result<()>>,
    /// As `serve` does, it takes over new versions.
    _watching: Watching,
}

impl Running {
    fn start(models: &Path) -> anyhow::Result<Self> {
        let flags = Flags {
            models: Some(text(models)?.to_owned()),
            cache_mode: Some("on".to_owned()),
            cache_fraction: Some("0.1".to_owned()),
            ..Flags::default()
        };
        say(&format!("flechette serve --models {} --cache-mode on --cache-fraction 0.1", models.display()))?;
        // Does not read the environment, which may set another cache size.
        let mut config = Config::resolve(&flags, [], None)?;
        let serving = Serving::load(&config, models)?;
        let engine = serving.engines().remove(0);
        let runtime = serve::runtime(&config)?;
        let bound = runtime.block_on(serving.bind(&config)).or_else(|error| {
            // The default ports may be in use.
            let Some(ServerError::Listen { .. }) = error.downcast_ref() else { return Err(error) };
            let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            (config.server.grpc, config.server.http) = (any, any);
            runtime.block_on(serving.bind(&config))
        })?;
        let (grpc, http) = (bound.grpc_addr(), bound.http_addr());
        let watching = serving.watch(&bound)?;
        let stop = Arc::new(Notify::new());
        let stopped = stop.clone();
        let server = runtime.spawn(async move {
            bound.run(async move { stopped.notified().await }).await?;
            anyhow::Ok(())
        });
        Ok(Self { runtime, engine, grpc, http, stop, server, _watching: watching })
    }

    fn print_hits(&self) -> anyhow::Result<()> {
        let Some(stats) = self.engine.cache_stats() else { return Ok(()) };
        let hits: u64 = stats.tables.iter().map(|t| t.hits).sum();
        let misses: u64 = stats.tables.iter().map(|t| t.misses).sum();
        print(&format!(
            "cache: {:.1} % of {} row lookups hit; {} rows in {:.1} MiB\n",
            100.0 * hits as f64 / (hits + misses).max(1) as f64,
            hits + misses,
            stats.entries,
            stats.total_bytes as f64 / f64::from(1 << 20),
        ))
    }

    /// Removes this directory and ends the process at a signal, while commands run. The system does not do it
    /// any more, because training has caught these signals.
    fn ends_at_signal(&self, dir: Option<PathBuf>) -> JoinHandle<anyhow::Result<()>> {
        self.runtime.spawn(async move {
            signalled().await?;
            if let Some(dir) = dir {
                let _ = fs::remove_dir_all(dir);
            }
            std::process::exit(interrupt::EXIT_CODE.into())
        })
    }

    fn wait_for_signal(&self) -> anyhow::Result<()> {
        self.runtime.block_on(signalled())
    }

    /// Drains the server.
    fn end(self) -> anyhow::Result<()> {
        let Self { runtime, stop, server, .. } = self;
        runtime.block_on(async move {
            stop.notify_one();
            server.await?
        })
    }
}

/// Waits for SIGTERM, SIGINT, or the end of the terminal.
async fn signalled() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let terminated = terminated()?;
    if interrupt::hangup_is_ignored() {
        terminated.await;
        return Ok(());
    }
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        () = terminated => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// Prints a command line of this program and runs it.
fn command(first: &[&str], rest: &[&str]) -> anyhow::Result<()> {
    let words = || ["flechette"].iter().chain(first).chain(rest).copied();
    say(&words().collect::<Vec<_>>().join(" "))?;
    run_cli(Cli::try_parse_from(words())?)
}

fn say(line: &str) -> anyhow::Result<()> {
    print(&format!("\n> {line}\n"))
}

fn write_data(path: &Path, rows: u64, seed: u64) -> anyhow::Result<()> {
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        write_criteo_tsv(rows, seed, &mut out)?;
        out.flush()
    };
    write().with_context(|| path.display().to_string())
}

fn first_scores(path: &Path) -> anyhow::Result<String> {
    let scores = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(scores.lines().take(SHOWN_SCORES).collect::<Vec<_>>().join(", "))
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{}: expected a path in UTF-8", path.display()))
}
