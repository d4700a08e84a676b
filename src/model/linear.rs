//! The fully connected layer: `y = x W^T + b`, optionally followed by a ReLU.
//!
//! Weights are stored in panels (`compute::gemm`). The forward product reads panels, and the gradient
//! product writes them. `backward` needs the transpose, which the trainer makes once per step
//! ([`Linear::transpose_panel`]). That is faster than a product that reads the stored panels in transposed
//! order.

use std::ops::Range;

use super::layer::{Layer, Weights};
use super::tape::{Rows, Tape, View};
use crate::compute::{
    LANES, Left, Output, Packed, Product, Real, Start, pack_transposed_panel, packed_len, vectorise,
};

/// Panels per piece. Each piece reads all chunks, so smaller pieces read more in total. With larger pieces, a
/// small layer would not have enough of them for several threads.
const PIECE_PANELS: usize = 4;

/// A fully connected layer between two views.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub input: View,
    pub output: View,
    /// Whether a ReLU follows.
    pub relu: bool,
    /// Position of its panels in the weights: `outputs` columns of depth `inputs`.
    pub weight: Range<usize>,
    /// Position of its bias, padded to whole panels; empty for none.
    pub bias: Range<usize>,
    /// Position of the transpose's panels in the transposed weights; empty if the input needs no gradient.
    pub transposed: Range<usize>,
}

impl Linear {
    /// Elements of the transpose's panels.
    #[must_use]
    pub(crate) fn transposed_len(&self) -> usize {
        packed_len(self.output.width, self.input.width)
    }

    /// Elements of one panel of the transpose.
    #[must_use]
    pub(crate) fn transposed_panel_len(&self) -> usize {
        self.output.width * LANES
    }

    /// Writes panel `p` of the transpose.
    pub(crate) fn transpose_panel<T: Real>(&self, values: &[T], p: usize, out: &mut [T]) {
        let (rows, columns) = (self.input.width, self.output.width);
        let packed = Packed { panels: &values[self.weight.clone()], rows, columns };
        vectorise(|| pack_transposed_panel(packed, p, out));
    }

    fn product<'a, T: Real>(
        &self,
        tape: &'a Tape<T>,
        weights: &'a [T],
        out: &'a mut [T],
        stride: usize,
    ) -> Product<'a, T> {
        let x = &tape.values[self.input.buffer];
        Product {
            rows: tape.samples,
            depth: self.input.width,
            columns: self.output.width,
            left: Left { data: x.from(0, self.input.column), row_stride: x.stride(), step_stride: 1 },
            panels: &weights[self.weight.clone()],
            start: if self.bias.is_empty() { Start::Zero } else { Start::Bias(&weights[self.bias.clone()]) },
            relu: self.relu,
            output: Output { data: out, stride },
        }
    }

    /// Writes the gradient of panel `first` and the following ones, until `out` is full: the sum of `x^T dy`
    /// over the chunks, in order. Each chunk is added to all panels while its `x` is in the core's cache.
    fn panels_gradient<T: Real>(&self, first: usize, tapes: &[Tape<T>], out: &mut [T]) {
        if tapes.is_empty() {
            out.fill(T::default());
        }
        let mut packed = [T::default(); LANES * super::MAX_CHUNK];
        for (i, tape) in tapes.iter().enumerate() {
            for (p, out) in out.chunks_exact_mut((self.input.width * LANES).max(1)).enumerate() {
                let column = (first + p) * LANES;
                let lanes = self.output.part(column, (self.output.width - column).min(LANES));
                pack_slopes(&tape.grads[self.output.buffer], lanes, &mut packed[..tape.samples * LANES]);
                let x = &tape.values[self.input.buffer];
                Product {
                    rows: self.input.width,
                    depth: tape.samples,
                    columns: LANES,
                    left: Left { data: x.from(0, self.input.column), row_stride: 1, step_stride: x.stride() },
                    panels: &packed,
                    start: if i == 0 { Start::Zero } else { Start::Add },
                    relu: false,
                    output: Output { data: out, stride: LANES },
                }
                .run();
            }
        }
    }

    fn bias_gradient<T: Real>(&self, tapes: &[Tape<T>], out: &mut [T]) {
        out.fill(T::default());
        for tape in tapes {
            for s in 0..tape.samples {
                let dy = tape.grads[self.output.buffer].row(s, self.output);
                out.iter_mut().zip(dy).for_each(|(sum, d)| *sum += *d);
            }
        }
    }
}

impl<T: Real> Layer<T> for Linear {
    fn forward(&self, weights: &Weights<T>, tape: &mut Tape<T>) {
        let mut out = std::mem::take(&mut tape.values[self.output.buffer]);
        let stride = out.stride();
        self.product(tape, &weights.values, out.from_mut(0, self.output.column), stride).run();
        tape.values[self.output.buffer] = out;
    }

    fn backward(&self, weights: &Weights<T>, tape: &mut Tape<T>) {
        if self.relu {
            let (values, grads) = (&tape.values[self.output.buffer], &mut tape.grads[self.output.buffer]);
            for s in 0..tape.samples {
                let dy = grads.row_mut(s, self.output);
                let y = values.row(s, self.output);
                vectorise(|| {
                    for (d, y) in dy.iter_mut().zip(y) {
                        *d = if *y > T::default() { *d } else { T::default() };
                    }
                });
            }
        }
        if self.transposed.is_empty() {
            return;
        }
        let mut dx = std::mem::take(&mut tape.grads[self.input.buffer]);
        let stride = dx.stride();
        let dy = &tape.grads[self.output.buffer];
        Product {
            rows: tape.samples,
            depth: self.output.width,
            columns: self.input.width,
            left: Left { data: dy.from(0, self.output.column), row_stride: dy.stride(), step_stride: 1 },
            panels: &weights.transposed[self.transposed.clone()],
            start: Start::Add,
            relu: false,
            output: Output { data: dx.from_mut(0, self.input.column), stride },
        }
        .run();
        tape.grads[self.input.buffer] = dx;
    }

    fn pieces(&self) -> Vec<usize> {
        let panels = self.output.width.div_ceil(LANES);
        let width = |first: usize| (panels - first).min(PIECE_PANELS) * self.input.width * LANES;
        let mut pieces: Vec<_> = (0..panels).step_by(PIECE_PANELS).map(width).collect();
        if !self.bias.is_empty() {
            pieces.push(self.bias.len());
        }
        pieces
    }

    fn gradient(&self, piece: usize, tapes: &[Tape<T>], out: &mut [T]) {
        let first = piece * PIECE_PANELS;
        if first < self.output.width.div_ceil(LANES) {
            self.panels_gradient(first, tapes, out);
        } else {
            vectorise(|| self.bias_gradient(tapes, out));
        }
    }

    fn as_linear(&self) -> Option<&Linear> {
        Some(self)
    }
}

/// Packs the columns `lanes` of every sample into one panel. Lanes past the last column are zero.
fn pack_slopes<T: Real>(grads: &Rows<T>, lanes: View, packed: &mut [T]) {
    for (s, line) in packed.chunks_exact_mut(LANES).enumerate() {
        if lanes.width == LANES {
            line.copy_from_slice(grads.row(s, lanes));
        } else {
            line[..lanes.width].copy_from_slice(grads.row(s, lanes));
            line[lanes.width..].fill(T::default());
        }
    }
}
