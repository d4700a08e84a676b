//! `train --metrics-http`: the metrics of a run over HTTP, for Prometheus. A thread of its own answers as
//! long as the process lives.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;

use crate::cli::InputError;
use crate::config::Config;
use crate::metrics::{Metrics, Training};
use crate::server::MetricsPort;

/// Binds the port and starts its thread. Returns the metrics of the run.
///
/// # Errors
/// When the port cannot be bound, a file of certificates or tokens cannot be used, or no thread can be
/// started.
pub(crate) fn start(address: SocketAddr, config: &Config, model: &str) -> anyhow::Result<Arc<Training>> {
    let metrics = Arc::new(Metrics::new()?);
    // The first page that is read has them.
    let training = metrics.training(model);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("threads")?;
    let port = runtime.block_on(MetricsPort::bind(address, config, metrics.clone()));
    let port = port.map_err(|error| InputError(error.into()))?;
    let bound = port.address(address)?;
    let serve = move || runtime.block_on(port.serve());
    std::thread::Builder::new().name("metrics".to_owned()).spawn(serve).context("threads")?;
    tracing::info!(address = %bound, "metrics");
    Ok(training)
}
