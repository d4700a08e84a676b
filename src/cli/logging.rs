//! The log on standard error: its level, its format, the limit on lines of each warning (`limit.rs`),
//! and a reader that does not read (`stderr.rs`).

mod limit;
mod stderr;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;

use anyhow::anyhow;
use tracing::Level;
use tracing_subscriber::filter::{FilterExt, LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use super::InputError;
use crate::config::LogFormat;
use limit::Limit;
pub(crate) use limit::end;
pub(crate) use stderr::LogWriter;

/// Changes the level of this process's log, once it has started.
static LEVEL: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Starts logging. The first call decides the format: `demo` runs several commands.
///
/// # Errors
/// When the level is not one.
pub(crate) fn start(level: &str, format: LogFormat) -> Result<(), InputError> {
    let (filter, handle) = reload::Layer::new(targets(level)?);
    let lines = fmt::layer().with_writer(|| LogWriter);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let lines = lines.with_filter(filter.and(Limit));
    if tracing_subscriber::registry().with(lines).try_init().is_ok() {
        let _ = LEVEL.set(handle);
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| match tracing::enabled!(Level::ERROR) {
            true => log_panic(panic),
            false => before(panic),
        }));
    }
    Ok(())
}

/// Writes a panic as one line of the log, in its format and within its limit.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("?");
    let text = panic.to_string().replace('\n', " ");
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(thread, backtrace, "{text}");
}

/// Changes the level.
///
/// # Errors
/// When the level is not one.
pub(crate) fn set_level(level: &str) -> Result<(), InputError> {
    let level = targets(level)?;
    match LEVEL.get().map(|handle| handle.reload(level)) {
        Some(Err(error)) => Err(InputError(anyhow!("log.level: {error}"))),
        Some(Ok(())) | None => Ok(()),
    }
}

/// The filter of a level or of directives. A level alone is that of this program: at `debug` the libraries
/// below it would write a line for each frame of HTTP/2.
fn targets(level: &str) -> Result<Targets, InputError> {
    if let Ok(own) = level.parse::<LevelFilter>() {
        return Ok(Targets::new()
            .with_default(own.min(LevelFilter::INFO))
            .with_target(env!("CARGO_PKG_NAME"), own));
    }
    level.parse().map_err(|error| {
        InputError(anyhow!("log.level: expected a level or filter directives, got {level:?}: {error}"))
    })
}
