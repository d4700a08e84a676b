//! ARC, the adaptive replacement cache (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement
//! cache", FAST 2003, figure 4). One LRU list holds rows that were used once, another holds rows that were
//! used again. Each has a ghost list of keys that were evicted from it. A miss of a key in a ghost list shows
//! that the list it was evicted from was too short, so the target size of that list grows.
//!
//! Limits: lists and ghost lists together hold at most twice as many keys as the cache. A row that returns
//! after its key was dropped counts as new. Every hit moves a row between lists, which is expensive in a
//! cache that many threads read.

use super::Simulated;
use super::list::{Links, List};

/// The list of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArcList {
    Unknown,
    /// T1: cached, used once recently.
    Recent,
    /// T2: cached, used twice or more.
    Frequent,
    /// B1: evicted from T1.
    GhostRecent,
    /// B2: evicted from T2.
    GhostFrequent,
}

/// An ARC cache.
#[derive(Debug)]
pub(crate) struct Arc {
    capacity: usize,
    links: Links,
    recent: List,
    frequent: List,
    ghost_recent: List,
    ghost_frequent: List,
    list_of: Vec<ArcList>,
    /// `p`: the target size of T1, in rows.
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
            ghost_recent: List::default(),
            ghost_frequent: List::default(),
            list_of: vec![ArcList::Unknown; keys as usize],
            target: 0.0,
        }
    }

    fn put(&mut self, key: u32, list: ArcList) {
        self.list_of[key as usize] = list;
        let links = &mut self.links;
        match list {
            ArcList::Unknown => {}
            ArcList::Recent => self.recent.push_front(links, key),
            ArcList::Frequent => self.frequent.push_front(links, key),
            ArcList::GhostRecent => self.ghost_recent.push_front(links, key),
            ArcList::GhostFrequent => self.ghost_frequent.push_front(links, key),
        }
    }

    /// REPLACE in the paper: evicts one row and remembers its key in a ghost list.
    fn replace(&mut self, key_is_ghost_frequent: bool) {
        let recent = self.recent.len() as f64;
        let from_recent = !self.recent.is_empty()
            && (recent > self.target || key_is_ghost_frequent && recent == self.target);
        if from_recent {
            if let Some(victim) = self.recent.pop_back(&mut self.links) {
                self.put(victim, ArcList::GhostRecent);
            }
        } else if let Some(victim) = self.frequent.pop_back(&mut self.links) {
            self.put(victim, ArcList::GhostFrequent);
        }
    }

    /// Case IV in the paper: makes room for a key that is in no list.
    fn admit(&mut self) {
        let used_once = self.recent.len() + self.ghost_recent.len();
        let all = used_once + self.frequent.len() + self.ghost_frequent.len();
        if used_once == self.capacity {
            if self.recent.len() < self.capacity {
                self.forget(ArcList::GhostRecent);
                self.replace(false);
            } else {
                self.forget(ArcList::Recent);
            }
        } else if all >= self.capacity {
            if all == 2 * self.capacity {
                self.forget(ArcList::GhostFrequent);
            }
            self.replace(false);
        }
    }

    fn forget(&mut self, list: ArcList) {
        let keys = match list {
            ArcList::Recent => &mut self.recent,
            ArcList::GhostRecent => &mut self.ghost_recent,
            _ => &mut self.ghost_frequent,
        };
        if let Some(key) = keys.pop_back(&mut self.links) {
            self.list_of[key as usize] = ArcList::Unknown;
        }
    }
}

impl Simulated for Arc {
    fn access(&mut self, key: u32) -> bool {
        let list = self.list_of[key as usize];
        let (ghosts_recent, ghosts_frequent) =
            (self.ghost_recent.len() as f64, self.ghost_frequent.len() as f64);
        match list {
            ArcList::Recent => self.recent.remove(&mut self.links, key),
            ArcList::Frequent => self.frequent.remove(&mut self.links, key),
            ArcList::GhostRecent => {
                self.target =
                    (self.target + (ghosts_frequent / ghosts_recent).max(1.0)).min(self.capacity as f64);
                self.replace(false);
                self.ghost_recent.remove(&mut self.links, key);
            }
            ArcList::GhostFrequent => {
                self.target = (self.target - (ghosts_recent / ghosts_frequent).max(1.0)).max(0.0);
                self.replace(true);
                self.ghost_frequent.remove(&mut self.links, key);
            }
            ArcList::Unknown => self.admit(),
        }
        self.put(key, if list == ArcList::Unknown { ArcList::Recent } else { ArcList::Frequent });
        matches!(list, ArcList::Recent | ArcList::Frequent)
    }
}
