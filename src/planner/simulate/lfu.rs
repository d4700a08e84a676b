//! Least frequently used: the victim is the row with the fewest uses since it was admitted; of several, the
//! least recently used one. One list for each count makes this constant-time (Shah, Mitra and Matani, "An
//! O(1) algorithm for implementing the LFU cache eviction scheme", 2010).
//!
//! Limits: the count of a row is lost when the row is evicted, and does not decay before. So a row that was
//! once hot stays cached long after, and new rows evict each other.

use super::Simulated;
use super::list::{Links, List};

/// An exact in-cache LFU cache.
#[derive(Debug)]
pub(crate) struct Lfu {
    capacity: usize,
    held: usize,
    links: Links,
    /// By count: the rows with this count, most recently used first.
    lists: Vec<List>,
    /// By key: uses since it was admitted; 0 if it is not cached.
    counts: Vec<u32>,
    /// A lower bound of the counts of cached keys.
    least: usize,
}

impl Lfu {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        let lists = vec![List::default(); 2];
        Self { capacity, held: 0, links: Links::new(keys), lists, counts: vec![0; keys as usize], least: 1 }
    }

    fn evict(&mut self) {
        while self.lists[self.least].is_empty() {
            self.least += 1;
        }
        if let Some(victim) = self.lists[self.least].pop_back(&mut self.links) {
            self.counts[victim as usize] = 0;
            self.held -= 1;
        }
    }
}

impl Simulated for Lfu {
    fn access(&mut self, key: u32) -> bool {
        let count = self.counts[key as usize] as usize;
        if count == 0 {
            if self.held == self.capacity {
                self.evict();
            }
            self.held += 1;
            self.least = 1;
        } else {
            self.lists[count].remove(&mut self.links, key);
        }
        self.counts[key as usize] += 1;
        if self.lists.len() == count + 1 {
            self.lists.push(List::default());
        }
        self.lists[count + 1].push_front(&mut self.links, key);
        count > 0
    }
}
