//! Tunes the number of pointers of the unified index (FLECHE section 3.3): a pure step function.
//!
//! A pointer takes memory that could cache rows, but its row is no longer a miss. The best number of pointers
//! is found by trial. The *capacity* is how many pointers there may be. It starts at 0 and grows by one step
//! per measurement while throughput rises. When throughput falls or stops rising, the tuner returns to the
//! best capacity and rests. A marked fall of throughput at rest means that the traffic has changed: all
//! pointers are removed and the trial starts again.
//!
//! Measurements are noisy. So only changes above [`NOISE`] count as a rise or a fall, and only a fall by more
//! than [`DECLINE`] in [`PATIENCE`] measurements in a row counts as a change of traffic.

/// Relative changes of throughput below this are noise.
const NOISE: f64 = 0.02;
/// A relative fall of throughput by this much means that the traffic has changed.
const DECLINE: f64 = 0.25;
/// A decline must show in this many measurements in a row. Growing ends after this many without a rise.
const PATIENCE: u32 = 3;

/// The tuner's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Advice {
    /// How many pointers there may be.
    pub capacity: u64,
    /// Whether all existing pointers are to be removed.
    pub clear: bool,
}

/// The state of the trial.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tuner {
    limit: u64,
    step: u64,
    capacity: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The best throughput so far is `best`, at capacity `at`. The `level` measurements since did not exceed
    /// it.
    Growing { best: f64, at: u64, level: u32 },
    /// At the best capacity, where throughput was `reached`. The last `fallen` measurements were markedly
    /// lower.
    Resting { reached: f64, fallen: u32 },
}

impl Tuner {
    /// A tuner for up to `limit` pointers in `steps` steps.
    #[must_use]
    pub(crate) fn new(limit: u64, steps: u64) -> Self {
        let step = limit.div_ceil(steps.max(1)).max(1);
        Self { limit, step, capacity: 0, phase: Phase::Growing { best: 0.0, at: 0, level: 0 } }
    }

    /// Takes a step. `throughput` is measured at the current capacity, in any unit. A measurement that is not
    /// finite is ignored.
    pub(crate) fn step(&mut self, throughput: f64) -> Advice {
        if throughput.is_finite() && self.limit > 0 {
            match self.phase {
                Phase::Growing { best, at, level } => self.grow(throughput, best, at, level),
                Phase::Resting { reached, fallen } => return self.rest(throughput, reached, fallen),
            }
        }
        Advice { capacity: self.capacity, clear: false }
    }

    fn grow(&mut self, throughput: f64, best: f64, at: u64, level: u32) {
        let rises = throughput > best * (1.0 + NOISE);
        let falls = throughput < best * (1.0 - NOISE);
        let (best, at, level) = if rises { (throughput, self.capacity, 0) } else { (best, at, level + 1) };
        if falls || level >= PATIENCE || self.capacity == self.limit {
            self.capacity = at;
            self.phase = Phase::Resting { reached: best, fallen: 0 };
        } else {
            self.capacity = (self.capacity + self.step).min(self.limit);
            self.phase = Phase::Growing { best, at, level };
        }
    }

    fn rest(&mut self, throughput: f64, reached: f64, fallen: u32) -> Advice {
        let fallen = if throughput < reached * (1.0 - DECLINE) { fallen + 1 } else { 0 };
        let clear = fallen >= PATIENCE;
        self.phase = if clear {
            self.capacity = 0;
            Phase::Growing { best: 0.0, at: 0, level: 0 }
        } else {
            // A later fall is measured from the highest throughput at rest.
            Phase::Resting { reached: reached.max(throughput), fallen }
        };
        Advice { capacity: self.capacity, clear }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
