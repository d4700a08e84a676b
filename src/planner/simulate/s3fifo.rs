//! S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
//! algorithm 1). New rows enter a small queue, a tenth of the cache. A row that was hit more than once before
//! it reaches the end of the small queue moves to the main queue. At the end of the main queue a row
//! re-enters it once for each use, at most three times. A ghost queue remembers the last keys that were
//! evicted from the small queue, as many as the main queue holds. If one of these is used again, it enters
//! the main queue.
//!
//! Limits: the size of the small queue is fixed. A row that leaves it early misses at its next use,
//! even where LRU would still hold the row. If the cache holds few rows, the small queue is one row.

use super::Simulated;
use super::list::{Links, List};

/// Use counts saturate here.
const MAX_USES: u8 = 3;
/// The small queue gets `1 / SMALL_PART` of the cache.
const SMALL_PART: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Unknown,
    Small,
    Main,
    Ghost,
}

/// An S3-FIFO cache.
#[derive(Debug)]
pub(crate) struct S3Fifo {
    capacity: usize,
    small_capacity: usize,
    links: Links,
    small: List,
    main: List,
    ghost: List,
    queue_of: Vec<Queue>,
    counts: Vec<u8>,
}

impl S3Fifo {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        Self {
            capacity,
            small_capacity: (capacity / SMALL_PART).max(1),
            links: Links::new(keys),
            small: List::default(),
            main: List::default(),
            ghost: List::default(),
            queue_of: vec![Queue::Unknown; keys as usize],
            counts: vec![0; keys as usize],
        }
    }

    /// Moves rows along the queues until one is evicted.
    fn evict(&mut self) {
        let held = self.small.len() + self.main.len();
        while self.small.len() + self.main.len() == held {
            if self.small.len() >= self.small_capacity || self.main.is_empty() {
                self.leave_small();
            } else {
                self.leave_main();
            }
        }
    }

    fn leave_small(&mut self) {
        let Some(key) = self.small.pop_back(&mut self.links) else { return };
        if self.counts[key as usize] > 1 {
            self.enter_main(key);
            return;
        }
        self.queue_of[key as usize] = Queue::Ghost;
        self.ghost.push_front(&mut self.links, key);
        if self.ghost.len() > self.capacity - self.small_capacity
            && let Some(old) = self.ghost.pop_back(&mut self.links)
        {
            self.queue_of[old as usize] = Queue::Unknown;
        }
    }

    fn leave_main(&mut self) {
        let Some(key) = self.main.pop_back(&mut self.links) else { return };
        let count = &mut self.counts[key as usize];
        if *count > 0 {
            *count -= 1;
            self.main.push_front(&mut self.links, key);
        } else {
            self.queue_of[key as usize] = Queue::Unknown;
        }
    }

    fn enter_main(&mut self, key: u32) {
        self.counts[key as usize] = 0;
        self.queue_of[key as usize] = Queue::Main;
        self.main.push_front(&mut self.links, key);
    }
}

impl Simulated for S3Fifo {
    fn access(&mut self, key: u32) -> bool {
        let queue = self.queue_of[key as usize];
        if matches!(queue, Queue::Small | Queue::Main) {
            let count = &mut self.counts[key as usize];
            *count = (*count + 1).min(MAX_USES);
            return true;
        }
        if queue == Queue::Ghost {
            self.ghost.remove(&mut self.links, key);
        }
        if self.small.len() + self.main.len() == self.capacity {
            self.evict();
        }
        if queue == Queue::Ghost {
            self.enter_main(key);
        } else {
            self.counts[key as usize] = 0;
            self.queue_of[key as usize] = Queue::Small;
            self.small.push_front(&mut self.links, key);
        }
        false
    }
}
