//! The optimal cache, which knows every access to come: on a miss with the cache full, the resident row
//! whose next access is farthest leaves (Belady, IBM Systems Journal 1966, algorithm MIN; proved optimal
//! by Mattson and others, 1970, among all that take in every row that they miss).
//!
//! Its limits: none can be built. It is the bound that the others are measured against. A cache that may
//! refuse a row could do a little better still.

use std::collections::BinaryHeap;

/// The next access of a key that has none.
const NEVER: u32 = u32::MAX;

/// By access: where the same key is accessed next.
#[derive(Debug)]
pub struct Future(Vec<u32>);

impl Future {
    /// Reads the accesses from their end.
    #[must_use]
    pub fn of(accesses: &[u32], keys: u32) -> Self {
        let mut seen = vec![NEVER; keys as usize];
        let mut next = vec![NEVER; accesses.len()];
        for (at, &key) in accesses.iter().enumerate().rev() {
            next[at] = std::mem::replace(&mut seen[key as usize], at as u32);
        }
        Self(next)
    }

    /// Whether each access hits a cache of `capacity`, told one after the other.
    pub fn run(&self, accesses: &[u32], keys: u32, capacity: usize, mut told: impl FnMut(u32, bool)) {
        if capacity == 0 {
            return accesses.iter().for_each(|&key| told(key, false));
        }
        let mut resident = vec![false; keys as usize];
        let mut held = 0;
        // Positions of next accesses. One that has passed is behind every one to come, so it is never
        // popped as the farthest; they are swept out when they are many.
        let mut farthest: BinaryHeap<u32> = BinaryHeap::new();
        let mut never: Vec<u32> = Vec::new();
        for (at, (&key, &next)) in accesses.iter().zip(&self.0).enumerate() {
            let hit = resident[key as usize];
            if !hit {
                if held == capacity {
                    let out = never.pop().or_else(|| farthest.pop().map(|at| accesses[at as usize]));
                    if let Some(out) = out {
                        resident[out as usize] = false;
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
            told(key, hit);
        }
    }
}
