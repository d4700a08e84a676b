//! W-TinyLFU (Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM
//! Transactions on Storage 2017, section 4). New rows enter a window, an LRU list of a hundredth of the
//! cache. A row that leaves the window enters the main part only if it was used more often recently than the
//! victim there. The main part is a segmented LRU: one fifth is on probation, four fifths are protected. Use
//! counts come from a count-min sketch of 4-bit counters. All counters and the number of counted accesses are
//! halved when that number reaches ten times the capacity.
//!
//! Limits: the sketch overestimates keys that collide. The size of the window is fixed here (later work
//! adapts it), so bursts of new rows hit less than under LRU. If the cache holds few rows, the window is one
//! row.

use super::Simulated;
use super::list::{Links, List};
use crate::mem::mix64;

/// The window gets `1 / WINDOW_PART` of the cache.
const WINDOW_PART: usize = 100;
/// Counted accesses per row of capacity at which the sketch is halved.
const SAMPLE: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Segment {
    Outside,
    Window,
    Probation,
    Protected,
}

/// A W-TinyLFU cache.
#[derive(Debug)]
pub(crate) struct WTinyLfu {
    window_capacity: usize,
    main_capacity: usize,
    protected_capacity: usize,
    links: Links,
    window: List,
    probation: List,
    protected: List,
    segment_of: Vec<Segment>,
    sketch: Sketch,
}

impl WTinyLfu {
    /// An empty cache of `capacity` of the keys `0..keys`; `capacity` is above 0.
    pub(crate) fn new(capacity: usize, keys: u32) -> Self {
        let window_capacity = (capacity / WINDOW_PART).max(1);
        let main_capacity = capacity - window_capacity;
        Self {
            window_capacity,
            main_capacity,
            protected_capacity: main_capacity * 4 / 5,
            links: Links::new(keys),
            window: List::default(),
            probation: List::default(),
            protected: List::default(),
            segment_of: vec![Segment::Outside; keys as usize],
            sketch: Sketch::new(capacity, keys),
        }
    }

    fn hit(&mut self, key: u32, segment: Segment) {
        let links = &mut self.links;
        match segment {
            Segment::Window => {
                self.window.remove(links, key);
                self.window.push_front(links, key);
                return;
            }
            Segment::Probation => self.probation.remove(links, key),
            _ => self.protected.remove(links, key),
        }
        self.protected.push_front(links, key);
        self.segment_of[key as usize] = Segment::Protected;
        if self.protected.len() > self.protected_capacity
            && let Some(down) = self.protected.pop_back(&mut self.links)
        {
            self.enter_probation(down);
        }
    }

    /// Moves the last row of the window to the main part if it wins against the victim there; evicts the
    /// loser.
    fn leave_window(&mut self) {
        let Some(candidate) = self.window.pop_back(&mut self.links) else { return };
        self.segment_of[candidate as usize] = Segment::Outside;
        if self.probation.len() + self.protected.len() < self.main_capacity {
            self.enter_probation(candidate);
            return;
        }
        // Probation is empty only if all rows of the main part are protected, or the main part has no room.
        let from = if self.probation.is_empty() { &mut self.protected } else { &mut self.probation };
        let Some(victim) = from.back() else { return };
        if self.sketch.count(candidate) > self.sketch.count(victim) {
            from.remove(&mut self.links, victim);
            self.segment_of[victim as usize] = Segment::Outside;
            self.enter_probation(candidate);
        }
    }

    fn enter_probation(&mut self, key: u32) {
        self.segment_of[key as usize] = Segment::Probation;
        self.probation.push_front(&mut self.links, key);
    }
}

impl Simulated for WTinyLfu {
    fn access(&mut self, key: u32) -> bool {
        self.sketch.add(key);
        let segment = self.segment_of[key as usize];
        if segment != Segment::Outside {
            self.hit(key, segment);
            return true;
        }
        if self.window.len() == self.window_capacity {
            self.leave_window();
        }
        self.segment_of[key as usize] = Segment::Window;
        self.window.push_front(&mut self.links, key);
        false
    }
}

/// A count-min sketch of four rows of 4-bit counters.
#[derive(Debug)]
struct Sketch {
    /// By row of the sketch. Each row has its own hash. A counter takes a byte but uses only 4 bits.
    counters: [Vec<u8>; 4],
    mask: u64,
    added: usize,
    period: usize,
}

/// The fewest columns, or about 16 per key if that is less, so that the sketch of a small cache has few
/// collisions.
const LEAST_COLUMNS: usize = 4096;
/// The largest 4-bit count.
const FULL: u8 = 15;

impl Sketch {
    fn new(capacity: usize, keys: u32) -> Self {
        let least = LEAST_COLUMNS.min((16 * keys as usize).next_power_of_two());
        let columns = (2 * capacity).next_power_of_two().max(least);
        let counters = std::array::from_fn(|_| vec![0; columns]);
        Self { counters, mask: columns as u64 - 1, added: 0, period: SAMPLE * capacity }
    }

    fn column(&self, key: u32, row: usize) -> usize {
        let hash = mix64(u64::from(key) << 2 | row as u64);
        ((hash >> 20) & self.mask) as usize
    }

    fn count(&self, key: u32) -> u8 {
        (0..4).map(|row| self.counters[row][self.column(key, row)]).min().unwrap_or(0)
    }

    /// Increments only the smallest of the key's counters (the paper's conservative update).
    fn add(&mut self, key: u32) {
        let least = self.count(key);
        if least < FULL {
            for row in 0..4 {
                let column = self.column(key, row);
                let counter = &mut self.counters[row][column];
                *counter += u8::from(*counter == least);
            }
        }
        self.added += 1;
        if self.added >= self.period {
            self.added /= 2;
            self.counters.iter_mut().flatten().for_each(|counter| *counter /= 2);
        }
    }
}

#[cfg(test)]
mod tests;
