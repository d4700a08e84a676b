//! The first values of a table's rows: a pure function of seed, table and row, so that any number of threads,
//! in any order, computes the same bytes.

use rayon::prelude::*;

use crate::mem::{SplitMix64, mix64};

/// Elements that one thread fills at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// First values, uniform between `-bound` and `bound`: element `i` of a row is output `i` of SplitMix64
/// (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014, section 5), started at a
/// hash of seed, table and row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Uniform {
    /// Seed of the model.
    pub seed: u64,
    /// [`table_code`] of the table.
    pub table_code: u64,
    /// The largest absolute value.
    pub bound: f32,
}

impl Uniform {
    /// The first value of row `row`.
    pub(crate) fn row(&self, row: u64, out: &mut [f32]) {
        let start = mix64(mix64(mix64(self.seed) ^ self.table_code) ^ row);
        let mut numbers = SplitMix64::new(start);
        for x in out {
            // 23 random bits become an odd multiple of 2^-23: symmetric about 0 and within the bound.
            let steps = (numbers.next_u64() >> 41) as i32 * 2 + 1 - (1 << 23);
            *x = steps as f32 * (1.0 / (1 << 23) as f32) * self.bound;
        }
    }

    /// Fills a whole table of rows of `dim` elements.
    pub(crate) fn table(&self, dim: usize, rows: &mut [f32]) {
        let dim = dim.max(1);
        let chunk_rows = CHUNK_ELEMENTS.div_ceil(dim);
        rows.par_chunks_mut(chunk_rows * dim).enumerate().for_each(|(chunk, rows)| {
            let first = (chunk * chunk_rows) as u64;
            for (i, row) in rows.chunks_mut(dim).enumerate() {
                self.row(first + i as u64, row);
            }
        });
    }
}

/// A hash of a table's name, for [`Uniform::table_code`].
#[must_use]
pub(crate) fn table_code(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

#[cfg(test)]
mod tests;
