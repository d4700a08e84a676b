//! The turns of threads that run only when a processor is free: after each, such a thread calls the
//! scheduler.
//!
//! Linux places a thread that wakes on a processor on which only threads of the idle policy run, as on one
//! that is free. But since Linux 6.12, a thread that falls asleep may stay in the queue of its processor
//! until the scheduler chooses the next thread there (delayed dequeue, EEVDF). While an idle thread computes,
//! that is at the next tick, up to 4 ms later. Until then the processor does not count as free, so a thread
//! of a request that wakes shares another one. `sched_yield` lets the scheduler choose.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::priority;

/// How long a turn is. Turns of half and of twice this length help threads of requests as much
/// (`docs/benchmarks.md`, Publishing).
const TURN: Duration = Duration::from_micros(100);

#[derive(Clone, Copy)]
enum Turn {
    /// The policy of the thread is not known: it may have inherited one.
    Unknown,
    /// The thread does not have the idle policy.
    NotIdle,
    Began(Instant),
}

thread_local! {
    static TURN_OF_THREAD: Cell<Turn> = const { Cell::new(Turn::Unknown) };
}

/// Ends the turn of this thread if it runs only when a processor is free and the turn was long enough. Work
/// that may run on such a thread calls it between its pieces, which should take less than a turn. It costs
/// nearly nothing on other threads.
pub(crate) fn give_way() {
    if is_over() {
        std::thread::yield_now();
        TURN_OF_THREAD.set(Turn::Began(Instant::now()));
    }
}

/// The policy of this thread has changed.
pub(super) fn forget_policy() {
    TURN_OF_THREAD.set(Turn::Unknown);
}

fn is_over() -> bool {
    match TURN_OF_THREAD.get() {
        Turn::NotIdle => false,
        Turn::Began(at) => at.elapsed() >= TURN,
        Turn::Unknown => {
            let is_idle = priority::has_idle_policy();
            TURN_OF_THREAD.set(if is_idle { Turn::Began(Instant::now()) } else { Turn::NotIdle });
            false
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::thread::{sleep, spawn};

    use super::*;
    use crate::pace::give_way_every;

    /// Whether a turn of this thread is over after a while, and [`give_way`] begins the next.
    fn takes_turns() -> bool {
        give_way();
        sleep(TURN);
        let is_over = is_over();
        let before = Instant::now();
        give_way();
        is_over && matches!(TURN_OF_THREAD.get(), Turn::Began(at) if at >= before)
    }

    #[test]
    fn only_threads_of_the_idle_policy_give_way_also_those_that_inherit_it() {
        let seen = spawn(|| {
            let before = takes_turns();
            priority::make_idle().unwrap();
            (before, takes_turns(), spawn(takes_turns).join().unwrap())
        });
        assert_eq!(seen.join().unwrap(), (false, true, true));
        assert!(!takes_turns(), "another thread");
    }

    #[test]
    fn every_third_piece_ends_a_turn() {
        let began = || match TURN_OF_THREAD.get() {
            Turn::Began(at) => Some(at),
            _ => None,
        };
        let ended = spawn(move || {
            priority::make_idle().unwrap();
            give_way();
            let mut piece = give_way_every(3);
            let mut ends = || {
                let before = began();
                sleep(TURN);
                piece();
                began() != before
            };
            [(); 6].map(|()| ends())
        });
        assert_eq!(ended.join().unwrap(), [false, false, true, false, false, true]);
    }
}
