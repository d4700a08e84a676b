//! The hit rate of a flat LRU cache at every size, and the size from which more memory gains little.
//!
//! An access hits every LRU cache that is larger than its stack distance: the number of distinct rows that
//! were used since the same row was last used (Mattson, Gecsei, Slutz and Traiger, IBM Systems Journal 1970).
//! A tree of partial sums over the times of last accesses counts these rows (Bennett and Kruskal, "LRU stack
//! processing", IBM Journal 1975). When all times are used up, the live ones are renumbered, so memory
//! depends on distinct rows and not on accesses.

use super::trace::Trace;

/// More memory pays if doubling the cache turns at least this share of all accesses from misses into hits.
pub(crate) const PAYING_GAIN: f64 = 0.01;

/// Hits of an LRU cache by size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Curve {
    /// By cache size in rows, from 0 to all distinct rows.
    hits: Vec<u64>,
    accesses: u64,
}

impl Curve {
    /// The curve of a trace. Takes O(n log n) time.
    #[must_use]
    pub(crate) fn of(trace: &Trace) -> Self {
        let keys = trace.keys() as usize;
        let mut stack = Stack::new(keys);
        let mut hits = vec![0; keys + 1];
        for &key in &trace.accesses {
            if let Some(distance) = stack.access(key) {
                hits[distance] += 1;
            }
        }
        for rows in 1..=keys {
            hits[rows] += hits[rows - 1];
        }
        Self { hits, accesses: trace.accesses.len() as u64 }
    }

    /// Hits of a cache of `rows`.
    #[must_use]
    pub(crate) fn hits(&self, rows: usize) -> u64 {
        self.hits[rows.min(self.hits.len() - 1)]
    }

    /// Hit rate of a cache of `rows`; 0 for an empty trace.
    #[must_use]
    pub(crate) fn rate(&self, rows: usize) -> f64 {
        self.hits(rows) as f64 / self.accesses.max(1) as f64
    }

    /// The smallest size such that doubling it, or any larger size, gains less than `gain` of all accesses.
    #[must_use]
    pub(crate) fn enough(&self, gain: f64) -> usize {
        let paying = |&rows: &usize| self.rate(2 * rows) - self.rate(rows) >= gain;
        (1..self.hits.len()).rev().find(paying).map_or(1, |rows| rows + 1).min(self.hits.len() - 1)
    }
}

/// The LRU stack, as the time of each key's last access. Times count from 1.
struct Stack {
    /// A Fenwick tree by time: 1 if the access at this time is the last one of its key.
    sums: Vec<u32>,
    /// By time: the accessed key.
    keys: Vec<u32>,
    /// By key: the time of its last access; 0 if it was not accessed.
    last: Vec<u32>,
    now: usize,
    /// Number of keys that were accessed so far.
    live: usize,
}

impl Stack {
    fn new(keys: usize) -> Self {
        let times = 2 * keys + 1;
        Self { sums: vec![0; times + 1], keys: vec![0; times + 1], last: vec![0; keys], now: 0, live: 0 }
    }

    /// The size of the smallest LRU cache that this access hits; `None` for the first access of a key.
    fn access(&mut self, key: u32) -> Option<usize> {
        if self.now + 1 == self.sums.len() {
            self.renumber();
        }
        let last = self.last[key as usize] as usize;
        let distance = (last > 0).then(|| self.live - self.sum(last) + 1);
        if last > 0 {
            self.add(last, u32::MAX);
        } else {
            self.live += 1;
        }
        self.now += 1;
        self.add(self.now, 1);
        self.keys[self.now] = key;
        self.last[key as usize] = self.now as u32;
        distance
    }

    /// Number of keys with a last access at or before `time`.
    fn sum(&self, mut time: usize) -> usize {
        let mut sum = 0u32;
        while time > 0 {
            sum = sum.wrapping_add(self.sums[time]);
            time &= time - 1;
        }
        sum as usize
    }

    fn add(&mut self, mut time: usize, change: u32) {
        while time < self.sums.len() {
            self.sums[time] = self.sums[time].wrapping_add(change);
            time += time & time.wrapping_neg();
        }
    }

    /// Renumbers the last accesses from 1 in their order.
    fn renumber(&mut self) {
        let mut kept = 0;
        for time in 1..=self.now {
            let key = self.keys[time];
            if self.last[key as usize] as usize == time {
                kept += 1;
                self.keys[kept] = key;
                self.last[key as usize] = kept as u32;
            }
        }
        self.now = kept;
        self.sums.fill(0);
        for time in 1..self.sums.len() {
            if time <= kept {
                self.sums[time] += 1;
            }
            let above = time + (time & time.wrapping_neg());
            if above < self.sums.len() {
                self.sums[above] += self.sums[time];
            }
        }
    }
}

#[cfg(test)]
mod tests;
