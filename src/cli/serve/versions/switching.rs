//! A switch of a main engine, on a thread of its own.
//!
//! A switch waits for batches, and a batch may never end. So the thread that makes all changes waits for it
//! for [`WAIT`], and then goes on with other models. It is woken when the switch has ended. Until then,
//! nothing else changes of the versions of this model.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::{Settling, VersionRefusal, refusal};
use crate::cli::serve::stamps::Stamper;
use crate::cli::serve::watch::{WatchCommand, unless_it_panics};
use crate::engine::switch::{NextVersion, SwitchError, SwitchReport};
use crate::metrics::EventKind;
use crate::pace;
use crate::types::Version;

/// How long other models wait for a switch that no client has asked for. Nearly all end in this time.
pub(super) const WAIT: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 1000 });

/// How long a client waits for a switch, and other models with it.
const ASKED_WAIT: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 10_000 });

/// What the main engine shall take over.
pub(super) struct SwitchTarget<F> {
    pub version: Version,
    /// Whether requests use the version through an engine of its own.
    pub own: bool,
    /// Called on the thread of the switch.
    pub next: F,
}

/// A switch that has begun.
pub(super) struct Switching {
    target: Version,
    /// Whether requests use the target through an engine of its own.
    own: bool,
    begun: Instant,
    /// Closed without a result if the switch panicked or has no thread.
    ended: Receiver<Result<SwitchReport, SwitchError>>,
}

/// How far a switch is.
pub(super) enum SwitchOutcome {
    /// The main engine has the version, or there was no switch.
    Done,
    /// The version is refused, for this reason.
    Refused(String),
    /// It goes on. The text says which.
    Running(String),
}

impl Switching {
    /// Waits for its end, as long as a client does. Returns whether it has ended, and holds no memory any
    /// more.
    pub(super) fn wait_for_end(self) -> bool {
        !matches!(self.ended.recv_timeout(ASKED_WAIT), Err(RecvTimeoutError::Timeout))
    }
}

impl Settling<'_> {
    /// Begins to take over a version.
    pub(super) fn begin_switch(
        &self,
        SwitchTarget { version, own, next }: SwitchTarget<impl FnOnce() -> NextVersion + Send + 'static>,
    ) -> Switching {
        let (end, ended) = mpsc::channel();
        let (engine, urgent) = (self.model.engine.clone(), self.options.urgent);
        let (wake, woken) = (self.context.wake.clone(), self.name.to_owned());
        let switch = move || {
            if !urgent {
                pace::begin();
            }
            let result = unless_it_panics(|| engine.switch(next()));
            drop(engine);
            // There is no receiver if the model was unloaded meanwhile.
            result.into_iter().for_each(|result| drop(end.send(result)));
            drop(end);
            // Without room, all models are looked at.
            let _ = wake.send(WatchCommand::Switched(woken));
        };
        if let Err(error) = std::thread::Builder::new().name("switch".to_owned()).spawn(switch) {
            tracing::warn!(model = self.name, %error, "no thread for a switch");
        }
        Switching { target: version, own, begun: Instant::now(), ended }
    }

    /// Waits for the end of the model's switch, if there is one, but not longer than `limit`, or as long as a
    /// client does if one waits for it.
    pub(super) fn end_switch(&mut self, limit: Duration) -> SwitchOutcome {
        let limit = if self.options.asked { ASKED_WAIT } else { limit };
        let (name, known) = (self.name, &mut *self.known);
        let Some(switching) = &known.switching else { return SwitchOutcome::Done };
        let &Switching { target, own, begun, ref ended } = switching;
        let result = match ended.recv_timeout(limit) {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(RecvTimeoutError::Disconnected) => Err("the switch failed inside the server".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                let seconds = begun.elapsed().as_secs();
                let waits = "a batch that began before does not end, or the machine has little time for it";
                return SwitchOutcome::Running(format!(
                    "version {target} is still being taken over after {seconds} s: {waits}; it goes on"
                ));
            }
        };
        known.switching = None;
        let events = &self.context.loader.metrics.events;
        match result {
            Ok(SwitchReport { from, to, carried, dropped }) => {
                tracing::info!(
                    model = name,
                    from = from.0,
                    version = to.0,
                    carried,
                    dropped,
                    "version taken over"
                );
                let text =
                    format!("version {to} after {from}; {carried} cached rows updated, {dropped} dropped");
                events.record(EventKind::Switched, name, text);
                known.refused.remove(&target);
                SwitchOutcome::Done
            }
            Err(error) => {
                let serving = self.model.engine.version().0;
                self.model.engine.count_refused();
                tracing::warn!(model = name, version = target.0, serving, %error, "version refused");
                events.record(EventKind::Refused, name, format!("version {target}: {error}"));
                let stamps = Stamper::new(&self.context.loader.models, name).of(&[target]);
                let reason = refusal(target, &error);
                known.refused.insert(target, VersionRefusal::new(stamps, reason.clone(), true));
                if !own {
                    known.secondary.remove(&target);
                }
                SwitchOutcome::Refused(reason)
            }
        }
    }
}
