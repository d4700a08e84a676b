//! The drain of a server: calls in flight finish, then its connections and batchers end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic_health::server::HealthReporter;

use super::periodic::HEALTH_NAMES;
use super::{Drained, ServerState};

/// How long clients have to close connections without calls, and batchers to end.
const CLOSE: Duration = Duration::from_secs(1);

/// The drain of a server, after its clients got GOAWAY.
pub(super) struct Drain<'a> {
    pub state: &'a Arc<ServerState>,
    pub health: HealthReporter,
    pub until: Instant,
}

impl Drain<'_> {
    /// Waits for the calls in flight until the limit, and ends the batchers.
    pub(super) async fn finish(mut self, mut calls: JoinHandle<()>) -> Drained {
        let (closed, unfinished) = loop {
            self.wait_for_calls().await;
            // A client without calls that does not close its end has to wait no more.
            let until = self.until.min(Instant::now() + CLOSE);
            let closed = tokio::time::timeout_at(until, &mut calls).await.is_ok();
            let unfinished = self.state.in_flight.load(Ordering::Acquire);
            // A call that was on its way when the last one ended is still accepted.
            if closed || unfinished == 0 || Instant::now() >= self.until {
                break (closed, unfinished);
            }
        };
        if !closed && unfinished > 0 {
            tracing::warn!(unfinished, "server.drain_seconds have passed: open connections are closed");
            for model in self.state.models.all() {
                for engine in model.engines() {
                    engine.batcher.abandon();
                }
            }
        }
        self.join_batchers().await;
        Drained { unfinished }
    }

    /// Waits until no call is in flight, or until the limit.
    async fn wait_for_calls(&mut self) {
        while self.state.in_flight.load(Ordering::Acquire) > 0 && Instant::now() < self.until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // A health watch ends only when its service is removed, and keeps its connection open until then.
        for name in HEALTH_NAMES {
            self.health.clear_service_status(name).await;
        }
    }

    /// Ends the batchers, and closes the logs of learned samples. If all calls finished in time, the queues
    /// are empty and this ends at once. Otherwise a model may still compute, and that cannot be stopped: its
    /// log is closed all the same, and the answers to records in the log's queue are dropped.
    async fn join_batchers(&self) {
        let models = self.state.models.all();
        let logs: Vec<_> = models.iter().filter_map(|model| model.main().learn_log.clone()).collect();
        let closed = ends_soon("close-learn-logs", move || logs.iter().for_each(|log| log.close()));
        let joined = ends_soon("drain", {
            let state = self.state.clone();
            move || {
                let engines = || models.iter().flat_map(|model| model.engines());
                engines().for_each(|engine| engine.batcher.close());
                engines().for_each(|engine| engine.batcher.join());
                // Last, because nothing waits for its scores.
                models.iter().filter_map(|model| model.shadow()).for_each(|shadow| shadow.end());
                // Before the answer, which may end the process: the end of a model writes its recorded
                // accesses.
                drop((models, state));
            }
        });
        let (closed, joined) = tokio::join!(closed, joined);
        if !joined {
            tracing::warn!("a model still computes: its batch is abandoned");
        }
        if !closed {
            tracing::warn!("a log of learned samples is not closed: the disk is slow");
        }
    }
}

/// Runs this on a thread of its own, and not as a blocking task of the runtime, whose end would wait for it.
/// Returns `false` if it does not end within [`CLOSE`]. A thread that cannot start is logged.
async fn ends_soon(thread: &str, run: impl FnOnce() + Send + 'static) -> bool {
    let (end, ended) = oneshot::channel();
    let started = std::thread::Builder::new().name(thread.to_owned()).spawn(move || {
        run();
        let _ = end.send(());
    });
    if let Err(error) = started {
        tracing::warn!(thread, %error, "a thread of the drain cannot start");
        return true;
    }
    tokio::time::timeout(CLOSE, ended).await.is_ok()
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;
    use crate::server::Server;
    use crate::server::fuzz::parts_of;

    #[tokio::test]
    async fn a_call_that_comes_just_after_the_last_one_has_the_whole_time_too() {
        let settings = "[server]\ngrpc = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n";
        let server = Server::bind(parts_of(settings)).await.unwrap();
        let state = server.state.clone();
        let (health, _service) = tonic_health::server::health_reporter();
        let drain = Drain { state: &state, health, until: Instant::now() + Duration::from_secs(60) };
        let calls = tokio::spawn({
            let state = state.clone();
            async move {
                tokio::time::sleep(CLOSE / 4).await;
                state.in_flight.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(2 * CLOSE).await;
                state.in_flight.fetch_sub(1, Ordering::SeqCst);
            }
        });
        assert_eq!(drain.finish(calls).await.unfinished, 0);
    }
}
