//! What commands print. Results go to standard output. If its reader closes it early (`| head`), the command
//! ends, and that is a success. Everything else goes to standard error, which need not be read: training goes
//! on after its reader has ended or stops reading, or its disk is full. `println!` and `eprintln!` would
//! panic or wait then, so clippy refuses them.

use std::io::{self, Write};

use super::logging::LogWriter;

/// Standard output was closed by its reader.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub(crate) struct ClosedOutput;

/// Writes to standard output.
///
/// # Errors
/// [`ClosedOutput`], and when standard output cannot be written.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ClosedOutput.into()),
        other => Ok(other?),
    }
}

/// Writes a result to standard output, and then ends as the command has ended: a closed output hides no
/// failure.
///
/// # Errors
/// That of the command, or as [`print()`].
pub(crate) fn print_and_end(text: &str, ended: anyhow::Result<()>) -> anyhow::Result<()> {
    let printed = print(text);
    ended.and(printed)
}

/// A number with these digits after its point; `-` for none.
pub(crate) fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Writes a line to standard error, if that is possible soon.
pub(crate) fn note(line: &str) {
    let _ = LogWriter.write(format!("{line}\n").as_bytes());
}
