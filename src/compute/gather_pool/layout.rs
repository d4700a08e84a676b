//! Reads the elements of a row of each element type, one by one or a register at a time. Both give the bits
//! of [`Element::decode`]: f16 is exact. int8 is a product and a sum, each rounded, even if the processor
//! could fuse them.

#![allow(unsafe_code)]

use crate::compute::vector::{Encoded, Vector};
use crate::types::Element;
use crate::types::element::{f16_values, f32_values, int8_parts, int8_values};

/// A row of one element type.
pub(crate) trait RowLayout<'a>: Copy {
    const ELEMENT: Element;

    /// The row that these bytes encode.
    fn of(bytes: &'a [u8]) -> Self;

    /// The elements of the row, padding included.
    fn values(self) -> impl Iterator<Item = f32>;

    /// One register of elements, starting with element `at`.
    ///
    /// # Safety
    /// The processor has the instruction set of `V`, and the row has `at + V::WIDTH` elements.
    unsafe fn load<V: Encoded>(self, at: usize) -> V;
}

#[derive(Clone, Copy)]
pub(crate) struct F32Row<'a>(&'a [u8]);

#[derive(Clone, Copy)]
pub(crate) struct F16Row<'a>(&'a [u8]);

#[derive(Clone, Copy)]
pub(crate) struct Int8Row<'a> {
    bytes: &'a [u8],
    scale: f32,
    bias: f32,
}

impl<'a> RowLayout<'a> for F32Row<'a> {
    const ELEMENT: Element = Element::F32;

    #[inline(always)]
    fn of(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    #[inline(always)]
    fn values(self) -> impl Iterator<Item = f32> {
        f32_values(self.0)
    }

    #[inline(always)]
    unsafe fn load<V: Encoded>(self, at: usize) -> V {
        // SAFETY: the caller guarantees `at + WIDTH` elements of 4 bytes and the instruction set.
        unsafe { Vector::load(self.0.as_ptr().cast::<f32>().add(at)) }
    }
}

impl<'a> RowLayout<'a> for F16Row<'a> {
    const ELEMENT: Element = Element::F16;

    #[inline(always)]
    fn of(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    #[inline(always)]
    fn values(self) -> impl Iterator<Item = f32> {
        f16_values(self.0)
    }

    #[inline(always)]
    unsafe fn load<V: Encoded>(self, at: usize) -> V {
        // SAFETY: the caller guarantees `at + WIDTH` elements of 2 bytes and the instruction set.
        unsafe { V::load_f16(self.0.as_ptr().add(2 * at)) }
    }
}

impl<'a> RowLayout<'a> for Int8Row<'a> {
    const ELEMENT: Element = Element::Int8;

    #[inline(always)]
    fn of(bytes: &'a [u8]) -> Self {
        let (_, [scale, bias]) = int8_parts(bytes);
        Self { bytes, scale, bias }
    }

    #[inline(always)]
    fn values(self) -> impl Iterator<Item = f32> {
        int8_values(self.bytes)
    }

    #[inline(always)]
    unsafe fn load<V: Encoded>(self, at: usize) -> V {
        // SAFETY: the caller guarantees `at + WIDTH` elements of 1 byte and the instruction set.
        unsafe {
            let steps = V::load_u8(self.bytes.as_ptr().add(at));
            steps.multiply(V::splat(self.scale)).add(V::splat(self.bias))
        }
    }
}
