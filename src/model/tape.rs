//! The numbers that one chunk of samples leaves behind on its way through a network.
//!
//! A network names its intermediate values by buffers, a matrix each with one row a sample, and
//! layers read and write [`View`]s, which are column ranges of buffers. Concatenation is then no
//! work: two layers write beside each other. Buffer 0 is the input row of the schema.
//!
//! A batch is cut into chunks of at most [`MAX_CHUNK`] samples and every chunk has its own tape, so threads
//! share nothing, a chunk's numbers stay in the core's own cache, and gradients of weights are
//! summed chunk after chunk in an order that no thread count can change. A chunk begins its sum where
//! the one before it ended, so the size of chunks is a matter of speed: it cannot change a bit of a
//! weight or a score either.

use aligned_vec::AVec;

use crate::compute::{Real, row_stride};

/// Most samples of one tape.
pub const MAX_CHUNK: usize = 64;

/// Most bytes of a tape's values, where that leaves room for some samples: an input row is written,
/// read by the first layers and written again by the next chunk, all within a core's second-level cache,
/// which holds a layer's weights and rows on their way too.
const TAPE_BYTES: usize = 640 << 10;

/// Fewest samples of one tape: fewer would not be worth the reading of the weights.
const MIN_CHUNK: usize = 8;

/// Samples of one tape of buffers of these widths: a power of two.
#[must_use]
pub(crate) fn chunk<T>(widths: &[usize]) -> usize {
    let bytes: usize = widths.iter().map(|&width| row_stride(width) * size_of::<T>()).sum();
    let fits = (TAPE_BYTES / bytes.max(1)).clamp(MIN_CHUNK, MAX_CHUNK);
    1 << fits.ilog2()
}

/// Bytes of a cache line: a tape's rows begin at one, save that in the input row the vectors do.
pub(crate) const ALIGNMENT: usize = 64;

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
    pub(crate) fn part(self, from: usize, width: usize) -> Self {
        debug_assert!(from + width <= self.width);
        Self { buffer: self.buffer, column: self.column + from, width }
    }
}

/// One buffer's numbers for a chunk: as many rows as the chunk has samples, of `stride` elements.
#[derive(Clone, Debug)]
pub struct Rows<T> {
    /// Elements before the first row's first column.
    lead: usize,
    /// Elements from one row to the next.
    stride: usize,
    data: AVec<T>,
}

impl<T: Real> Rows<T> {
    /// Rows of `width` columns, of which column `aligned` begins a cache line.
    fn new(width: usize, aligned: usize, rows: usize) -> Self {
        let line = ALIGNMENT / size_of::<T>();
        let lead = aligned.next_multiple_of(line) - aligned;
        let stride = row_stride(lead + width);
        let mut data = AVec::new(ALIGNMENT);
        data.resize(stride * rows, T::default());
        Self { lead, stride, data }
    }

    /// Elements from one row to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The view's columns of sample `s`.
    #[must_use]
    pub fn row(&self, s: usize, view: View) -> &[T] {
        &self.from(s, view.column)[..view.width]
    }

    /// The view's columns of sample `s`, to write.
    pub fn row_mut(&mut self, s: usize, view: View) -> &mut [T] {
        &mut self.from_mut(s, view.column)[..view.width]
    }

    /// From column `column` of sample `s` on.
    #[must_use]
    pub fn from(&self, s: usize, column: usize) -> &[T] {
        &self.data[self.lead + s * self.stride + column..]
    }

    /// From column `column` of sample `s` on, to write.
    pub fn from_mut(&mut self, s: usize, column: usize) -> &mut [T] {
        &mut self.data[self.lead + s * self.stride + column..]
    }
}

impl<T: Real> Default for Rows<T> {
    fn default() -> Self {
        Self { lead: 0, stride: 0, data: AVec::new(ALIGNMENT) }
    }
}

/// Values, and for training gradients, of every buffer for one chunk.
#[derive(Clone, Debug)]
pub struct Tape<T> {
    /// How many rows there are.
    pub rows: usize,
    /// How many rows hold a sample.
    pub samples: usize,
    /// Every buffer's values.
    pub values: Vec<Rows<T>>,
    /// The loss's gradient by every value; empty on a tape that only scores.
    pub grads: Vec<Rows<T>>,
}

impl<T: Real> Tape<T> {
    /// A tape for buffers of these widths. Where pooled vectors begin in the input row, there begins a
    /// cache line: they are written in whole lines then.
    #[must_use]
    pub(crate) fn new(widths: &[usize], dense_width: usize, training: bool) -> Self {
        let rows = chunk::<T>(widths);
        let aligned = |buffer| if buffer == 0 { dense_width } else { 0 };
        let values: Vec<_> =
            widths.iter().enumerate().map(|(b, &width)| Rows::new(width, aligned(b), rows)).collect();
        let grads = if training { values.clone() } else { Vec::new() };
        Self { rows, samples: 0, values, grads }
    }

    /// Forgets every gradient.
    pub(crate) fn zero_grads(&mut self) {
        for rows in &mut self.grads {
            let used = rows.stride * self.samples;
            rows.data[..used].fill(T::default());
        }
    }
}
