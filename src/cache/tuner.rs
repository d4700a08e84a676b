//! How many rows of host memory the unified index points at (FLECHE 3.3): a pure step function.
//!
//! Every pointer takes room that a row could have had, and spares a look into the host's own index. Where
//! the balance lies, only a trial shows. So the capacity starts at none and grows by a step a measurement, while
//! throughput rises; it goes back by one step and rests once throughput falls, or no longer rises. When
//! throughput falls markedly while resting, the traffic has changed: all pointers go and the trial
//! starts again.
//!
//! Measurements are noisy, so a rise or a fall is only what exceeds [`NOISE`], and a change of traffic only
//! what exceeds [`DECLINE`] for [`PATIENCE`] measurements in a row.

/// Changes of throughput below this share are taken for noise.
pub(crate) const NOISE: f64 = 0.02;
/// A fall of this share below what was reached means that the traffic has changed.
pub(crate) const DECLINE: f64 = 0.25;
/// Measurements in a row that must show it, or that show no rise before growing ends.
pub(crate) const PATIENCE: u32 = 3;

/// What the index is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Advice {
    /// How many pointers there may be from now on.
    pub capacity: u64,
    /// Whether those that there are shall go.
    pub clear: bool,
}

/// A trial and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tuner {
    limit: u64,
    step: u64,
    capacity: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The best throughput so far was `best` at capacity `at`; `level` steps since have not exceeded it.
    Growing { best: f64, at: u64, level: u32 },
    /// At a peak where throughput was `reached`; the last `fallen` measurements were markedly lower.
    Resting { reached: f64, fallen: u32 },
}

impl Tuner {
    /// A tuner that goes up to `limit` pointers, in as many `steps`.
    #[must_use]
    pub(crate) fn new(limit: u64, steps: u64) -> Self {
        let step = limit.div_ceil(steps.max(1)).max(1);
        Self { limit, step, capacity: 0, phase: Phase::Growing { best: 0.0, at: 0, level: 0 } }
    }

    /// What is advised now, before the next measurement.
    #[must_use]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Takes the throughput that was measured at the present capacity, in any unit. A measurement that is
    /// no finite number is passed over.
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
            // Better luck raises the mark: a later fall is a fall from there.
            Phase::Resting { reached: reached.max(throughput), fallen }
        };
        Advice { capacity: self.capacity, clear }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
