//! How a model in training is saved as a version.
//!
//! A version holds everything that a step reads: dense weights, f32 rows, and the optimizer state of both, so
//! that training can resume from it. The state of a dense tensor is stored as `optimizer.<state>.<tensor>`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::TrainError;
use super::optim::{Betas, Optimizer, OptimizerKind};
use super::reference::ReferenceTrainer;
use super::train_state::TrainState;
use crate::model::Parameter;
use crate::schema::Schema;
use crate::store::disk::{Disk, SystemDisk};
use crate::store::{
    Checkpoint, Contents, DenseTensor, Numbering, TableRows, TrainingTotals, Written, all_finite, publish,
};
use crate::types::Version;

/// The name that the state of a dense tensor has in a version.
pub(crate) fn state_name(state: &str, tensor: &str) -> String {
    format!("optimizer.{state}.{tensor}")
}

/// A copy of a model in training except its rows, taken between two batches.
pub(crate) struct DenseCheckpoint {
    schema: Arc<Schema>,
    parameters: Vec<Parameter>,
    /// As the model has them. Their tensors are made when they are written, so that Train does not wait.
    weights: Vec<f32>,
    /// One vector per state of the dense optimizer.
    states: Vec<Vec<f32>>,
    pub training: TrainingTotals,
    optimizer: Optimizer,
}

/// A dense tensor with its name and shape.
type NamedTensor = (String, Vec<usize>, Vec<f32>);

/// The parts of a version besides a [`DenseCheckpoint`].
#[derive(Default)]
pub(crate) struct VersionParts<'a> {
    /// All rows, or the changed rows of a delta.
    pub rows: Vec<TableRows<'a>>,
    pub numbering: Numbering,
    /// The position of training in its data, as JSON.
    pub cursor: Option<&'a str>,
    /// Figures by name.
    pub quality: BTreeMap<String, f64>,
}

impl DenseCheckpoint {
    /// Writes a version.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] for weights and rows that are not finite, or whose optimizer state is not,
    /// because training could not continue from them (a step checks only the loss, which it computes before
    /// its update); and [`TrainError::Store`]. Earlier versions are untouched.
    pub(crate) fn publish(
        &self,
        disk: &dyn Disk,
        models: &Path,
        name: &str,
        parts: VersionParts<'_>,
    ) -> Result<Written, TrainError> {
        self.check_finite()?;
        for (shape, rows) in self.schema.tables.iter().zip(&parts.rows) {
            let finite = match *rows {
                // What is behind deltas was checked when its version was published.
                TableRows::Table(table) => table.newest_floats().all(all_finite),
                TableRows::Source(source, table) | TableRows::Changed(_, source, table) => {
                    source.first_not_finite(table)?.is_none()
                }
            };
            if !finite {
                let what = format!("table {:?}: a row or its optimizer state", shape.name);
                return Err(self.not_finite(what));
            }
        }
        let (weights, states) = (self.weight_tensors(), self.state_tensors());
        let contents = Contents {
            model_toml: &self.schema.to_toml(),
            numbering: parts.numbering,
            dense: named(&weights),
            tables: parts.rows,
            checkpoint: Some(Checkpoint { dense_states: named(&states), cursor: parts.cursor }),
            training: Some(self.training),
            quality: parts.quality,
            metadata: notes(self.optimizer),
        };
        Ok(publish(disk, models, name, &contents)?)
    }

    fn check_finite(&self) -> Result<(), TrainError> {
        if !all_finite(&self.weights) {
            let bad = self.parameters.iter().find(|p| !all_finite(&p.read(&self.weights)));
            let what = bad.map_or("a dense weight".to_owned(), |p| format!("weights: {:?}", p.name));
            return Err(self.not_finite(what));
        }
        let kinds = self.optimizer.kind.dense().row_states();
        match kinds.iter().zip(&self.states).find(|(_, state)| !all_finite(state)) {
            Some((kind, _)) => {
                Err(self.not_finite(format!("a dense weight's {}", state_name(kind.name, "*"))))
            }
            None => Ok(()),
        }
    }

    fn not_finite(&self, what: String) -> TrainError {
        TrainError::NotFinite { what, steps: self.training.steps, lr: self.optimizer.lr }
    }

    fn weight_tensors(&self) -> Vec<NamedTensor> {
        self.parameters.iter().map(|p| (p.name.clone(), p.shape.clone(), p.read(&self.weights))).collect()
    }

    fn state_tensors(&self) -> Vec<NamedTensor> {
        let kinds = self.optimizer.kind.dense().row_states().iter().zip(&self.states);
        let of_kind = kinds.flat_map(|(kind, values)| {
            let tensor = |p: &Parameter| (state_name(kind.name, &p.name), p.shape.clone(), p.read(values));
            self.parameters.iter().map(tensor)
        });
        of_kind.collect()
    }
}

fn named(tensors: &[NamedTensor]) -> Vec<DenseTensor<'_>> {
    tensors
        .iter()
        .map(|(name, shape, values)| DenseTensor { name: name.clone(), shape: shape.clone(), values })
        .collect()
}

/// The settings of an optimizer, for the notes of a version.
pub(crate) fn notes(optimizer: Optimizer) -> BTreeMap<String, String> {
    let Optimizer { kind, lr, eps, betas: Betas { first, second }, .. } = optimizer;
    let mut notes = vec![("optimizer", kind.to_string()), ("lr", lr.to_string()), ("eps", eps.to_string())];
    if kind == OptimizerKind::Adam {
        notes.extend([("beta1", first.to_string()), ("beta2", second.to_string())]);
    }
    notes.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

impl ReferenceTrainer {
    /// Writes a new version of the model. Its number is 1 more than the highest existing number.
    ///
    /// # Errors
    /// As [`DenseCheckpoint::publish`].
    pub fn save(&self, models: &Path, name: &str) -> Result<Version, TrainError> {
        let parts = VersionParts { rows: self.rows(), ..VersionParts::default() };
        Ok(self.state.checkpoint().publish(&SystemDisk, models, name, parts)?.base.version)
    }

    /// The rows of every table, to save.
    pub(crate) fn rows(&self) -> Vec<TableRows<'_>> {
        self.tables.iter().map(TableRows::from).collect()
    }
}

impl TrainState {
    /// Copies the dense weights and their optimizer state.
    pub(crate) fn checkpoint(&self) -> DenseCheckpoint {
        self.checkpoint_in(None)
    }

    /// As [`Self::checkpoint`], in the memory of an earlier one.
    pub(crate) fn checkpoint_in(&self, memory: Option<DenseCheckpoint>) -> DenseCheckpoint {
        let copies = memory.map(|DenseCheckpoint { weights, states, .. }| (weights, states));
        let (mut weights, mut states) = copies.unwrap_or_default();
        weights.clear();
        weights.extend_from_slice(&self.weights.values);
        states.clone_from(&self.dense_states);
        DenseCheckpoint {
            schema: self.schema.clone(),
            parameters: self.model.parameters().to_vec(),
            weights,
            states,
            training: TrainingTotals {
                steps: self.steps,
                samples: self.samples,
                last_batch_unix_ms: self.last_batch_unix_ms,
            },
            optimizer: self.optimizer,
        }
    }
}
