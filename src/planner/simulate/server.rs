//! The server's default: LRU eviction behind admission by frequency. While the cache has room it admits every
//! row. Once it is full, a row is admitted at its second recent miss, by the code of the server
//! (`cache::policy::frequency`, which explains the idea and its limits).
//!
//! Differences from a server: here every access is a batch of its own, and eviction is exact, one row at a
//! time. A server evicts in the background by age classes, and keeps a part of its room free between its
//! watermarks.

use super::Simulated;
use super::lru::Lru;
use crate::cache::policy::frequency::Sketch;
use crate::types::FlatKey;

/// Misses after which a row is admitted, as in the server's default.
const MISSES: u32 = 2;

/// An LRU cache that admits by frequency.
#[derive(Debug)]
pub(crate) struct ServerDefault {
    lru: Lru,
    sketch: Sketch,
}

impl ServerDefault {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        let sketch = Sketch::new(Sketch::bytes_of(capacity), MISSES);
        Self { lru: Lru::new(capacity, keys), sketch }
    }
}

impl Simulated for ServerDefault {
    fn access(&mut self, key: u32) -> bool {
        // As in the server, the sketch also counts a miss while the cache has room.
        if self.lru.contains(key) || self.sketch.admits(FlatKey(key.into()), 1) || !self.lru.is_full() {
            return self.lru.access(key);
        }
        false
    }
}
