//! Parses the command line, sets up tracing and dispatches.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use flechette::cli::{self, Cli};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    cli::exit(cli::run(cli))
}
