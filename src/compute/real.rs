//! The number types that kernels and layers are written for: f32 to serve and train, f64 so that
//! gradients can be checked against finite differences through the very same code.

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
    /// The nearest value.
    fn from_f64(x: f64) -> Self;
    /// Exactly.
    fn to_f64(self) -> f64;
    /// Square root, rounded once.
    fn sqrt(self) -> Self;
    /// `e^x`.
    fn exp(self) -> Self;
    /// `ln(1 + x)`.
    fn ln_1p(self) -> Self;
    /// Runs a product on the best instruction set of this machine.
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

    /// From f32, exactly.
    #[must_use]
    fn from_f32(x: f32) -> Self {
        Self::from_f64(f64::from(x))
    }

    /// The greater of the two; a NaN stays one.
    #[must_use]
    fn at_least(self, floor: Self) -> Self {
        if self < floor { floor } else { self }
    }
}

impl Real for f32 {
    fn from_f64(x: f64) -> Self {
        x as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
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
        gemm::product_f32(product);
    }
    fn transpose(block: &Block<'_, Self>, to: &mut [Self]) {
        gemm::transpose_f32(block, to);
    }
}

impl Real for f64 {
    fn from_f64(x: f64) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        self
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
        gemm::product_portable(product);
    }
    fn transpose(block: &Block<'_, Self>, to: &mut [Self]) {
        gemm::transpose_portable(block, to);
    }
}
