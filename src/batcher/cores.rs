//! Under overload, threads that read messages wait until a core is free, so that they do not interrupt
//! batches.
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
    /// Batches that are computed.
    computing: Vec<Begun>,
    /// The number of the next batch.
    next: u64,
    /// Threads that wait for the end of one.
    waiting: usize,
    /// A model counts as overloaded until this instant.
    overloaded: Option<Instant>,
}

/// A batch that has begun.
struct Begun {
    number: u64,
    at: Instant,
    /// How long it may take. Then it is stuck, and no message waits for its end any more.
    patience: Duration,
}

impl State {
    /// Threads that compute a batch and are not stuck.
    fn busy(&self) -> usize {
        self.computing.iter().filter(|batch| batch.at.elapsed() < batch.patience).count()
    }
}

impl Cores {
    pub(crate) fn new(count: usize, most: Duration) -> Self {
        Self { count, most, state: Mutex::default(), free: Condvar::new() }
    }

    /// A model is overloaded, for about this long from now on.
    pub(crate) fn overloaded(&self, time: Duration) {
        self.state().overloaded = Some(Instant::now() + time);
    }

    /// A batch begins, which is stuck if it takes longer than `patience`. It ends when the value is dropped.
    pub(crate) fn compute(&self, patience: Duration) -> Computing<'_> {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.computing.push(Begun { number, at: Instant::now(), patience });
        Computing { cores: self, number }
    }

    /// Under overload, waits while a batch is computed on every core. Returns whether a core is free.
    pub(crate) fn wait_for_one(&self) -> bool {
        let mut state = self.state();
        let overloaded = state.overloaded.is_some_and(|until| Instant::now() < until);
        let is_free = state.busy() < self.count;
        if is_free || !overloaded {
            return is_free;
        }
        state.waiting += 1;
        let none_is_free = |state: &mut State| state.busy() >= self.count;
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
pub(crate) struct Computing<'c> {
    cores: &'c Cores,
    number: u64,
}

impl Drop for Computing<'_> {
    fn drop(&mut self) {
        let mut state = self.cores.state();
        state.computing.retain(|batch| batch.number != self.number);
        if state.waiting > 0 {
            self.cores.free.notify_all();
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
        let _batch = cores.compute(FOREVER);
        assert!(!cores.wait_for_one());
        cores.overloaded(Duration::ZERO);
        assert!(!cores.wait_for_one(), "the overload is over");
    }

    #[test]
    fn under_overload_nothing_waits_while_a_core_is_free() {
        let cores = Cores::new(2, FOREVER);
        cores.overloaded(FOREVER);
        let _batch = cores.compute(FOREVER);
        assert!(cores.wait_for_one());
    }

    #[test]
    fn under_overload_the_end_of_a_batch_ends_the_wait_for_a_core() {
        let cores = Cores::new(1, FOREVER);
        cores.overloaded(FOREVER);
        let batch = cores.compute(FOREVER);
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
    fn under_overload_nothing_waits_for_a_batch_that_is_stuck() {
        let cores = Cores::new(1, FOREVER);
        cores.overloaded(FOREVER);
        let _stuck = cores.compute(Duration::ZERO);
        assert!(cores.wait_for_one());
        let batch = cores.compute(FOREVER);
        assert_eq!(cores.state().busy(), 1);
        drop(batch);
        assert_eq!(cores.state().computing.len(), 1);
    }

    #[test]
    fn the_wait_for_a_core_has_a_limit() {
        let cores = Cores::new(1, Duration::from_millis(1));
        cores.overloaded(FOREVER);
        let _batch = cores.compute(FOREVER);
        assert!(!cores.wait_for_one());
    }
}
