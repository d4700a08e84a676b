//! Vector registers, for kernels that keep sums in registers over a whole loop.
//!
//! Most loops are vectorised by the compiler ([`super::vectorise`]). But the compiler does not keep many sums
//! in registers over a long loop, so loops with many sums use registers explicitly.

#![allow(unsafe_code)]

use super::Real;

/// A vector register of `T`.
///
/// # Safety
/// An implementation reads and writes exactly `WIDTH` elements through pointers, with any alignment. A caller
/// of its functions guarantees that the processor has the type's instruction set, and that the pointers are
/// valid for that.
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
/// As for [`Vector`]. The instruction set may be larger.
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

    macro_rules! vector {
        ($vector:ident, $width:literal: $load:ident, $store:ident, $splat:ident, $zero:ident, $add:ident,
            $multiply:ident, $multiply_add:ident, $divide:ident, $max:ident;
            $from_f16:ident($load_f16:ident), $from_u8:ident, $from_i32:ident($load_u8:ident)) => {
            // SAFETY: the intrinsics read and write WIDTH unaligned elements. The caller guarantees that the
            // pointers are valid for that, and the instruction set.
            unsafe impl Vector<f32> for $vector {
                const WIDTH: usize = $width;
                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $load(from) }
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    // SAFETY: see the impl.
                    unsafe { $store(to, self) }
                }
                #[inline(always)]
                unsafe fn splat(x: f32) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $splat(x) }
                }
                #[inline(always)]
                unsafe fn multiply_add(self, by: Self, plus: Self) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $multiply_add(self, by, plus) }
                }
                #[inline(always)]
                unsafe fn add(self, other: Self) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $add(self, other) }
                }
                #[inline(always)]
                unsafe fn divide(self, by: Self) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $divide(self, by) }
                }
                #[inline(always)]
                unsafe fn relu(self) -> Self {
                    // `max(a, b)` is `a > b ? a : b`, so this is `0 > x ? 0 : x` and keeps a NaN, as
                    // `at_least` does.
                    // SAFETY: see the impl.
                    unsafe { $max($zero(), self) }
                }
            }

            // SAFETY: as above. `load_f16` reads 2 WIDTH bytes and `load_u8` WIDTH bytes: WIDTH elements.
            unsafe impl Encoded for $vector {
                #[inline(always)]
                unsafe fn load_f16(from: *const u8) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $from_f16($load_f16(from.cast())) }
                }
                #[inline(always)]
                unsafe fn load_u8(from: *const u8) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $from_i32($from_u8($load_u8(from.cast()))) }
                }
                #[inline(always)]
                unsafe fn multiply(self, by: Self) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $multiply(self, by) }
                }
            }
        };
    }

    // Instruction set: AVX-512F.
    vector!(__m512, 16: _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_add_ps,
        _mm512_mul_ps, _mm512_fmadd_ps, _mm512_div_ps, _mm512_max_ps;
        _mm512_cvtph_ps(_mm256_loadu_si256), _mm512_cvtepu8_epi32, _mm512_cvtepi32_ps(_mm_loadu_si128));
    // Instruction set: AVX2 and FMA; for `Encoded` also F16C.
    vector!(__m256, 8: _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_add_ps,
        _mm256_mul_ps, _mm256_fmadd_ps, _mm256_div_ps, _mm256_max_ps;
        _mm256_cvtph_ps(_mm_loadu_si128), _mm256_cvtepu8_epi32, _mm256_cvtepi32_ps(_mm_loadl_epi64));
}
