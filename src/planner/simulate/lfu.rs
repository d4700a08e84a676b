//! Least frequently used: of the rows in the cache, the one that was asked for least often since it
//! came in leaves; among equals, the one that was asked for longest ago. In constant time by a list a
//! frequency (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
//! scheme", 2010).
//!
//! Its limits: a count is forgotten when its row leaves and never ages while it stays, so a row that was
//! hot once keeps its place long after, and new rows push each other out.

use super::Simulated;
use super::list::{Links, List};

/// An exact in-cache LFU cache.
#[derive(Debug)]
pub(crate) struct Lfu {
    capacity: usize,
    held: usize,
    links: Links,
    /// By frequency; the newest of each in front.
    lists: Vec<List>,
    /// By key: how often it was asked for since it came in; 0 outside.
    counts: Vec<u32>,
    /// No resident key has a lower frequency.
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
        if let Some(out) = self.lists[self.least].pop_back(&mut self.links) {
            self.counts[out as usize] = 0;
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
