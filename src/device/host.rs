//! The host device: every kernel in plain Rust, and so the oracle for every other device.

use super::Real;

/// One lookup of a gather-pool: which values each sample has, and where its vector goes.
#[derive(Clone, Copy, Debug)]
pub struct PoolLookup<'a> {
    /// `samples + 1` offsets: sample `s` owns the occurrences `offsets[s]..offsets[s + 1]`.
    pub offsets: &'a [u32],
    /// Elements of a row.
    pub dim: usize,
    /// Divide the sum by the count.
    pub mean: bool,
    /// Where the vector begins in the output row.
    pub column: usize,
}

/// Pools the rows of each sample's ids into `dim` columns of its output row.
///
/// `row(i)` is the row of occurrence `i`, or `None` for one that reads as zeros. An element's sum
/// starts at +0 and the rows are added in id order, as every device has it ([`super::pool`]); an empty
/// bag is zeros. `out` holds one row of `stride` elements a sample.
///
/// # Panics
/// When `out` is too short, or a row is not `dim` long.
pub fn gather_pool<'r, T: Real>(
    lookup: &PoolLookup<'_>,
    row: impl Fn(usize) -> Option<&'r [f32]>,
    out: &mut [T],
    stride: usize,
) {
    for (bag, line) in lookup.offsets.windows(2).zip(out.chunks_mut(stride)) {
        let (first, end) = (bag[0] as usize, bag[1] as usize);
        let sum = &mut line[lookup.column..][..lookup.dim];
        match (first < end).then(|| row(first)).flatten() {
            // 0 + v: v itself, save that a negative zero becomes a positive one.
            Some(values) => {
                for (s, v) in sum.iter_mut().zip(&values[..lookup.dim]) {
                    *s = T::default() + T::from_f32(*v);
                }
            }
            None => sum.fill(T::default()),
        }
        for values in (first + 1..end).filter_map(&row) {
            for (s, v) in sum.iter_mut().zip(&values[..lookup.dim]) {
                *s += T::from_f32(*v);
            }
        }
        if lookup.mean && end > first + 1 {
            let count = T::from_f64((end - first) as f64);
            for s in sum {
                *s = *s / count;
            }
        }
    }
}

/// Bytes of memory that this process may use: the machine's, or less where a control group says so.
/// None where the system does not tell.
#[must_use]
pub fn memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let machine = total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|limit| limit.trim().parse().ok()).unwrap_or(u64::MAX);
    Some(machine.min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bags_are_pooled_in_id_order_and_land_in_their_column() {
        let table = [1.0f32, 2.0, 10.0, 20.0, 100.0, 200.0];
        let ids = [0usize, 1, 2, 2, 9];
        let row = |i: usize| table.chunks_exact(2).nth(ids[i]);
        let pool = |mean| {
            let mut out = vec![-1.0f32; 4 * 3];
            let lookup = PoolLookup { offsets: &[0, 1, 1, 4, 5], dim: 2, mean, column: 1 };
            gather_pool(&lookup, row, &mut out, 3);
            out
        };
        assert_eq!(pool(false), [-1., 1., 2., -1., 0., 0., -1., 210., 420., -1., 0., 0.]);
        assert_eq!(pool(true), [-1., 1., 2., -1., 0., 0., -1., 70., 140., -1., 0., 0.]);
    }

    #[test]
    fn a_negative_zero_is_pooled_to_a_positive_one() {
        let lookup = PoolLookup { offsets: &[0, 1], dim: 1, mean: false, column: 0 };
        let mut out = [1.0f32];
        gather_pool(&lookup, |_| Some(&[-0.0][..]), &mut out, 1);
        assert_eq!(out[0].to_bits(), 0);
    }
}
