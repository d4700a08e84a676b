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

/// Copies rows past the caches, each over one of the same length: for many bytes that are not read soon. A line that
/// is written so is not read before.
///
/// # Panics
/// When two lengths differ.
pub(crate) fn copy_past_caches<'r>(rows: impl Iterator<Item = (&'r mut [f32], &'r [f32])>) {
    let _ends = Streams;
    for (to, from) in rows {
        assert_eq!(to.len(), from.len(), "lengths");
        stream(to, from);
    }
}

/// Streaming stores of this thread, which are not ordered among its others before this is dropped.
struct Streams;

impl Drop for Streams {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Copies all of `from`; some of it by streaming stores.
#[inline(always)]
fn stream(to: &mut [f32], from: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128, _mm_loadu_ps, _mm_stream_ps};
        const WORDS: usize = size_of::<__m128>() / size_of::<f32>();
        if to.as_ptr().cast::<__m128>().is_aligned() {
            let (whole, rest) = to.split_at_mut(to.len() / WORDS * WORDS);
            for (to, from) in whole.chunks_exact_mut(WORDS).zip(from.chunks_exact(WORDS)) {
                // SAFETY: SSE is part of x86-64. Both have room for a register, and `to` is on its grid. Whoever calls
                // this fences before anybody else may touch what it wrote (`Streams`).
                unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_loadu_ps(from.as_ptr())) };
            }
            return rest.copy_from_slice(&from[whole.len()..]);
        }
    }
    to.copy_from_slice(from);
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

#[cfg(test)]
mod tests;
