//! The hit rate of a flat LRU cache at every size at once, and the size at which more stops paying.
//!
//! An access hits every LRU cache that is larger than the number of distinct rows asked for since the
//! same row was last asked for (its stack distance; Mattson, Gecsei, Slutz and Traiger, IBM Systems
//! Journal 1970). The distances are counted by a tree of partial sums over the times of last accesses
//! (Bennett and Kruskal, "LRU stack processing", IBM Journal 1975), which is written anew whenever its
//! times have run out, so that it takes memory by distinct rows and not by accesses.

use super::trace::Trace;

/// More memory stops paying where a cache twice as large would never hit this share of all accesses
/// more.
pub(crate) const PAYING_GAIN: f64 = 0.01;

/// Hits of an LRU cache by its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Curve {
    /// By rows in the cache, from 0 to all distinct rows.
    hits: Vec<u64>,
    accesses: u64,
}

impl Curve {
    /// Measures a trace, in the time of a sort.
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

    /// Hits of a cache of so many rows.
    #[must_use]
    pub(crate) fn hits(&self, rows: usize) -> u64 {
        self.hits[rows.min(self.hits.len() - 1)]
    }

    /// Hits over accesses of a cache of so many rows; 0 for a trace without any.
    #[must_use]
    pub(crate) fn rate(&self, rows: usize) -> f64 {
        self.hits(rows) as f64 / self.accesses.max(1) as f64
    }

    /// The fewest rows from which on a cache twice as large would hit less than `gain` of all accesses
    /// more.
    #[must_use]
    pub(crate) fn enough(&self, gain: f64) -> usize {
        let paying = |&rows: &usize| self.rate(2 * rows) - self.rate(rows) >= gain;
        (1..self.hits.len()).rev().find(paying).map_or(1, |rows| rows + 1).min(self.hits.len() - 1)
    }
}

/// Times of last accesses, and how many of them are after each.
struct Stack {
    /// By time, as a Fenwick tree: whether a key was last accessed then.
    sums: Vec<u32>,
    /// By time: the key that was accessed then.
    keys: Vec<u32>,
    /// By key: when it was last accessed, counted from 1; 0 never.
    last: Vec<u32>,
    now: usize,
    live: usize,
}

impl Stack {
    fn new(keys: usize) -> Self {
        let times = 2 * keys + 1;
        Self { sums: vec![0; times + 1], keys: vec![0; times + 1], last: vec![0; keys], now: 0, live: 0 }
    }

    /// The least size of an LRU cache that this access hits; none for a first one.
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

    /// Keys last accessed up to this time.
    fn sum(&self, mut time: usize) -> usize {
        let mut sum = 0u32;
        while time > 0 {
            sum = sum.wrapping_add(self.sums[time]);
            time &= time - 1;
        }
        sum as usize
    }

    fn add(&mut self, mut time: usize, what: u32) {
        while time < self.sums.len() {
            self.sums[time] = self.sums[time].wrapping_add(what);
            time += time & time.wrapping_neg();
        }
    }

    /// Gives the last accesses the times from 1 on, in their order.
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
