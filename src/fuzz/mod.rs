//! Fuzzing of everything that parses bytes or text from outside. Each target is a test in a module `fuzz`
//! beside its parser, so `cargo test --lib fuzz::` runs all of them.
//!
//! A target begins with valid inputs and changes them: [`bytes`] changes any file or text, and [`wire`] the
//! fields of a protobuf message. It calls [`run`] with a check, which must hold for every input. In each
//! check, nothing may panic, one input may take at most [`LONGEST`], and at most [`MOST_BYTES`] may be
//! allocated.
//!
//! `FLECHETTE_FUZZ_SECONDS` is the time of each target. After a failure proptest prints the input with the
//! fewest changes that fails, and a line with its seed. It also adds the line to a file of
//! `proptest-regressions/`; every later run begins with the seeds there. `.ci/fuzz` lets libFuzzer choose the
//! changes (`guided.rs`).

pub(crate) mod bytes;
#[cfg(flechette_fuzz)]
mod guided;
pub(crate) mod memory;
pub(crate) mod wire;

use std::cell::Cell;
use std::fmt::Debug;
use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Each target runs so long, without the environment variable.
const SECONDS: f64 = 0.5;

/// One input that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(60);

/// How many bytes more the thread of a check may hold than before it.
const MOST_BYTES: usize = 64 << 20;

/// Inputs between two looks at the saved seeds.
const CASES: u32 = 100;

/// With so many inputs, some must be valid.
const ENOUGH: u64 = 500;

/// If a time is given, the least inputs per second, up to [`LEAST`] in all. A target that is stuck in one of
/// its first inputs checks fewer, even if it is not stuck for [`LONGEST`].
const LEAST_PER_S: f64 = 0.5;
const LEAST: f64 = 100.0;

/// Checks inputs until the time is over. The check returns whether the parser accepts the input.
///
/// # Panics
/// When the check panics, takes too much memory, or, after many inputs, has accepted none, and when few
/// inputs were checked in a time that is given.
#[track_caller]
pub(crate) fn run<S>(inputs: S, check: impl Fn(S::Value) -> bool)
where
    S: Strategy,
    S::Value: Clone + Debug + Send + 'static,
{
    let given = std::env::var("FLECHETTE_FUZZ_SECONDS").ok();
    let given = given.map(|text| text.parse::<f64>().expect("FLECHETTE_FUZZ_SECONDS: a number"));
    let seconds = given.unwrap_or(SECONDS);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let source_file = Some(std::panic::Location::caller().file());
    let (all, accepted) = (Cell::new(0), Cell::new(0));
    let watch = Watch::start();
    let checked = |input: S::Value| {
        all.set(all.get() + 1);
        let _watched = watch.input(&input);
        let (valid, memory) = memory::measured(|| check(input));
        accepted.set(accepted.get() + u64::from(valid));
        memory
    };
    #[cfg(flechette_fuzz)]
    guided::run(&inputs, seconds, |input| assert!(checked(input) <= MOST_BYTES, "too much memory"));
    while all.get() == 0 || Instant::now() < end {
        let config = Config { cases: CASES, source_file, max_shrink_time: 60_000, ..Config::default() };
        let mut runner = TestRunner::new(config);
        let result = runner.run(&inputs, |input| {
            if all.get() > 0 && Instant::now() >= end {
                return Ok(());
            }
            let memory = checked(input);
            prop_assert!(memory <= MOST_BYTES, "{} bytes of memory", memory);
            Ok(())
        });
        if let Err(failure) = result {
            panic!("{failure}\n{runner}");
        }
    }
    println!("{} inputs, {} accepted, in {seconds} s", all.get(), accepted.get());
    assert!(all.get() < ENOUGH || accepted.get() > 0, "no input is valid, so most of the parser is not run");
    let least = given.map_or(0.0, |seconds| (LEAST_PER_S * seconds).min(LEAST)) as u64;
    assert!(all.get() >= least, "{} inputs in {seconds} s, fewer than {least}", all.get());
}

/// Ends the process if an input hangs.
struct Watch {
    /// The input that is checked, since when.
    now: Arc<Mutex<Option<Input>>>,
    /// The thread ends when this is dropped.
    _running: Sender<()>,
}

type Input = (Instant, Box<dyn Debug + Send>);

impl Watch {
    fn start() -> Self {
        let (now, (running, ended)) = (Arc::new(Mutex::<Option<Input>>::default()), channel());
        let watched = now.clone();
        std::thread::spawn(move || {
            while ended.recv_timeout(LONGEST / 60) == Err(RecvTimeoutError::Timeout) {
                if let Some((since, input)) = &*watched.lock().unwrap()
                    && since.elapsed() > LONGEST
                {
                    // The printing macros would be captured, and lost with the process.
                    let text = format!("an input takes more than {LONGEST:?}: {input:?}\n");
                    let _ = std::io::stderr().write_all(text.as_bytes());
                    std::process::abort();
                }
            }
        });
        Self { now, _running: running }
    }

    fn input(&self, input: &(impl Clone + Debug + Send + 'static)) -> Watched<'_> {
        *self.now.lock().unwrap() = Some((Instant::now(), Box::new(input.clone())));
        Watched(self)
    }
}

/// An input that is being checked.
struct Watched<'a>(&'a Watch);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        *self.0.now.lock().unwrap() = None;
    }
}
