//! `flechette man` and `flechette completions`: files for packages, generated from the command line's own
//! description.

use std::io;
use std::path::PathBuf;

use anyhow::Context;
use clap_complete::Shell;

use crate::cli::{command, print};

/// Flags of `man`.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Directory for the pages: flechette.1 and one for each command, such as flechette-serve.1
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Flags of `completions`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Writes the manual pages.
///
/// # Errors
/// When the directory cannot be written.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let shown = || args.dir.display().to_string();
    std::fs::create_dir_all(&args.dir).with_context(shown)?;
    clap_mangen::generate_to(command(), &args.dir).with_context(shown)
}

/// Prints a script that completes the command line in a shell.
///
/// # Errors
/// When standard output is closed or cannot be written.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "flechette", &mut script);
    print(std::str::from_utf8(&script).map_err(io::Error::other)?)
}
