//! What a device does for the cache, the models and the trainer: memory, and one function a kernel.

pub mod host;

mod gemm;
mod real;
mod simd;

pub use gemm::{LANES, Left, Output, Product, Start, pack, pack_transposed_panel, packed_len, row_stride};
pub use real::Real;
pub use simd::vectorise;
