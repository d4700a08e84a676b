//! Rests of a thread that works in the background.
//!
//! Opening a version and taking it over read and write much memory. Requests that are computed meanwhile take
//! longer, also if the work has a processor only when no request has it: they share the memory and its
//! caches, and a processor that is never idle does not help another one. So such a thread works for a
//! fraction of a millisecond, and then rests as long. `docs/benchmarks.md` (Publishing) has p99 with these
//! rests. Without them it was 2.2 times that at rest.
//!
//! A rest that helps no request only makes the version older. So a thread rests only if a batch of requests
//! was computed since its last rest.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a thread works before it rests.
const WORK: Duration = Duration::from_micros(200);

/// The longest rest. A thread that has worked longer has waited for something, and rested then.
const LONGEST: Duration = Duration::from_millis(2);

/// The batches of requests that were computed.
static BATCHES: AtomicU64 = AtomicU64::new(0);

/// The last rest of a thread.
#[derive(Clone, Copy, PartialEq)]
struct Rested {
    end: Instant,
    /// [`BATCHES`] before the rest.
    batches: u64,
}

thread_local! {
    /// `Some` on threads that rest.
    static RESTED: Cell<Option<Rested>> = const { Cell::new(None) };
}

/// From now on, [`rest`] rests on this thread.
pub(crate) fn begin() {
    RESTED.set(Some(Rested { end: Instant::now(), batches: BATCHES.load(Ordering::Relaxed) }));
}

/// Counts a batch of requests.
pub(crate) fn count_batch() {
    BATCHES.fetch_add(1, Ordering::Relaxed);
}

/// Rests if this thread is one that rests, has worked for a while, and requests were computed meanwhile. Long
/// loops call it about every 50 microseconds. It costs nearly nothing on other threads.
pub(crate) fn rest() {
    let Some(rested) = RESTED.get() else { return };
    let Some(rest) = after(rested.end.elapsed()) else { return };
    let batches = BATCHES.load(Ordering::Relaxed);
    if batches != rested.batches {
        sleep(rest);
    }
    RESTED.set(Some(Rested { end: Instant::now(), batches }));
}

/// Items that are handled between two rests of [`rested`].
const AT_ONCE: usize = 256;

/// The same items, with rests in between. For items that take about 200 ns.
pub(crate) fn rested<T>(items: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    items.into_iter().enumerate().map(|(n, item)| {
        if n.is_multiple_of(AT_ONCE) {
            rest();
        }
        item
    })
}

/// How long to rest after working for this long.
fn after(worked: Duration) -> Option<Duration> {
    (worked >= WORK).then(|| worked.min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_is_as_long_as_the_work_before_it_but_not_longer_than_its_limit() {
        assert_eq!(after(Duration::from_micros(199)), None);
        assert_eq!(after(Duration::from_micros(300)), Some(Duration::from_micros(300)));
        assert_eq!(after(Duration::from_secs(5)), Some(Duration::from_millis(2)));
    }

    #[test]
    fn only_a_thread_that_has_begun_rests() {
        let rests = || {
            let before = RESTED.get();
            sleep(WORK);
            rest();
            RESTED.get() != before
        };
        assert!(!rests());
        assert!(
            std::thread::spawn(move || {
                begin();
                rests()
            })
            .join()
            .unwrap()
        );
        assert!(!rests(), "another thread");
    }
}
