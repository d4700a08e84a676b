//! Parses the command line, runs the command, and exits with its code.

use std::process::ExitCode;

use flechette::cli;

fn main() -> ExitCode {
    cli::exit(cli::run(cli::parse()))
}
