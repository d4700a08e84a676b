//! What publishing costs, with the real program in real processes.
//!
//! - `serving.rs`: p99 at half of the capacity in windows in which versions of about a million rows, or one
//!   with all rows, are taken over, against windows at rest; and the hit rate of the cache before and after a
//!   version that changes about 5 % of the rows. The versions were trained before, and renamed into place.
//! - `beside.rs`: p99 of `serve --train` at full speed, against `serve` of the same version at the same rate;
//!   and the time from the cut of a version until it is served, in one process and in two.
//! - `training.rs`: samples per second with versions at an interval, against none; and how long the next
//!   step waits for the cut of a version, in mean steps. With rows in memory, and with a scratchpad.
//!
//! Each p99 is also measured beside threads that only spin in the time that requests leave (`spinner.rs`).
//!
//! Both sides of a ratio run in turn, and the first side alternates. Every version but the first is a delta
//! (`versions.compact_at` is 100), except the last one of `serving.rs`, which has all rows.
//!
//! `--rows N` per table (700,000; 26 tables of dim 16), `--steps N` before a version that is taken over
//! (2,800, of 128 samples), `--versions N` (6), `--every S` seconds between versions (5), `--rounds N` (3),
//! `--seconds S` of training in a round (12), `--only TEXT` (a part of `serving`, `beside`, `training`),
//! `--json`. A short run: `--rows 2000 --steps 20 --versions 2 --every 1 --rounds 1 --seconds 3`.

mod beside;
mod figures;
#[path = "../harness/mod.rs"]
mod harness;
mod program;
mod server;
mod serving;
mod spinner;
mod training;

use figures::Figures;
use harness::Options;
use program::Bench;
use spinner::Pattern;

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    if let Some(pattern) = options.value("--spin") {
        pattern.parse::<Pattern>()?.spin();
    }
    let bench = Bench::new(&options)?;
    let mut figures = Figures::new(&bench);
    for (name, part) in [
        ("serving", serving::measure as fn(&Bench, &mut Figures) -> anyhow::Result<()>),
        ("beside", beside::measure),
        ("training", training::measure),
    ] {
        if options.wants(name) {
            part(&bench, &mut figures)?;
        }
    }
    figures.finish(options.json);
    Ok(())
}

/// Measures both sides of a ratio. The first side alternates, because the speed of the machine drifts.
fn in_turn<A, B>(
    round: usize,
    first: impl FnOnce() -> anyhow::Result<A>,
    second: impl FnOnce() -> anyhow::Result<B>,
) -> anyhow::Result<(A, B)> {
    if round.is_multiple_of(2) {
        let first = first()?;
        Ok((first, second()?))
    } else {
        let second = second()?;
        Ok((first()?, second))
    }
}
