//! The element-wise part of the cross layers of DCN and DCN-v2. The products with weights (`u` below) are
//! ordinary linear layers.
//!
//! - DCN (2017): `x' = x0 (x . w) + b + x`, where `u = x . w` is one number per sample.
//! - DCN-v2: `x' = x0 * (W x + b) + x`, where `u = W x + b` is as wide as `x`.

use std::ops::Range;

use super::layer::{Layer, Weights};
use super::tape::{Tape, View};
use crate::compute::{Real, vectorise};

/// `out = x0 * u + x`, element by element.
#[derive(Clone, Debug)]
pub(crate) struct CrossV2 {
    /// The network's first input.
    pub x0: View,
    /// `W x + b`.
    pub u: View,
    /// This layer's input.
    pub x: View,
    /// This layer's output.
    pub out: View,
}

impl<T: Real> Layer<T> for CrossV2 {
    fn forward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        let mut out = std::mem::take(&mut tape.values[self.out.buffer]);
        for s in 0..tape.samples {
            let row = |view: View| tape.values[view.buffer].row(s, view);
            let (x0, u, x, out) = (row(self.x0), row(self.u), row(self.x), out.row_mut(s, self.out));
            vectorise(|| {
                for (((o, x0), u), x) in out.iter_mut().zip(x0).zip(u).zip(x) {
                    *o = *x0 * *u + *x;
                }
            });
        }
        tape.values[self.out.buffer] = out;
    }

    fn backward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        let dy = std::mem::take(&mut tape.grads[self.out.buffer]);
        for s in 0..tape.samples {
            let dy = dy.row(s, self.out);
            let values = &tape.values;
            let row = |view: View| values[view.buffer].row(s, view);
            add_products(tape.grads[self.x0.buffer].row_mut(s, self.x0), dy, row(self.u));
            add_products(tape.grads[self.u.buffer].row_mut(s, self.u), dy, row(self.x0));
            add(tape.grads[self.x.buffer].row_mut(s, self.x), dy);
        }
        tape.grads[self.out.buffer] = dy;
    }
}

/// `out = x0 u + b + x`, with one `u` per sample.
#[derive(Clone, Debug)]
pub(crate) struct CrossV1 {
    /// The network's first input.
    pub x0: View,
    /// `x . w`, one column.
    pub u: View,
    /// This layer's input.
    pub x: View,
    /// This layer's output.
    pub out: View,
    /// Position of `b` in the weights, padded to whole panels.
    pub bias: Range<usize>,
}

impl<T: Real> Layer<T> for CrossV1 {
    fn forward(&self, weights: &Weights<T>, tape: &mut Tape<T>) {
        let mut out = std::mem::take(&mut tape.values[self.out.buffer]);
        let bias = &weights.values[self.bias.clone()];
        for s in 0..tape.samples {
            let row = |view: View| tape.values[view.buffer].row(s, view);
            let (x0, u, x, out) = (row(self.x0), row(self.u)[0], row(self.x), out.row_mut(s, self.out));
            vectorise(|| {
                for (((o, x0), b), x) in out.iter_mut().zip(x0).zip(bias).zip(x) {
                    *o = *x0 * u + *b + *x;
                }
            });
        }
        tape.values[self.out.buffer] = out;
    }

    fn backward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        let dy = std::mem::take(&mut tape.grads[self.out.buffer]);
        for s in 0..tape.samples {
            let dy = dy.row(s, self.out);
            let values = &tape.values;
            let u = values[self.u.buffer].row(s, self.u)[0];
            let x0 = values[self.x0.buffer].row(s, self.x0);
            let dx0 = tape.grads[self.x0.buffer].row_mut(s, self.x0);
            dx0.iter_mut().zip(dy).for_each(|(g, d)| *g += *d * u);
            let mut du = T::default();
            dy.iter().zip(x0).for_each(|(d, x)| du += *d * *x);
            tape.grads[self.u.buffer].row_mut(s, self.u)[0] += du;
            add(tape.grads[self.x.buffer].row_mut(s, self.x), dy);
        }
        tape.grads[self.out.buffer] = dy;
    }

    fn pieces(&self) -> Vec<usize> {
        vec![self.bias.len()]
    }

    fn gradient(&self, _: usize, tapes: &[Tape<T>], out: &mut [T]) {
        out.fill(T::default());
        for tape in tapes {
            for s in 0..tape.samples {
                let dy = tape.grads[self.out.buffer].row(s, self.out);
                add(&mut out[..dy.len()], dy);
            }
        }
    }
}

fn add<T: Real>(to: &mut [T], from: &[T]) {
    vectorise(|| to.iter_mut().zip(from).for_each(|(t, f)| *t += *f));
}

fn add_products<T: Real>(to: &mut [T], a: &[T], b: &[T]) {
    vectorise(|| to.iter_mut().zip(a).zip(b).for_each(|((t, a), b)| *t += *a * *b));
}
