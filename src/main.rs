//! Parses the command line, runs the command, and exits with its code.

use std::process::ExitCode;

use flechette::cli;

/// Each request allocates and frees buffers of many sizes. The allocator of the system gives such memory back
/// and asks for it again all the time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::exit(cli::run(cli::parse()))
}
