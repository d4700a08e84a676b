//! The HTTP port: one task for each connection, whose time and memory are limited.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::server::TcpIncoming;

use super::listener::{Connection, ConnectionLimit, Limited};
use super::security::Security;
use super::stopped;
use crate::config::ServerConfig;

/// Most bytes of a request's head, which a client may leave unfinished.
const HEAD_BYTES: usize = 16 << 10;

/// How long a connection of the HTTP port may take.
#[derive(Clone, Copy)]
pub(crate) struct AnswerTimes {
    /// Until the first answer has left.
    pub first: Duration,
    /// From one answer that has left to the next one.
    pub next: Duration,
}

/// Accepts connections, and answers their requests.
pub(crate) struct HttpPort {
    port: Limited,
    times: AnswerTimes,
    routes: Router,
}

impl AnswerTimes {
    pub(crate) fn of(config: &ServerConfig) -> Self {
        Self { first: config.handshake.min(config.http_idle), next: config.http_idle }
    }
}

/// The connections of a port that is bound. `name` is the setting or flag that gives its address.
pub(crate) fn connections(
    name: &'static str,
    listener: TcpListener,
    security: Arc<Security>,
    limit: ConnectionLimit,
) -> Limited {
    let tls = Box::new(move || security.http());
    Limited::new(name, TcpIncoming::from(listener), tls, limit)
}

impl HttpPort {
    /// A port that answers the connections of [`connections`].
    pub(crate) fn new(port: Limited, times: AnswerTimes, routes: Router) -> Self {
        Self { port, times, routes }
    }

    /// Serves until `stop` is set, and ends when all connections are closed.
    pub(crate) async fn serve(self, stop: watch::Receiver<bool>) {
        let mut http1 = http1::Builder::new();
        http1.max_buf_size(HEAD_BYTES);
        let Self { port, times, routes } = self;
        let closing = stop.clone();
        let connection = move |stream, permit| {
            let stream = TokioIo::new(Connection::http(stream, permit, times));
            let connection = http1.serve_connection(stream, TowerToHyperService::new(routes.clone()));
            let mut stop = closing.clone();
            async move {
                let mut connection = pin!(connection);
                // An error of the connection is the client's.
                tokio::select! {
                    _ = connection.as_mut() => return,
                    () = stopped(&mut stop) => connection.as_mut().graceful_shutdown(),
                }
                let _ = connection.await;
            }
        };
        port.serve(stop, connection).await;
    }
}
