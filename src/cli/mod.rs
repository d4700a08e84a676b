//! The command line: each subcommand is a file with an `Args` of flags and a `run`.
//!
//! The exit code is 0 for success, 2 for a usage or input error, 130 when a signal ended `train` or a second
//! signal ended `serve`, 1 for anything else. An error and its causes are one line on standard error. If the
//! reader closes standard output early (`| head`), that is a success.

pub(crate) mod background;
pub mod client;
pub(crate) mod config;
#[cfg(target_os = "linux")]
pub(crate) mod cut_file;
pub(crate) mod demo;
pub(crate) mod flags;
pub(crate) mod format_flags;
pub(crate) mod init;
pub(crate) mod label;
pub(crate) mod load;
pub(crate) mod logging;
pub(crate) mod man;
pub(crate) mod models;
mod output;
pub(crate) mod pipeline_flags;
pub(crate) mod plan;
pub(crate) mod runtime;
pub(crate) mod score;
mod score_file;
pub mod serve;
pub(crate) mod terminal;
pub(crate) mod train;
pub(crate) mod training_flags;
pub(crate) mod verify;
pub(crate) mod versions;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::{Flags, Layers, arenas_are_given};
use crate::dataset::DatasetError;
use crate::mem;
use crate::predict::PredictError;
use crate::schema::SchemaError;
use crate::trainer::TrainError;
use serve::EarlyHangup;
use terminal::ClosedOutput;
pub(crate) use terminal::{note, or_dash, print, print_and_end};
use train::interrupt::{self, Interrupted};

/// Trains recommendation models larger than GPU memory, and serves click-through-rate (CTR) scores from them.
#[derive(Debug, Parser)]
#[command(name = "flechette", version)]
pub struct Cli {
    /// TOML file of settings; environment variables and flags override it
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

/// The end of `serve --help`. Only some settings have a flag.
const SETTINGS: &str = "Every setting is also a key of the file of --config and a variable \
    FLECHETTE_<SECTION>_<KEY>; `flechette config print` lists them.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Writes a model.toml for a data set and an architecture to standard output
    Init(init::Args),
    /// Trains a model on click logs and writes a new version of it
    Train(Box<train::Args>),
    /// Serves every model of a directory over gRPC, and trains one of them with --train
    #[command(after_help = SETTINGS)]
    Serve(Box<serve::Args>),
    /// Checks the settings of serve, or prints them with their sources
    Config(config::Args),
    /// Lists the labels of a served model, or sets the version that a label names
    Label(label::Args),
    /// Lists the models of a server, or loads or unloads one
    Models(models::Args),
    /// Scores the rows of a data file with a served model
    Score(score::Args),
    /// Sends requests to a server for some time, and prints throughput and latency
    Load(load::Args),
    /// Computes the hit rates of caches of several sizes on a data set or an access trace
    Plan(plan::Args),
    /// Lists the versions of a model and checks them, writes one as a full version, or removes old ones
    Versions(versions::Args),
    /// Trains with the pipeline and with the sequential trainer, and compares every byte
    Verify(verify::Args),
    /// Generates data, trains a model on it, serves the model, and scores held-out rows
    Demo(demo::Args),
    /// Writes manual pages of all commands
    Man(man::ManArgs),
    /// Prints a script that completes this command line in a shell
    Completions(man::CompletionsArgs),
}

impl Command {
    /// Whether it reads models or data in parallel.
    const fn reads_models(&self) -> bool {
        match self {
            Self::Train(_)
            | Self::Serve(_)
            | Self::Plan(_)
            | Self::Versions(_)
            | Self::Verify(_)
            | Self::Demo(_) => true,
            Self::Init(_)
            | Self::Config(_)
            | Self::Label(_)
            | Self::Models(_)
            | Self::Score(_)
            | Self::Load(_)
            | Self::Man(_)
            | Self::Completions(_) => false,
        }
    }
}

/// Parses the command line of this process. Ends the process on a usage error, `--help` or `--version`.
#[must_use]
pub fn parse() -> Cli {
    Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit())
}

fn command() -> clap::Command {
    let commands = Cli::command().mut_subcommands(|command| {
        command.mut_args(|arg| {
            // `--lr -1` is a wrong value of `--lr`, not an unknown flag `-1`.
            let negative = arg.get_action().takes_values() && !arg.is_positional();
            arg.allow_negative_numbers(negative)
        })
    });
    // Learned samples have no format.
    commands.mut_subcommand("train", |train| {
        train.mut_arg("format", |format| format.required(false).required_unless_present("learned"))
    })
}

/// Runs a command. Settings are read and checked for every command, so that a wrong file is always reported.
///
/// # Errors
/// The error of the command. [`exit`] turns it into a message and an exit code.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    let mut flags = match &cli.command {
        Command::Serve(args) => args.settings.clone(),
        Command::Train(args) => args.flags(),
        Command::Plan(args) => args.flags(),
        Command::Verify(args) => args.flags(),
        Command::Config(args) => args.flags(),
        _ => Flags::default(),
    };
    flags.config = cli.config;
    // It reports more than the first error.
    if let Command::Config(args) = &cli.command {
        return config::run(args, &flags);
    }
    let early = matches!(&cli.command, Command::Serve(_)).then(EarlyHangup::catch).transpose()?;
    let settings = Layers::load(&flags).map_err(|e| InputError(e.into()))?;
    let config = settings.clone().config().map_err(|e| InputError(e.into()))?;
    if !arenas_are_given() {
        mem::limit_arenas();
    }
    logging::start(&config.log.level, config.log.format)?;
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    #[cfg(target_os = "linux")]
    if let Err(error) = cut_file::report() {
        tracing::warn!(%error, "if a mapped file is cut short, the process ends without a word");
    }
    if cli.command.reads_models() {
        background::start_shared_pool()?;
    }
    let result = match cli.command {
        Command::Init(args) => init::run(args),
        Command::Train(args) => train::run(*args, &config),
        Command::Serve(args) => serve::run(*args, &config, settings, early.unwrap_or_default()),
        Command::Label(args) => label::run(args),
        Command::Models(args) => models::run(args),
        Command::Score(args) => score::run(args),
        Command::Load(args) => load::run(args),
        Command::Plan(args) => plan::run(args, &config),
        Command::Versions(args) => versions::run(&args),
        Command::Verify(args) => verify::run(&args, &config),
        Command::Demo(args) => demo::run(args),
        Command::Man(args) => man::man(&args),
        Command::Completions(args) => man::completions(&args),
        Command::Config(args) => config::run(&args, &flags),
    };
    logging::end();
    result
}

/// An error that the user can correct: bad flags, bad input. Its exit code is 2.
#[derive(Debug, thiserror::Error)]
#[error("{}", error_line(.0.as_ref()))]
pub(crate) struct InputError(pub anyhow::Error);

/// An error and its causes on one line: `a: b: c`. A cause is left out if the text before it already ends
/// with the cause. A name at the beginning of a cause is left out if the text before it ends with that
/// name.
pub(crate) fn error_line(error: &(dyn Error + 'static)) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let mut text = error.to_string().lines().collect::<Vec<_>>().join("; ");
        if let (Some(last), Some((name, rest))) = (texts.last(), text.split_once(": "))
            && last.ends_with(name)
        {
            text = rest.to_owned();
        }
        if !texts.iter().any(|before| before.ends_with(&text)) {
            texts.push(text);
        }
    }
    texts.join(": ")
}

/// Prints an error and returns the exit code of the process.
#[must_use]
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let code = exit_code(&error);
    if code == interrupt::EXIT_CODE {
        note(&error_line(error.as_ref()));
    } else if code != 0 {
        note(&format!("error: {}", error_line(error.as_ref())));
    }
    ExitCode::from(code)
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let input = |e: &(dyn Error + 'static)| {
        e.is::<InputError>()
            || e.is::<SchemaError>()
            || e.is::<DatasetError>()
            || e.downcast_ref().is_some_and(is_input_error)
    };
    if error.is::<Interrupted>() {
        interrupt::EXIT_CODE
    } else if error.is::<ClosedOutput>() {
        0
    } else if error.chain().any(input) {
        2
    } else {
        1
    }
}

/// Whether training stopped because of the data or the flags. The variants must be matched here, because they
/// are transparent: the errors inside them are not in the chain.
fn is_input_error(error: &TrainError) -> bool {
    match error {
        TrainError::Dataset(_)
        | TrainError::Encode(_)
        | TrainError::NoLabels { .. }
        | TrainError::Scratchpad { .. }
        | TrainError::Lookahead { .. }
        | TrainError::Replicas { .. }
        | TrainError::Lambda { .. } => true,
        TrainError::Batch(error) => {
            matches!(error, PredictError::AbsentId { .. } | PredictError::NotFinite { .. })
        }
        TrainError::Diverged { .. }
        | TrainError::NotFinite { .. }
        | TrainError::Memory(_)
        | TrainError::TableMemory { .. }
        | TrainError::ScratchpadMemory { .. }
        | TrainError::Weights(_)
        | TrainError::State(_)
        | TrainError::Store(_)
        | TrainError::Threads { .. }
        | TrainError::Hazard(_)
        | TrainError::Device(_)
        | TrainError::StillWriting { .. }
        | TrainError::Stopped => false,
    }
}

#[cfg(test)]
mod tests;
