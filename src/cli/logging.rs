//! The log on standard error.

use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use anyhow::anyhow;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use super::InputError;

/// Changes the level of this process's log, once it has started.
static LEVEL: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Starts logging.
///
/// # Errors
/// When the level is not one.
pub(crate) fn start(level: &str) -> Result<(), InputError> {
    let (filter, handle) = reload::Layer::new(targets(level)?);
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    // A subscriber that exists already is kept: `demo` runs several commands.
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

fn targets(level: &str) -> Result<Targets, InputError> {
    level.parse().map_err(|error| {
        InputError(anyhow!("log.level: expected a level or filter directives, got {level:?}: {error}"))
    })
}
