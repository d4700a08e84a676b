//! Parses the command line and dispatches.

use std::process::ExitCode;

use clap::Parser;
use flechette::cli::{self, Cli};

fn main() -> ExitCode {
    cli::exit(cli::run(Cli::parse()))
}
