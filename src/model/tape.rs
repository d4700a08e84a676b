//! A tape holds the intermediate values and gradients of one chunk of samples.
//!
//! Each intermediate value of a network is a buffer: a matrix with one row per sample. Layers read and write
//! [`View`]s, which are column ranges of buffers. So concatenation needs no copy: two layers write to
//! neighbouring columns. Buffer 0 is the input row of the schema.
//!
//! A batch is cut into chunks, and each chunk has its own tape. So threads share no memory, and the values of
//! a chunk stay in the core's cache. A gradient of a weight is one sum over all samples in batch order,
//! whatever the chunks are. So neither the number of threads nor the size of chunks changes a bit of a weight
//! or a score.
//!
//! All weights are read once for each chunk. If they do not fit the second-level cache, that takes longer
//! than the products of a small chunk. So when a batch is scored, each thread gets its part of the batch in
//! as few chunks as possible ([`scoring_chunk`]). In training a tape has gradients too, and a batch needs a
//! tape for each of its chunks at the same time, so chunks are smaller ([`chunk`]).

use aligned_vec::AVec;

use crate::compute::{Real, row_stride};

/// Most samples of a chunk in training.
pub(crate) const MAX_CHUNK: usize = 64;

/// Most samples of a chunk that is scored. Tiles of all instruction sets divide it (`compute::gemm`).
pub(crate) const MAX_SCORED: usize = 96;

/// Most bytes of a tape's values in training, unless [`MIN_CHUNK`] samples need more.
const TAPE_BYTES: usize = 640 << 10;

/// Fewest samples of a chunk in training: with fewer, reading the weights would dominate.
const MIN_CHUNK: usize = 8;

/// Samples of a chunk in training, for buffers of these widths: a power of two.
#[must_use]
pub(crate) fn chunk<T>(widths: &[usize]) -> usize {
    let bytes: usize = widths.iter().map(|&width| row_stride(width) * size_of::<T>()).sum();
    let fits = (TAPE_BYTES / bytes.max(1)).clamp(MIN_CHUNK, MAX_CHUNK);
    1 << fits.ilog2()
}

/// Samples of a chunk when so many threads score a batch. A part that is smaller than a chunk in training is
/// not worth a thread.
#[must_use]
pub(crate) fn scoring_chunk<T>(widths: &[usize], samples: usize, threads: usize) -> usize {
    samples.div_ceil(threads.max(1)).clamp(chunk::<T>(widths), MAX_SCORED)
}

/// Bytes of a cache line. The rows of a tape are aligned to it. In the input row, the first pooled vector is
/// aligned instead.
pub(crate) const ALIGNMENT: usize = 64;

/// A range of columns of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// Number of the buffer.
    pub buffer: usize,
    /// First column.
    pub column: usize,
    /// Number of columns.
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

/// One buffer for one chunk: a row of `stride` elements per sample.
#[derive(Clone, Debug)]
pub struct Rows<T> {
    /// Elements before the first row's first column.
    lead: usize,
    /// Elements from one row to the next.
    stride: usize,
    data: AVec<T>,
}

impl<T: Real> Rows<T> {
    /// Rows of `width` columns. Column `aligned` is aligned to a cache line.
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
    pub(crate) fn row(&self, s: usize, view: View) -> &[T] {
        &self.from(s, view.column)[..view.width]
    }

    /// The view's columns of sample `s`, mutable.
    pub(crate) fn row_mut(&mut self, s: usize, view: View) -> &mut [T] {
        &mut self.from_mut(s, view.column)[..view.width]
    }

    /// The elements from column `column` of sample `s` on.
    #[must_use]
    pub fn from(&self, s: usize, column: usize) -> &[T] {
        &self.data[self.lead + s * self.stride + column..]
    }

    /// The elements from column `column` of sample `s` on, mutable.
    #[allow(clippy::wrong_self_convention)] // as `from`
    pub fn from_mut(&mut self, s: usize, column: usize) -> &mut [T] {
        &mut self.data[self.lead + s * self.stride + column..]
    }
}

impl<T: Real> Default for Rows<T> {
    fn default() -> Self {
        Self { lead: 0, stride: 0, data: AVec::new(ALIGNMENT) }
    }
}

/// The values of all buffers for one chunk, and in training their gradients.
#[derive(Clone, Debug)]
pub struct Tape<T> {
    /// Rows allocated.
    pub rows: usize,
    /// Rows in use.
    pub samples: usize,
    /// Values, one entry per buffer.
    pub values: Vec<Rows<T>>,
    /// Derivatives of the loss with respect to each value; empty on a tape that only scores.
    pub grads: Vec<Rows<T>>,
}

impl<T: Real> Tape<T> {
    /// A tape for buffers of these widths. In the input row, the first pooled vector is aligned to a cache
    /// line, so that vectors are written in whole lines.
    #[must_use]
    pub(crate) fn new(widths: &[usize], dense_width: usize, training: bool) -> Self {
        let rows = if training { chunk::<T>(widths) } else { MAX_SCORED };
        let aligned = |buffer| if buffer == 0 { dense_width } else { 0 };
        let values: Vec<_> =
            widths.iter().enumerate().map(|(b, &width)| Rows::new(width, aligned(b), rows)).collect();
        let grads = if training { values.clone() } else { Vec::new() };
        Self { rows, samples: 0, values, grads }
    }

    /// Sets all gradients in use to 0.
    pub(crate) fn zero_grads(&mut self) {
        for rows in &mut self.grads {
            let used = rows.stride * self.samples;
            rows.data[..used].fill(T::default());
        }
    }
}
