//! `load --find-p99`: the highest rate at which p99 is within a limit and every request is scored.
//!
//! The search measures windows of `--seconds`. The first one is a closed loop of one client, and its
//! requests per second are the first rate. Then the rate is doubled until a window fails, or halved until one
//! passes, and the interval between the two is bisected. A rate fails if two windows fail, because a pause of
//! the machine can make one of them fail. At most 20 doublings or halvings lie between the least and the
//! greatest rate, and 5 bisections follow. A window ends with its last answer, at most `--timeout` after its
//! last request.

use std::time::Duration;

use anyhow::anyhow;
use serde_json::json;

use super::report::Report;
use super::{Args, MAX_RATE, Pace};
use crate::cli::{print, print_and_end};

/// Least rate that is tried, in requests per second.
const LEAST_RATE: f64 = 1.0;
/// The search ends when the lowest rate that failed is at most this many times the highest that passed.
const CLOSE: f64 = 1.05;
/// Windows that must fail before a rate has failed.
const WINDOWS: usize = 2;
/// Statuses that mean overload. Any other status ends the search.
const OVERLOAD: [&str; 2] = ["DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"];

/// What the windows have shown so far, in requests per second.
#[derive(Clone, Copy, Debug, Default)]
struct Bracket {
    /// The highest rate that passed.
    passed: Option<f64>,
    /// The lowest rate that failed.
    failed: Option<f64>,
}

impl Bracket {
    fn add(&mut self, rate: f64, passes: bool) {
        *if passes { &mut self.passed } else { &mut self.failed } = Some(rate);
    }

    /// The rate of the next window, if the search goes on.
    fn next(&self, first: f64) -> Option<f64> {
        match (self.passed, self.failed) {
            (None, None) => Some(first.clamp(LEAST_RATE, MAX_RATE)),
            (Some(passed), None) => (passed < MAX_RATE).then(|| (2.0 * passed).min(MAX_RATE)),
            (None, Some(failed)) => (failed > LEAST_RATE).then(|| (failed / 2.0).max(LEAST_RATE)),
            (Some(passed), Some(failed)) => (failed > CLOSE * passed).then(|| (passed + failed) / 2.0),
        }
    }
}

/// Searches the rate with windows that `drive` measures, prints each window, and then the result.
///
/// # Errors
/// When a request fails for another reason than load, or no rate passes.
pub(super) fn run(
    limit: Duration,
    args: &Args,
    drive: impl Fn(Pace, f64) -> anyhow::Result<Report>,
) -> anyhow::Result<()> {
    let one_client = Pace::Clients(1);
    if args.warmup > 0.0 {
        drive(one_client, args.warmup)?;
    }
    // Errors of load end no search.
    let check = |report: &Report| match report.tally.errors.keys().any(|code| !OVERLOAD.contains(code)) {
        true => report.tally.result(args.target.addr()),
        false => Ok(()),
    };
    let first = drive(one_client, args.seconds)?;
    check(&first)?;
    if !args.json {
        print(&heading(args))?;
    }
    let (mut bracket, mut windows, mut found) = (Bracket::default(), Vec::new(), None);
    while let Some(rate) = bracket.next(first.requests_per_s()) {
        let mut passed = false;
        for _ in 0..WINDOWS {
            let report = drive(Pace::Rate(rate), args.seconds)?;
            check(&report)?;
            passed = passes(&report, limit);
            if !args.json {
                print(&line(&report, rate, passed))?;
            }
            windows.push(report);
            if passed {
                found = Some(windows.len() - 1);
                break;
            }
        }
        bracket.add(rate, passed);
    }
    let found = found.map(|window| &windows[window]);
    let text = if args.json { json(limit, found, &windows) } else { summary(limit, found) };
    let none =
        || anyhow!("no rate from {LEAST_RATE} requests/s had p99 within {limit:?} and no failed request");
    print_and_end(&text, found.map(|_| ()).ok_or_else(none))
}

fn passes(report: &Report, limit: Duration) -> bool {
    let tally = &report.tally;
    tally.failed() == 0 && tally.unsent == 0 && report.p99() <= limit
}

fn heading(args: &Args) -> String {
    format!(
        "open loop, windows of {} s, {} samples a request\n{:>12} {:>12} {:>12} {:>12} {:>8} {:>8}\n",
        args.seconds, args.batch, "requests/s", "samples/s", "p50 us", "p99 us", "failed", "unsent"
    )
}

fn line(report: &Report, rate: f64, passes: bool) -> String {
    format!(
        "{rate:>12.1} {:>12.0} {:>12} {:>12} {:>8} {:>8}  {}\n",
        report.samples_per_s(),
        report.us(0.5),
        report.us(0.99),
        report.tally.failed(),
        report.tally.unsent,
        if passes { "passes" } else { "fails" },
    )
}

fn summary(limit: Duration, found: Option<&Report>) -> String {
    found.map_or_else(String::new, |report| {
        format!(
            "p99 within {limit:?}: {:.1} requests/s, {:.0} samples/s, p99 {} us\n",
            report.requests_per_s(),
            report.samples_per_s(),
            report.us(0.99)
        )
    })
}

fn json(limit: Duration, found: Option<&Report>, windows: &[Report]) -> String {
    let windows: Vec<_> = windows.iter().map(Report::json).collect();
    let found = found.map(Report::json);
    format!("{}\n", json!({"p99_limit_us": limit.as_micros() as u64, "found": found, "windows": windows}))
}

#[cfg(test)]
mod tests;
