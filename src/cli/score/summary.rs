//! What `score` prints at the end.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde_json::json;

use super::{Answer, IN_FLIGHT};
use crate::cli::or_dash;
use crate::cli::score_file::ScoreFile;
use crate::trainer::eval::Quality;

/// Significant digits of recorded latencies.
const DIGITS: u8 = 3;

/// What is printed at the end.
pub(super) struct Summary {
    pub rows: u64,
    pub skipped: u64,
    pub seconds: f64,
    requests: u64,
    /// Scores and labels; `None` once a row had no label.
    labelled: Option<(Vec<f32>, Vec<f32>)>,
    /// The versions that computed scores.
    versions: Vec<u64>,
    absent: BTreeMap<String, u64>,
    latency_us: Histogram<u64>,
}

impl Summary {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            rows: 0,
            skipped: 0,
            seconds: 0.0,
            requests: 0,
            labelled: Some((Vec::new(), Vec::new())),
            versions: Vec::new(),
            absent: BTreeMap::new(),
            latency_us: Histogram::new(DIGITS)?,
        })
    }

    pub(super) fn take(&mut self, answer: Answer, out: Option<&mut ScoreFile>) -> anyhow::Result<()> {
        let Answer { response, rows, took } = answer;
        if let Some(out) = out {
            out.write(&response.scores, &response.logits, &rows.skips)?;
        }
        self.rows += response.scores.len() as u64;
        self.requests += 1;
        match (&mut self.labelled, rows.labels) {
            (Some((scores, known)), Some(labels)) => {
                scores.extend_from_slice(&response.scores);
                known.extend_from_slice(&labels);
            }
            _ => self.labelled = None,
        }
        if !self.versions.contains(&response.version) {
            self.versions.push(response.version);
        }
        for absent in response.absent {
            let sum = self.absent.entry(absent.feature).or_default();
            *sum = sum.saturating_add(absent.count);
        }
        self.latency_us.record(took.as_micros() as u64)?;
        Ok(())
    }

    fn quality(&self) -> Option<Quality> {
        self.labelled.as_ref().map(|(scores, labels)| Quality::of(scores, labels))
    }

    fn all_absent(&self) -> u64 {
        self.absent.values().copied().fold(0, u64::saturating_add)
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let quality = self.quality();
        let us = |quantile| self.latency_us.value_at_quantile(quantile);
        json!({
            "rows": self.rows,
            "skipped": self.skipped,
            "auc": quality.and_then(|q| q.auc),
            "logloss": quality.map(|q| q.log_loss),
            "normalized_entropy": quality.and_then(|q| q.normalized_entropy),
            "infinite_losses": quality.map(|q| q.infinite),
            "samples_per_s": self.rows as f64 / self.seconds,
            "seconds": self.seconds,
            "requests": self.requests,
            "version": self.versions.last(),
            "versions": self.versions,
            "absent": self.all_absent(),
            "absent_by_feature": self.absent,
            "p50_us": us(0.5),
            "p90_us": us(0.9),
            "p99_us": us(0.99),
            "max_us": self.latency_us.max(),
        })
    }

    pub(super) fn text(&self) -> String {
        let versions: Vec<String> = self.versions.iter().map(u64::to_string).collect();
        let mut text = format!(
            "{} rows, {:.0} rows/s, version {}, {} lines skipped\n",
            self.rows,
            self.rows as f64 / self.seconds,
            versions.join(" and "),
            self.skipped,
        );
        // Writing to a string cannot fail.
        if let Some(quality) = self.quality() {
            let _ = writeln!(
                text,
                "AUC {}, log loss {:.6}, normalized entropy {}",
                or_dash(quality.auc, 6),
                quality.log_loss,
                or_dash(quality.normalized_entropy, 6),
            );
            if quality.infinite > 0 {
                let count = quality.infinite;
                let _ = writeln!(
                    text,
                    "{count} rows have an infinite loss: a score of exactly 0 or 1, and the other label"
                );
            }
        }
        let us = |quantile| self.latency_us.value_at_quantile(quantile);
        let _ = writeln!(
            text,
            "{} requests, {IN_FLIGHT} in flight: p50 {} us, p90 {} us, p99 {} us, max {} us",
            self.requests,
            us(0.5),
            us(0.9),
            us(0.99),
            self.latency_us.max(),
        );
        let absent = self.all_absent();
        let _ =
            writeln!(text, "{absent} absent ids{}", if absent > 0 { ", which took a default:" } else { "" });
        for (feature, count) in &self.absent {
            let _ = writeln!(text, "  {feature} {count}");
        }
        text
    }
}
