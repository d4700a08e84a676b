//! The kernels of a [`Product`]: tiles held in vector registers, for each instruction set.

#![allow(unsafe_code)]

use super::{LANES, Product, Start};
use crate::device::Real;
use crate::device::vector::{Portable, Vector};

/// Runs an f32 product on the widest vectors of this machine.
///
/// # Panics
/// As [`Product::run`].
pub(in crate::device) fn product_f32(product: &mut Product<'_, f32>) {
    if !product.check() {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F, and the shape was checked.
            return unsafe { product_avx512(product) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has AVX2 and FMA, and the shape was checked.
            return unsafe { product_avx2(product) };
        }
    }
    // SAFETY: the shape was checked.
    unsafe { plain(product) }
}

/// Runs a product with plain arithmetic.
///
/// # Panics
/// As [`Product::run`].
pub(in crate::device) fn product_portable<T: Real>(product: &mut Product<'_, T>) {
    if product.check() {
        // SAFETY: the shape was checked.
        unsafe { plain(product) }
    }
}

/// # Safety
/// [`Product::check`] has said yes.
unsafe fn plain<T: Real>(product: &mut Product<'_, T>) {
    // SAFETY: `Portable` needs no instruction set; the caller vouches for the shape.
    unsafe { by_panels::<T, Portable<T>, 4, 4>(product) }
}

/// # Safety
/// The processor has AVX-512F, and [`Product::check`] has said yes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn product_avx512(product: &mut Product<'_, f32>) {
    // SAFETY: this function has the target feature; the caller vouches for the shape.
    unsafe { by_panels::<f32, std::arch::x86_64::__m512, 2, 12>(product) }
}

/// # Safety
/// The processor has AVX2 and FMA, and [`Product::check`] has said yes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn product_avx2(product: &mut Product<'_, f32>) {
    // Four registers a row: 3 rows fill 12 of 16.
    // SAFETY: as above.
    unsafe { by_panels::<f32, std::arch::x86_64::__m256, 4, 3>(product) }
}

/// Every panel, and in it every tile of up to `MR` rows.
///
/// # Safety
/// [`Product::check`] has said yes, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn by_panels<T: Real, V: Vector<T>, const N: usize, const MR: usize>(p: &mut Product<'_, T>) {
    debug_assert_eq!(N * V::WIDTH, LANES);
    let output = p.output.data.as_mut_ptr();
    for first in (0..p.columns).step_by(LANES) {
        let width = (p.columns - first).min(LANES);
        let mut row = 0;
        while row < p.rows {
            // SAFETY: the caller vouches that every row, step and column lies inside its slice. Only `a`
            // may point past it, when the depth is 0, and is then not read: it wraps.
            unsafe {
                let tile = Tile {
                    depth: p.depth,
                    a: p.left.data.as_ptr().wrapping_add(row * p.left.row_stride),
                    row_stride: p.left.row_stride,
                    step_stride: p.left.step_stride,
                    b: p.panels.as_ptr().add(first * p.depth),
                    bias: if let Start::Bias(bias) = p.start {
                        bias.as_ptr().add(first)
                    } else {
                        std::ptr::null()
                    },
                    add: matches!(p.start, Start::Add),
                    relu: p.relu,
                    c: output.add(row * p.output.stride + first),
                    c_stride: p.output.stride,
                    width,
                };
                row += match p.rows - row {
                    left if left >= MR => tile.run::<V, N, MR>(),
                    8.. if MR > 8 => tile.run::<V, N, 8>(),
                    4.. if MR > 4 => tile.run::<V, N, 4>(),
                    2.. => tile.run::<V, N, 2>(),
                    _ => tile.run::<V, N, 1>(),
                };
            }
        }
    }
}

/// One tile of `C`: some rows of one panel.
struct Tile<T> {
    depth: usize,
    a: *const T,
    row_stride: usize,
    step_stride: usize,
    b: *const T,
    bias: *const T,
    add: bool,
    relu: bool,
    c: *mut T,
    c_stride: usize,
    width: usize,
}

#[allow(clippy::needless_range_loop)]
impl<T: Real> Tile<T> {
    /// Computes `ROWS` rows and gives back `ROWS`.
    ///
    /// # Safety
    /// `a` has ROWS rows of `depth` steps, `b` `depth` lines of [`LANES`], `c` ROWS rows of `width`
    /// elements that nothing else refers to, and `bias` is null or has LANES elements.
    #[inline(always)]
    unsafe fn run<V: Vector<T>, const N: usize, const ROWS: usize>(&self) -> usize {
        // SAFETY: as the caller vouches; a narrower last panel goes through `edge`, which is whole.
        unsafe {
            // Plain counted loops: iterators here make the compiler keep the sums in memory.
            let mut edge = [T::default(); LANES];
            let mut sums = [[V::splat(T::default()); N]; ROWS];
            for r in 0..ROWS {
                let mut from = self.bias;
                if self.add {
                    from = self.c.add(r * self.c_stride).cast_const();
                    if self.width < LANES {
                        std::ptr::copy_nonoverlapping(from, edge.as_mut_ptr(), self.width);
                        from = edge.as_ptr();
                    }
                }
                if !from.is_null() {
                    for i in 0..N {
                        sums[r][i] = V::load(from.add(i * V::WIDTH));
                    }
                }
            }
            let (mut a, mut b) = (self.a, self.b);
            for _ in 0..self.depth {
                let mut lanes = [V::splat(T::default()); N];
                for i in 0..N {
                    lanes[i] = V::load(b.add(i * V::WIDTH));
                }
                for r in 0..ROWS {
                    let x = V::splat(*a.wrapping_add(r * self.row_stride));
                    for i in 0..N {
                        sums[r][i] = x.multiply_add(lanes[i], sums[r][i]);
                    }
                }
                a = a.wrapping_add(self.step_stride);
                b = b.wrapping_add(LANES);
            }
            for r in 0..ROWS {
                let to = self.c.add(r * self.c_stride);
                let out = if self.width < LANES { edge.as_mut_ptr() } else { to };
                for i in 0..N {
                    let sum = if self.relu { sums[r][i].relu() } else { sums[r][i] };
                    sum.store(out.add(i * V::WIDTH));
                }
                if self.width < LANES {
                    std::ptr::copy_nonoverlapping(edge.as_ptr(), to, self.width);
                }
            }
            ROWS
        }
    }
}
