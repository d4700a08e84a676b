//! Runs a loop on the widest vectors of this machine.
//!
//! The binary is built for any x86-64, so plain loops get 128-bit vectors. Code that is inlined into a
//! function with more target features is compiled with them, and IEEE arithmetic is the same at every
//! width: nothing is contracted or reassociated, so no bit changes.
//!
//! Whether a closure is inlined is the compiler's choice, and it declines large ones. Those are
//! written as a type with [`Wide::run`], which can be told to be.

#![allow(unsafe_code)]

/// Something to run. Implementations mark `run` with `#[inline(always)]`, and so what it calls.
pub trait Wide {
    /// What comes of it.
    type Output;
    /// Runs it.
    fn run(self) -> Self::Output;
}

impl<R, F: FnOnce() -> R> Wide for F {
    type Output = R;
    #[inline(always)]
    fn run(self) -> R {
        self()
    }
}

/// Asks memory for the cache line at this address, wherever it points.
#[inline(always)]
#[allow(clippy::missing_const_for_fn)]
pub(super) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and a prefetch reads nothing that the program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Runs `work`, compiled for the best instruction set that the processor reports.
#[inline]
pub fn vectorise<W: Wide>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: the processor has AVX-512F and VL.
            return unsafe { with_avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { with_avx2(work) };
        }
    }
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn with_avx512<W: Wide>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<W: Wide>(work: W) -> W::Output {
    work.run()
}
