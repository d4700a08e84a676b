//! Runs a loop on the widest vectors of this machine.
//!
//! The binary is built for any x86-64, so plain loops get 128-bit vectors. A closure that is
//! inlined into a function with more target features is compiled with them, and IEEE arithmetic is
//! the same at every width: nothing is contracted or reassociated, so no bit changes.

#![allow(unsafe_code)]

/// Calls `f`, compiled for the best instruction set that the processor reports.
#[inline]
pub fn vectorise<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F.
            return unsafe { with_avx512(f) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { with_avx2(f) };
        }
    }
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}
