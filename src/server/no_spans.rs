//! Without the cargo feature `otel` there are no spans (`spans.rs`).

use super::ServerError;
use super::origin::TraceId;
use super::report::Report;
use crate::config::{NO_OTEL, OtelConfig};
use crate::metrics::Metrics;

/// Makes spans, if there were one.
pub(crate) enum Spans {}

impl Spans {
    /// # Errors
    /// Always.
    pub(crate) fn start(_: &OtelConfig, _: &Metrics) -> Result<Self, ServerError> {
        Err(ServerError::Otel(NO_OTEL.to_owned()))
    }

    pub(crate) fn record(&self, _: &Report<'_>) -> Option<TraceId> {
        match *self {}
    }

    pub(crate) async fn flush(&self) {
        match *self {}
    }
}
