//! Threads that take the time that requests leave, and do nothing with it.
//!
//! A machine may be slower as soon as its processors are never idle: a virtual one loses them to others for
//! milliseconds then, which no program that uses the free time can avoid. So p99 beside these threads is the
//! second baseline of what training, or a version that is taken over, costs the requests. They have the idle
//! policy (by `chrt`) and run in a process of their own, this program with `--spin`.

use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::harness::program::Running;

/// How long each thread spins, and then rests.
#[derive(Clone, Copy)]
pub struct Pattern {
    work: Duration,
    rest: Duration,
}

/// After this long, a thread calls the scheduler, as those of the server do (`src/pace/turn.rs`).
const TURN: Duration = Duration::from_micros(100);

/// As training: always.
pub const ALWAYS: Pattern = Pattern { work: Duration::from_millis(1), rest: Duration::ZERO };

/// Much as threads that open a version while requests are computed (`src/pace.rs`). These take more time of
/// the processors: they rest no longer after they had to wait, and all spin until the version is served.
pub const WITH_RESTS: Pattern = Pattern { work: Duration::from_millis(1), rest: Duration::from_micros(500) };

impl Pattern {
    /// Starts a thread for each processor, until the value is dropped.
    pub fn start(self) -> anyhow::Result<Running> {
        let mut command = Command::new("chrt");
        command.args(["--idle", "0"]).arg(std::env::current_exe()?).args(["--spin", &self.text()]);
        Ok(Running(command.spawn().context("chrt, of util-linux")?))
    }

    fn text(self) -> String {
        format!("{},{}", self.work.as_micros(), self.rest.as_micros())
    }

    /// Spins until the process is killed.
    pub fn spin(self) -> ! {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 1..threads {
            std::thread::spawn(move || self.spin_here());
        }
        self.spin_here()
    }

    fn spin_here(self) -> ! {
        loop {
            let begun = Instant::now();
            while begun.elapsed() < self.work {
                let turn = Instant::now();
                while turn.elapsed() < TURN {
                    std::hint::spin_loop();
                }
                std::thread::yield_now();
            }
            if !self.rest.is_zero() {
                std::thread::sleep(self.rest);
            }
        }
    }
}

impl FromStr for Pattern {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (work, rest) = text.split_once(',').context("--spin WORK,REST in microseconds")?;
        let micros = |text: &str| anyhow::Ok(Duration::from_micros(text.parse()?));
        Ok(Self { work: micros(work)?, rest: micros(rest)? })
    }
}
