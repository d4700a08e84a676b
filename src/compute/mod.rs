//! CPU kernels: matrix products and gather-pool. They use the widest vector instructions of the machine.
//! Their results define the bits that every other device must produce.

pub(crate) mod gather_pool;
mod gemm;
pub(crate) mod pool;
mod real;
pub(crate) mod simd;
mod vector;

pub(crate) use gemm::{
    LANES, Left, Matrix, Output, Packed, Product, Start, pack, pack_transposed, pack_transposed_panel,
    packed_len, row_stride,
};
pub(crate) use real::Real;
pub(crate) use simd::Wide;
pub use simd::vectorise;
