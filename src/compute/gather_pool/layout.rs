//! How the loops of gather-pool read a row, for each type of element: as numbers one by one, and as
//! registers. Both give the bits of [`Element::decode`]: f16 is exact, and int8 is a product and a sum, each
//! rounded, whatever the processor could fuse.

#![allow(unsafe_code)]

use crate::compute::vector::{Encoded, Vector};
use crate::types::Element;
use crate::types::element::{f16_values, f32_values, int8_parts, int8_values};

/// A row of one type of element.
pub(crate) trait RowLayout<'a>: Copy {
    /// The type.
    const ELEMENT: Element;

    /// The row of these bytes.
    fn of(bytes: &'a [u8]) -> Self;

    /// Its elements, and what they are padded with.
    fn values(self) -> impl Iterator<Item = f32>;

    /// Its elements from `at` on, as many as a register holds.
    ///
    /// # Safety
    /// The processor has the instruction set of `V`, and the row has so many elements.
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
        // SAFETY: as the caller vouches: `at + WIDTH` elements of 4 bytes are in the row.
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
        // SAFETY: as the caller vouches: `at + WIDTH` elements of 2 bytes are in the row.
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
        // SAFETY: as the caller vouches: `at + WIDTH` elements of 1 byte are in the row, and the
        // instruction set is there.
        unsafe {
            let steps = V::load_u8(self.bytes.as_ptr().add(at));
            steps.multiply(V::splat(self.scale)).add(V::splat(self.bias))
        }
    }
}
