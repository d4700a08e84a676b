//! Vector registers, for kernels that keep sums in registers over a whole loop.
//!
//! Most loops are vectorised by the compiler ([`super::vectorise`]). But the compiler does not keep many sums
//! in registers over a long loop, so loops with many sums use registers explicitly.

#![allow(unsafe_code)]

use super::Real;

/// A vector register of `T`.
///
/// # Safety
/// `WIDTH` elements are read and written through pointers, which need no alignment. The processor must have
/// the implementing type's instruction set.
pub(crate) unsafe trait Vector<T>: Copy {
    const WIDTH: usize;
    unsafe fn load(from: *const T) -> Self;
    unsafe fn store(self, to: *mut T);
    unsafe fn splat(x: T) -> Self;
    unsafe fn multiply_add(self, by: Self, plus: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn divide(self, by: Self) -> Self;
    unsafe fn relu(self) -> Self;
}

/// A vector register of f32 that can be filled from elements of other types.
///
/// # Safety
/// `WIDTH` elements are read through pointers, which need no alignment. The processor must have the
/// implementing type's instruction set.
pub(crate) unsafe trait Encoded: Vector<f32> {
    /// From IEEE binary16, exactly.
    unsafe fn load_f16(from: *const u8) -> Self;
    /// From unsigned bytes, exactly.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// The rounded product. It is not fused with an addition that follows.
    unsafe fn multiply(self, by: Self) -> Self;
}

/// Any number type on any machine. `multiply_add` rounds the product before the sum.
#[derive(Clone, Copy)]
pub(crate) struct Portable<T>([T; 8]);

// SAFETY: reads and writes 8 elements, WIDTH says 8, and no instruction set is assumed.
unsafe impl<T: Real> Vector<T> for Portable<T> {
    const WIDTH: usize = 8;
    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller guarantees WIDTH elements.
        Self(unsafe { from.cast::<[T; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: as for load.
        unsafe { to.cast::<[T; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn multiply_add(self, by: Self, mut plus: Self) -> Self {
        for i in 0..8 {
            plus.0[i] += self.0[i] * by.0[i];
        }
        plus
    }
    #[inline(always)]
    unsafe fn add(mut self, other: Self) -> Self {
        for i in 0..8 {
            self.0[i] += other.0[i];
        }
        self
    }
    #[inline(always)]
    unsafe fn divide(mut self, by: Self) -> Self {
        for i in 0..8 {
            self.0[i] = self.0[i] / by.0[i];
        }
        self
    }
    #[inline(always)]
    unsafe fn relu(self) -> Self {
        Self(self.0.map(|x| x.at_least(T::default())))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Encoded, Vector};

    // SAFETY: the intrinsics read and write WIDTH unaligned elements; the callers are functions with
    // the target feature, entered only where the processor reports it.
    unsafe impl Vector<f32> for __m512 {
        const WIDTH: usize = 16;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the impl.
            unsafe { _mm512_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, by: Self, plus: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_fmadd_ps(self, by, plus) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn divide(self, by: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_div_ps(self, by) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // `max(a, b)` is `a > b ? a : b`, so this is `0 > x ? 0 : x` and keeps a NaN, as `at_least` does.
            // SAFETY: see the impl.
            unsafe { _mm512_max_ps(_mm512_setzero_ps(), self) }
        }
    }

    // SAFETY: as above. Loads of 32 bytes (f16) and 16 bytes (u8) have 16 elements.
    unsafe impl Encoded for __m512 {
        #[inline(always)]
        unsafe fn load_f16(from: *const u8) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }
        #[inline(always)]
        unsafe fn load_u8(from: *const u8) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
        }
        #[inline(always)]
        unsafe fn multiply(self, by: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_mul_ps(self, by) }
        }
    }

    // SAFETY: as above; the callers also have F16C. Loads of 16 bytes (f16) and 8 bytes (u8) have 8 elements.
    unsafe impl Encoded for __m256 {
        #[inline(always)]
        unsafe fn load_f16(from: *const u8) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        }
        #[inline(always)]
        unsafe fn load_u8(from: *const u8) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
        }
        #[inline(always)]
        unsafe fn multiply(self, by: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_mul_ps(self, by) }
        }
    }

    // SAFETY: as for `__m512`.
    unsafe impl Vector<f32> for __m256 {
        const WIDTH: usize = 8;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the impl.
            unsafe { _mm256_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, by: Self, plus: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_fmadd_ps(self, by, plus) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn divide(self, by: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_div_ps(self, by) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_max_ps(_mm256_setzero_ps(), self) }
        }
    }
}
