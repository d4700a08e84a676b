//! Row gradients that replicas exchange: coalesced, one per row, and sorted by row.
//!
//! A replica's gradients come from the gather-reduce of Tensor Casting (section IV) without the optimizer. To
//! sum the gradients of several replicas, a thread takes a block of rows and walks along all sorted lists at
//! once. Then the optimizer runs on the sums.

use rayon::prelude::*;

use super::window::{CachedMut, RecordSpan, Window};
use crate::compute::vectorise;
use crate::pace::give_way;
use crate::trainer::casting::Casting;
use crate::trainer::optim::Step;
use crate::trainer::update::{RecordShape, RowUpdate};

/// Rows that one thread sums at a time.
const SUMMED_ROWS: usize = 512;

/// Gradients of some rows of a window.
#[derive(Default)]
pub(crate) struct RowGradients {
    tables: Vec<TableGradients>,
}

/// The gradients of one table.
#[derive(Default)]
struct TableGradients {
    /// Places of the rows in the window, ascending.
    places: Vec<u32>,
    /// Elements of a gradient.
    dim: usize,
    /// The gradients, end to end.
    values: Vec<f32>,
}

impl RowGradients {
    /// Finds the places of the rows that a batch, or a part of one, uses, and makes room for their gradients.
    pub(crate) fn place(&mut self, window: &Window, casting: &Casting, shapes: &[RecordShape]) {
        self.tables.resize_with(shapes.len(), TableGradients::default);
        self.tables.par_iter_mut().zip(shapes).enumerate().for_each(|(t, (table, shape))| {
            window.place(t, casting, &mut table.places);
            table.dim = shape.dim;
            table.values.resize(table.places.len() * shape.dim, 0.0);
        });
    }

    /// Computes the gradients of the last backward pass, times `scale`.
    pub(crate) fn coalesce(&mut self, update: &RowUpdate<'_>, casting: &Casting, scale: f32) {
        self.tables.par_iter_mut().zip(casting.tables()).for_each(|(table, casted)| {
            give_way();
            update.coalesce(casted, table.dim, &mut table.values);
            if scale != 1.0 {
                table.values.iter_mut().for_each(|g| *g *= scale);
            }
        });
    }

    /// Sets the gradients to the sums over `parts`, in the order of `parts`. The places must already be the
    /// union of the places of `parts`.
    pub(crate) fn sum(&mut self, parts: &[&Self]) {
        let blocks =
            self.tables.iter_mut().enumerate().flat_map(|(t, TableGradients { places, dim, values })| {
                let (rows, elements) = (places.chunks(SUMMED_ROWS), values.chunks_mut(SUMMED_ROWS * *dim));
                let dim = *dim;
                rows.zip(elements).map(move |(places, values)| (t, dim, places, values))
            });
        let blocks: Vec<_> = blocks.collect();
        blocks.into_par_iter().for_each(|(t, dim, places, values)| {
            give_way();
            let mut parts: Vec<_> = parts.iter().map(|part| part.tables[t].from(places[0])).collect();
            vectorise(|| sum_rows(places, values.chunks_exact_mut(dim), &mut parts));
        });
    }

    /// Updates the rows in a cache, one table per job.
    pub(crate) fn update(&self, cached: Vec<CachedMut<'_>>, shapes: &[RecordShape], step: &Step<f32>) {
        let tables = cached.into_par_iter().zip(&self.tables).zip(shapes);
        tables.for_each(|((CachedMut { records, words }, table), shape)| {
            give_way();
            vectorise(|| {
                for (&place, grad) in table.places.iter().zip(table.values.chunks_exact(table.dim)) {
                    let record = &mut records[place as usize * words..][..words];
                    shape.cut(record).update(step, grad);
                }
            });
        });
    }

    pub(crate) fn places(&self, t: usize) -> &[u32] {
        &self.tables[t].places
    }

    /// Where the record of each row is in a cache.
    pub(crate) fn records<'a>(&'a self, window: &'a Window) -> impl Iterator<Item = RecordSpan> + 'a {
        let tables = self.tables.iter().enumerate();
        tables.flat_map(move |(t, table)| table.places.iter().map(move |&place| window.record(t, place)))
    }
}

impl TableGradients {
    /// All places from `place` on, and their gradients.
    fn from(&self, place: u32) -> (&[u32], &[f32]) {
        let at = self.places.partition_point(|&other| other < place);
        (&self.places[at..], &self.values[at * self.dim..])
    }
}

/// Sums the gradients of each row of `places` over all parts. No part may begin before `places[0]`.
#[inline(always)]
fn sum_rows<'v>(places: &[u32], values: impl Iterator<Item = &'v mut [f32]>, parts: &mut [(&[u32], &[f32])]) {
    for (place, sum) in places.iter().zip(values) {
        let mut first = true;
        for (theirs, grads) in parts.iter_mut().filter(|(theirs, _)| theirs.first() == Some(place)) {
            let (grad, rest) = grads.split_at(sum.len());
            if first {
                sum.copy_from_slice(grad);
            } else {
                sum.iter_mut().zip(grad).for_each(|(sum, g)| *sum += *g);
            }
            (first, *theirs, *grads) = (false, &theirs[1..], rest);
        }
    }
}
