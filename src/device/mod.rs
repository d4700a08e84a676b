//! What a device does for the cache, the models and the trainer: one function a kernel, and the
//! choice of the machine's device.

pub mod choice;
pub mod cuda;
#[cfg(feature = "cusim")]
pub mod cusim;
pub mod flags;
pub mod host;
pub mod pool;
pub mod scratch;

mod gemm;
mod real;
mod simd;
mod vector;

pub use choice::{Choice, DeviceError, Why, choose};
pub use gemm::{
    LANES, Left, Output, Product, Start, pack, pack_transposed, pack_transposed_panel, packed_len, row_stride,
};
pub use real::Real;
pub use simd::{Wide, vectorise};
