//! Runtimes for the network: with several threads, or for one command on its own thread.

use std::io;
use std::sync::RwLock;
use std::thread;

use tokio::runtime::{Builder, Runtime};

/// Runs the calls of a command on this thread.
///
/// # Errors
/// When the system has no descriptors for it.
pub(crate) fn on_this_thread<T>(calls: impl Future<Output = T>) -> io::Result<T> {
    Ok(Builder::new_current_thread().enable_all().build()?.block_on(calls))
}

/// A runtime with this many threads, each of which calls `before_sleep` when it has nothing left to do.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn with_threads(
    threads: usize,
    before_sleep: impl Fn() + Send + Sync + 'static,
) -> io::Result<Runtime> {
    check_threads(threads)?;
    Builder::new_multi_thread().worker_threads(threads).on_thread_park(before_sleep).enable_all().build()
}

/// Runs this many threads at a time, until all have started. If the system refused one of tokio's own threads
/// (`ulimit -u`, the limit of a container), tokio would panic and then wait for ever.
fn check_threads(threads: usize) -> io::Result<()> {
    let all_started = RwLock::new(());
    let wait = || drop(all_started.read());
    thread::scope(|scope| {
        let starting = all_started.write();
        let started =
            (0..threads).try_for_each(|_| thread::Builder::new().spawn_scoped(scope, wait).map(drop));
        drop(starting);
        started
    })
}
