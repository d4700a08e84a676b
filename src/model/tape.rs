//! The numbers that one chunk of samples leaves behind on its way through a network.
//!
//! A network names its intermediate values by buffers, a matrix each with one row a sample, and
//! layers read and write [`View`]s, which are column ranges of buffers. Concatenation is then no
//! work: two layers write beside each other. Buffer 0 is the input row of the schema.
//!
//! A batch is cut into chunks of [`CHUNK`] samples and every chunk has its own tape, so threads
//! share nothing, a chunk's numbers stay in the core's own cache, and gradients of weights are
//! summed chunk after chunk in an order that no thread count can change. A chunk begins its sum where
//! the one before it ended, so the size of chunks is a matter of speed: it cannot change a bit either.

use crate::device::{Real, row_stride};

/// Samples of one tape.
pub const CHUNK: usize = 64;

/// Some columns of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Which buffer.
    pub buffer: usize,
    /// Its first column.
    pub column: usize,
    /// How many columns.
    pub width: usize,
}

impl View {
    /// Columns `from..from + width` of this view.
    #[must_use]
    pub fn part(self, from: usize, width: usize) -> Self {
        debug_assert!(from + width <= self.width);
        Self { buffer: self.buffer, column: self.column + from, width }
    }
}

/// One buffer's numbers for a chunk: up to [`CHUNK`] rows of `stride` elements.
#[derive(Clone, Debug, Default)]
pub struct Rows<T> {
    /// Elements from one row to the next.
    pub stride: usize,
    /// The elements.
    pub data: Vec<T>,
}

impl<T: Real> Rows<T> {
    fn new(width: usize) -> Self {
        let stride = row_stride(width);
        Self { stride, data: vec![T::default(); stride * CHUNK] }
    }

    /// The view's columns of sample `s`.
    #[must_use]
    pub fn row(&self, s: usize, view: View) -> &[T] {
        &self.data[s * self.stride + view.column..][..view.width]
    }

    /// The view's columns of sample `s`, to write.
    pub fn row_mut(&mut self, s: usize, view: View) -> &mut [T] {
        &mut self.data[s * self.stride + view.column..][..view.width]
    }

    /// From the view's first element on.
    #[must_use]
    pub fn from(&self, view: View) -> &[T] {
        &self.data[view.column..]
    }
}

/// Values, and for training gradients, of every buffer for one chunk.
#[derive(Clone, Debug)]
pub struct Tape<T> {
    /// How many rows hold a sample.
    pub samples: usize,
    /// Every buffer's values.
    pub values: Vec<Rows<T>>,
    /// The loss's gradient by every value; empty on a tape that only scores.
    pub grads: Vec<Rows<T>>,
}

impl<T: Real> Tape<T> {
    /// A tape for buffers of these widths.
    #[must_use]
    pub fn new(widths: &[usize], training: bool) -> Self {
        let values: Vec<_> = widths.iter().map(|&width| Rows::new(width)).collect();
        let grads = if training { values.clone() } else { Vec::new() };
        Self { samples: 0, values, grads }
    }

    /// Forgets every gradient.
    pub fn zero_grads(&mut self) {
        for rows in &mut self.grads {
            let used = rows.stride * self.samples;
            rows.data[..used].fill(T::default());
        }
    }
}
