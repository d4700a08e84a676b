//! The number types of kernels and layers: f32 for serving and training, and f64, so that tests can compare
//! the gradients of the same code with finite differences.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign};

use super::gemm;
use super::gemm::{Block, Product};

/// f32 or f64.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
{
    /// Rounds to the nearest value.
    fn from_f64(x: f64) -> Self;
    /// Square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// `e^x`.
    fn exp(self) -> Self;
    /// `ln(1 + x)`.
    fn ln_1p(self) -> Self;
    /// Computes a product with the widest vectors of this machine.
    ///
    /// # Panics
    /// As [`Product::run`].
    fn product(product: &mut Product<'_, Self>);
    /// Writes the transpose of a block.
    ///
    /// # Panics
    /// When a slice is too short for the block.
    #[doc(hidden)]
    fn transpose(block: &Block<'_, Self>, to: &mut [Self]);

    /// Converts from f32, exactly.
    #[must_use]
    fn from_f32(x: f32) -> Self {
        Self::from_f64(f64::from(x))
    }

    /// The greater of the two; NaN if `self` is NaN.
    #[must_use]
    fn at_least(self, floor: Self) -> Self {
        if self < floor { floor } else { self }
    }
}

macro_rules! real {
    ($($float:ident: $product:ident, $transpose:ident;)+) => {$(
        #[allow(clippy::unnecessary_cast)] // of f64 to f64
        impl Real for $float {
            fn from_f64(x: f64) -> Self {
                x as $float
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln_1p(self) -> Self {
                self.ln_1p()
            }
            fn product(product: &mut Product<'_, Self>) {
                gemm::$product(product);
            }
            fn transpose(block: &Block<'_, Self>, to: &mut [Self]) {
                gemm::$transpose(block, to);
            }
        }
    )+};
}

real! {
    f32: product_f32, transpose_f32;
    f64: product_portable, transpose_portable;
}
