//! Random replacement: every cached row is the victim with equal probability (Belady, "A study of replacement
//! algorithms for a virtual-storage computer", IBM Systems Journal 1966, uses it as the baseline).
//!
//! Limits: it learns nothing. A policy that is not better is not worth its bookkeeping.

use super::Simulated;
use crate::mem::mix64;

/// A cache that evicts at random, the same way for the same seed.
#[derive(Debug)]
pub(crate) struct Random {
    capacity: usize,
    residents: Vec<u32>,
    /// By key.
    resident: Vec<bool>,
    state: u64,
}

impl Random {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32, seed: u64) -> Self {
        Self { capacity, residents: Vec::new(), resident: vec![false; keys as usize], state: seed }
    }

    /// A number below `end`: SplitMix64 (Steele, Lea and Flood, 2014), scaled.
    fn below(&mut self, end: usize) -> usize {
        let word = mix64(self.state);
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((u128::from(word) * end as u128) >> 64) as usize
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
