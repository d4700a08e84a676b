//! Which rows are admitted to the cache and which are evicted, one policy per file.
//!
//! **Admission** decides on a missed row: [`probability`] admits a share of all misses, [`frequency`] admits
//! rows that were used repeatedly while missing.
//!
//! **Eviction** starts when the cache is above its high watermark and ends at the low one. Victims are chosen
//! by coldness: the age of the last use ([`lru`]), or the [`rank`] in a data set. A sample of the entries
//! gives the threshold: the coldness that the share to be evicted reaches. A sweep evicts every entry at or
//! above the threshold. Except for the sampling error, this evicts the coldest entries, and the lookup path
//! maintains no list.

pub(crate) mod frequency;
pub(crate) mod lru;
pub(crate) mod probability;
pub(crate) mod rank;

use crate::types::{FlatKey, RowId};
use frequency::Sketch;
use probability::Probability;
use rank::Ranks;

/// A row that a batch used and did not find in the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Missed {
    pub key: FlatKey,
    /// The number of the batch.
    pub batch: u64,
    /// How often the batch uses the row, at least once.
    pub occurrences: u32,
}

/// Which missed rows are admitted.
#[derive(Debug)]
pub(crate) enum Admission {
    /// A random share.
    Probability(Probability),
    /// Rows used repeatedly while missing.
    Frequency(Sketch),
}

impl Admission {
    /// Whether a missed row is admitted. `roomy` tells whether the cache has room for it without an eviction.
    ///
    /// Call this once for each missed row of a batch: a call may count the miss.
    #[inline]
    pub(crate) fn admits(&self, missed: Missed, roomy: impl FnOnce() -> bool) -> bool {
        match self {
            Self::Probability(probability) => probability.admits(missed.key, missed.batch),
            Self::Frequency(sketch) => sketch.admits(missed.key, missed.occurrences) || roomy(),
        }
    }

    /// Prefetches what [`Self::admits`] reads for a key.
    #[inline]
    pub(crate) fn prefetch(&self, key: FlatKey) {
        match self {
            Self::Probability(_) => {}
            Self::Frequency(sketch) => sketch.prefetch(key),
        }
    }

    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Probability(_) => 0,
            Self::Frequency(sketch) => sketch.bytes(),
        }
    }
}

/// The eviction policy of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EvictionOption {
    /// Evicts the least recently used rows.
    #[default]
    Lru,
    /// Evicts the rows with the lowest frequency in a data set first. The list has the rows in descending
    /// order of frequency. Rows that are not listed are evicted before all listed rows, least recently used
    /// first. Listed rows beyond the number that the cache can hold are ignored.
    Lfu(Vec<RowId>),
}

/// Which entries are evicted first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Eviction {
    /// The longest unused.
    #[default]
    Lru,
    /// The least frequent in a data set.
    Lfu(Ranks),
}

impl Eviction {
    /// The policy, with ranks for the first `ranked` listed rows. `key` gives the key of a row.
    pub(crate) fn new(option: &EvictionOption, ranked: usize, key: impl FnMut(RowId) -> FlatKey) -> Self {
        match option {
            EvictionOption::Lru => Self::Lru,
            EvictionOption::Lfu(rows) => Self::Lfu(Ranks::new(rows[..ranked].iter().copied().map(key))),
        }
    }

    /// Whether eviction depends on a row's age alone. Kernels can compute the age. For other policies, the
    /// host computes the coldness.
    pub(crate) fn is_by_age(&self) -> bool {
        matches!(self, Self::Lru)
    }

    /// The coldness of an entry last used `age` batches ago. Larger values are evicted first.
    #[inline]
    #[must_use]
    pub(crate) fn coldness(&self, key: FlatKey, age: u32) -> u64 {
        match self {
            Self::Lru => lru::coldness(age),
            Self::Lfu(ranks) => ranks.coldness(key, age),
        }
    }

    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Lru => 0,
            Self::Lfu(ranks) => ranks.bytes(),
        }
    }
}

/// The fill levels at which eviction starts and ends, as shares of the capacity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watermarks {
    /// Eviction starts above this level.
    pub high: f64,
    /// Eviction ends at this level.
    pub low: f64,
}

impl Watermarks {
    /// The share of what is used to evict once eviction has started; 0 at or below the low watermark.
    #[must_use]
    pub(crate) fn excess(&self, level: Level) -> f64 {
        let (used, target) = (level.used as f64, self.low * level.capacity as f64);
        if used <= target { 0.0 } else { 1.0 - target / used }
    }

    /// Whether eviction starts.
    #[must_use]
    pub(crate) fn crossed(&self, level: Level) -> bool {
        level.used as f64 > self.high * level.capacity as f64
    }
}

/// How much of a limited resource is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level {
    pub used: u64,
    pub capacity: u64,
}

/// How full the cache's two limited resources are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fill {
    /// Index entries.
    pub entries: Level,
    /// Bytes of the pool.
    pub bytes: Level,
    pub watermarks: Watermarks,
}

impl Fill {
    /// The larger of both shares to evict; 0 if both resources are at or below the low watermark.
    #[must_use]
    pub(crate) fn excess(&self) -> f64 {
        let watermarks = &self.watermarks;
        watermarks.excess(self.entries).max(watermarks.excess(self.bytes))
    }

    /// Whether either resource starts an eviction.
    #[must_use]
    pub(crate) fn crosses(&self) -> bool {
        let watermarks = &self.watermarks;
        watermarks.crossed(self.entries) || watermarks.crossed(self.bytes)
    }
}

/// The coldness that about `share` of the sampled entries reach; `u64::MAX` if the sample is empty or the
/// share is 0. Reorders the sample.
#[must_use]
pub(crate) fn threshold(sample: &mut [u64], share: f64) -> u64 {
    let evicted = (share * sample.len() as f64).ceil() as usize;
    match sample.len().checked_sub(evicted.min(sample.len())) {
        _ if evicted == 0 => u64::MAX,
        None => u64::MAX,
        Some(kept) => *sample.select_nth_unstable(kept).1,
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
