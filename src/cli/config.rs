//! `flechette config`: checks and prints the settings as `serve` reads them. Opens no port, device or model.

use crate::cli::{InputError, error_line, print};
use crate::config::{Flags, Layers};

/// Flags of `config`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Prints everything that is wrong with the file, the environment and the flags, and exits with 2
    Check(Settings),
    /// Prints every setting with its value and the source of the value, as a file for --config
    Print(Settings),
}

#[derive(Debug, clap::Args)]
struct Settings {
    #[command(flatten)]
    flags: Flags,
}

impl Args {
    /// The flags that set values.
    pub(crate) fn flags(&self) -> Flags {
        match &self.action {
            Action::Check(settings) | Action::Print(settings) => settings.flags.clone(),
        }
    }
}

/// Checks or prints. `flags` also name the file.
///
/// # Errors
/// When the settings are wrong. All errors but the last are printed already.
pub(crate) fn run(args: &Args, flags: &Flags) -> anyhow::Result<()> {
    let load = || Layers::load(flags).map_err(|e| InputError(e.into()));
    let mut problems = load()?.problems();
    if let Some(last) = problems.pop() {
        problems.iter().for_each(|problem| eprintln!("error: {}", error_line(problem)));
        return Err(InputError(last.into()).into());
    }
    let layers = load()?;
    let config = layers.clone().config().map_err(|e| InputError(e.into()))?;
    config.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    if config.server.models.is_none() {
        eprintln!("warning: server.models: missing, but serve needs it");
    }
    match args.action {
        Action::Check(_) => print("the settings are valid\n"),
        Action::Print(_) => print(&layers.to_toml(&config)),
    }
}
