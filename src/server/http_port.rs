//! The HTTP port: one task for each connection, whose time and memory are limited.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{mpsc, watch};

use super::listener::{Connection, Limited};
use super::stopped;

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
    pub port: Limited,
    pub times: AnswerTimes,
    pub routes: Router,
}

impl HttpPort {
    /// Serves until `stop` is set, and ends when all connections are closed.
    pub(crate) async fn serve(mut self, mut stop: watch::Receiver<bool>) {
        let mut http1 = http1::Builder::new();
        http1.max_buf_size(HEAD_BYTES);
        // Each task of a connection has a sender, so the channel is closed when the last of them has ended.
        let (open, mut all_closed) = mpsc::channel::<Infallible>(1);
        loop {
            let (stream, permit) = tokio::select! {
                accepted = self.port.accept() => accepted,
                () = stopped(&mut stop) => break,
            };
            let stream = TokioIo::new(Connection::http(stream, permit, self.times));
            let connection = http1.serve_connection(stream, TowerToHyperService::new(self.routes.clone()));
            let (mut stop, open) = (stop.clone(), open.clone());
            tokio::spawn(async move {
                let mut connection = pin!(connection);
                // An error of the connection is the client's.
                tokio::select! {
                    _ = connection.as_mut() => return,
                    () = stopped(&mut stop) => connection.as_mut().graceful_shutdown(),
                }
                let _ = connection.await;
                drop(open);
            });
        }
        drop((self, open));
        all_closed.recv().await;
    }
}
