//! Random replacement: every cached row is the victim with equal probability (Belady, "A study of replacement
//! algorithms for a virtual-storage computer", IBM Systems Journal 1966, uses it as the baseline).
//!
//! Limits: it learns nothing from accesses. A policy that keeps state must be better to justify it.

use super::Simulated;
use crate::mem::SplitMix64;

/// A cache that evicts at random. Equal seeds give equal victims.
#[derive(Debug)]
pub(crate) struct Random {
    capacity: usize,
    residents: Vec<u32>,
    /// By key.
    resident: Vec<bool>,
    numbers: SplitMix64,
}

impl Random {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32, seed: u64) -> Self {
        Self {
            capacity,
            residents: Vec::new(),
            resident: vec![false; keys as usize],
            numbers: SplitMix64::new(seed),
        }
    }

    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.numbers.next_u64()) * end as u128) >> 64) as usize
    }
}

impl Simulated for Random {
    fn access(&mut self, key: u32) -> bool {
        if self.resident[key as usize] {
            return true;
        }
        self.resident[key as usize] = true;
        if self.residents.len() < self.capacity {
            self.residents.push(key);
        } else {
            let place = self.below(self.capacity);
            let victim = std::mem::replace(&mut self.residents[place], key);
            self.resident[victim as usize] = false;
        }
        false
    }
}
