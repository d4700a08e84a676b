//! Parses the command line, runs the command, and exits with its code.

use std::process::ExitCode;

use flechette::cli;

/// A request allocates and frees many small buffers, on several threads. With this allocator, a request of
/// one sample takes 8 % less time of the processor than with that of the system.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::exit(cli::run(cli::parse()))
}
