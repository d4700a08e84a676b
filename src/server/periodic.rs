//! What a server looks at again and again: its readiness, overload, stuck versions, and the figures of the
//! status page.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::stuck::Stuck;
use super::{ServerState, methods, pressure, status_page};
use crate::batcher::CORES;

/// The services with a health status: the whole server, and those that score.
pub(super) const HEALTH_NAMES: [&str; 3] = ["", methods::CTR, methods::KSERVE];

/// How often readiness is checked.
const UPDATE_EVERY: Duration = pressure::TICK;

/// Reports readiness to the clients of the health service.
pub(super) async fn set_health(health: &HealthReporter, ready: bool) {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    for name in HEALTH_NAMES {
        health.set_service_status(name, status).await;
    }
}

/// After a pause of the process or of this task, no ticks follow at once to make up for it: there are no
/// answers between those, and the measured rate of a model would drop.
fn ticks() -> Interval {
    let mut ticks = tokio::time::interval(UPDATE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Updates health, the version gauge and the history of the status page. `ready` is the readiness that was
/// reported last.
pub(super) async fn update_status(state: Arc<ServerState>, health: HealthReporter, mut ready: bool) {
    let (mut sampled, mut ticked) = (None::<Instant>, Instant::now());
    let mut sampling: Option<JoinHandle<()>> = None;
    let mut stuck = Stuck::default();
    let mut overloads = status_page::Overloads::default();
    let mut ticks = ticks();
    loop {
        ticks.tick().await;
        let elapsed = ticked.elapsed();
        ticked = Instant::now();
        let served = state.models.all();
        overloads.retain(&served, &state.metrics.events);
        stuck.retain(&served);
        for model in &served {
            model.pressure().tick(elapsed);
            let overloaded = model.pressure().overloaded();
            if overloaded {
                CORES.overloaded(2 * UPDATE_EVERY);
            }
            overloads.look(model.name(), overloaded, &state.metrics.events);
            stuck.look(model);
            model.main().metrics.version.set(model.stable_version().0 as f64);
        }
        let now_ready = state.ready();
        // Only a change: watching clients get a message for each report.
        if now_ready != ready {
            set_health(&health, now_ready).await;
            ready = now_ready;
        }
        let due = sampled.is_none_or(|sampled| sampled.elapsed() >= status_page::EVERY);
        if due && sampling.as_ref().is_none_or(JoinHandle::is_finished) {
            sampled = Some(Instant::now());
            let state = state.clone();
            // With hundreds of tables it takes milliseconds. Not awaited: all blocking threads may wait for a
            // disk, and readiness must go on.
            sampling = Some(tokio::task::spawn_blocking(move || status_page::sample(&state)));
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::pressure::Pressure;
    use super::*;
    use crate::batcher::Priority;

    #[test]
    fn after_a_pause_under_overload_the_rate_and_the_overload_are_those_of_before() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let pressure = Pressure::new();
        pressure.refused(Priority::Normal);
        (0..2000).for_each(|_| pressure.answered());
        pressure.tick(Duration::from_secs(1));
        runtime.block_on(async {
            let mut ticks = ticks();
            ticks.tick().await;
            let mut ticked = Instant::now();
            std::thread::sleep(10 * UPDATE_EVERY);
            (0..2000 * 10 / 5).for_each(|_| pressure.answered());
            while tokio::time::timeout(UPDATE_EVERY / 2, ticks.tick()).await.is_ok() {
                pressure.tick(ticked.elapsed());
                ticked = Instant::now();
            }
        });
        assert!(pressure.overloaded());
        // At 2000 answers a second a call takes 15 ms.
        assert_eq!((0..30).map(|_| pressure.enter(Some(Priority::Normal))).last(), Some(30));
        pressure.admit(Priority::Normal, None).unwrap();
    }
}
