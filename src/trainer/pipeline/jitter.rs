//! Random sleeps of a stage, for tests and `flechette verify`: the trained bytes must not depend on the
//! stages' speeds.

use std::time::Duration;

use crate::mem::mix64;

/// The longest sleep.
const MOST_MICROS: u64 = 2_000;

/// The sleeps of one stage. Without a seed there are none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Jitter {
    draws: Option<u64>,
}

impl Jitter {
    /// The sleeps of stage number `stage`.
    #[must_use]
    pub(crate) fn new(seed: Option<u64>, stage: u64) -> Self {
        Self { draws: seed.map(|seed| mix64(seed ^ mix64(stage))) }
    }

    /// Sleeps in half of the calls, so that a stage may also be far faster than its neighbours.
    pub(crate) fn sleep(&mut self) {
        let Some(draws) = &mut self.draws else { return };
        *draws = mix64(*draws);
        if *draws & 1 == 0 {
            std::thread::sleep(Duration::from_micros((*draws >> 1) % MOST_MICROS));
        }
    }
}
