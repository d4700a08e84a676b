//! The priorities of background threads on Linux. Elsewhere they have that of the thread that starts them.
//!
//! - **Idle** (`SCHED_IDLE`): the thread runs only when a processor is free. To the scheduler, the processor
//!   on which it runs is free, so a request that wakes gets it at once. But if other threads always need all
//!   processors, it waits for seconds each time.
//! - **Low** (`nice`): the thread always gets some time. But a request that wakes meanwhile may have to share
//!   the processor of another request: to the scheduler, none is free.
//!
//! So a background thread has the idle policy until it has waited for a processor so long that the low
//! priority would have given it more time. Then all background threads have the low priority for a while.
//! They also have it while training in the same process takes the time that requests leave, because new
//! versions come before that, and while a client waits for them. And a thread has it while it takes locks of
//! requests ([`not_idle`]).
//!
//! Whether a thread may leave the idle policy again depends on its rights: it needs `CAP_SYS_NICE`, or a
//! limit of `nice` (`RLIMIT_NICE`) that allows the low priority. Without them, background threads always have
//! the low priority (setpriority(2), sched(7)).
#![allow(unsafe_code)]

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::process::{getpriority_process, setpriority_process};

use crate::sync::EvenPoisoned;

/// How much greater the `nice` value of the low priority is. Such a thread gets a ninth of the time of a
/// thread of requests, if both always need the processor.
const LOWER: i32 = 10;

const LOWEST: i32 = 19;

/// An idle thread is starved if it waits more than this many times as long as it runs.
const MOST_WAIT: u32 = 9;

/// A shorter wait starves no thread.
const SHORT_WAIT: Duration = Duration::from_millis(50);

/// How often a thread looks whether it is starved.
const MEASURED_EVERY: Duration = Duration::from_millis(100);

/// How long background threads have the low priority after one was starved.
const LOW_FOR: Duration = Duration::from_secs(300);

/// That of this process.
static WANTED: Wanted = Wanted { starved: Mutex::new(None), are_urgent: super::are_urgent };

/// The priority of a background thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Priority {
    Idle,
    Low,
}

/// Decides the priority that background threads should have.
struct Wanted {
    /// When a thread was starved.
    starved: Mutex<Option<Instant>>,
    /// Whether background threads should not wait for a free processor now.
    are_urgent: fn() -> bool,
}

/// The time that a thread ran, and the time that it waited for a processor.
#[derive(Clone, Copy, Debug, Default)]
struct RunTime {
    ran: Duration,
    waited: Duration,
}

/// The priority of this thread, and its times when it last looked at them.
#[derive(Clone, Copy)]
struct Measured {
    priority: Priority,
    /// Whether it must not be idle now.
    has_locks: bool,
    at: Instant,
    time: RunTime,
}

thread_local! {
    /// `Some` on background threads.
    static MEASURED: Cell<Option<Measured>> = const { Cell::new(None) };
}

/// Makes this thread a background thread. Threads that it starts inherit its priority of that moment.
pub(super) fn begin() {
    begin_with(&WANTED);
}

fn begin_with(wanted: &Wanted) {
    // Tried at the priority that threads of requests have.
    let idle_can_end = idle_can_end();
    if let Err(error) = lower() {
        tracing::warn!(%error, "new versions are opened at the priority of requests");
        return;
    }
    let (at, time) = (Instant::now(), RunTime::of_thread().unwrap_or_default());
    let mut measured = Measured { priority: Priority::Low, has_locks: false, at, time };
    if idle_can_end {
        measured.take(wanted.at(at));
    }
    MEASURED.set(Some(measured));
}

/// The priority of this thread from now on; `None` if it is no background thread.
pub(super) fn renew() -> Option<Priority> {
    renew_with(&WANTED)
}

fn renew_with(wanted: &Wanted) -> Option<Priority> {
    let mut measured = MEASURED.get()?;
    let now = Instant::now();
    if idle_can_end() && now - measured.at >= MEASURED_EVERY {
        let time = RunTime::of_thread()?;
        let was_idle = measured.priority == Priority::Idle && wanted.at(now) == Priority::Idle;
        let is_starved = was_idle && time.is_starved_since(measured.time);
        if is_starved {
            *wanted.starved.lock().even_poisoned() = Some(now);
        }
        (measured.at, measured.time) = (now, time);
        measured.take(wanted.at(now));
        MEASURED.set(Some(measured));
        // Only now, because the log has a lock.
        if is_starved {
            let seconds = LOW_FOR.as_secs();
            tracing::info!("the processors are busy: new versions have a low priority for {seconds} s");
        }
    }
    Some(measured.priority)
}

/// Does work, during which this thread is not idle.
pub(super) fn not_idle<T>(work: impl FnOnce() -> T) -> T {
    not_idle_with(&WANTED, work)
}

fn not_idle_with<T>(wanted: &Wanted, work: impl FnOnce() -> T) -> T {
    let set = |has_locks| {
        let Some(mut measured) = MEASURED.get().filter(|_| idle_can_end()) else { return };
        measured.has_locks = has_locks;
        measured.take(wanted.at(Instant::now()));
        MEASURED.set(Some(measured));
    };
    set(true);
    let result = work();
    set(false);
    result
}

/// Lets this thread, and the threads that it starts from now on, run only when a processor is free.
///
/// # Errors
/// When the system refuses.
pub(crate) fn make_idle() -> io::Result<()> {
    set_policy(libc::SCHED_IDLE)
}

/// Whether this thread has the idle policy.
pub(super) fn has_idle_policy() -> bool {
    // SAFETY: the call takes a number, of which 0 means this thread, and touches no memory.
    (unsafe { libc::sched_getscheduler(0) }) == libc::SCHED_IDLE
}

impl Wanted {
    fn at(&self, now: Instant) -> Priority {
        let starved = *self.starved.lock().even_poisoned();
        let is_starved = starved.is_some_and(|at| now.saturating_duration_since(at) < LOW_FOR);
        match is_starved || (self.are_urgent)() {
            true => Priority::Low,
            false => Priority::Idle,
        }
    }
}

impl Measured {
    fn take(&mut self, wanted: Priority) {
        let priority = if self.has_locks { Priority::Low } else { wanted };
        if priority == self.priority {
            return;
        }
        let taken = match priority {
            Priority::Idle => make_idle(),
            Priority::Low => set_policy(libc::SCHED_OTHER),
        };
        if taken.is_ok() {
            self.priority = priority;
        }
    }
}

impl RunTime {
    /// That of this thread so far; `None` if the system does not count it.
    fn of_thread() -> Option<Self> {
        // Nanoseconds on a processor, nanoseconds ready for one, and how often it got one, which is 0 if the
        // system does not count (Documentation/scheduler/sched-stats.rst).
        let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        let numbers: Vec<u64> = text.split_whitespace().map_while(|number| number.parse().ok()).collect();
        let &[ran, waited, times] = &numbers[..] else { return None };
        let [ran, waited] = [ran, waited].map(Duration::from_nanos);
        (times > 0).then_some(Self { ran, waited })
    }

    fn is_starved_since(self, earlier: Self) -> bool {
        let waited = self.waited.saturating_sub(earlier.waited);
        waited > SHORT_WAIT && waited > self.ran.saturating_sub(earlier.ran) * MOST_WAIT
    }
}

/// Whether a thread of this process can leave the idle policy, and can know when it should.
fn idle_can_end() -> bool {
    static CAN_END: OnceLock<bool> = OnceLock::new();
    // A thread that cannot keeps the policy, so a thread that ends tries it.
    let tries = || {
        RunTime::of_thread()?;
        lower().ok()?;
        make_idle().ok()?;
        set_policy(libc::SCHED_OTHER).ok()
    };
    *CAN_END.get_or_init(|| {
        let tried = std::thread::Builder::new().name("priority".to_owned()).spawn(tries);
        tried.is_ok_and(|tried| tried.join().is_ok_and(|can| can.is_some()))
    })
}

/// Gives this thread the `nice` value of the low priority, which it keeps while it is idle.
fn lower() -> rustix::io::Result<()> {
    setpriority_process(None, (getpriority_process(None)? + LOWER).min(LOWEST))
}

/// Sets the policy of this thread.
fn set_policy(policy: libc::c_int) -> io::Result<()> {
    // SAFETY: all fields are numbers, for which zero is a value.
    let none: libc::sched_param = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the thread is this one, which runs, and the call reads `none` before it returns.
    match unsafe { libc::pthread_setschedparam(libc::pthread_self(), policy, &raw const none) } {
        0 => {
            super::turn::forget_policy();
            Ok(())
        }
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// The policy of this thread: field 41 of its `stat` (proc_pid_stat(5)).
    pub(crate) fn policy() -> i32 {
        let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The name of the thread is in brackets, and may have spaces.
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(38).unwrap().parse().unwrap()
    }

    fn policy_and_nice() -> [i32; 2] {
        [policy(), getpriority_process(None).unwrap()]
    }

    fn on_a_thread<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    #[test]
    fn a_thread_is_starved_if_the_low_priority_had_given_it_more_time() {
        let time =
            |ran, waited| RunTime { ran: Duration::from_millis(ran), waited: Duration::from_millis(waited) };
        let is_starved = |ran: u64, waited: u64| time(7 + ran, 5 + waited).is_starved_since(time(7, 5));
        assert!(is_starved(10, 91) && is_starved(0, 51));
        assert!(!is_starved(10, 90) && !is_starved(0, 50), "a short wait is none of a busy machine");
    }

    #[test]
    fn background_threads_are_idle_until_one_is_starved_and_then_have_the_low_priority_for_a_while() {
        // Background threads of other tests may be starved at any time.
        static TRAINS: AtomicBool = AtomicBool::new(false);
        let trains = || TRAINS.load(Ordering::Relaxed);
        let wanted = Wanted { starved: Mutex::new(None), are_urgent: trains };
        let before = policy_and_nice();
        let nice = (before[1] + LOWER).min(LOWEST);
        let [low, idle] = [libc::SCHED_OTHER, libc::SCHED_IDLE].map(|policy| [policy, nice]);
        let seen = on_a_thread(|| {
            begin_with(&wanted);
            let first = policy_and_nice();
            let with_locks = not_idle_with(&wanted, policy_and_nice);
            let after = |at| {
                *wanted.starved.lock().unwrap() = at;
                std::thread::sleep(MEASURED_EVERY);
                let priority = renew_with(&wanted).unwrap();
                (priority, policy_and_nice())
            };
            let now = Instant::now();
            let starved = after(Some(now));
            let later = now.checked_sub(LOW_FOR).map(|long_ago| after(Some(long_ago)));
            TRAINS.store(true, Ordering::Relaxed);
            (first, with_locks, [starved, after(None)], later)
        });
        let (first, with_locks, starved_and_training, later) = seen;
        assert_eq!(with_locks, low);
        assert_eq!(starved_and_training, [(Priority::Low, low); 2]);
        let (priority, first_as) = if idle_can_end() { (Priority::Idle, idle) } else { (Priority::Low, low) };
        assert_eq!(first, first_as);
        assert!(later.is_none_or(|later| later == (priority, first_as)));
        assert_eq!(policy_and_nice(), before);
    }

    #[test]
    fn a_thread_that_no_one_made_a_background_thread_keeps_its_priority() {
        let before = policy_and_nice();
        assert_eq!(on_a_thread(|| (renew(), policy_and_nice())), (None, before));
    }
}
