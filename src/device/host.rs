//! The host device: every kernel in plain Rust, and so the oracle for every other device.

#![allow(unsafe_code)]

use std::ops::Range;

use super::vector::Vector;

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

impl PoolLookup<'_> {
    /// The occurrences of all its samples.
    #[must_use]
    pub fn occurrences(&self) -> Range<usize> {
        let last = self.offsets.len().saturating_sub(1);
        self.offsets.first().map_or(0..0, |first| *first as usize..self.offsets[last] as usize)
    }

    /// The same lookup of some of its samples: enough for 32 KiB of rows, and at least one.
    pub fn blocks(self) -> impl Iterator<Item = (Range<usize>, Self)> {
        let samples = self.offsets.len().saturating_sub(1);
        let bytes = self.occurrences().len() * self.dim * size_of::<f32>();
        let count = bytes.div_ceil(BLOCK_BYTES).clamp(1, samples.max(1));
        let block = samples.div_ceil(count).max(1);
        (0..samples).step_by(block).map(move |first| {
            let end = (first + block).min(samples);
            (first..end, Self { offsets: &self.offsets[first..=end], ..self })
        })
    }
}

/// Bytes of rows that are collected before they are pooled.
const BLOCK_BYTES: usize = 32 << 10;

/// Bytes of rows that are on their way while one is pooled: what memory gives in the time that it takes
/// to answer. 512 B to 8 KiB were measured, with little between them.
const AHEAD_BYTES: usize = 2 << 10;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Finds the rows of these occurrences, and asks memory for the first of them.
///
/// Finding rows and reading them are loops of their own, so that each keeps all that it knows in
/// registers. One loop for both was measured to take two to three times as long. The guess behind it is
/// that reads of its variables wait for writes whose addresses end in the same 12 bits, and which
/// in turn wait for a row.
pub fn collect_rows<'r>(
    occurrences: Range<usize>,
    row: impl Fn(usize) -> Option<&'r [f32]>,
    rows: &mut Vec<Option<&'r [f32]>>,
) {
    rows.clear();
    rows.extend(occurrences.map(row));
    let dim = rows.iter().find_map(|row| row.map(<[f32]>::len)).unwrap_or(0);
    let first = rows.len().min(rows_ahead(dim));
    for row in &rows[..first] {
        let Some(row) = row else { continue };
        prefetch_first(row, dim);
    }
}

/// Rows of `dim` elements that are on their way while one is pooled.
#[inline(always)]
const fn rows_ahead(dim: usize) -> usize {
    match AHEAD_BYTES / size_of::<f32>() / if dim > 0 { dim } else { 1 } {
        0 => 1,
        rows => rows,
    }
}

/// Asks memory for the cache lines of `values`.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    prefetch_first(values, values.len());
}

/// Asks memory for the cache lines of the first `count` values.
#[inline(always)]
#[allow(clippy::missing_const_for_fn)]
fn prefetch_first<T>(values: &[T], count: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let mut at = 0;
        while at < count {
            // SAFETY: SSE is part of x86-64, and a prefetch reads nothing that the program can see,
            // wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(at).cast()) };
            at += (LINE_BYTES / size_of::<T>()).max(1);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, count, LINE_BYTES);
}

/// Pools the rows of each sample's ids into `dim` columns of its output row.
///
/// `rows` holds the row of every occurrence from the first sample's on, or `None` for one that reads
/// as zeros. A bag starts as its first row and the others are added in id order, as every device has it
/// ([`super::pool`]); an empty bag is zeros. `out` holds one row of `stride` elements a sample.
///
/// # Panics
/// When `rows` or `out` is too short, or a row is not `dim` long.
pub fn gather_pool(lookup: &PoolLookup<'_>, rows: &[Option<&[f32]>], out: &mut [f32], stride: usize) {
    let pool = GatherPool { lookup, rows, out, stride };
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: the processor has AVX-512F and VL.
            return unsafe { pool.run_avx512() };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { pool.run_avx2() };
        }
    }
    pool.run_any();
}

struct GatherPool<'a> {
    lookup: &'a PoolLookup<'a>,
    rows: &'a [Option<&'a [f32]>],
    out: &'a mut [f32],
    stride: usize,
}

impl GatherPool<'_> {
    /// # Safety
    /// The processor has AVX-512F and VL.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl")]
    unsafe fn run_avx512(self) {
        use std::arch::x86_64::__m512;
        match self.lookup.dim {
            // SAFETY: this function has the target feature.
            16 => unsafe { self.run_in_registers::<__m512, 1>() },
            // SAFETY: as above.
            32 => unsafe { self.run_in_registers::<__m512, 2>() },
            // SAFETY: as above.
            64 => unsafe { self.run_in_registers::<__m512, 4>() },
            // SAFETY: as above.
            128 => unsafe { self.run_in_registers::<__m512, 8>() },
            _ => self.run_any(),
        }
    }

    /// # Safety
    /// The processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn run_avx2(self) {
        use std::arch::x86_64::__m256;
        match self.lookup.dim {
            // SAFETY: this function has the target feature.
            16 => unsafe { self.run_in_registers::<__m256, 2>() },
            // SAFETY: as above.
            32 => unsafe { self.run_in_registers::<__m256, 4>() },
            // SAFETY: as above.
            64 => unsafe { self.run_in_registers::<__m256, 8>() },
            _ => self.run_any(),
        }
    }

    /// For rows of `N` registers: the sum stays in them.
    ///
    /// # Safety
    /// The processor has the instruction set of `V`.
    #[inline(always)]
    unsafe fn run_in_registers<V: Vector<f32>, const N: usize>(self) {
        let Self { lookup: &PoolLookup { offsets, mean, column, .. }, rows, out, stride } = self;
        let Some(last) = offsets.len().checked_sub(2) else { return };
        let end = last.checked_mul(stride).and_then(|at| at.checked_add(column + N * V::WIDTH));
        assert!(end.is_some_and(|end| end <= out.len()), "output: too short");
        let mut ahead = Ahead::of(rows, N * V::WIDTH);
        let mut rest = rows;
        let mut to = out.as_mut_ptr().wrapping_add(column);
        // SAFETY: the caller vouches for the instruction set. `to` is the first of as many elements as
        // the registers hold, within `out` for every sample as the assertion has it.
        unsafe {
            if one_each(offsets) {
                for row in &rows[..=last] {
                    ahead.ask();
                    match row {
                        Some(row) => copy::<V, N>(row, to),
                        None => store::<V, N>([V::splat(0.0); N], to),
                    }
                    to = to.wrapping_add(stride);
                }
                return;
            }
            for bag in offsets.windows(2) {
                let bag = rest.split_off(..(bag[1] - bag[0]) as usize).unwrap_or_default();
                store::<V, N>(sum_of::<V, N>(bag, mean, &mut ahead), to);
                to = to.wrapping_add(stride);
            }
        }
    }

    /// For any width: the sum is made where it goes.
    #[inline(always)]
    fn run_any(self) {
        let Self { lookup, mut rows, out, stride } = self;
        let dim = lookup.dim;
        let mut ahead = Ahead::of(rows, dim);
        for (bag, line) in lookup.offsets.windows(2).zip(out.chunks_mut(stride)) {
            let (bag, rest) = rows.split_at((bag[1] - bag[0]) as usize);
            rows = rest;
            let sum = &mut line[lookup.column..][..dim];
            match bag.first() {
                Some(Some(first)) => sum.copy_from_slice(&first[..dim]),
                _ => sum.fill(0.0),
            }
            bag.iter().for_each(|_| ahead.ask());
            for row in bag.iter().skip(1).flatten() {
                sum.iter_mut().zip(&row[..dim]).for_each(|(s, v)| *s += *v);
            }
            if lookup.mean && bag.len() > 1 {
                let count = bag.len() as f32;
                sum.iter_mut().for_each(|s| *s /= count);
            }
        }
    }
}

/// Whether every bag is of one: most features of most models, and a copy then.
fn one_each(offsets: &[u32]) -> bool {
    // No branch in the loop, for the compiler to use vectors.
    offsets.windows(2).fold(0, |odd, bag| odd | (bag[1].wrapping_sub(bag[0]) ^ 1)) == 0
}

/// Goes over the rows some way before the one that is pooled, and asks memory for them.
struct Ahead<'a> {
    rows: std::slice::Iter<'a, Option<&'a [f32]>>,
    dim: usize,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    fn of(rows: &'a [Option<&'a [f32]>], dim: usize) -> Self {
        Self { rows: rows.get(rows_ahead(dim)..).unwrap_or_default().iter(), dim }
    }

    /// Asks for the next row.
    #[inline(always)]
    fn ask(&mut self) {
        if let Some(Some(row)) = self.rows.next() {
            prefetch_first(row, self.dim);
        }
    }
}

/// Copies a row.
///
/// # Safety
/// The processor has the instruction set of `V`, and `to` has room for it.
#[inline(always)]
unsafe fn copy<V: Vector<f32>, const N: usize>(row: &[f32], to: *mut f32) {
    let from = row[..N * V::WIDTH].as_ptr();
    for k in 0..N {
        // SAFETY: as the caller vouches, and `from` has as many elements as are read.
        unsafe { V::load(from.add(k * V::WIDTH)).store(to.add(k * V::WIDTH)) };
    }
}

/// The sum or mean of a bag.
///
/// # Safety
/// The processor has the instruction set of `V`.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn sum_of<V: Vector<f32>, const N: usize>(
    bag: &[Option<&[f32]>],
    mean: bool,
    ahead: &mut Ahead<'_>,
) -> [V; N] {
    // SAFETY: the caller vouches for the instruction set, and `from` has as many elements as are read.
    unsafe {
        let Some((first, others)) = bag.split_first() else { return [V::splat(0.0); N] };
        ahead.ask();
        let mut sum = [V::splat(0.0); N];
        if let Some(row) = first {
            let from = row[..N * V::WIDTH].as_ptr();
            for k in 0..N {
                sum[k] = V::load(from.add(k * V::WIDTH));
            }
        }
        for row in others {
            ahead.ask();
            // Counted, not `flatten`: that was measured to cost as much again as all the rest.
            let Some(row) = row else { continue };
            let from = row[..N * V::WIDTH].as_ptr();
            for k in 0..N {
                sum[k] = sum[k].add(V::load(from.add(k * V::WIDTH)));
            }
        }
        if mean && !others.is_empty() {
            let count = V::splat(bag.len() as f32);
            for k in 0..N {
                sum[k] = sum[k].divide(count);
            }
        }
        sum
    }
}

/// Writes registers one behind the other.
///
/// # Safety
/// The processor has the instruction set of `V`, and `to` has room for them.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn store<V: Vector<f32>, const N: usize>(values: [V; N], to: *mut f32) {
    // Counted, as all loops over registers: iterators make the compiler keep them in memory.
    for k in 0..N {
        // SAFETY: as the caller vouches.
        unsafe { values[k].store(to.add(k * V::WIDTH)) };
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
    use proptest::prelude::*;

    use super::*;

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    proptest! {
        #[test]
        fn every_width_has_the_bits_of_the_plain_loop(
            dim in prop::sample::select(vec![1usize, 7, 16, 32, 40, 64, 128]),
            mean in any::<bool>(),
            sizes in prop::collection::vec(0u32..6, 1..12),
            seed in any::<u32>(),
        ) {
            let hash = |x: usize| (x as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed);
            let value = |x: u32| (f64::from(x) / f64::from(u32::MAX) - 0.5) as f32;
            let table: Vec<f32> = (0..10 * dim).map(|i| value(hash(i))).collect();
            let mut offsets = vec![0];
            sizes.iter().for_each(|size| offsets.push(offsets[offsets.len() - 1] + size));
            // Ids past the 10 rows read as zeros.
            let ids = 0..offsets[offsets.len() - 1] as usize;
            let rows: Vec<_> = ids.map(|i| table.chunks_exact(dim).nth(hash(i) as usize % 13)).collect();
            let lookup = PoolLookup { offsets: &offsets, dim, mean, column: 3 };
            let stride = dim + 5;
            let mut any = vec![-1.0f32; sizes.len() * stride];
            GatherPool { lookup: &lookup, rows: &rows, out: &mut any, stride }.run_any();
            let mut best = vec![-1.0f32; any.len()];
            gather_pool(&lookup, &rows, &mut best, stride);
            prop_assert_eq!(bits(&best), bits(&any));
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                best.fill(-1.0);
                // SAFETY: the processor has AVX2.
                unsafe { GatherPool { lookup: &lookup, rows: &rows, out: &mut best, stride }.run_avx2() };
                prop_assert_eq!(bits(&best), bits(&any));
            }
        }

        #[test]
        fn blocks_are_the_whole_lookup_in_order(
            sizes in prop::collection::vec(0u32..200, 0..70),
            start in 0u32..9,
            dim in 1usize..300,
        ) {
            let mut offsets = vec![start];
            sizes.iter().for_each(|size| offsets.push(offsets[offsets.len() - 1] + size));
            let whole = PoolLookup { offsets: &offsets, dim, mean: false, column: 2 };
            let (mut sample, mut occurrence) = (0, start as usize);
            for (samples, block) in whole.blocks() {
                prop_assert_eq!(samples.start, sample);
                prop_assert!(!samples.is_empty());
                prop_assert_eq!(block.offsets, &offsets[samples.start..=samples.end]);
                prop_assert_eq!(block.occurrences().start, occurrence);
                (sample, occurrence) = (samples.end, block.occurrences().end);
            }
            prop_assert_eq!((sample, occurrence), (sizes.len(), offsets[sizes.len()] as usize));
        }
    }

    #[test]
    fn bags_are_pooled_in_id_order_and_land_in_their_column() {
        let table = [1.0f32, 2.0, 10.0, 20.0, 100.0, 200.0];
        let ids = [0usize, 1, 2, 2, 9];
        let rows = ids.map(|id| table.chunks_exact(2).nth(id));
        let pool = |mean| {
            let mut out = vec![-1.0f32; 4 * 3];
            let lookup = PoolLookup { offsets: &[0, 1, 1, 4, 5], dim: 2, mean, column: 1 };
            gather_pool(&lookup, &rows, &mut out, 3);
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
            gather_pool(&lookup, &[Some(&[-0.0f32; 16][..dim])], &mut out, dim);
            assert!(out.iter().all(|x| x.to_bits() == (-0.0f32).to_bits()));
        }
    }
}
