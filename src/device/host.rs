//! The host device: every kernel in plain Rust, and so the oracle for every other device.

use super::{Real, Wide, vectorise};

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
/// `row(i)` is the row of occurrence `i`, or `None` for one that reads as zeros. A bag starts as its
/// first row and the others are added in id order, as every device has it ([`super::pool`]); an empty
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
    vectorise(GatherPool { lookup, row, out, stride });
}

struct GatherPool<'a, T, R> {
    lookup: &'a PoolLookup<'a>,
    row: R,
    out: &'a mut [T],
    stride: usize,
}

impl<'r, T: Real, R: Fn(usize) -> Option<&'r [f32]>> Wide for GatherPool<'_, T, R> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { lookup, row, out, stride } = self;
        match lookup.dim {
            16 => pool_width::<T, 16>(lookup, row, out, stride),
            32 => pool_width::<T, 32>(lookup, row, out, stride),
            _ => pool_any(lookup, row, out, stride),
        }
    }
}

/// For narrow rows: the sum stays in registers, and so little is done for a row that the processor
/// reads ahead over many of them. At 128 elements this form measured slower than `pool_any`.
#[inline(always)]
fn pool_width<'r, T: Real, const DIM: usize>(
    lookup: &PoolLookup<'_>,
    row: impl Fn(usize) -> Option<&'r [f32]>,
    out: &mut [T],
    stride: usize,
) {
    let row = |i| row(i).map(|values| &values.as_chunks::<DIM>().0[0]);
    for (bag, line) in lookup.offsets.windows(2).zip(out.chunks_mut(stride)) {
        let (first, end) = (bag[0] as usize, bag[1] as usize);
        let mut sum = [T::default(); DIM];
        if let Some(values) = (first < end).then(|| row(first)).flatten() {
            sum.iter_mut().zip(values).for_each(|(s, v)| *s = T::from_f32(*v));
        }
        for i in first + 1..end {
            let Some(values) = row(i) else { continue };
            sum.iter_mut().zip(values).for_each(|(s, v)| *s += T::from_f32(*v));
        }
        if let Some(count) = divisor(lookup, end - first) {
            sum.iter_mut().for_each(|s| *s = *s / count);
        }
        line[lookup.column..][..DIM].copy_from_slice(&sum);
    }
}

/// For any width: the sum is made where it goes.
#[inline(always)]
fn pool_any<'r, T: Real>(
    lookup: &PoolLookup<'_>,
    row: impl Fn(usize) -> Option<&'r [f32]>,
    out: &mut [T],
    stride: usize,
) {
    for (bag, line) in lookup.offsets.windows(2).zip(out.chunks_mut(stride)) {
        let (first, end) = (bag[0] as usize, bag[1] as usize);
        let sum = &mut line[lookup.column..][..lookup.dim];
        match (first < end).then(|| row(first)).flatten() {
            Some(values) => {
                for (s, v) in sum.iter_mut().zip(&values[..lookup.dim]) {
                    *s = T::from_f32(*v);
                }
            }
            None => sum.fill(T::default()),
        }
        for i in first + 1..end {
            let Some(values) = row(i) else { continue };
            for (s, v) in sum.iter_mut().zip(&values[..lookup.dim]) {
                *s += T::from_f32(*v);
            }
        }
        if let Some(count) = divisor(lookup, end - first) {
            for s in sum {
                *s = *s / count;
            }
        }
    }
}

/// Most bytes that [`prefetch_rows`] asks for: they must still be in the first-level cache when they
/// are read.
const PREFETCH_BYTES: usize = 32 << 10;

/// Asks for the rows that a gather-pool will read, which the caller then does next but one. A gather
/// that writes as much as it reads was measured to have few reads in flight by itself. Why is a guess,
/// not seen in counters: a read whose address ends in the same 12 bits as an unfinished write's
/// waits for that write, and so for the read that it waits for.
pub fn prefetch_rows<'r>(lookup: &PoolLookup<'_>, row: impl Fn(usize) -> Option<&'r [f32]>) {
    let (first, end) = (lookup.offsets[0] as usize, lookup.offsets[lookup.offsets.len() - 1] as usize);
    // Larger bags read much more than they write, and do without.
    if (end - first) * lookup.dim * size_of::<f32>() > PREFETCH_BYTES {
        return;
    }
    for values in (first..end).filter_map(row) {
        prefetch(values);
    }
}

/// Asks for every cache line of `values`.
#[inline(always)]
#[allow(unsafe_code, clippy::missing_const_for_fn)]
fn prefetch(values: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(LINE_FLOATS) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and a prefetch reads nothing that the program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// f32 of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE_FLOATS: usize = 16;

/// What the sum of a bag of `count` ids is divided by, where that would change it.
#[inline(always)]
fn divisor<T: Real>(lookup: &PoolLookup<'_>, count: usize) -> Option<T> {
    (lookup.mean && count > 1).then(|| T::from_f64(count as f64))
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
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_width_has_the_bits_of_the_plain_loop(
            dim in prop::sample::select(vec![16usize, 32]),
            mean in any::<bool>(),
            sizes in prop::collection::vec(0u32..6, 1..12),
            seed in any::<u32>(),
        ) {
            let bits = |x: usize| (x as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed);
            let value = |x: u32| (f64::from(x) / f64::from(u32::MAX) - 0.5) as f32;
            let table: Vec<f32> = (0..10 * dim).map(|i| value(bits(i))).collect();
            // Ids past the 10 rows read as zeros.
            let row = |i: usize| table.chunks_exact(dim).nth(bits(i) as usize % 13);
            let mut offsets = vec![0];
            sizes.iter().for_each(|size| offsets.push(offsets[offsets.len() - 1] + size));
            let lookup = PoolLookup { offsets: &offsets, dim, mean, column: 3 };
            let stride = dim + 5;
            let mut fast = vec![-1.0f32; sizes.len() * stride];
            let mut plain = fast.clone();
            gather_pool(&lookup, row, &mut fast, stride);
            pool_any(&lookup, row, &mut plain, stride);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&fast), bits(&plain));
        }
    }

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
    fn a_lone_row_comes_out_as_it_is_to_the_bit() {
        for dim in [1, 16] {
            let lookup = PoolLookup { offsets: &[0, 1], dim, mean: true, column: 0 };
            let mut out = vec![1.0f32; dim];
            gather_pool(&lookup, |_| Some(&[-0.0f32; 16][..dim]), &mut out, dim);
            assert!(out.iter().all(|x| x.to_bits() == (-0.0f32).to_bits()));
        }
    }
}
