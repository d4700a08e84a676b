//! Work that may wait. Training and shadow scoring beside a server run only when a processor is free: they
//! take the time that requests leave. New versions are opened and taken over at a low priority, and with
//! rests ([`pace`]). So they also have some time on a machine whose processors are never free, and requests
//! get new weights there too.

use anyhow::Context;

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

/// How much greater the `nice` value of a low priority is. Such a thread gets a ninth of the time of a thread
/// of requests, if both always need the processor.
#[cfg(target_os = "linux")]
const LOWER: i32 = 10;

#[cfg(target_os = "linux")]
const LOWEST: i32 = 19;

/// Gives this thread a low priority, which threads that it starts inherit, and rests. Leaves the priority as
/// it is on systems other than Linux, where it belongs to the process.
pub(crate) fn low_priority() {
    pace::begin();
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{getpriority_process, setpriority_process};

        let lower = |nice: i32| setpriority_process(None, (nice + LOWER).min(LOWEST));
        if let Err(error) = getpriority_process(None).and_then(lower) {
            tracing::warn!(%error, "new versions are opened at the priority of requests");
        }
    }
}

/// Threads of low priority that rest, one a processor.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn low_priority_pool(name: &'static str) -> anyhow::Result<rayon::ThreadPool> {
    build(named(name, 0).start_handler(|_| low_priority()))
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
        assert_eq!(policy(), "0");
    }

    #[test]
    fn threads_that_open_versions_have_a_low_priority() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        assert_eq!(low_priority_pool("test").unwrap().install(nice), (before + LOWER).min(LOWEST));
        assert_eq!(nice(), before);
    }
}
