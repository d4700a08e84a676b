//! Least recently used: the row with the oldest last access is evicted (Mattson, Gecsei, Slutz and Traiger,
//! "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970; they show that a larger cache
//! holds everything that a smaller one holds).
//!
//! Limits: one pass over many rows that are used once evicts everything else, and a row that is used now and
//! then is evicted for rows that are used once.

use super::Simulated;
use super::list::{Links, List};

/// An exact LRU cache.
#[derive(Debug)]
pub(crate) struct Lru {
    capacity: usize,
    links: Links,
    /// Most recently used first.
    list: List,
    resident: Vec<bool>,
}

impl Lru {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        let resident = vec![false; keys as usize];
        Self { capacity, links: Links::new(keys), list: List::default(), resident }
    }

    pub(crate) fn contains(&self, key: u32) -> bool {
        self.resident[key as usize]
    }

    pub(crate) fn is_full(&self) -> bool {
        self.list.len() == self.capacity
    }
}

impl Simulated for Lru {
    fn access(&mut self, key: u32) -> bool {
        let hit = self.contains(key);
        if hit {
            self.list.remove(&mut self.links, key);
        } else {
            if self.is_full()
                && let Some(victim) = self.list.pop_back(&mut self.links)
            {
                self.resident[victim as usize] = false;
            }
            self.resident[key as usize] = true;
        }
        self.list.push_front(&mut self.links, key);
        hit
    }
}
