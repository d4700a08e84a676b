//! Work that may wait: training beside a server, and opening new versions. It runs at low priority, so it
//! takes the time that requests leave.

use anyhow::Context;

/// The lowest priority (`nice`). On Linux it is that of a thread, and threads inherit it.
const NICE: i32 = 19;

/// Lowers the priority of this thread, and of the threads that it starts from now on. `what` is said in the
/// log if this fails.
pub(crate) fn lower_priority(what: &str) {
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::warn!(%error, "{what} at the priority of requests");
    }
}

/// Threads for parallel work of this thread, at its priority. `name` is that of the threads, with a number.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn pool(name: &'static str, threads: usize) -> anyhow::Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.thread_name(move |n| format!("{name}-{n}")).build().context("threads")
}
