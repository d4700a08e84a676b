//! Overload of the server: which calls are refused before their message is read.
//!
//! A batcher refuses requests that would wait too long, but only after their messages were read and
//! decoded. Under heavy overload that work alone takes the processor from the model, and requests age in
//! the buffers of the network, where no deadline is seen. So while requests are refused, the gate compares
//! the calls in flight with the measured rate of answers: by Little's law, `calls / rate` is how long a new
//! call would take. If that is more than [`MOST`] or a share of its time, it is refused at once, which
//! costs little. More calls in flight would not be answered sooner.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// How often [`Pressure::tick`] is called at least.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// Ticks without a refusal after which the overload is over.
const CALM: u64 = 5;

/// The share of a client's time that a call may take.
const SHARE: u32 = 5;

/// The most time that a call may take.
const MOST: Duration = Duration::from_millis(25);

/// So many calls are always let in, so that the rate can be measured.
const LEAST: usize = 16;

/// The weight of the last tick in the rate.
const WEIGHT: f64 = 0.5;

/// The rate of answers while the server is overloaded.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Since the last tick.
    answered: AtomicU64,
    /// Ticks since the last refusal. The server is overloaded below [`CALM`].
    calm: AtomicU64,
    /// Answers per second, the bits of an f64.
    rate: AtomicU64,
}

impl Pressure {
    pub(crate) const fn new() -> Self {
        Self { answered: AtomicU64::new(0), calm: AtomicU64::new(CALM), rate: AtomicU64::new(0) }
    }

    /// A call got its scores.
    pub(crate) fn answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    /// A call was refused because of overload.
    pub(crate) fn refused(&self) {
        self.calm.store(0, Ordering::Relaxed);
    }

    /// How long a call would take, if that is too long, with this many calls in flight.
    pub(crate) fn too_long(&self, in_flight: usize, deadline: Option<Instant>) -> Option<Duration> {
        if self.calm.load(Ordering::Relaxed) >= CALM || in_flight <= LEAST {
            return None;
        }
        let rate = f64::from_bits(self.rate.load(Ordering::Relaxed)).max(1.0);
        let takes = Duration::from_secs_f64((in_flight as f64 / rate).min(60.0));
        let time =
            deadline.map_or(MOST, |deadline| deadline.saturating_duration_since(Instant::now()) / SHARE);
        (takes > time.min(MOST)).then_some(takes)
    }

    /// Measures the rate. `elapsed` is the time since the last call.
    pub(crate) fn tick(&self, elapsed: Duration) {
        let last = self.answered.swap(0, Ordering::Relaxed) as f64 / elapsed.as_secs_f64().max(1e-3);
        let known = f64::from_bits(self.rate.load(Ordering::Relaxed));
        let rate = if known == 0.0 { last } else { known + WEIGHT * (last - known) };
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
        // If a refusal falls between both, the overload lasts a tick less.
        let calm = self.calm.load(Ordering::Relaxed);
        self.calm.store(calm.saturating_add(1).min(CALM), Ordering::Relaxed);
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

    /// Pressure after a second with so many answers, and then a refusal if the server is overloaded.
    fn after(answers: u64, overloaded: bool) -> Pressure {
        let pressure = Pressure::new();
        (0..answers).for_each(|_| pressure.answered());
        pressure.tick(SECOND);
        if overloaded {
            pressure.refused();
        }
        pressure
    }

    #[test]
    fn a_server_that_refuses_nothing_lets_every_call_in() {
        let soon = Some(Instant::now() + Duration::from_millis(1));
        assert_eq!(after(1, false).too_long(1_000_000, soon), None);
    }

    #[test]
    fn under_overload_calls_are_let_in_that_take_a_fifth_of_their_time_and_at_most_25_ms() {
        let pressure = after(1000, true);
        let soon = Some(Instant::now() + Duration::from_millis(100));
        assert_eq!(pressure.too_long(LEAST + 1, soon), None);
        assert_eq!(pressure.too_long(21, soon), Some(Duration::from_millis(21)));
        for deadline in [None, Some(Instant::now() + SECOND)] {
            assert_eq!(pressure.too_long(25, deadline), None);
            assert_eq!(pressure.too_long(26, deadline), Some(Duration::from_millis(26)));
        }
        assert_eq!(pressure.too_long(LEAST, Some(Instant::now())), None);
    }

    #[test]
    fn the_overload_ends_some_ticks_after_the_last_refusal() {
        let pressure = after(10, true);
        let now = Some(Instant::now());
        assert!((1..CALM).all(|_| {
            pressure.tick(SECOND);
            pressure.too_long(LEAST + 1, now).is_some()
        }));
        pressure.tick(SECOND);
        assert_eq!(pressure.too_long(LEAST + 1, now), None);
    }
}
