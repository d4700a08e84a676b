//! The drain of a server: calls in flight finish, then its connections and batchers end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic_health::server::HealthReporter;

use super::updates::HEALTH_NAMES;
use super::{Drained, ServerState};

/// How long clients have to close connections without calls, and batchers to end.
const CLOSE: Duration = Duration::from_secs(1);

/// The drain of a server, after its clients got GOAWAY.
pub(super) struct Drain<'a> {
    pub shared: &'a Arc<ServerState>,
    pub health: HealthReporter,
    pub until: Instant,
}

impl Drain<'_> {
    /// Waits for the calls in flight until the limit, and ends the batchers.
    pub(super) async fn finish(mut self, calls: JoinHandle<()>) -> Drained {
        while self.shared.in_flight.load(Ordering::Acquire) > 0 && Instant::now() < self.until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // A health watch ends only when its service is removed, and keeps its connection open until then.
        for name in HEALTH_NAMES {
            self.health.clear_service_status(name).await;
        }
        // Only connections without calls are left. A client that does not close its end has to wait no more.
        let until = self.until.min(Instant::now() + CLOSE);
        let closed = tokio::time::timeout_at(until, calls).await;
        let unfinished = self.shared.in_flight.load(Ordering::Acquire);
        if closed.is_err() && unfinished > 0 {
            tracing::warn!(unfinished, "server.drain_seconds have passed: open connections are closed");
            for model in self.shared.models.all() {
                for served in model.engines() {
                    served.batcher.abandon();
                }
            }
        }
        self.join_batchers().await;
        Drained { unfinished }
    }

    /// Ends the batchers. If all calls finished in time, the queues are empty and this ends at once.
    /// Otherwise a model may still compute, and that cannot be stopped.
    async fn join_batchers(&self) {
        let (shared, (end, ended)) = (self.shared.clone(), oneshot::channel());
        // Not a blocking task of the runtime, whose end would wait for it.
        let joining = std::thread::Builder::new().name("drain".into()).spawn(move || {
            for model in shared.models.all() {
                model.shadow().iter().for_each(|shadow| shadow.end());
                model.engines().iter().for_each(|served| served.batcher.join());
                // Its queue is empty if all calls finished in time. Otherwise the answers to its records are
                // dropped.
                model.main().learn_log.iter().for_each(|log| log.close());
            }
            // Before the answer, which may end the process: the end of a model writes its recorded accesses.
            drop(shared);
            let _ = end.send(());
        });
        if joining.is_err() || tokio::time::timeout(CLOSE, ended).await.is_err() {
            tracing::warn!("a model still computes: its batch is abandoned");
        }
    }
}
