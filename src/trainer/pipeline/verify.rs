//! Verifies the pipeline on a user's own data: the sequential trainer takes every step too, and all bytes
//! are compared.
//!
//! After each step, the rows that it updated, the dense weights, and the optimizer state of both are
//! compared. After the last step every row of every table is compared. So a row that the pipeline has
//! corrupted is reported at the next step that updates it, or else at the end.

use std::fmt;

use super::super::reference::ReferenceTrainer;
use super::super::train_state::TrainState;
use super::super::{Progress, TrainError};
use super::train::{RowObserver, StepObserver, UpdatedRows};
use crate::rowlog::WorkingFile;
use crate::types::{Batch, TableId};

/// The first place where the pipeline's bytes differ from the sequential trainer's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Name of the table; `None` for a dense weight or its state.
    pub table: Option<String>,
    /// The row of the table, or the index among the dense weights.
    pub row: u64,
    /// The step after which the difference was found, counted from 1; the last step + 1 if only the final
    /// comparison found it.
    pub step: u64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.table {
            Some(table) => write!(f, "table {table:?}, row {}, step {}", self.row, self.step),
            None => write!(f, "dense weight {}, step {}", self.row, self.step),
        }
    }
}

/// Observes a pipeline and takes each of its steps with the sequential trainer.
pub(crate) struct Verifier {
    oracle: ReferenceTrainer,
    logits: Vec<f32>,
    first: Option<Difference>,
}

impl Verifier {
    /// A verifier with a trainer that starts from the same bytes as the pipeline.
    #[must_use]
    pub(crate) fn new(oracle: ReferenceTrainer) -> Self {
        Self { oracle, logits: Vec::new(), first: None }
    }

    /// The first difference so far.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn first_difference(&self) -> Option<&Difference> {
        self.first.as_ref()
    }

    /// Compares every row of the working file, after [`Pipeline::flush`](super::Pipeline::flush). Returns
    /// the first difference of the run.
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub(crate) fn finish(mut self, store: &WorkingFile) -> Result<Option<Difference>, TrainError> {
        for t in 0..self.oracle.tables().len() {
            let (table, mut different) = (TableId(t as u32), None);
            let width = store.tables()[t].width();
            store.for_each_chunk(table, |first, records| {
                for (row, record) in (first..).zip(records.chunks_exact(width.max(1))) {
                    if different.is_none() && !same_row(&self.oracle, table, row, record) {
                        different = Some(row);
                    }
                }
                Ok(())
            })?;
            if let Some(row) = different {
                self.differs(Some(table), row, self.oracle.steps() + 1);
            }
        }
        Ok(self.first)
    }

    fn differs(&mut self, table: Option<TableId>, row: u64, step: u64) {
        let name = table.map(|table| self.oracle.schema().tables[table.index()].name.clone());
        self.first.get_or_insert(Difference { table: name, row, step });
    }
}

impl StepObserver for Verifier {
    fn learnt(&mut self, batch: &Batch, progress: &Progress<'_>) -> Result<(), TrainError> {
        self.oracle.step(batch, progress.labels, &mut self.logits)?;
        Ok(())
    }

    fn row_observer(&mut self) -> Option<&mut dyn RowObserver> {
        if self.first.is_none() { Some(self) } else { None }
    }

    fn stepped(&mut self, train_state: &TrainState) -> Result<(), TrainError> {
        let ours = std::iter::once(&train_state.weights.values[..])
            .chain(train_state.dense_states.iter().map(|s| &s[..]));
        let theirs = std::iter::once(&self.oracle.weights().values[..])
            .chain(self.oracle.dense_states().iter().map(|s| &s[..]));
        let different =
            |(a, b): (&[f32], &[f32])| a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
        if let Some(at) = ours.zip(theirs).find_map(different) {
            self.differs(None, at as u64, self.oracle.steps());
        }
        Ok(())
    }
}

impl RowObserver for Verifier {
    fn rows(&mut self, tables: &[UpdatedRows<'_>]) {
        for &UpdatedRows { table, rows, ref record } in tables {
            let different = |(k, &row): (usize, &u64)| !same_row(&self.oracle, table, row, record(k));
            if let Some((_, &row)) = rows.iter().enumerate().find(|&row| different(row)) {
                self.differs(Some(table), row, self.oracle.steps());
            }
        }
    }
}

/// Whether the record equals the sequential trainer's row and state, bit for bit.
fn same_row(oracle: &ReferenceTrainer, table: TableId, row: u64, record: &[f32]) -> bool {
    let table = &oracle.tables()[table.index()];
    let state = |state: &'_ crate::store::State| {
        let width = state.width();
        state.as_slice()[row as usize * width..][..width].to_vec()
    };
    let states = table.states().iter().flat_map(state);
    let weights = table.row_values(row).unwrap_or_default().iter().copied();
    weights.chain(states).map(f32::to_bits).eq(record.iter().map(|x| x.to_bits()))
}

#[cfg(test)]
mod tests;
