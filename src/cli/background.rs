//! Work that may wait. Training and shadow scoring beside a server run only when a processor is free: they
//! take the time that requests leave. New versions are opened and taken over by background threads
//! ([`pace`]), which also have some time on a machine whose processors are never free, so requests get new
//! weights there too.

use std::error::Error as _;

use anyhow::Context;

use crate::pace;

/// Lets this thread, and the threads that it starts from now on, run only when a processor is free. `what` is
/// said in the log if the system refuses. Does nothing on systems other than Linux.
pub(crate) fn only_when_idle(what: &str) {
    #[cfg(target_os = "linux")]
    if let Err(error) = pace::priority::make_idle() {
        tracing::warn!(%error, "{what} at the priority of requests");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = what;
}

/// Background threads, one a processor.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn background_pool(name: &'static str) -> anyhow::Result<rayon::ThreadPool> {
    build(named(name, 0).start_handler(|_| pace::begin()))
}

/// Threads that run only when a processor is free. `name` is that of the threads, with a number; `what` is
/// said in the log if the system refuses.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn idle_pool(
    name: &'static str,
    threads: usize,
    what: &'static str,
) -> anyhow::Result<rayon::ThreadPool> {
    build(named(name, threads).start_handler(move |_| only_when_idle(what)))
}

/// Threads for parallel work of this thread, with its policy. `name` is that of the threads, with a number.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn pool(name: &'static str, threads: usize) -> anyhow::Result<rayon::ThreadPool> {
    build(named(name, threads))
}

/// Starts the threads that rayon shares between all other threads, one a processor. Otherwise it would start
/// them when they are first used, and panic if the system refuses.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn start_shared_pool() -> anyhow::Result<()> {
    match named("shared", 0).build_global() {
        // Without a source, they run already.
        Err(error) if error.source().is_some() => Err(error).context("threads"),
        _ => Ok(()),
    }
}

fn named(name: &'static str, threads: usize) -> rayon::ThreadPoolBuilder {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.thread_name(move |n| format!("{name}-{n}"))
}

fn build(pool: rayon::ThreadPoolBuilder) -> anyhow::Result<rayon::ThreadPool> {
    pool.build().context("threads")
}

#[cfg(test)]
#[cfg(all(target_os = "linux", not(flechette_loom)))]
mod tests {
    use super::*;
    use crate::pace::priority::tests::policy;

    #[test]
    fn threads_in_the_background_and_those_that_they_start_have_the_idle_policy() {
        let thread = std::thread::spawn(|| {
            let pools = [pool("test", 1), idle_pool("test", 1, "this test runs")];
            let before = pools.map(|pool| pool.unwrap().install(policy));
            only_when_idle("this test runs");
            (before, policy(), pool("test", 1).unwrap().install(policy))
        });
        let (idle, other) = (libc::SCHED_IDLE, libc::SCHED_OTHER);
        assert_eq!(thread.join().unwrap(), ([other, idle], idle, idle));
        assert_eq!(policy(), libc::SCHED_OTHER);
    }
}
