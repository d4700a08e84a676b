//! The command line: one file a subcommand, each an `Args` of flags and a `run`.
//!
//! The exit code is 0 for success, 2 for a usage or input error, 1 for anything else. An error
//! goes to standard error, its whole chain on one line. A reader that closes standard output
//! early (`| head`) has what it wanted: that is success.

pub mod client;
pub(crate) mod demo;
pub(crate) mod init;
pub(crate) mod load;
pub(crate) mod plan;
pub(crate) mod score;
pub(crate) mod scratchpad;
pub mod serve;
pub(crate) mod train;
pub(crate) mod training;
pub(crate) mod verify;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use clap::{Parser, Subcommand};

use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Config, Flags};
use crate::dataset::DatasetError;
use crate::predict::PredictError;
use crate::schema::SchemaError;
use crate::trainer::TrainError;

/// Serves CTR scores from recommendation models larger than a GPU, and trains them in place.
#[derive(Debug, Parser)]
#[command(name = "flechette", version)]
pub struct Cli {
    /// Settings, TOML; the environment and flags win over it
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Writes a model.toml for a data set and an architecture to standard output
    Init(init::Args),
    /// Trains a model on click logs and writes a new version of it
    Train(train::Args),
    /// Serves every model of a directory over gRPC
    Serve(serve::Args),
    /// Scores the rows of a data file with a served model
    Score(score::Args),
    /// Drives a server with requests and prints throughput and latency
    Load(load::Args),
    /// Tells what caches of several sizes would hit on a data set
    Plan(plan::Args),
    /// Trains on data by the pipeline and sequentially, and compares every byte
    Verify(verify::Args),
    /// Shows everything: makes data, trains, serves, scores
    Demo(demo::Args),
}

/// Runs the command that was parsed. Settings are read and checked for every command, also for one
/// that needs none of them, so that a wrong file is told of where it is named.
///
/// # Errors
/// What the command could not do; [`exit`] tells whose fault it was.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    let mut flags = match &cli.command {
        Command::Serve(args) => args.flags(),
        Command::Train(args) => args.flags(),
        Command::Plan(args) => args.flags(),
        Command::Verify(args) => args.flags(),
        _ => Flags::default(),
    };
    flags.config = cli.config;
    let config = Config::load(&flags).map_err(|e| InputError(e.into()))?;
    trace(&config.log_level)?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    match cli.command {
        Command::Init(args) => init::run(args),
        Command::Train(args) => train::run(args, &config),
        Command::Serve(_) => serve::run(&config),
        Command::Score(args) => score::run(args),
        Command::Load(args) => load::run(args),
        Command::Plan(args) => plan::run(args, &config),
        Command::Verify(args) => verify::run(&args, &config),
        Command::Demo(args) => demo::run(args),
    }
}

/// Logs to standard error from here on.
fn trace(level: &str) -> Result<(), InputError> {
    let filter: Targets = level.parse().map_err(|error| {
        InputError(anyhow!("log.level: expected a level or filter directives, got {level:?}: {error}"))
    })?;
    let lines =
        tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    // A subscriber that is set up already stays.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter)).try_init();
    Ok(())
}

/// An error that the user can mend: bad flags, bad input. Its exit code is 2.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
pub(crate) struct InputError(pub anyhow::Error);

/// Prints an error and gives the process its exit code.
#[must_use]
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let code = exit_code(&error);
    if code != 0 {
        let line = format!("{error:#}").lines().collect::<Vec<_>>().join("; ");
        eprintln!("error: {line}");
    }
    ExitCode::from(code)
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let closed_pipe = |e: &(dyn std::error::Error + 'static)| {
        e.downcast_ref().map(io::Error::kind) == Some(io::ErrorKind::BrokenPipe)
    };
    let input = |e: &(dyn std::error::Error + 'static)| {
        e.is::<InputError>()
            || e.is::<SchemaError>()
            || e.is::<DatasetError>()
            || e.downcast_ref().is_some_and(is_of_data)
    };
    if error.chain().any(closed_pipe) {
        0
    } else if error.chain().any(input) {
        2
    } else {
        1
    }
}

/// Whether training stopped for what the data or the flags say. The variants speak for the errors inside them, which
/// therefore do not stand in the chain.
fn is_of_data(error: &TrainError) -> bool {
    match error {
        TrainError::Dataset(_)
        | TrainError::Encode(_)
        | TrainError::NoLabels { .. }
        | TrainError::Scratchpad { .. }
        | TrainError::TooManyTables { .. }
        | TrainError::TooManyRows { .. }
        | TrainError::Lookahead { .. }
        | TrainError::Replicas { .. }
        | TrainError::Lambda { .. } => true,
        TrainError::Batch(error) => {
            matches!(error, PredictError::AbsentId { .. } | PredictError::NotFinite { .. })
        }
        TrainError::Diverged { .. }
        | TrainError::NotFinite { .. }
        | TrainError::Memory(_)
        | TrainError::Weights(_)
        | TrainError::State(_)
        | TrainError::Store(_)
        | TrainError::Threads { .. }
        | TrainError::Hazard(_)
        | TrainError::Device(_)
        | TrainError::Stopped => false,
    }
}

#[cfg(test)]
mod tests;
