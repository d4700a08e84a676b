//! W-TinyLFU (Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM
//! Transactions on Storage 2017, section 4): a window of a hundredth of the cache takes in what is new,
//! as LRU. What leaves it enters the main part only if it was asked for more often of late than the
//! row that would have to leave there. The main part is a segmented LRU, a fifth on probation and four
//! fifths protected. Frequencies are those of a count-min sketch of 4-bit counters, halved every ten
//! times the cache's size in accesses, so that they are of late.
//!
//! Its limits: the sketch errs upwards where keys collide; the window's hundredth is fixed here (later
//! work adapts it), so bursts of new rows hit less than under LRU. With room for a few rows only, the
//! window is one row.

use super::Simulated;
use super::list::{Links, List};
use crate::mem::mix64;

/// The window has this part of the cache.
const WINDOW_PART: usize = 100;
/// Accesses, in cache sizes, after which the sketch is halved.
const SAMPLE: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
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
    places: Vec<Place>,
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
            places: vec![Place::Outside; keys as usize],
            sketch: Sketch::new(capacity, keys),
        }
    }

    fn hit(&mut self, key: u32, place: Place) {
        let links = &mut self.links;
        match place {
            Place::Window => {
                self.window.remove(links, key);
                self.window.push_front(links, key);
                return;
            }
            Place::Probation => self.probation.remove(links, key),
            _ => self.protected.remove(links, key),
        }
        self.protected.push_front(links, key);
        self.places[key as usize] = Place::Protected;
        if self.protected.len() > self.protected_capacity
            && let Some(down) = self.protected.pop_back(&mut self.links)
        {
            self.enter_probation(down);
        }
    }

    /// What left the window enters the main part, or something else has to.
    fn leave_window(&mut self) {
        let Some(candidate) = self.window.pop_back(&mut self.links) else { return };
        self.places[candidate as usize] = Place::Outside;
        if self.probation.len() + self.protected.len() < self.main_capacity {
            self.enter_probation(candidate);
            return;
        }
        // Probation is empty only where all of the main part is protected, or there is none.
        let from = if self.probation.is_empty() { &mut self.protected } else { &mut self.probation };
        let Some(victim) = from.back() else { return };
        if self.sketch.count(candidate) > self.sketch.count(victim) {
            from.remove(&mut self.links, victim);
            self.places[victim as usize] = Place::Outside;
            self.enter_probation(candidate);
        }
    }

    fn enter_probation(&mut self, key: u32) {
        self.places[key as usize] = Place::Probation;
        self.probation.push_front(&mut self.links, key);
    }
}

impl Simulated for WTinyLfu {
    fn access(&mut self, key: u32) -> bool {
        self.sketch.add(key);
        let place = self.places[key as usize];
        if place != Place::Outside {
            self.hit(key, place);
            return true;
        }
        if self.window.len() == self.window_capacity {
            self.leave_window();
        }
        self.places[key as usize] = Place::Window;
        self.window.push_front(&mut self.links, key);
        false
    }
}

/// A count-min sketch of four rows of 4-bit counters.
#[derive(Debug)]
struct Sketch {
    /// By row, each hashed apart; a byte each, of which 4 bits are used.
    counters: [Vec<u8>; 4],
    mask: u64,
    added: usize,
    period: usize,
}

/// So wide at least, or 16 times the keys, that a small cache is not judged by a crowded sketch.
const LEAST_COLUMNS: usize = 4096;
/// The most that 4 bits count.
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

    /// Adds to the least of the key's counters only, as the paper's conservative update does.
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
