//! The HTTP port of a process that trains without a server. It has only `/metrics`, with the TLS and the
//! tokens of a server's HTTP port.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::server::TcpIncoming;

use super::http_port::{AnswerTimes, HttpPort};
use super::listener::{ConnectionLimit, Limited};
use super::security::{Role, Security};
use super::{ServerError, bound, listen, web};
use crate::config::Config;
use crate::metrics::Metrics;

/// The flag that gives the address.
const FLAG: &str = "--metrics-http";

/// Most connections: Prometheus has one, and a few people may look too.
const CONNECTIONS: usize = 64;

/// A port that is bound.
pub(crate) struct MetricsPort {
    listener: TcpListener,
    times: AnswerTimes,
    page: Arc<Page>,
}

struct Page {
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
        let security = Arc::new(Security::open(server, tls.as_ref(), auth, &metrics)?);
        let times = AnswerTimes { first: server.handshake.min(server.http_idle), next: server.http_idle };
        let listener = listen(FLAG, address).await?;
        // It is no server: the alert of one that is not ready must not fire.
        metrics.server.ready.set(f64::NAN);
        Ok(Self { listener, times, page: Arc::new(Page { security, metrics }) })
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
        let Self { listener, times, page } = self;
        let security = page.security.clone();
        let watching = tokio::spawn(security.clone().watch());
        let limit = ConnectionLimit::new(CONNECTIONS, page.metrics.connections("http"));
        let tls = Box::new(move || security.http());
        let routes = Router::new()
            .route(
                "/metrics",
                get(async |State(page): State<Arc<Page>>| web::metrics_page(page.metrics.render())),
            )
            .route_layer(middleware::from_fn_with_state(page.clone(), allowed))
            .with_state(page);
        let port = Limited::new(FLAG, TcpIncoming::from(listener), tls, limit);
        let never = watch::Sender::new(false);
        HttpPort { port, times, routes }.serve(never.subscribe()).await;
        watching.abort();
    }
}

async fn allowed(State(page): State<Arc<Page>>, request: Request, next: Next) -> Response {
    match page.security.allow(Role::Metrics, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => web::refused(&refusal),
    }
}
