//! ARC, the adaptive replacement cache (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement
//! cache", FAST 2003, figure 4): rows seen once and rows seen again in two LRU lists, each with a list of
//! keys that have left it. A miss that is found among the left says which of the two deserved more
//! room, and the target moves there.
//!
//! Its limits: the lists of the left remember twice the cache's size in keys and no further; a row that
//! comes back after that is new again. Every hit moves a row between lists, which a cache read by many
//! threads pays for.

use super::Simulated;
use super::list::{Links, List};

/// Where a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Unknown,
    /// T1: in the cache, seen once of late.
    Recent,
    /// T2: in the cache, seen twice or more.
    Frequent,
    /// B1: left from T1.
    LeftRecent,
    /// B2: left from T2.
    LeftFrequent,
}

/// An ARC cache.
#[derive(Debug)]
pub(crate) struct Arc {
    capacity: usize,
    links: Links,
    recent: List,
    frequent: List,
    left_recent: List,
    left_frequent: List,
    places: Vec<Place>,
    /// `p`: how many rows T1 should have.
    target: f64,
}

impl Arc {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        Self {
            capacity,
            links: Links::new(keys),
            recent: List::default(),
            frequent: List::default(),
            left_recent: List::default(),
            left_frequent: List::default(),
            places: vec![Place::Unknown; keys as usize],
            target: 0.0,
        }
    }

    fn put(&mut self, key: u32, place: Place) {
        self.places[key as usize] = place;
        let links = &mut self.links;
        match place {
            Place::Unknown => {}
            Place::Recent => self.recent.push_front(links, key),
            Place::Frequent => self.frequent.push_front(links, key),
            Place::LeftRecent => self.left_recent.push_front(links, key),
            Place::LeftFrequent => self.left_frequent.push_front(links, key),
        }
    }

    /// REPLACE: one row leaves the cache and is remembered.
    fn replace(&mut self, asked_left_frequent: bool) {
        let recent = self.recent.len() as f64;
        let from_recent =
            !self.recent.is_empty() && (recent > self.target || asked_left_frequent && recent == self.target);
        if from_recent {
            if let Some(out) = self.recent.pop_back(&mut self.links) {
                self.put(out, Place::LeftRecent);
            }
        } else if let Some(out) = self.frequent.pop_back(&mut self.links) {
            self.put(out, Place::LeftFrequent);
        }
    }

    /// Case IV: a key of no list.
    fn admit(&mut self) {
        let seen_once = self.recent.len() + self.left_recent.len();
        let all = seen_once + self.frequent.len() + self.left_frequent.len();
        if seen_once == self.capacity {
            if self.recent.len() < self.capacity {
                self.forget(Place::LeftRecent);
                self.replace(false);
            } else {
                self.forget(Place::Recent);
            }
        } else if all >= self.capacity {
            if all == 2 * self.capacity {
                self.forget(Place::LeftFrequent);
            }
            self.replace(false);
        }
    }

    fn forget(&mut self, place: Place) {
        let list = match place {
            Place::Recent => &mut self.recent,
            Place::LeftRecent => &mut self.left_recent,
            _ => &mut self.left_frequent,
        };
        if let Some(out) = list.pop_back(&mut self.links) {
            self.places[out as usize] = Place::Unknown;
        }
    }
}

impl Simulated for Arc {
    fn access(&mut self, key: u32) -> bool {
        let place = self.places[key as usize];
        let (once, twice) = (self.left_recent.len() as f64, self.left_frequent.len() as f64);
        match place {
            Place::Recent => self.recent.remove(&mut self.links, key),
            Place::Frequent => self.frequent.remove(&mut self.links, key),
            Place::LeftRecent => {
                self.target = (self.target + (twice / once).max(1.0)).min(self.capacity as f64);
                self.replace(false);
                self.left_recent.remove(&mut self.links, key);
            }
            Place::LeftFrequent => {
                self.target = (self.target - (once / twice).max(1.0)).max(0.0);
                self.replace(true);
                self.left_frequent.remove(&mut self.links, key);
            }
            Place::Unknown => self.admit(),
        }
        self.put(key, if place == Place::Unknown { Place::Recent } else { Place::Frequent });
        matches!(place, Place::Recent | Place::Frequent)
    }
}
