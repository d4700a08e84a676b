//! The HTTP port of a process that trains without a server. It has only `/metrics`, with the TLS and the
//! tokens of a server's HTTP port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::middleware;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::http_port::{self, AnswerTimes, HttpPort};
use super::listener::ConnectionLimit;
use super::security::Security;
use super::{ServerError, bound, listen, web};
use crate::config::{AuthConfig, Config};
use crate::metrics::Metrics;

/// The flag that gives the address.
const FLAG: &str = "--metrics-http";

/// Most connections: Prometheus has one, and a few people may look too.
const CONNECTIONS: usize = 64;

/// How often metrics are read without a request.
const READ_EVERY: Duration = Duration::from_secs(10);

/// A port that is bound.
pub(crate) struct MetricsPort {
    listener: TcpListener,
    times: AnswerTimes,
    security: Arc<Security>,
    metrics: Arc<Metrics>,
}

impl MetricsPort {
    /// Binds the port.
    ///
    /// # Errors
    /// When a file of certificates or tokens cannot be used, or the port cannot be bound.
    pub(crate) async fn bind(
        address: SocketAddr,
        config: &Config,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ServerError> {
        let Config { server, tls, auth, .. } = config;
        // The other files may be readable for the server alone, or not valid any more.
        let tls = tls.as_ref().filter(|tls| tls.http);
        let auth = AuthConfig { metrics: auth.metrics.clone(), ..AuthConfig::default() };
        if auth.metrics.is_some() && tls.is_none() && !address.ip().is_loopback() {
            tracing::warn!("auth.metrics: its tokens are not encrypted on the network: tls.http is off");
        }
        let security = Arc::new(Security::open(server, tls, &auth, &metrics)?);
        let times = AnswerTimes::of(server);
        let listener = listen(FLAG, address).await?;
        // It is no server: the alert of one that is not ready must not fire.
        metrics.server.ready.set(f64::NAN);
        Ok(Self { listener, times, security, metrics })
    }

    /// The address, with the real port if port 0 was given.
    ///
    /// # Errors
    /// When the system does not tell it.
    pub(crate) fn address(&self, given: SocketAddr) -> Result<SocketAddr, ServerError> {
        bound(FLAG, &self.listener, given)
    }

    /// Answers requests as long as it is polled.
    pub(crate) async fn serve(self) {
        let Self { listener, times, security, metrics } = self;
        let watching = tokio::spawn(security.clone().watch());
        let reading = tokio::spawn(read_regularly(metrics.clone()));
        let limit = ConnectionLimit::new(CONNECTIONS, metrics.connections("http"));
        let page = get(async |State(metrics): State<Arc<Metrics>>| web::metrics_page(metrics.render()));
        let routes = Router::new()
            .route("/metrics", page)
            .route_layer(middleware::from_fn_with_state(security.clone(), web::check_token))
            .with_state(metrics);
        let never = watch::Sender::new(false);
        let port = http_port::connections(FLAG, listener, security, limit);
        HttpPort::new(port, times, routes).serve(never.subscribe()).await;
        watching.abort();
        reading.abort();
    }
}

/// Renders the metrics regularly, also without requests: what histograms have recorded takes memory until
/// then.
async fn read_regularly(metrics: Arc<Metrics>) {
    loop {
        tokio::time::sleep(READ_EVERY).await;
        let metrics = metrics.clone();
        // It fails only when the runtime ends.
        let _ = tokio::task::spawn_blocking(move || metrics.render()).await;
    }
}
