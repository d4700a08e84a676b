//! The second half of a step: gradients of rows and dense weights, and the optimizer on both.

use rayon::prelude::*;

use super::casting::Casted;
use super::optim::{Optimizer, Step};
use super::train::Learner;
use crate::device::{Wide, vectorise};
use crate::model::{Model, Tape};
use crate::store::Table;

impl Learner {
    /// Gradients and updates of rows, table by table, and of dense weights, piece by piece.
    pub(super) fn update(&mut self) {
        let Self { model, weights, dense_states, grads, tables, casted, tapes, optimizer, .. } = self;
        let tapes = &tapes[..];
        let dense = Optimizer { kind: optimizer.kind.dense(), ..*optimizer }.step(self.steps);
        let rows = optimizer.step(self.steps);
        let pieces = split_pieces(model, &mut weights.values, grads, dense_states);
        rayon::join(
            || {
                pieces.into_par_iter().enumerate().for_each(|(i, mut piece)| {
                    model.gradient(i, tapes, piece.grads);
                    dense.update_dense(piece.weights, piece.grads, &mut piece.states);
                });
            },
            || {
                tables.par_iter_mut().zip(casted).for_each(|(table, casted)| {
                    update_rows(table, casted, tapes, &rows);
                });
            },
        );
    }
}

/// One piece of the dense weights with all that its update touches.
struct Piece<'a> {
    weights: &'a mut [f32],
    grads: &'a mut [f32],
    states: Vec<&'a mut [f32]>,
}

fn split_pieces<'a>(
    model: &Model<f32>,
    mut weights: &'a mut [f32],
    mut grads: &'a mut [f32],
    states: &'a mut [Vec<f32>],
) -> Vec<Piece<'a>> {
    let mut states: Vec<&mut [f32]> = states.iter_mut().map(|state| &mut state[..]).collect();
    let pieces = model.pieces().map(|len| Piece {
        weights: weights.split_off_mut(..len).unwrap_or_default(),
        grads: grads.split_off_mut(..len).unwrap_or_default(),
        states: states.iter_mut().map(|state| state.split_off_mut(..len).unwrap_or_default()).collect(),
    });
    pieces.collect()
}

/// The gather-reduce of one table, fused with the optimizer (Tensor Casting, section IV).
fn update_rows(table: &mut Table, casted: &Casted, tapes: &[Tape<f32>], step: &Step<f32>) {
    let dim = table.dim();
    let Some((weights, states)) = table.parts_mut() else {
        debug_assert!(false, "a learner's tables are its own");
        return;
    };
    let states = states.iter_mut().filter_map(|state| Some((state.width(), state.rows_mut()?))).collect();
    vectorise(UpdateRows { dim, weights, states, casted, tapes, step });
}

struct UpdateRows<'a> {
    dim: usize,
    weights: &'a mut [f32],
    /// Elements a row, and all rows, of every state.
    states: Vec<(usize, &'a mut [f32])>,
    casted: &'a Casted,
    tapes: &'a [Tape<f32>],
    step: &'a Step<f32>,
}

impl Wide for UpdateRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { dim, weights, mut states, casted, tapes, step } = self;
        let mut grad = vec![0.0f32; dim];
        let chunk = tapes.first().map_or(1, |tape| tape.rows as u32);
        for (row, sources) in casted.rows() {
            for (i, source) in sources.enumerate() {
                let (tape, s) = (source.sample / chunk, source.sample % chunk);
                let from = &tapes[tape as usize].grads[0].from(s as usize, source.column as usize)[..dim];
                if i == 0 {
                    grad.iter_mut().zip(from).for_each(|(sum, g)| *sum = *g / source.divisor);
                } else {
                    grad.iter_mut().zip(from).for_each(|(sum, g)| *sum += *g / source.divisor);
                }
            }
            let row = row as usize;
            let weights = &mut weights[row * dim..][..dim];
            match &mut states[..] {
                [] => step.update_row(weights, &grad, &mut []),
                [one] => step.update_row(weights, &grad, &mut [state_row(one, row)]),
                [one, two, ..] => {
                    step.update_row(weights, &grad, &mut [state_row(one, row), state_row(two, row)]);
                }
            }
        }
    }
}

#[inline(always)]
fn state_row<'s>((width, rows): &'s mut (usize, &mut [f32]), row: usize) -> &'s mut [f32] {
    &mut rows[row * *width..][..*width]
}
