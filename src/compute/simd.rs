//! Runs a loop with the widest vectors of this machine.
//!
//! The program is compiled for any x86-64, so plain loops get 128-bit vectors. Code that is inlined into a
//! function with more target features is compiled with those features. Results have the same bits at every
//! width, because the compiler neither contracts nor reassociates IEEE arithmetic.
//!
//! The compiler does not inline large closures. Large loops are therefore types with [`Wide::run`], which is
//! `#[inline(always)]`.

#![allow(unsafe_code)]

/// Code for [`vectorise`]. Implementations mark `run`, and all functions that it calls, with
/// `#[inline(always)]`.
pub trait Wide {
    /// The result.
    type Output;
    /// Runs the code.
    fn run(self) -> Self::Output;
}

impl<R, F: FnOnce() -> R> Wide for F {
    type Output = R;
    #[inline(always)]
    fn run(self) -> R {
        self()
    }
}

/// Copies rows with streaming stores, for large targets that are not read again soon. Streaming stores bypass
/// the caches and do not read the target's lines first.
///
/// # Panics
/// When the lengths of a target and its source differ.
pub(crate) fn copy_past_caches<'r>(rows: impl Iterator<Item = (&'r mut [f32], &'r [f32])>) {
    let _fence = FenceOnDrop;
    for (to, from) in rows {
        assert_eq!(to.len(), from.len(), "lengths");
        stream(to, from);
    }
}

/// When dropped, orders this thread's streaming stores before its later stores.
struct FenceOnDrop;

impl Drop for FenceOnDrop {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Copies all of `from`, with streaming stores if `to` is aligned.
#[inline(always)]
fn stream(to: &mut [f32], from: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128, _mm_loadu_ps, _mm_stream_ps};
        const WORDS: usize = size_of::<__m128>() / size_of::<f32>();
        if to.as_ptr().cast::<__m128>().is_aligned() {
            let (whole, rest) = to.split_at_mut(to.len() / WORDS * WORDS);
            for (to, from) in whole.chunks_exact_mut(WORDS).zip(from.chunks_exact(WORDS)) {
                // SAFETY: SSE is part of x86-64. Both chunks are as long as a register, and `to` is aligned.
                // The only caller, `copy_past_caches`, fences before it returns, also when it panics
                // (`FenceOnDrop`). Until then the target is borrowed mutably, so no other thread accesses it.
                unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_loadu_ps(from.as_ptr())) };
            }
            return rest.copy_from_slice(&from[whole.len()..]);
        }
    }
    to.copy_from_slice(from);
}

/// Runs `work`, compiled for the widest vectors that the processor reports.
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

/// # Safety
/// The processor has AVX-512F and VL.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn with_avx512<W: Wide>(work: W) -> W::Output {
    work.run()
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<W: Wide>(work: W) -> W::Output {
    work.run()
}

#[cfg(test)]
mod tests;
