//! Layers without weights: DLRM's pairwise dot products, the second-order term of the factorisation machine,
//! and the sum that joins wide and deep parts.

use super::layer::{Layer, Weights};
use super::tape::{Rows, Tape, View};
use crate::compute::{
    LANES, Left, Matrix, Output, Product, Real, Start, Wide, pack, pack_transposed, packed_len, vectorise,
};

/// DLRM's interaction of the vectors `[first, rest..]`, each as wide as `first`. Writes `[first, triangle]`,
/// where `triangle` is the strictly lower triangle of their Gram matrix in row order.
#[derive(Clone, Debug)]
pub(crate) struct PairwiseDots {
    /// The output of the bottom MLP.
    pub first: View,
    /// The features' vectors, one after the other.
    pub rest: View,
    /// `first.width + n (n - 1) / 2` columns for `n` vectors.
    pub out: View,
}

impl PairwiseDots {
    /// Number of vectors that interact when `rest` has `rest_width` columns.
    #[must_use]
    pub(crate) fn vectors(dim: usize, rest_width: usize) -> usize {
        1 + rest_width / dim
    }

    /// Number of output columns.
    #[must_use]
    pub(crate) fn out_width(dim: usize, rest_width: usize) -> usize {
        let n = Self::vectors(dim, rest_width);
        dim + n * (n - 1) / 2
    }

    /// Writes the vectors of sample `s` as the rows of an `n x dim` matrix.
    fn stack<T: Real>(&self, tape: &Tape<T>, s: usize, stacked: &mut [T]) {
        let (first, rest) = stacked.split_at_mut(self.first.width);
        first.copy_from_slice(tape.values[self.first.buffer].row(s, self.first));
        rest.copy_from_slice(tape.values[self.rest.buffer].row(s, self.rest));
    }

    /// Writes `[first, triangle]` of every sample. A row of the triangle is the dot product with `first`,
    /// followed by those with the preceding vectors of `rest`. Two products, `first rest^T` and
    /// `rest rest^T`, give both parts without a copy of `first` and `rest` into one matrix. Rows are copied
    /// in whole registers if there is room, and the next row overwrites the excess, because copies of odd
    /// lengths would take longer than the products.
    #[inline(always)]
    fn write_dots<T: Real>(&self, tape: &Tape<T>, out: &mut Rows<T>) {
        let (dim, n) = (self.first.width, self.rest.width / self.first.width);
        let width = n.next_multiple_of(LANES);
        let mut panels = vec![T::default(); packed_len(dim, n)];
        let mut gram = vec![T::default(); n * width];
        let mut by_first = vec![T::default(); width];
        for s in 0..tape.samples {
            let first = tape.values[self.first.buffer].row(s, self.first);
            let rest = tape.values[self.rest.buffer].row(s, self.rest);
            pack_transposed(Matrix { data: rest, stride: dim, rows: n, columns: dim }, &mut panels);
            Small { rows: 1, depth: dim, columns: width }.run(first, &panels, &mut by_first);
            Small { rows: n, depth: dim, columns: width }.run(rest, &panels, &mut gram);
            let (to, mut triangle) = out.row_mut(s, self.out).split_at_mut(dim);
            to.copy_from_slice(first);
            for (i, (dot, line)) in by_first.iter().zip(gram.chunks_exact(width)).enumerate() {
                triangle[0] = *dot;
                copy_vectors(&line[..i.next_multiple_of(VECTOR)], &mut triangle[1..], i);
                triangle = &mut triangle[i + 1..];
            }
        }
    }

    /// Adds the gradients of the inputs. If `Z` has the vectors as rows and `G = Z Z^T`, then
    /// `dZ = (dG + dG^T) Z`. `dG` is lower triangular.
    #[inline(always)]
    fn add_slopes<T: Real>(&self, tape: &mut Tape<T>) {
        let (dim, n) = (self.first.width, Self::vectors(self.first.width, self.rest.width));
        let width = dim.next_multiple_of(LANES);
        let mut stacked = vec![T::default(); n * dim];
        let mut panels = vec![T::default(); packed_len(n, dim)];
        let mut symmetric = vec![T::default(); n * n];
        let mut dz = vec![T::default(); n * width];
        for s in 0..tape.samples {
            self.stack(tape, s, &mut stacked);
            pack(Matrix { data: &stacked, stride: dim, rows: n, columns: dim }, &mut panels);
            let (dfirst, mut triangle) = tape.grads[self.out.buffer].row(s, self.out).split_at(dim);
            for i in 1..n {
                let (line, rest) = triangle.split_at(i);
                symmetric[i * n..][..i].iter_mut().zip(line).for_each(|(to, d)| *to = *d);
                let column = symmetric[i..].iter_mut().step_by(n);
                column.zip(line).for_each(|(to, d)| *to = *d);
                triangle = rest;
            }
            Small { rows: n, depth: n, columns: width }.run(&symmetric, &panels, &mut dz);
            dz.iter_mut().zip(dfirst).for_each(|(z, d)| *z += *d);
            let (first, rest) = dz.split_at(width);
            let grads = tape.grads[self.first.buffer].row_mut(s, self.first);
            grads.iter_mut().zip(first).for_each(|(g, z)| *g += *z);
            let grads = tape.grads[self.rest.buffer].row_mut(s, self.rest);
            for (grad, z) in grads.chunks_exact_mut(dim).zip(rest.chunks_exact(width)) {
                grad.iter_mut().zip(z).for_each(|(g, z)| *g += *z);
            }
        }
    }
}

/// Elements that [`copy_vectors`] copies at a time.
const VECTOR: usize = 16;

/// Copies the first `len` elements. If `to` has room, copies all of `from`, which is `len` rounded up to
/// whole vectors.
#[inline(always)]
fn copy_vectors<T: Real>(from: &[T], to: &mut [T], len: usize) {
    if from.len() > to.len() {
        return to[..len].copy_from_slice(&from[..len]);
    }
    let (to, _) = to.as_chunks_mut::<VECTOR>();
    from.as_chunks::<VECTOR>().0.iter().zip(to).for_each(|(from, to)| *to = *from);
}

/// `c = a b` for small matrices: `a` is row-major `rows x depth`, `b` is packed into whole panels of
/// `depth x columns`.
struct Small {
    rows: usize,
    depth: usize,
    columns: usize,
}

impl Small {
    fn run<T: Real>(&self, a: &[T], panels: &[T], c: &mut [T]) {
        Product {
            rows: self.rows,
            depth: self.depth,
            columns: self.columns,
            left: Left { data: a, row_stride: self.depth, step_stride: 1 },
            panels,
            start: Start::Zero,
            relu: false,
            output: Output { data: c, stride: self.columns },
        }
        .run();
    }
}

struct WriteDots<'a, T> {
    dots: &'a PairwiseDots,
    tape: &'a Tape<T>,
    out: &'a mut Rows<T>,
}

impl<T: Real> Wide for WriteDots<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        self.dots.write_dots(self.tape, self.out);
    }
}

struct AddSlopes<'a, T> {
    dots: &'a PairwiseDots,
    tape: &'a mut Tape<T>,
}

impl<T: Real> Wide for AddSlopes<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        self.dots.add_slopes(self.tape);
    }
}

impl<T: Real> Layer<T> for PairwiseDots {
    fn forward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        let mut out = std::mem::take(&mut tape.values[self.out.buffer]);
        vectorise(WriteDots { dots: self, tape, out: &mut out });
        tape.values[self.out.buffer] = out;
    }

    fn backward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        vectorise(AddSlopes { dots: self, tape });
    }
}

/// The second-order term of the factorisation machine, one number per sample:
/// `1/2 sum_d ((sum_f v_fd)^2 - sum_f v_fd^2)`, where `v_fd` is element `d` of the vector of feature `f`.
#[derive(Clone, Debug)]
pub(crate) struct FactorisationMachine {
    /// The features' vectors, one after the other.
    pub vectors: View,
    /// Elements per vector.
    pub dim: usize,
    /// One column.
    pub out: View,
}

impl FactorisationMachine {
    fn sums<T: Real>(&self, vectors: &[T], sums: &mut [T]) {
        sums.fill(T::default());
        for vector in vectors.chunks_exact(self.dim) {
            sums.iter_mut().zip(vector).for_each(|(s, v)| *s += *v);
        }
    }
}

impl<T: Real> Layer<T> for FactorisationMachine {
    fn forward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        let mut sums = vec![T::default(); self.dim];
        for s in 0..tape.samples {
            let vectors = tape.values[self.vectors.buffer].row(s, self.vectors);
            self.sums(vectors, &mut sums);
            let (mut of_sums, mut of_squares) = (T::default(), T::default());
            sums.iter().for_each(|x| of_sums += *x * *x);
            vectors.iter().for_each(|x| of_squares += *x * *x);
            let term = T::from_f64(0.5) * (of_sums - of_squares);
            tape.values[self.out.buffer].row_mut(s, self.out)[0] = term;
        }
    }

    fn backward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        let mut sums = vec![T::default(); self.dim];
        for s in 0..tape.samples {
            let dy = tape.grads[self.out.buffer].row(s, self.out)[0];
            let vectors = tape.values[self.vectors.buffer].row(s, self.vectors);
            self.sums(vectors, &mut sums);
            let grads = tape.grads[self.vectors.buffer].row_mut(s, self.vectors);
            for (grad, vector) in grads.chunks_exact_mut(self.dim).zip(vectors.chunks_exact(self.dim)) {
                for ((g, v), sum) in grad.iter_mut().zip(vector).zip(&sums) {
                    *g += dy * (*sum - *v);
                }
            }
        }
    }
}

/// The sum of all columns of all views, in order: one number per sample.
#[derive(Clone, Debug)]
pub(crate) struct SumOfTerms {
    pub terms: Vec<View>,
    /// One column.
    pub out: View,
}

impl<T: Real> Layer<T> for SumOfTerms {
    fn forward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        for s in 0..tape.samples {
            let mut sum = T::default();
            for view in &self.terms {
                tape.values[view.buffer].row(s, *view).iter().for_each(|x| sum += *x);
            }
            tape.values[self.out.buffer].row_mut(s, self.out)[0] = sum;
        }
    }

    fn backward(&self, _: &Weights<T>, tape: &mut Tape<T>) {
        for s in 0..tape.samples {
            let dy = tape.grads[self.out.buffer].row(s, self.out)[0];
            for view in &self.terms {
                let grads = tape.grads[view.buffer].row_mut(s, *view);
                vectorise(|| grads.iter_mut().for_each(|g| *g += dy));
            }
        }
    }
}
