//! Vector registers: what kernels that hold numbers in registers are written over.
//!
//! Most loops leave vectors to the compiler ([`super::vectorise`]). Where numbers must stay in
//! registers over a loop, it does not see that, and those kernels say so themselves.

#![allow(unsafe_code)]

use super::Real;

/// A vector register of `T`.
///
/// # Safety
/// `WIDTH` elements are read and written through the pointers given, which need no alignment; the implementing type's
/// instruction set must be there.
pub(super) unsafe trait Vector<T>: Copy {
    const WIDTH: usize;
    unsafe fn load(from: *const T) -> Self;
    unsafe fn store(self, to: *mut T);
    unsafe fn splat(x: T) -> Self;
    unsafe fn multiply_add(self, by: Self, plus: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn divide(self, by: Self) -> Self;
    unsafe fn relu(self) -> Self;
}

/// Any number type, on any machine: a product is rounded before it is added.
#[derive(Clone, Copy)]
pub(super) struct Portable<T>([T; 8]);

// SAFETY: reads and writes 8 elements, WIDTH says 8, and no instruction set is assumed.
unsafe impl<T: Real> Vector<T> for Portable<T> {
    const WIDTH: usize = 8;
    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller vouches for WIDTH elements.
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

    use super::Vector;

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
            // The second operand comes back unless the first is greater: `0 > x ? 0 : x`, as
            // `at_least` has it, so that a NaN stays one.
            // SAFETY: see the impl.
            unsafe { _mm512_max_ps(_mm512_setzero_ps(), self) }
        }
    }

    // SAFETY: as for the wider one.
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
