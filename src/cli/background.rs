//! Work that may wait: training beside a server, and opening new versions. Its threads run only when a
//! processor is free, so it takes the time that requests leave. Those that open versions also rest
//! ([`pace`]).

use anyhow::{Context, anyhow};

use crate::pace;

/// Lets this thread, and the threads that it starts from now on, run only when a processor is free. `what` is
/// said in the log if the system refuses. Does nothing on systems other than Linux.
///
/// A low priority (`nice`) does not suffice: a thread of low priority that runs keeps its processor for some
/// milliseconds when a request arrives. One of the policy `SCHED_IDLE` gives it up at once.
pub(crate) fn only_when_idle(what: &str) {
    #[cfg(target_os = "linux")]
    {
        use thread_priority::unix::{NormalThreadSchedulePolicy, ThreadSchedulePolicy};
        use thread_priority::{ThreadPriority, set_thread_priority_and_policy, thread_native_id};

        let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
        let set = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy);
        if let Err(error) = set {
            tracing::warn!(?error, "{what} at the priority of requests");
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = what;
}

/// Threads that run only when a processor is free, one a processor, and that rest.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn idle_pool(name: &'static str) -> anyhow::Result<rayon::ThreadPool> {
    // Threads inherit the policy of the thread that starts them.
    let starter = std::thread::Builder::new().spawn(move || {
        only_when_idle("new versions are opened");
        build(named(name, 0).start_handler(|_| pace::begin()))
    });
    starter.context("threads")?.join().map_err(|_| anyhow!("threads"))?
}

/// Threads for parallel work of this thread, with its policy. `name` is that of the threads, with a number.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn pool(name: &'static str, threads: usize) -> anyhow::Result<rayon::ThreadPool> {
    build(named(name, threads))
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

    /// The policy of a thread: field 41 of its `stat` (proc_pid_stat(5)).
    fn policy() -> String {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The name of the thread is in brackets, and may have spaces.
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(38).unwrap().to_owned()
    }

    #[test]
    fn threads_in_the_background_and_those_that_they_start_have_the_idle_policy() {
        const SCHED_IDLE: &str = "5";
        let thread = std::thread::spawn(|| {
            only_when_idle("this test runs");
            (policy(), pool("test", 1).unwrap().install(policy))
        });
        assert_eq!(thread.join().unwrap(), (SCHED_IDLE.to_owned(), SCHED_IDLE.to_owned()));
        assert_eq!(idle_pool("test").unwrap().install(policy), SCHED_IDLE);
        assert_eq!(policy(), "0");
    }
}
