//! Least recently used: the row that was asked for longest ago leaves (Mattson, Gecsei, Slutz and
//! Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970, who show that
//! what it holds only grows with its size).
//!
//! Its limits: one pass over many rows that never come again puts out everything else, and a row that is
//! asked for every now and then loses its place to rows that are asked for once.

use super::Simulated;
use super::list::{Links, List};

/// An exact LRU cache.
#[derive(Debug)]
pub(crate) struct Lru {
    capacity: usize,
    links: Links,
    /// The newest in front.
    list: List,
    resident: Vec<bool>,
}

impl Lru {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        let resident = vec![false; keys as usize];
        Self { capacity, links: Links::new(keys), list: List::default(), resident }
    }
}

impl Simulated for Lru {
    fn access(&mut self, key: u32) -> bool {
        let hit = self.resident[key as usize];
        if hit {
            self.list.remove(&mut self.links, key);
        } else {
            if self.list.len() == self.capacity
                && let Some(out) = self.list.pop_back(&mut self.links)
            {
                self.resident[out as usize] = false;
            }
            self.resident[key as usize] = true;
        }
        self.list.push_front(&mut self.links, key);
        hit
    }
}
