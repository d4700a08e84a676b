//! Threads that work in the background of requests: their rests, their [`priority`], and their [turns](turn).
//!
//! Opening a version and taking it over read and write much memory. Requests that are computed meanwhile take
//! longer, also if the work has a processor only when no request has it: they share the memory and its
//! caches. So such a thread works for about a millisecond, and then rests. `docs/benchmarks.md` (Publishing)
//! has p99 of requests meanwhile. Shorter work with shorter rests made it higher: each rest wakes a
//! processor.
//!
//! A rest that helps no request only makes the version older. So a thread rests only if a batch of requests
//! was computed since its last rest.

#[cfg(target_os = "linux")]
pub(crate) mod priority;
#[cfg(target_os = "linux")]
mod turn;

use std::cell::Cell;
use std::cmp::Ordering;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a thread works before it rests.
const WORK: Duration = Duration::from_millis(1);

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
    /// `Some` on background threads.
    static RESTED: Cell<Option<Rested>> = const { Cell::new(None) };
}

/// Makes this thread a background thread: from now on, [`rest`] rests, and requests come first. Threads that
/// it starts inherit the priority that it has at that moment.
pub(crate) fn begin() {
    #[cfg(target_os = "linux")]
    priority::begin();
    RESTED.set(Some(Rested { end: Instant::now(), batches: BATCHES.load(Relaxed) }));
}

/// Whether other threads take all the time that requests leave.
static FREE_TIME_TAKEN: AtomicBool = AtomicBool::new(false);

/// While it exists, background threads do not wait for a free processor: training in this process takes all
/// the time that requests leave.
pub(crate) struct FreeTimeTaken(());

impl FreeTimeTaken {
    /// One at a time.
    pub(crate) fn begin() -> Self {
        FREE_TIME_TAKEN.store(true, Relaxed);
        Self(())
    }
}

impl Drop for FreeTimeTaken {
    fn drop(&mut self) {
        FREE_TIME_TAKEN.store(false, Relaxed);
    }
}

/// The clients that wait for what begins when background threads have ended their work.
static CLIENTS_WAIT: AtomicUsize = AtomicUsize::new(0);

/// While one exists, background threads neither rest nor wait for a free processor: a client waits for them.
pub(crate) struct ClientWaits(());

impl ClientWaits {
    pub(crate) fn begin() -> Self {
        CLIENTS_WAIT.fetch_add(1, Relaxed);
        Self(())
    }
}

impl Drop for ClientWaits {
    fn drop(&mut self) {
        CLIENTS_WAIT.fetch_sub(1, Relaxed);
    }
}

/// Whether background threads should not wait for a free processor now.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn are_urgent() -> bool {
    FREE_TIME_TAKEN.load(Relaxed) || CLIENTS_WAIT.load(Relaxed) > 0
}

/// Counts a batch of requests.
pub(crate) fn count_batch() {
    BATCHES.fetch_add(1, Relaxed);
}

/// Calls the scheduler if this thread runs only when a processor is free, and has not called it for a while.
/// Work that may run on such a thread calls this between its pieces, which should take less than 0.1 ms. It
/// costs nearly nothing on other threads.
pub(crate) fn give_way() {
    #[cfg(target_os = "linux")]
    turn::give_way();
}

/// Returns a function for loops of small pieces. Of its calls, every `calls`-th one calls [`give_way`].
pub(crate) fn give_way_every(calls: u32) -> impl FnMut() {
    let mut called = 0;
    move || {
        called += 1;
        if called == calls {
            called = 0;
            give_way();
        }
    }
}

/// As [`slice::sort_unstable_by`], with calls of [`give_way`] between its comparisons.
pub(crate) fn sort_unstable_by<T>(items: &mut [T], mut compare: impl FnMut(&T, &T) -> Ordering) {
    /// A comparison takes a few nanoseconds.
    const COMPARISONS: u32 = 4096;
    let mut compared = give_way_every(COMPARISONS);
    items.sort_unstable_by(|a, b| {
        compared();
        compare(a, b)
    });
}

/// Rests if this is a background thread, it has worked for a while, and requests were computed meanwhile.
/// Long loops call it about every 50 microseconds. It includes [`give_way`], and costs nearly nothing on
/// other threads.
pub(crate) fn rest() {
    give_way();
    let Some(rested) = RESTED.get() else { return };
    let worked = rested.end.elapsed();
    if worked < WORK {
        return;
    }
    let is_idle = is_idle();
    let batches = BATCHES.load(Relaxed);
    if is_needed(rested.batches, batches) {
        sleep(after(worked, is_idle));
    }
    RESTED.set(Some(Rested { end: Instant::now(), batches }));
}

/// Whether a rest is needed if so many batches were computed before the last rest, and so many until now.
fn is_needed(before: u64, now: u64) -> bool {
    now != before && CLIENTS_WAIT.load(Relaxed) == 0
}

/// Does work that takes locks of requests: meanwhile this thread does not wait for a free processor, because
/// a request could wait for the lock as long.
pub(crate) fn with_locks<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(target_os = "linux")]
    let work = || priority::not_idle(work);
    work()
}

/// Whether this thread runs only when a processor is free.
fn is_idle() -> bool {
    #[cfg(target_os = "linux")]
    let is_idle = priority::renew() == Some(priority::Priority::Idle);
    #[cfg(not(target_os = "linux"))]
    let is_idle = false;
    is_idle
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

/// How long to rest after working for this long: half as long if requests get the processor at once anyway.
fn after(worked: Duration, is_idle: bool) -> Duration {
    let rest = if is_idle { worked / 2 } else { worked };
    rest.min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_is_as_long_as_the_work_before_it_or_half_as_long_but_not_longer_than_its_limit() {
        let worked = Duration::from_micros(1300);
        assert_eq!([false, true].map(|is_idle| after(worked, is_idle)), [worked, worked / 2]);
        assert_eq!([false, true].map(|is_idle| after(Duration::from_secs(5), is_idle)), [LONGEST; 2]);
    }

    #[test]
    fn no_thread_rests_while_a_client_waits_or_if_nothing_was_computed() {
        let _waits = ClientWaits::begin();
        assert!(!is_needed(3, 4) && !is_needed(4, 4));
        assert!(are_urgent());
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
