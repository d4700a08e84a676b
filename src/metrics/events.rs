//! The last events of the process, which the status page lists. The log has them too.
//!
//! A few of each kind are kept, so that versions that are published every second do not push out the one
//! that was refused an hour ago.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use serde::Serialize;

use crate::sync::EvenPoisoned;
use crate::types::unix_ms;

/// Events of each kind that are kept.
const EACH: usize = 20;

/// Most characters of a text.
const TEXT: usize = 500;

/// What happened to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub(crate) enum EventKind {
    Loaded,
    Unloaded,
    /// A version was taken over.
    Switched,
    /// A version, or the whole model, cannot be served.
    Refused,
    /// A loaded version is no longer on disk.
    Gone,
    Label,
    Published,
    NotPublished,
    TrainingEnded,
    TrainingFailed,
    OverloadBegan,
    OverloadEnded,
}

const KINDS: usize = EventKind::OverloadEnded as usize + 1;

/// Something that happened to a model.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    /// When it happened. It may be recorded later than a younger event.
    #[serde(skip)]
    at: Instant,
    /// Ascending in the order in which events were recorded.
    number: u64,
    unix_ms: u64,
    kind: EventKind,
    model: String,
    text: String,
}

#[derive(Default)]
struct Kept {
    recorded: u64,
    kinds: [VecDeque<Event>; KINDS],
}

/// The last events of each kind.
#[derive(Default)]
pub(crate) struct Events(Mutex<Kept>);

impl Events {
    fn locked(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().even_poisoned()
    }

    pub(crate) fn record(&self, kind: EventKind, model: &str, text: impl AsRef<str>) {
        self.record_since(Instant::now(), kind, model, text);
    }

    /// Records what happened a moment ago.
    pub(crate) fn record_since(&self, at: Instant, kind: EventKind, model: &str, text: impl AsRef<str>) {
        let mut kept = self.locked();
        let number = kept.recorded;
        kept.recorded += 1;
        let text: String = text.as_ref().chars().take(TEXT).collect();
        let events = &mut kept.kinds[kind as usize];
        if events.len() == EACH {
            events.pop_front();
        }
        let unix_ms = unix_ms().saturating_sub(at.elapsed().as_millis() as u64);
        events.push_back(Event { at, number, unix_ms, kind, model: model.to_owned(), text });
    }

    /// Those that are kept, the newest first, in the order in which they happened.
    pub(crate) fn last(&self) -> Vec<Event> {
        let mut all: Vec<Event> = self.locked().kinds.iter().flatten().cloned().collect();
        all.sort_by_key(|event| Reverse((event.at, event.number)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_events_push_out_only_their_own_kind() {
        let events = Events::default();
        events.record(EventKind::Refused, "ads", "version 2: damaged");
        (0..1000).for_each(|version| events.record(EventKind::Published, "ads", format!("{version}")));
        let last = events.last();
        assert_eq!(last.len(), EACH + 1);
        assert_eq!((last[0].kind, last[0].text.as_str()), (EventKind::Published, "999"));
        assert_eq!(last[EACH].kind, EventKind::Refused);
    }

    #[test]
    fn an_event_that_is_recorded_late_is_where_it_happened() {
        let events = Events::default();
        let published = Instant::now();
        events.record(EventKind::Switched, "ads", "version 2 after 1");
        events.record_since(published, EventKind::Published, "ads", "version 2");
        let kinds: Vec<EventKind> = events.last().iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Switched, EventKind::Published]);
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let events = Events::default();
        events.record(EventKind::Refused, "ads", "\u{e9}".repeat(TEXT + 1));
        assert_eq!(events.last()[0].text.chars().count(), TEXT);
    }
}
