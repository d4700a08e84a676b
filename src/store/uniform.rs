//! The first values of a table's rows: a pure function of seed, table and row, so that filling needs no
//! order and gives the same bytes on any number of threads.

use rayon::prelude::*;

/// Elements that one thread fills at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// First values, uniform between `-bound` and `bound`: element `i` of a row is
/// output `i` of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014, section 5) started at a hash of seed, table and row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Uniform {
    /// The model's seed.
    pub seed: u64,
    /// The table, as a number: [`table_code`].
    pub table_code: u64,
    /// The largest absolute value.
    pub bound: f32,
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Uniform {
    /// The first value of row `row`.
    pub fn row(&self, row: u64, out: &mut [f32]) {
        let start = [self.table_code, row]
            .iter()
            .fold(mix(self.seed.wrapping_add(GOLDEN)), |hash, &part| mix((hash ^ part).wrapping_add(GOLDEN)));
        let mut state = start;
        for x in out {
            state = state.wrapping_add(GOLDEN);
            // 23 bits, as an odd number of 2^-23: symmetric about 0 and never outside the bound.
            let steps = (mix(state) >> 41) as i32 * 2 + 1 - (1 << 23);
            *x = steps as f32 * (1.0 / (1 << 23) as f32) * self.bound;
        }
    }

    /// The first values of `rows`, a whole table of rows of `dim` elements.
    pub fn table(&self, dim: usize, rows: &mut [f32]) {
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

/// A number for a table's name.
#[must_use]
pub fn table_code(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

/// SplitMix64's output function.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The first outputs for seed 1234567, as published with the reference implementation.
        let outputs = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423_u64];
        for (i, output) in outputs.into_iter().enumerate() {
            assert_eq!(mix(GOLDEN.wrapping_mul(i as u64 + 1).wrapping_add(1_234_567)), output);
        }
    }

    #[test]
    fn first_values_are_spread_evenly_within_the_bound() {
        let uniform = Uniform { seed: 7, table_code: table_code("users"), bound: 0.25 };
        let mut rows = vec![0.0; 64 * 4096];
        uniform.table(64, &mut rows);
        assert!(rows.iter().all(|x| x.abs() <= 0.25));
        let mut tenths = [0_u32; 10];
        rows.iter().for_each(|x| tenths[((x + 0.25) * 20.0) as usize] += 1);
        // 26,214 expected a tenth; six standard deviations are 922.
        assert!(tenths.iter().all(|&n| n.abs_diff(26_214) < 922), "{tenths:?}");
    }

    #[test]
    fn a_table_is_filled_with_the_same_bytes_on_any_number_of_threads() {
        let uniform = Uniform { seed: 1, table_code: 2, bound: 1.0 };
        let dim = 7;
        let one_by_one: Vec<u32> = (0..30_000)
            .flat_map(|row| {
                let mut out = [0.0; 7];
                uniform.row(row, &mut out);
                out.map(f32::to_bits)
            })
            .collect();
        for threads in [1, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut rows = vec![0.0_f32; 30_000 * dim];
            pool.install(|| uniform.table(dim, &mut rows));
            assert!(rows.iter().map(|x| x.to_bits()).eq(one_by_one.iter().copied()), "{threads} threads");
        }
    }

    proptest! {
        #[test]
        fn a_row_depends_on_seed_table_and_row(seed: u64, code: u64, row: u64) {
            let values = |seed, table_code, row| {
                let mut out = [0.0_f32; 8];
                Uniform { seed, table_code, bound: 1.0 }.row(row, &mut out);
                out.map(f32::to_bits)
            };
            let here = values(seed, code, row);
            prop_assert_eq!(here, values(seed, code, row));
            prop_assert_ne!(here, values(seed ^ 1, code, row));
            prop_assert_ne!(here, values(seed, code ^ 1, row));
            prop_assert_ne!(here, values(seed, code, row ^ 1));
        }
    }
}
