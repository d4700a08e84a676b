//! A thread that can be joined with a time limit.

use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::sync::EvenPoisoned;

/// A thread whose join has a time limit, because a system call or a call of a model cannot be interrupted.
pub(crate) struct BoundedThread {
    /// Closed when the thread ends. Behind a mutex only because a receiver alone cannot be shared.
    ended: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl BoundedThread {
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<Self> {
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _end = end;
            run();
        })?;
        Ok(Self { ended: Mutex::new(ended), thread: Some(thread) })
    }

    /// Waits for the end of the thread. Returns `false` if it has not ended in time.
    pub(crate) fn wait(&mut self, limit: Duration) -> bool {
        let ended = self.ended.get_mut().even_poisoned();
        if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            return false;
        }
        if let Some(thread) = self.thread.take() {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                tracing::error!(thread = name, "a thread panicked");
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_a_thread_has_a_limit_and_ends_with_the_thread() {
        let (release, held) = mpsc::channel::<()>();
        let mut thread = BoundedThread::start("held", move || assert!(held.recv().is_err())).unwrap();
        assert!(!thread.wait(Duration::from_millis(1)));
        drop(release);
        assert!(thread.wait(Duration::from_secs(20)));
    }
}
