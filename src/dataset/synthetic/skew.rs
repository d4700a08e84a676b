//! How often each id occurs. Ranks follow a bounded power law, `P(rank) ~ rank^-alpha`. A fixed permutation
//! maps ranks to ids, so that hot ids are spread over the table.
//!
//! A draw inverts the distribution function of the continuous power law on `[1, rows + 1)` and rounds down.
//! This takes one `powf` and no table. A named skew is the share of accesses of the hottest 2 % of the ids
//! (at least one id); bisection finds its alpha, which depends on the number of rows. The shares are those
//! of the traces in ScratchPipe (section V): low is Alibaba's user table, high is Criteo.

use std::str::FromStr;

use super::random::{Purpose, Stream};
use crate::mem::unit;

/// The share of ids that counts as hot in a named skew.
pub(crate) const HOT_IDS: f64 = 0.02;
/// Largest alpha.
const MAX_ALPHA: f64 = 100.0;

/// How unevenly ids are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Skew {
    /// All ids are equally frequent.
    Uniform,
    /// The hottest 2 % of the ids take 8.5 % of the accesses.
    Low,
    /// The hottest 2 % of the ids take 30 % of the accesses.
    Medium,
    /// The hottest 2 % of the ids take 80 % of the accesses.
    High,
    /// The exponent of the power law.
    Alpha(f64),
}

impl FromStr for Skew {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "uniform" => Self::Uniform,
            "low" => Self::Low,
            "medium" => Self::Medium,
            "high" => Self::High,
            number => match number.parse() {
                Ok(alpha) if (0.0..=MAX_ALPHA).contains(&alpha) => Self::Alpha(alpha),
                _ => {
                    let names = "uniform, low, medium, high";
                    return Err(format!(
                        "skew: expected {names} or an exponent from 0 to {MAX_ALPHA}, got {text:?}"
                    ));
                }
            },
        })
    }
}

impl Skew {
    /// The exponent for a table of this many rows.
    #[must_use]
    pub fn alpha(self, rows: u64) -> f64 {
        let share = match self {
            Self::Uniform => return 0.0,
            Self::Alpha(alpha) => return alpha,
            Self::Low => 0.085,
            Self::Medium => 0.3,
            Self::High => 0.8,
        };
        if rows == 1 {
            return 0.0;
        }
        let hot = 1.0 + (HOT_IDS * rows as f64).max(1.0);
        let (mut low, mut high) = (0.0, MAX_ALPHA);
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            let below = integral(hot, middle) < share * integral(1.0 + rows as f64, middle);
            *(if below { &mut low } else { &mut high }) = middle;
        }
        0.5 * (low + high)
    }
}

/// The integral of `x^-alpha` from 1 to `end`.
fn integral(end: f64, alpha: f64) -> f64 {
    let power = 1.0 - alpha;
    if power.abs() < 1e-9 { end.ln() } else { (end.powf(power) - 1.0) / power }
}

/// Draws ids of one table.
#[derive(Clone, Debug)]
pub(crate) struct IdSampler {
    rows: u64,
    power: f64,
    /// The integral over all rows.
    mass: f64,
    permutation: Permutation,
}

impl IdSampler {
    /// A sampler for the `place`-th table, which has `rows` ids.
    pub(crate) fn new(skew: Skew, rows: u64, seed: u64, place: u64) -> Self {
        let alpha = skew.alpha(rows);
        let mass = integral(1.0 + rows as f64, alpha);
        Self { rows, power: 1.0 - alpha, mass, permutation: Permutation::new(rows, seed, place) }
    }

    pub(crate) fn id(&self, word: u64) -> u64 {
        self.permutation.of(self.rank(unit(word)))
    }

    /// The rank for a draw `u` in `[0, 1)`: lower ranks get at most a share `u` of the accesses. The
    /// hottest id has rank 0.
    fn rank(&self, u: f64) -> u64 {
        let area = u * self.mass;
        let x = if self.power.abs() < 1e-9 {
            area.exp()
        } else {
            (1.0 + area * self.power).powf(self.power.recip())
        };
        // The cast saturates. Rounding may give `rows`, which is not a rank.
        ((x - 1.0) as u64).min(self.rows - 1)
    }
}

/// A bijection of `0..rows`: a bijection of the next power of two, applied until the result is below
/// `rows`, on average fewer than two times.
#[derive(Clone, Debug)]
struct Permutation {
    rows: u64,
    mask: u64,
    shift: u32,
    factors: [u64; 2],
    offset: u64,
}

impl Permutation {
    fn new(rows: u64, seed: u64, place: u64) -> Self {
        let bits = u64::BITS - (rows - 1).leading_zeros();
        let stream = Stream::new(seed, Purpose::Permutation, place);
        let mask = if bits == 0 { 0 } else { u64::MAX >> (u64::BITS - bits) };
        Self {
            rows,
            mask,
            shift: bits.div_ceil(2).max(1),
            factors: [stream.word(0) | 1, stream.word(1) | 1],
            offset: stream.word(2),
        }
    }

    fn of(&self, rank: u64) -> u64 {
        let mut at = rank;
        loop {
            for factor in self.factors {
                // Multiplying by an odd factor, adding, and xor with a right shift are bijections of these
                // bits.
                at = at.wrapping_mul(factor).wrapping_add(self.offset) & self.mask;
                at ^= at >> self.shift;
            }
            if at < self.rows {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests;
