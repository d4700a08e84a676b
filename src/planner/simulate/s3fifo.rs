//! S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP
//! 2023, algorithm 1): a small queue of a tenth of the cache takes in what is new, and only what was
//! asked for more than once while it passed goes on to the main queue, whose rows go round once for each
//! time that they were asked for, three at most. Keys that left the small queue are remembered, as many
//! as the main queue holds, and enter the main queue when they come back.
//!
//! Its limits: the small queue's tenth is fixed; a row whose second and third access both come after it
//! has passed costs two misses. With room for a few rows only, the tenth is one row.

use super::Simulated;
use super::list::{Links, List};

/// Counted up to here.
const MOST: u8 = 3;
/// The small queue has this part of the cache.
const SMALL_PART: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
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
    places: Vec<Place>,
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
            places: vec![Place::Unknown; keys as usize],
            counts: vec![0; keys as usize],
        }
    }

    /// Moves rows on until one has left.
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
        self.places[key as usize] = Place::Ghost;
        self.ghost.push_front(&mut self.links, key);
        if self.ghost.len() > self.capacity - self.small_capacity
            && let Some(old) = self.ghost.pop_back(&mut self.links)
        {
            self.places[old as usize] = Place::Unknown;
        }
    }

    fn leave_main(&mut self) {
        let Some(key) = self.main.pop_back(&mut self.links) else { return };
        let count = &mut self.counts[key as usize];
        if *count > 0 {
            *count -= 1;
            self.main.push_front(&mut self.links, key);
        } else {
            self.places[key as usize] = Place::Unknown;
        }
    }

    fn enter_main(&mut self, key: u32) {
        self.counts[key as usize] = 0;
        self.places[key as usize] = Place::Main;
        self.main.push_front(&mut self.links, key);
    }
}

impl Simulated for S3Fifo {
    fn access(&mut self, key: u32) -> bool {
        let place = self.places[key as usize];
        if matches!(place, Place::Small | Place::Main) {
            let count = &mut self.counts[key as usize];
            *count = (*count + 1).min(MOST);
            return true;
        }
        if place == Place::Ghost {
            self.ghost.remove(&mut self.links, key);
        }
        if self.small.len() + self.main.len() == self.capacity {
            self.evict();
        }
        if place == Place::Ghost {
            self.enter_main(key);
        } else {
            self.counts[key as usize] = 0;
            self.places[key as usize] = Place::Small;
            self.small.push_front(&mut self.links, key);
        }
        false
    }
}
