//! The calls of a model that are being computed, and which calls are refused before their message is decoded.
//!
//! A batcher refuses requests that would wait too long, but only after their messages were decoded. Under
//! heavy overload that work alone takes the processor from the model, and requests age in the buffers of the
//! network, where no deadline is seen. So while requests are refused, the rate of answers is measured, and
//! the calls that are being computed are compared with it: by Little's law, `calls / rate` is how long a new
//! call would take. If that is more than [`MAX_CALL_TIME`] or a share of its time, it is refused at once,
//! which costs little. More calls at a time would not be answered sooner. Only calls of the same priority and
//! of higher ones count, because those are computed first, and a refusal of a low priority is no sign of
//! overload for higher ones.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::batcher::Priority;

/// How often [`Pressure::tick`] is called at least.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// Ticks without a refusal after which the overload is over.
const CALM: u64 = 5;

/// A call may take one part in `DEADLINE_DIVISOR` of its client's time.
const DEADLINE_DIVISOR: u32 = 5;

/// The most time that a call may take.
const MAX_CALL_TIME: Duration = Duration::from_millis(25);

/// At least this many calls are always admitted, so that the rate can be measured.
const LEAST: usize = 16;

/// The weight of the last tick in the rate.
const WEIGHT: f64 = 0.5;

/// The calls of a model that hold a place, and their rate of answers. Streams do not count.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Calls that hold a place, and the memory of their messages.
    places: AtomicUsize,
    bytes: AtomicUsize,
    /// Calls that are being computed, by priority. A call whose answer is leaving does not count: its client
    /// decides how long that takes.
    calls: [AtomicUsize; 3],
    /// Since the last tick.
    answered: AtomicU64,
    /// Ticks since the last refusal of each priority or of a higher one. Below [`CALM`] it is overloaded.
    calm: [AtomicU64; 3],
    /// Answers per second, the bits of an f64. NaN if it is not known: without overload, there are as many
    /// answers as calls, and not as many as there could be.
    rate: AtomicU64,
}

impl Pressure {
    pub(crate) const fn new() -> Self {
        Self {
            places: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            calls: [const { AtomicUsize::new(0) }; 3],
            answered: AtomicU64::new(0),
            calm: [const { AtomicU64::new(CALM) }; 3],
            rate: AtomicU64::new(f64::NAN.to_bits()),
        }
    }

    /// A call takes a place. Without a priority it is not computed. Returns the number of places taken.
    pub(crate) fn enter(&self, priority: Option<Priority>) -> usize {
        if let Some(priority) = priority {
            self.calls[priority as usize].fetch_add(1, Ordering::Relaxed);
        }
        self.places.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A call has left its place.
    pub(crate) fn leave(&self, priority: Option<Priority>) {
        if let Some(priority) = priority {
            self.calls[priority as usize].fetch_sub(1, Ordering::Relaxed);
        }
        self.places.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the memory of all calls.
    pub(crate) fn add_bytes(&self, bytes: usize) -> usize {
        self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    pub(crate) fn release_bytes(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A call has taken a place.
    ///
    /// # Errors
    /// When the call would take too long.
    pub(crate) fn admit(&self, priority: Priority, deadline: Option<Instant>) -> Result<(), Status> {
        let Some(takes) = self.too_long(priority, deadline) else { return Ok(()) };
        self.refused(priority);
        let text = format!("overloaded: a call takes about {} ms now", takes.as_millis());
        Err(overloaded(text, takes))
    }

    /// A call got its scores.
    pub(crate) fn answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    /// A call was refused because of overload.
    pub(crate) fn refused(&self, priority: Priority) {
        for calm in &self.calm[priority as usize..] {
            calm.store(0, Ordering::Relaxed);
        }
    }

    /// Whether a call of any priority was refused just now.
    pub(crate) fn overloaded(&self) -> bool {
        // A refusal of any priority counts for the lowest one.
        self.calm[Priority::Low as usize].load(Ordering::Relaxed) < CALM
    }

    /// How long a call would take, if that is too long.
    fn too_long(&self, priority: Priority, deadline: Option<Instant>) -> Option<Duration> {
        let before = self.calls[..=priority as usize].iter().map(|calls| calls.load(Ordering::Relaxed));
        let before: usize = before.sum();
        if self.calm[priority as usize].load(Ordering::Relaxed) >= CALM || before <= LEAST {
            return None;
        }
        let rate = f64::from_bits(self.rate.load(Ordering::Relaxed));
        if rate.is_nan() {
            return None;
        }
        let takes = Duration::from_secs_f64((before as f64 / rate.max(1.0)).min(60.0));
        let time = deadline.map_or(MAX_CALL_TIME, |deadline| {
            deadline.saturating_duration_since(Instant::now()) / DEADLINE_DIVISOR
        });
        (takes > time.min(MAX_CALL_TIME)).then_some(takes)
    }

    /// Measures the rate. `elapsed` is the time since the last call.
    pub(crate) fn tick(&self, elapsed: Duration) {
        let last = self.answered.swap(0, Ordering::Relaxed) as f64 / elapsed.as_secs_f64().max(1e-3);
        let known = f64::from_bits(self.rate.load(Ordering::Relaxed));
        let [.., lowest] = &self.calm;
        let rate = match known {
            _ if lowest.load(Ordering::Relaxed) >= CALM => f64::NAN,
            known if known.is_nan() || known == 0.0 => last,
            known => known + WEIGHT * (last - known),
        };
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
        for calm in &self.calm {
            // If a refusal falls between both, the overload lasts a tick less.
            let ticks = calm.load(Ordering::Relaxed);
            calm.store(ticks.saturating_add(1).min(CALM), Ordering::Relaxed);
        }
    }
}

/// The status of a call that was refused because of overload. `retry` is when it may be sent again.
pub(crate) fn overloaded(text: String, retry: Duration) -> Status {
    Status::with_error_details(Code::ResourceExhausted, text, ErrorDetails::with_retry_info(Some(retry)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The pressure after a second with `answers` answers, and with a refusal if the model is overloaded.
    fn after(answers: u64, overloaded: bool) -> Pressure {
        let pressure = Pressure::new();
        if overloaded {
            pressure.refused(Priority::Normal);
        }
        (0..answers).for_each(|_| pressure.answered());
        pressure.tick(SECOND);
        pressure
    }

    /// How long a call takes, if that is too long, with this many calls of a priority being computed.
    fn takes(pressure: &Pressure, calls: usize, deadline: Option<Instant>) -> Option<Duration> {
        pressure.calls[Priority::Normal as usize].store(calls, Ordering::Relaxed);
        pressure.too_long(Priority::Normal, deadline)
    }

    #[test]
    fn a_model_that_refuses_nothing_lets_every_call_in() {
        let soon = Some(Instant::now() + Duration::from_millis(1));
        assert_eq!(takes(&after(1, false), 1_000_000, soon), None);
    }

    #[test]
    fn the_rate_before_an_overload_refuses_no_call() {
        let pressure = after(10, false);
        pressure.refused(Priority::Normal);
        assert_eq!(takes(&pressure, 1_000_000, None), None);
        (0..1000).for_each(|_| pressure.answered());
        pressure.tick(SECOND);
        assert_eq!(takes(&pressure, 100, None), Some(Duration::from_millis(100)));
    }

    #[test]
    fn under_overload_calls_are_let_in_that_take_a_fifth_of_their_time_and_at_most_25_ms() {
        let pressure = after(1000, true);
        let soon = Some(Instant::now() + Duration::from_millis(100));
        assert_eq!(takes(&pressure, LEAST + 1, soon), None);
        assert_eq!(takes(&pressure, 21, soon), Some(Duration::from_millis(21)));
        for deadline in [None, Some(Instant::now() + SECOND)] {
            assert_eq!(takes(&pressure, 25, deadline), None);
            assert_eq!(takes(&pressure, 26, deadline), Some(Duration::from_millis(26)));
        }
        assert_eq!(takes(&pressure, LEAST, Some(Instant::now())), None);
    }

    #[test]
    fn the_overload_of_a_priority_refuses_no_higher_one() {
        let pressure = after(1000, true);
        pressure.calls[Priority::Normal as usize].store(100, Ordering::Relaxed);
        assert!(pressure.too_long(Priority::Low, None).is_some());
        assert!(pressure.too_long(Priority::Normal, None).is_some());
        pressure.calls[Priority::High as usize].store(100, Ordering::Relaxed);
        assert_eq!(pressure.too_long(Priority::High, None), None);
        pressure.refused(Priority::High);
        assert_eq!(pressure.too_long(Priority::High, None), Some(Duration::from_millis(100)));
    }

    #[test]
    fn the_overload_ends_some_ticks_after_the_last_refusal() {
        let pressure = after(10, true);
        let now = Some(Instant::now());
        assert!((2..CALM).all(|_| {
            pressure.tick(SECOND);
            takes(&pressure, LEAST + 1, now).is_some()
        }));
        pressure.tick(SECOND);
        assert_eq!(takes(&pressure, LEAST + 1, now), None);
    }
}
