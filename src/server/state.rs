//! The state of a server that its services and ports share, and what follows from it: whether the server is
//! ready, the text of its metrics, and the model of a name.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;

use super::model::Model;
use super::models::Models;
use super::not_served::{NotServed, Reason};
use super::report::Slow;
use super::repository::Repository;
use super::security::Security;
use super::serving_engine::ServingEngine;
use super::spans::Spans;
use super::status::CallError;
use super::{convert, status_page};
use crate::config::ServerConfig;
use crate::metrics::Metrics;

/// What the services and the ports share.
pub(crate) struct ServerState {
    pub models: Models,
    pub not_served: NotServed,
    pub metrics: Arc<Metrics>,
    pub history: status_page::History,
    pub security: Arc<Security>,
    pub config: ServerConfig,
    pub slow: Slow,
    pub spans: Option<Spans>,
    pub grpc_addr: SocketAddr,
    pub http_addr: SocketAddr,
    pub draining: AtomicBool,
    /// Set when connections and streams should end.
    pub closing: watch::Sender<bool>,
    /// What loads and unloads models, if that is possible.
    pub repository: OnceLock<Arc<dyn Repository>>,
    /// Calls whose answer has not left, counted by [`super::charge::Charge`].
    pub in_flight: AtomicUsize,
    /// Those of them that have a place.
    pub places: AtomicUsize,
    /// Places that Learn calls hold.
    pub learn_places: AtomicUsize,
    /// Connections that have calls in flight.
    pub callers: AtomicUsize,
    /// Memory of their messages, counted by [`super::charge::Charge`], and of answers (`answer.rs`).
    pub in_flight_bytes: AtomicUsize,
}

impl ServerState {
    pub(crate) fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub(crate) fn ready(&self) -> bool {
        self.not_ready().is_none()
    }

    /// All metrics as they are now, in Prometheus's text format.
    pub(crate) fn metrics_text(&self) -> String {
        self.models.all().iter().for_each(|model| model.main().predict.measure());
        let server = &self.metrics.server;
        server.ready.set(f64::from(self.ready()));
        server.not_served.set(self.not_served.refused().len() as f64);
        server.places.set(self.places.load(Ordering::Relaxed) as f64);
        server.in_flight.set(self.in_flight.load(Ordering::Relaxed) as f64);
        server.in_flight_bytes.set(self.in_flight_bytes.load(Ordering::Relaxed) as f64);
        self.metrics.render()
    }

    /// The served model of this name.
    pub(crate) fn find(&self, model: String) -> Result<Arc<Model>, CallError> {
        match self.models.get(&model) {
            Some(model) => Ok(model),
            None => Err(match self.not_served.get(&model) {
                None => CallError::NoModel { model: convert::clip(model) },
                Some(Reason::Loading { .. }) => CallError::Loading { model },
                Some(Reason::Refused(_)) => CallError::Refused { model },
            }),
        }
    }

    /// The error of a request for a served model. While the model loads further versions, the one that it
    /// lacks may be among them.
    pub(crate) fn unless_loading(&self, model: &str, error: CallError) -> CallError {
        match error {
            CallError::NoVersion { .. } | CallError::NoLabel { .. } if self.not_served.is_loading(model) => {
                CallError::VersionsLoading { model: model.to_owned() }
            }
            error => error,
        }
    }

    /// Why the server is not ready, or `None` if it is: every model was tried, and at least one is served.
    pub(crate) fn not_ready(&self) -> Option<String> {
        if self.draining() {
            return Some("draining".to_owned());
        }
        let loading = |(name, reason)| (reason == Reason::Loading { at_start: true }).then_some(name);
        let loading: Vec<String> = self.not_served.all().into_iter().filter_map(loading).collect();
        if !loading.is_empty() {
            return Some(format!("loading: model {}", loading.join(", ")));
        }
        let models = self.models.all();
        if models.is_empty() {
            return Some("no model is served".to_owned());
        }
        let names = |are: fn(&ServingEngine) -> bool| {
            let names = models.iter().filter(|model| are(model.stable()));
            names.map(|model| model.name()).collect::<Vec<_>>().join(", ")
        };
        let not_ready = names(|engine| !engine.predict.ready());
        if !not_ready.is_empty() {
            return Some(format!("not ready: {not_ready}"));
        }
        let stuck = names(|engine| engine.batcher.is_stuck());
        (!stuck.is_empty()).then(|| format!("stuck: a call of model {stuck} does not end"))
    }
}
