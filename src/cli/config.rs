//! `flechette config`: checks and prints the settings as `serve` reads them. Opens no port, device or model.

use serde_json::json;

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
    Check(Check),
    /// Prints every setting with its value and the source of the value, as a file for --config
    Print(Settings),
}

#[derive(Debug, clap::Args)]
struct Check {
    #[command(flatten)]
    flags: Flags,
    /// Prints one line of JSON at the end: valid, errors, warnings
    #[arg(long)]
    json: bool,
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
            Action::Check(check) => check.flags.clone(),
            Action::Print(settings) => settings.flags.clone(),
        }
    }
}

/// Checks or prints. `flags` also name the file.
///
/// # Errors
/// When the settings are wrong. All errors but the last are printed already.
pub(crate) fn run(args: &Args, flags: &Flags) -> anyhow::Result<()> {
    let json = matches!(&args.action, Action::Check(Check { json: true, .. }));
    let mut problems = Layers::load(flags).map_or_else(|error| vec![error], Layers::problems);
    if json && !problems.is_empty() {
        let errors: Vec<String> = problems.iter().map(|problem| error_line(problem)).collect();
        print(&format!("{}\n", json!({"valid": false, "errors": errors, "warnings": []})))?;
    }
    if let Some(last) = problems.pop() {
        problems.iter().for_each(|problem| eprintln!("error: {}", error_line(problem)));
        return Err(InputError(last.into()).into());
    }
    let layers = Layers::load(flags).map_err(|e| InputError(e.into()))?;
    let config = layers.clone().config().map_err(|e| InputError(e.into()))?;
    let missing = "server.models: missing, but serve needs it".to_owned();
    let missing = config.server.models.is_none().then_some(missing);
    let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).chain(missing).collect();
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    match args.action {
        Action::Check(_) if json => {
            print(&format!("{}\n", json!({"valid": true, "errors": [], "warnings": warnings})))
        }
        Action::Check(_) => print("the settings are valid\n"),
        Action::Print(_) => print(&layers.to_toml(&config)),
    }
}
