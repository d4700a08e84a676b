//! The optimal cache, which knows the future: when a full cache misses, it evicts the row whose next access
//! is farthest (Belady, IBM Systems Journal 1966, algorithm MIN; proved optimal by Mattson and others, 1970,
//! among policies that admit every missed row).
//!
//! Limits: a real cache does not know the future. The hits are an upper bound for every policy that admits
//! all missed rows. A policy that may refuse a row can be slightly better.

use std::collections::BinaryHeap;

/// The key is not accessed again.
const NEVER: u32 = u32::MAX;

/// By access: the position of the next access of the same key.
#[derive(Debug)]
pub struct Future(Vec<u32>);

impl Future {
    /// The future of these accesses of the keys `0..keys`.
    #[must_use]
    pub fn of(accesses: &[u32], keys: u32) -> Self {
        let mut seen = vec![NEVER; keys as usize];
        let mut next = vec![NEVER; accesses.len()];
        for (at, &key) in accesses.iter().enumerate().rev() {
            next[at] = std::mem::replace(&mut seen[key as usize], at as u32);
        }
        Self(next)
    }

    /// Calls `on_access` for each access in order, with its key and whether it hits a cache of `capacity`.
    pub fn run(&self, accesses: &[u32], keys: u32, capacity: usize, mut on_access: impl FnMut(u32, bool)) {
        if capacity == 0 {
            return accesses.iter().for_each(|&key| on_access(key, false));
        }
        let mut resident = vec![false; keys as usize];
        let mut held = 0;
        // Positions of next accesses. A position that has passed is smaller than every future one, so it is
        // never popped as the farthest. Such positions are removed when there are many.
        let mut farthest: BinaryHeap<u32> = BinaryHeap::new();
        let mut never: Vec<u32> = Vec::new();
        for (at, (&key, &next)) in accesses.iter().zip(&self.0).enumerate() {
            let hit = resident[key as usize];
            if !hit {
                if held == capacity {
                    let victim = never.pop().or_else(|| farthest.pop().map(|at| accesses[at as usize]));
                    if let Some(victim) = victim {
                        resident[victim as usize] = false;
                        held -= 1;
                    }
                }
                resident[key as usize] = true;
                held += 1;
            }
            if next == NEVER {
                never.push(key);
            } else {
                farthest.push(next);
            }
            if farthest.len() > 2 * capacity + 1024 {
                farthest.retain(|&position| position > at as u32);
            }
            on_access(key, hit);
        }
    }
}
