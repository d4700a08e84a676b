//! When the network waits for the models.
//!
//! While a batch is computed on every core, a thread that reads a message takes its core from a model, and
//! the request of the message waits for the end of a batch anyway. Below the capacity this does not matter.
//! Under overload, so many messages come that models lose a large part of their time to it. So while a model
//! is overloaded, threads of the runtime that have nothing left to do wait until a batch ends, or at most
//! [`MAX_WAIT`], and then find several messages at once.

use std::sync::{Condvar, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::sync::EvenPoisoned;

/// The longest wait. Messages for another model, or for none, must not wait longer.
const MAX_WAIT: Duration = Duration::from_millis(4);

/// The cores that this process may use.
pub(crate) static CORES: LazyLock<Cores> =
    LazyLock::new(|| Cores::new(std::thread::available_parallelism().map_or(1, usize::from), MAX_WAIT));

pub(crate) struct Cores {
    count: usize,
    most: Duration,
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Default)]
struct State {
    /// Threads that compute a batch.
    computing: usize,
    /// Threads that wait for the end of one.
    waiting: usize,
    /// A model counts as overloaded until this instant.
    overloaded: Option<Instant>,
}

impl Cores {
    pub(crate) fn new(count: usize, most: Duration) -> Self {
        Self { count, most, state: Mutex::default(), free: Condvar::new() }
    }

    /// A model is overloaded, for about this long from now on.
    pub(crate) fn overloaded(&self, time: Duration) {
        self.state().overloaded = Some(Instant::now() + time);
    }

    /// A batch begins. It ends when the value is dropped.
    pub(crate) fn compute(&self) -> Computing<'_> {
        self.state().computing += 1;
        Computing(self)
    }

    /// Under overload, waits while a batch is computed on every core. Returns whether a core is free.
    pub(crate) fn wait_for_one(&self) -> bool {
        let mut state = self.state();
        let overloaded = state.overloaded.is_some_and(|until| Instant::now() < until);
        if state.computing < self.count || !overloaded {
            return state.computing < self.count;
        }
        state.waiting += 1;
        let none_is_free = |state: &mut State| state.computing >= self.count;
        let waited = self.free.wait_timeout_while(state, self.most, none_is_free);
        let (mut state, timeout) = waited.even_poisoned();
        state.waiting -= 1;
        !timeout.timed_out()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().even_poisoned()
    }
}

/// A batch that is computed.
pub(crate) struct Computing<'c>(&'c Cores);

impl Drop for Computing<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.computing -= 1;
        if state.waiting > 0 {
            self.0.free.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOREVER: Duration = Duration::from_secs(3600);

    #[test]
    fn without_overload_nothing_waits() {
        let cores = Cores::new(1, FOREVER);
        let _batch = cores.compute();
        assert!(!cores.wait_for_one());
        cores.overloaded(Duration::ZERO);
        assert!(!cores.wait_for_one(), "the overload is over");
    }

    #[test]
    fn under_overload_nothing_waits_while_a_core_is_free() {
        let cores = Cores::new(2, FOREVER);
        cores.overloaded(FOREVER);
        let _batch = cores.compute();
        assert!(cores.wait_for_one());
    }

    #[test]
    fn under_overload_the_end_of_a_batch_ends_the_wait_for_a_core() {
        let cores = Cores::new(1, FOREVER);
        cores.overloaded(FOREVER);
        let batch = cores.compute();
        std::thread::scope(|scope| {
            let wait = scope.spawn(|| cores.wait_for_one());
            while cores.state().waiting == 0 {
                std::thread::yield_now();
            }
            drop(batch);
            assert!(wait.join().unwrap());
        });
        assert_eq!(cores.state().waiting, 0);
    }

    #[test]
    fn the_wait_for_a_core_has_a_limit() {
        let cores = Cores::new(1, Duration::from_millis(1));
        cores.overloaded(FOREVER);
        let _batch = cores.compute();
        assert!(!cores.wait_for_one());
    }
}
