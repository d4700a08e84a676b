//! When the overload of a model begins and ends, for the list of events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::metrics::{EventKind, Events};
use crate::server::model::Model;

/// How long a model is without overload before the overload counts as over. Shorter pauses belong to it.
const QUIET: Duration = Duration::from_secs(30);

/// The models that are overloaded, with the time when that was seen last.
#[derive(Default)]
pub(crate) struct Overloads(BTreeMap<String, Instant>);

impl Overloads {
    /// The overload of a model ends when it is not served any more.
    pub(crate) fn retain(&mut self, served: &[Arc<Model>], events: &Events) {
        self.0.retain(|name, _| {
            let is_served = served.iter().any(|model| model.name() == name);
            if !is_served {
                events.record(EventKind::OverloadEnded, name, "the model is not served any more");
            }
            is_served
        });
    }

    /// Records the beginning or the end of an overload.
    pub(crate) fn look(&mut self, model: &str, overloaded: bool, events: &Events) {
        match (self.0.get_mut(model), overloaded) {
            (Some(last), true) => *last = Instant::now(),
            (None, true) => {
                self.0.insert(model.to_owned(), Instant::now());
                events.record(EventKind::OverloadBegan, model, "requests are refused because of load");
            }
            (Some(last), false) if last.elapsed() >= QUIET => {
                self.0.remove(model);
                let seconds = QUIET.as_secs();
                let text = format!("no request was refused because of load for {seconds} s");
                events.record(EventKind::OverloadEnded, model, text);
            }
            _ => {}
        }
    }
}
