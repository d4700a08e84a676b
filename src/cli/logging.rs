//! The log on standard error.

use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use anyhow::anyhow;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use super::InputError;
use crate::config::LogFormat;

/// Changes the level of this process's log, once it has started.
static LEVEL: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Starts logging. The first call decides the format: `demo` runs several commands.
///
/// # Errors
/// When the level is not one.
pub(crate) fn start(level: &str, format: LogFormat) -> Result<(), InputError> {
    let (filter, handle) = reload::Layer::new(targets(level)?);
    let lines = fmt::layer().with_writer(io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    if tracing_subscriber::registry().with(lines.with_filter(filter)).try_init().is_ok() {
        let _ = LEVEL.set(handle);
    }
    Ok(())
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
