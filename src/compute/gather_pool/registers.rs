//! The loops of gather-pool, for each instruction set.
//!
//! For common row widths the sum stays in registers. Rows of other widths are summed in the output row. The
//! bits are the same, because both add in id order and then divide. Rows are decoded as they are added.

#![allow(unsafe_code)]

use super::layout::{F16Row, F32Row, Int8Row, RowLayout};
use super::{PoolLookup, rows_ahead};
use crate::compute::vector::{Encoded, Vector};
use crate::mem::prefetch::prefetch_first;
use crate::types::Element;

/// A gather-pool. `new` has checked that the output columns lie within `out` for every sample.
pub(crate) struct GatherPool<'a> {
    lookup: &'a PoolLookup<'a>,
    rows: &'a [Option<&'a [u8]>],
    out: &'a mut [f32],
    stride: usize,
}

impl<'a> GatherPool<'a> {
    /// `None` if there are no samples.
    ///
    /// # Panics
    /// When `rows` or `out` is too short, or the columns do not fit the stride.
    pub(crate) fn new(
        lookup: &'a PoolLookup<'a>,
        rows: &'a [Option<&'a [u8]>],
        out: &'a mut [f32],
        stride: usize,
    ) -> Option<Self> {
        let last = lookup.offsets.len().checked_sub(2)?;
        assert!(lookup.occurrences().len() <= rows.len(), "rows: too few");
        let end = lookup.column.checked_add(lookup.dim).filter(|end| *end <= stride);
        let end = end.and_then(|end| last.checked_mul(stride)?.checked_add(end));
        assert!(end.is_some_and(|end| end <= out.len()), "output: too short");
        Some(Self { lookup, rows, out, stride })
    }

    /// Runs with the widest vectors of this machine.
    ///
    /// # Panics
    /// When a row has another length than the lookup's `dim` needs, or the offsets decrease.
    pub(crate) fn run(self) {
        match self.lookup.element {
            Element::F32 => self.run_on::<F32Row>(),
            Element::F16 => self.run_on::<F16Row>(),
            Element::Int8 => self.run_on::<Int8Row>(),
        }
    }

    fn run_on<L: RowLayout<'a>>(self) {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
                // SAFETY: the processor has AVX-512F and VL.
                return unsafe { self.run_avx512::<L>() };
            }
            if has_avx2() {
                // SAFETY: the processor has AVX2, FMA and F16C.
                return unsafe { self.run_avx2::<L>() };
            }
        }
        self.run_any::<L>();
    }

    /// # Safety
    /// The processor has AVX-512F and VL.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl")]
    unsafe fn run_avx512<L: RowLayout<'a>>(self) {
        use std::arch::x86_64::__m512;
        match self.lookup.dim {
            // SAFETY: this function has the target feature, and rows of 16 elements are one register.
            16 => unsafe { self.run_in_registers::<L, __m512, 1>() },
            // SAFETY: as above.
            32 => unsafe { self.run_in_registers::<L, __m512, 2>() },
            // SAFETY: as above.
            64 => unsafe { self.run_in_registers::<L, __m512, 4>() },
            // SAFETY: as above.
            128 => unsafe { self.run_in_registers::<L, __m512, 8>() },
            _ => self.run_any::<L>(),
        }
    }

    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn run_avx2<L: RowLayout<'a>>(self) {
        use std::arch::x86_64::__m256;
        match self.lookup.dim {
            // SAFETY: this function has the target features, and rows of 16 elements are two registers.
            16 => unsafe { self.run_in_registers::<L, __m256, 2>() },
            // SAFETY: as above.
            32 => unsafe { self.run_in_registers::<L, __m256, 4>() },
            // SAFETY: as above.
            64 => unsafe { self.run_in_registers::<L, __m256, 8>() },
            _ => self.run_any::<L>(),
        }
    }

    /// For rows of `N` registers: the sum stays in registers.
    ///
    /// # Safety
    /// The processor has the instruction set of `V`, and the lookup's `dim` is `N` registers.
    #[inline(always)]
    unsafe fn run_in_registers<L: RowLayout<'a>, V: Encoded, const N: usize>(self) {
        let Self { lookup: &PoolLookup { offsets, mean, column, .. }, mut rows, out, stride } = self;
        let mut ahead = Ahead::of(rows, L::ELEMENT.row_bytes(N * V::WIDTH));
        let mut to = out.as_mut_ptr().wrapping_add(column);
        // SAFETY: the caller guarantees the instruction set. `to` points to the `dim` elements of a sample's
        // vector, which are `N` registers, and moves by the stride from sample to sample. `new` has checked
        // that the elements of the last sample, and so of every sample, lie within `out`.
        unsafe {
            if one_each(offsets) {
                for row in &rows[..offsets.len() - 1] {
                    ahead.prefetch_next();
                    match row {
                        Some(row) => copy::<L, V, N>(row, to),
                        None => store::<V, N>([V::splat(0.0); N], to),
                    }
                    to = to.wrapping_add(stride);
                }
                return;
            }
            for bag in offsets.windows(2) {
                let (bag, rest) = rows.split_at((bag[1] - bag[0]) as usize);
                rows = rest;
                store::<V, N>(sum_of::<L, V, N>(bag, mean, &mut ahead), to);
                to = to.wrapping_add(stride);
            }
        }
    }

    /// For any width: the sum is accumulated in the output row.
    #[inline(always)]
    pub(crate) fn run_any<L: RowLayout<'a>>(self) {
        let Self { lookup, mut rows, out, stride } = self;
        let dim = lookup.dim;
        let mut ahead = Ahead::of(rows, lookup.row_bytes());
        for (bag, line) in lookup.offsets.windows(2).zip(out.chunks_mut(stride)) {
            let (bag, rest) = rows.split_at((bag[1] - bag[0]) as usize);
            rows = rest;
            let sum = &mut line[lookup.column..][..dim];
            match bag.first() {
                Some(Some(first)) => {
                    sum.iter_mut().zip(whole::<L>(first, dim).values()).for_each(|(s, v)| *s = v);
                }
                _ => sum.fill(0.0),
            }
            bag.iter().for_each(|_| ahead.prefetch_next());
            for row in bag.iter().skip(1).flatten() {
                sum.iter_mut().zip(whole::<L>(row, dim).values()).for_each(|(s, v)| *s += v);
            }
            if lookup.mean && bag.len() > 1 {
                let count = bag.len() as f32;
                sum.iter_mut().for_each(|s| *s /= count);
            }
        }
    }
}

/// Whether the processor has the features of [`GatherPool::run_avx2`].
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Whether every bag has exactly one id, as in most features. Pooling is then a copy.
fn one_each(offsets: &[u32]) -> bool {
    // No branch in the loop, so that the compiler vectorises it.
    offsets.windows(2).fold(0, |odd, bag| odd | (bag[1].wrapping_sub(bag[0]) ^ 1)) == 0
}

/// Prefetches rows at a fixed distance ahead of the row that is being pooled.
struct Ahead<'a> {
    rows: std::slice::Iter<'a, Option<&'a [u8]>>,
    row_bytes: usize,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    fn of(rows: &'a [Option<&'a [u8]>], row_bytes: usize) -> Self {
        Self { rows: rows.get(rows_ahead(row_bytes)..).unwrap_or_default().iter(), row_bytes }
    }

    /// Prefetches the next row.
    #[inline(always)]
    fn prefetch_next(&mut self) {
        if let Some(Some(row)) = self.rows.next() {
            prefetch_first(row, self.row_bytes);
        }
    }
}

/// A row of `dim` elements.
///
/// # Panics
/// When the bytes have another length.
#[inline(always)]
fn whole<'a, L: RowLayout<'a>>(row: &'a [u8], dim: usize) -> L {
    assert_eq!(row.len(), L::ELEMENT.row_bytes(dim), "bytes of a row");
    L::of(row)
}

/// Decodes a row into `to`.
///
/// # Safety
/// The processor has the instruction set of `V`, and `to` has room for the row.
#[inline(always)]
unsafe fn copy<'a, L: RowLayout<'a>, V: Encoded, const N: usize>(row: &'a [u8], to: *mut f32) {
    let row = whole::<L>(row, N * V::WIDTH);
    for k in 0..N {
        // SAFETY: the caller guarantees instruction set and room, and the row has `N * WIDTH` elements.
        unsafe { row.load::<V>(k * V::WIDTH).store(to.add(k * V::WIDTH)) };
    }
}

/// The sum or mean of a bag.
///
/// # Safety
/// The processor has the instruction set of `V`.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn sum_of<'a, L: RowLayout<'a>, V: Encoded, const N: usize>(
    bag: &[Option<&'a [u8]>],
    mean: bool,
    ahead: &mut Ahead<'_>,
) -> [V; N] {
    // SAFETY: the caller guarantees the instruction set, and each row has `N * WIDTH` elements.
    unsafe {
        let Some((first, others)) = bag.split_first() else { return [V::splat(0.0); N] };
        ahead.prefetch_next();
        let mut sum = [V::splat(0.0); N];
        if let Some(row) = first {
            let row = whole::<L>(row, N * V::WIDTH);
            for k in 0..N {
                sum[k] = row.load(k * V::WIDTH);
            }
        }
        for row in others {
            ahead.prefetch_next();
            // Not `flatten`: it was measured to double the time.
            let Some(row) = row else { continue };
            let row = whole::<L>(row, N * V::WIDTH);
            for k in 0..N {
                sum[k] = sum[k].add(row.load(k * V::WIDTH));
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

/// Writes registers one after the other.
///
/// # Safety
/// The processor has the instruction set of `V`, and `to` has room for them.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn store<V: Vector<f32>, const N: usize>(values: [V; N], to: *mut f32) {
    // All loops over registers use an index: with iterators the compiler keeps the registers in memory.
    for k in 0..N {
        // SAFETY: the caller guarantees instruction set and room.
        unsafe { values[k].store(to.add(k * V::WIDTH)) };
    }
}
