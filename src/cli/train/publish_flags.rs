//! The flags of publishing: the interval, and the gate that the last samples must pass.

use std::str::FromStr;
use std::time::Duration;

use anyhow::anyhow;

use crate::cli::InputError;
use crate::cli::flags::{seconds_of, whole};
use crate::trainer::progressive::Progressive;
use crate::trainer::publish::Every;

/// Flags of publishing.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PublishFlags {
    /// Publishes a version at this interval while training goes on: 500steps, 5s or 200ms. Earlier when the
    /// rows that changed take a sixteenth of the tables and 64 MiB. `serve --train` has the default 5s
    #[arg(long, value_name = "INTERVAL")]
    pub(super) publish_every: Option<Interval>,
    /// Refuses to publish a version whose progressive AUC is below the bound, or whose log loss is above it
    /// or not finite: auc=0.7 or logloss=0.5
    #[arg(long, value_name = "BOUND")]
    publish_gate: Option<Gate>,
    /// Samples before the version that --publish-gate looks at; at most --window [default: 10000, or --window
    /// if that is less]
    #[arg(long, value_name = "N", requires = "publish_gate")]
    #[arg(value_parser = whole::<usize>(1, 1 << 30))]
    gate_samples: Option<usize>,
}

/// The default of `--gate-samples`.
const GATE_SAMPLES: usize = 10_000;

/// The least and the most seconds of `--publish-every`.
const LEAST: f64 = 0.001;
const MOST: f64 = 1e9;

/// The value of `--publish-every`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval(pub(super) Every);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let steps = |text: &str| text.trim().parse::<u64>().ok().filter(|&steps| steps > 0).map(Every::Steps);
        let time = |seconds: &f64| (LEAST..=MOST).contains(seconds);
        let every = match text.strip_suffix("steps") {
            Some(text) => steps(text),
            None => seconds_of(text).filter(time).map(|time| Every::Time(Duration::from_secs_f64(time))),
        };
        every.map(Self).ok_or_else(|| {
            format!("expected a number of steps, such as 500steps, or a time from {LEAST}s to {MOST}s")
        })
    }
}

/// The value of `--publish-gate`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gate {
    Auc(f64),
    LogLoss(f64),
}

impl FromStr for Gate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bound = |text: &str| text.parse().ok().filter(|bound: &f64| bound.is_finite() && *bound > 0.0);
        let gate = match text.split_once('=') {
            Some(("auc", least)) => bound(least).filter(|&least| least < 1.0).map(Self::Auc),
            Some(("logloss", most)) => bound(most).map(Self::LogLoss),
            _ => None,
        };
        gate.ok_or_else(|| "expected auc= and a number below 1, or logloss= and a positive number".to_owned())
    }
}

impl PublishFlags {
    /// With an interval, if none was given.
    #[must_use]
    pub(crate) fn or_every(mut self, every: Duration) -> Self {
        self.publish_every.get_or_insert(Interval(Every::Time(every)));
        self
    }

    /// Checks what the flags need of each other. `window` is that of the progressive validation.
    ///
    /// # Errors
    /// For a gate without an interval, or of more samples than the window has.
    pub(crate) fn check_needs(&self, window: usize) -> anyhow::Result<()> {
        if let Some(got) = self.gate_samples.filter(|&got| got > window) {
            return Err(InputError(anyhow!("--gate-samples: limit {window} (--window), got {got}")).into());
        }
        if self.publish_gate.is_some() && self.publish_every.is_none() {
            return Err(InputError(anyhow!("--publish-gate: used only with --publish-every")).into());
        }
        Ok(())
    }

    /// Whether versions are published while training goes on.
    pub(crate) fn publishes(&self) -> bool {
        self.publish_every.is_some()
    }

    /// Checks that a version with these last samples may be published.
    ///
    /// # Errors
    /// What the gate found, and its bound.
    pub(crate) fn check(&self, progressive: &Progressive) -> Result<(), String> {
        let Some(gate) = self.publish_gate else { return Ok(()) };
        let refused = |what: &str| Err(format!("--publish-gate: {what}"));
        let Some(last) = progressive.last(self.gate_samples.unwrap_or(GATE_SAMPLES)) else {
            return refused("no sample was trained");
        };
        let (samples, quality) = (last.quality.samples, last.quality);
        match (gate, quality.auc) {
            _ if !quality.log_loss.is_finite() => {
                refused(&format!("log loss of the last {samples} samples: not finite"))
            }
            (Gate::Auc(_), None) => refused(&format!("all labels of the last {samples} samples are equal")),
            (Gate::Auc(least), Some(auc)) if auc.is_nan() || auc < least => refused(&format!(
                "AUC of the last {samples} samples: expected at least {least}, got {auc:.4}"
            )),
            (Gate::LogLoss(most), _) if quality.log_loss > most => refused(&format!(
                "log loss of the last {samples} samples: expected at most {most}, got {:.4}",
                quality.log_loss
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_steps_or_times() {
        let every = |text: &str| text.parse::<Interval>().map(|Interval(every)| every);
        assert_eq!(every("500steps"), Ok(Every::Steps(500)));
        assert_eq!(every("5s"), Ok(Every::Time(Duration::from_secs(5))));
        assert_eq!(every("200ms"), Ok(Every::Time(Duration::from_millis(200))));
        assert_eq!(every("1.5s"), Ok(Every::Time(Duration::from_millis(1500))));
        for wrong in ["", "5", "0s", "-1s", "steps", "0.5ms", "nans", "2e9s", "5m"] {
            let error = every(wrong).unwrap_err();
            assert!(error.ends_with("or a time from 0.001s to 1000000000s"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_gate_has_one_bound() {
        assert_eq!("auc=0.7".parse(), Ok(Gate::Auc(0.7)));
        assert_eq!("logloss=0.5".parse(), Ok(Gate::LogLoss(0.5)));
        for wrong in ["auc", "auc=1", "auc=nan", "logloss=-1", "logloss=inf", "recall=0.5"] {
            assert!(wrong.parse::<Gate>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gate_looks_at_no_more_samples_than_the_window_has() {
        let flags = |gate_samples| PublishFlags {
            publish_every: Some(Interval(Every::Steps(1))),
            publish_gate: Some(Gate::Auc(0.5)),
            gate_samples,
        };
        assert!(flags(None).check_needs(10).is_ok() && flags(Some(10)).check_needs(10).is_ok());
        let error = flags(Some(11)).check_needs(10).unwrap_err().to_string();
        assert_eq!(error, "--gate-samples: limit 10 (--window), got 11");
    }

    #[test]
    fn a_gate_refuses_what_is_worse_than_its_bound_or_not_finite() {
        let flags = |gate: &str| PublishFlags {
            publish_every: None,
            publish_gate: Some(gate.parse().unwrap()),
            gate_samples: Some(4),
        };
        let refusal = |gate: &str, logits: [f32; 4], labels: [f32; 4]| {
            let mut last = Progressive::new(10);
            last.push(&logits, &labels);
            flags(gate).check(&last).err()
        };
        let labels = [0.0, 1.0, 0.0, 1.0];
        let (good, bad) = ([-2.2, 2.2, -1.4, 1.4], [2.2, -2.2, 1.4, -1.4]);
        for gate in ["auc=0.7", "logloss=0.5"] {
            assert_eq!(refusal(gate, good, labels), None);
            assert!(refusal(gate, bad, labels).is_some_and(|reason| reason.contains("expected at")));
            let infinite = refusal(gate, [f32::INFINITY, 2.2, -1.4, f32::NAN], labels);
            assert_eq!(
                infinite.as_deref(),
                Some("--publish-gate: log loss of the last 4 samples: not finite")
            );
        }
        assert!(refusal("auc=0.7", good, [1.0; 4]).is_some_and(|reason| reason.contains("are equal")));
        assert!(refusal("logloss=5", good, [1.0; 4]).is_none());
        // The f32 probability of this logit is exactly 1.
        assert_eq!(refusal("logloss=5", [18.0, -1.0, -1.4, 1.4], labels), None);
    }
}
