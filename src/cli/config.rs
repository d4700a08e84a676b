//! `flechette config`: checks and prints the settings as `serve` reads them. Opens no port, device or model.
//!
//! The files that the settings name may be on another machine, so they are read only with `--files`.

use anyhow::anyhow;
use serde_json::json;

use crate::cli::serve::models_not_there;
use crate::cli::{InputError, error_line, note, print, print_and_end};
use crate::config::{Flags, Layers};
use crate::server;
use crate::store::{self, StoreError};

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
    /// Also reads the files of certificates, keys and tokens, and the directory of models, that the settings
    /// name
    #[arg(long)]
    files: bool,
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
    let problems = Layers::load(flags).map_or_else(|error| vec![error], Layers::problems);
    refuse(problems, json)?;
    let layers = Layers::load(flags).map_err(|e| InputError(e.into()))?;
    let config = layers.clone().config().map_err(|e| InputError(e.into()))?;
    let mut of_models = Vec::new();
    if matches!(&args.action, Action::Check(Check { files: true, .. })) {
        refuse(server::unusable_files(config.tls.as_ref(), &config.auth), json)?;
        if let Some(models) = &config.server.models {
            match store::models(models) {
                Ok(names) => of_models = models_not_there(&config, &names),
                // `serve --train` makes it.
                Err(error @ StoreError::MissingDirectory { .. }) => {
                    of_models = vec![format!("server.models: {error}; serve needs it, without --train")];
                }
                Err(error) => refuse(vec![InputError(anyhow!("server.models: {error}"))], json)?,
            }
        }
    }
    let missing = "server.models: missing, but serve needs it".to_owned();
    let missing = config.server.models.is_none().then_some(missing);
    let warnings =
        config.warnings.iter().cloned().chain(config.open_administration()).chain(missing).chain(of_models);
    let warnings: Vec<String> = warnings.collect();
    warnings.iter().for_each(|warning| note(&format!("warning: {warning}")));
    match args.action {
        Action::Check(_) if json => {
            print(&format!("{}\n", json!({"valid": true, "errors": [], "warnings": warnings})))
        }
        Action::Check(_) => print("the settings are valid\n"),
        Action::Print(_) => print(&layers.to_toml(&config)),
    }
}

/// Prints what is wrong; the last of it is the error. Nothing is wrong with an empty list.
fn refuse<E: std::error::Error + Send + Sync + 'static>(
    mut problems: Vec<E>,
    json: bool,
) -> anyhow::Result<()> {
    let errors: Vec<String> = problems.iter().map(|problem| error_line(problem)).collect();
    let Some(last) = problems.pop() else { return Ok(()) };
    problems.iter().for_each(|problem| note(&format!("error: {}", error_line(problem))));
    let document = json!({"valid": false, "errors": errors, "warnings": []});
    let text = if json { format!("{document}\n") } else { String::new() };
    print_and_end(&text, Err(InputError(last.into()).into()))
}
