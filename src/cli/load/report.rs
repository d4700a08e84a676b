//! How the requests of a run ended, and the report of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::anyhow;
use hdrhistogram::Histogram;
use serde_json::json;
use tonic::Status;

use crate::cli::client::status_text;
use crate::metrics::code_name;
use crate::server::proto::PredictResponse;
use crate::sync::EvenPoisoned;

/// Significant digits of recorded latencies.
const DIGITS: u8 = 3;

/// How requests ended.
pub(super) struct Tally {
    pub ok: u64,
    pub samples: u64,
    pub absent: u64,
    pub versions: BTreeSet<u64>,
    pub errors: BTreeMap<&'static str, u64>,
    pub first_error: Option<Status>,
    /// Open loop: requests that were due while too many had no answer.
    pub unsent: u64,
    /// Latencies of scored requests.
    pub latency_us: Histogram<u64>,
}

impl Tally {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            ok: 0,
            samples: 0,
            absent: 0,
            versions: BTreeSet::new(),
            errors: BTreeMap::new(),
            first_error: None,
            unsent: 0,
            latency_us: Histogram::new(DIGITS)?,
        })
    }

    pub(super) fn take(&mut self, answer: Result<PredictResponse, Status>, took: Duration) {
        match answer {
            Ok(response) => {
                self.ok += 1;
                self.samples += response.scores.len() as u64;
                let absent = response.absent.iter().map(|absent| absent.count);
                self.absent = absent.fold(self.absent, u64::saturating_add);
                self.versions.insert(response.version);
                // A histogram that resizes itself accepts every value.
                let _ = self.latency_us.record(took.as_micros() as u64);
            }
            Err(status) => {
                *self.errors.entry(code_name(status.code() as i32)).or_default() += 1;
                self.first_error.get_or_insert(status);
            }
        }
    }

    /// Takes the counts out. All requests must have ended.
    pub(super) fn taken(tally: &Mutex<Self>) -> anyhow::Result<Self> {
        let mut tally = tally.lock().even_poisoned();
        Ok(std::mem::replace(&mut tally, Self::new()?))
    }

    /// Scored requests whose latency was at most this long.
    pub(super) fn within(&self, time: Duration) -> u64 {
        self.latency_us.count_between(0, time.as_micros() as u64)
    }

    pub(super) fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    /// An error if any request to this server failed.
    pub(super) fn result(&self, addr: &str) -> anyhow::Result<()> {
        let Some(first) = &self.first_error else { return Ok(()) };
        let (failed, sent) = (self.failed(), self.ok + self.failed());
        Err(anyhow!("{addr}: {failed} of {sent} requests failed, the first with {}", status_text(first)))
    }
}

/// What is printed at the end.
pub(super) struct Report {
    pub mode: &'static str,
    pub batch: u32,
    /// `None`: a closed loop.
    pub rate: Option<f64>,
    /// The time of sending that was asked for.
    pub asked: f64,
    /// Time from the first request to the last answer, and at least `asked`.
    pub seconds: f64,
    /// The time limit of a request: `--timeout`.
    pub timeout: Duration,
    pub tally: Tally,
}

impl Report {
    pub(super) fn us(&self, quantile: f64) -> u64 {
        self.tally.latency_us.value_at_quantile(quantile)
    }

    /// The same; `None` if nothing was scored.
    fn shown_us(&self, quantile: f64) -> Option<u64> {
        (!self.tally.latency_us.is_empty()).then(|| self.us(quantile))
    }

    pub(super) fn p99(&self) -> Duration {
        Duration::from_micros(self.us(0.99))
    }

    /// Scored requests per second.
    pub(super) fn requests_per_s(&self) -> f64 {
        self.tally.ok as f64 / self.seconds
    }

    /// Scored samples per second.
    pub(super) fn samples_per_s(&self) -> f64 {
        self.tally.samples as f64 / self.seconds
    }

    /// Scored requests per second of sending whose latency was within the time limit.
    pub(super) fn goodput_per_s(&self) -> f64 {
        // The requests of an open loop were due in the time that was asked for. A closed loop ends with its
        // last answer.
        let sending = if self.rate.is_some() { self.asked } else { self.seconds };
        self.tally.within(self.timeout) as f64 / sending
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let tally = &self.tally;
        json!({
            "mode": self.mode,
            "batch": self.batch,
            "rate": self.rate,
            "seconds": self.seconds,
            "sent": tally.ok + tally.failed(),
            "ok": tally.ok,
            "errors": tally.errors,
            "failed": tally.failed(),
            "unsent": tally.unsent,
            "requests_per_s": self.requests_per_s(),
            "goodput_per_s": self.goodput_per_s(),
            "samples_per_s": self.samples_per_s(),
            "rows": tally.samples,
            "absent": tally.absent,
            "version": tally.versions.last(),
            "versions": tally.versions,
            "p50_us": self.shown_us(0.5),
            "p90_us": self.shown_us(0.9),
            "p99_us": self.shown_us(0.99),
            "p999_us": self.shown_us(0.999),
            "max_us": self.shown_us(1.0),
        })
    }

    pub(super) fn text(&self) -> String {
        let tally = &self.tally;
        let mut text = format!(
            "{} loop, {:.1} s: {} sent, {} scored, {} failed\n",
            self.mode,
            self.seconds,
            tally.ok + tally.failed(),
            tally.ok,
            tally.failed(),
        );
        // Writing to a string cannot fail.
        for (code, count) in &tally.errors {
            let _ = writeln!(text, "  {code} {count}");
        }
        if let Some(status) = &tally.first_error {
            let _ = writeln!(text, "  the first: {}", status_text(status));
        }
        if tally.unsent > 0 {
            let unsent = tally.unsent;
            let _ = writeln!(
                text,
                "{unsent} requests were due but not sent, because --outstanding requests had no answer: \
                 the server is too slow for this rate, and the latencies do not include them"
            );
        }
        let (requests, samples) = (self.requests_per_s(), self.samples_per_s());
        let versions: Vec<String> = tally.versions.iter().map(u64::to_string).collect();
        let versions = versions.join(" and ");
        let _ = writeln!(text, "{requests:.1} requests/s, {samples:.0} samples/s, version {versions}");
        let goodput = self.goodput_per_s();
        let _ = writeln!(text, "goodput: {goodput:.1} requests/s were scored within --timeout");
        if tally.latency_us.is_empty() {
            return text;
        }
        let from = if self.rate.is_some() { "the due time" } else { "the send" };
        let _ = writeln!(
            text,
            "latency from {from}: p50 {} us, p90 {} us, p99 {} us, p99.9 {} us, max {} us",
            self.us(0.5),
            self.us(0.9),
            self.us(0.99),
            self.us(0.999),
            tally.latency_us.max(),
        );
        text
    }
}

#[cfg(test)]
mod tests;
