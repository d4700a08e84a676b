//! A learner's first values, and its way into a version.
//!
//! A version holds everything that a step reads: dense weights and rows, and the optimizer's state
//! of both, so that training can be resumed from it. State of a dense tensor lies beside it, as
//! `optimizer.<state>.<tensor>`.

use std::collections::BTreeMap;
use std::path::Path;

use super::TrainError;
use super::optim::Optimizer;
use super::train::{Learner, Parts, zeroed_states};
use crate::model::Model;
use crate::schema::Schema;
use crate::store::{Contents, DenseTensor, PlainMemory, Table, Uniform, table_code, write};
use crate::types::Version;

/// A learner with fresh weights: dense ones as the model draws them, rows uniform within
/// `sqrt(1 / rows)` of zero, all a pure function of the seed.
///
/// # Errors
/// [`TrainError::Memory`] when the tables do not fit.
pub fn initialise(schema: &Schema, optimizer: Optimizer, seed: u64) -> Result<Learner, TrainError> {
    let model = Model::new(schema);
    let weights = model.initialise(seed);
    let dense_states = zeroed_states(optimizer.kind, weights.values.len());
    let tables = schema.tables.iter().map(|shape| {
        let width = |rowwise| if rowwise { 1 } else { shape.dim };
        let states: Vec<_> = optimizer.kind.row_states().iter().map(|s| (s.name, width(s.rowwise))).collect();
        let mut table = Table::zeroed(&PlainMemory, shape.rows, shape.dim, &states)?;
        let uniform = Uniform {
            seed,
            table_code: table_code(&shape.name),
            bound: (1.0 / shape.rows as f64).sqrt() as f32,
        };
        if let Some(rows) = table.rows_mut() {
            uniform.table(shape.dim, rows);
        }
        Ok(table)
    });
    let tables = tables.collect::<Result<_, TrainError>>()?;
    let schema = schema.clone();
    Ok(Learner::new(Parts { schema, model, weights, dense_states, tables, optimizer, steps: 0 }))
}

impl Learner {
    /// Writes a new version of the model: the highest number there is, plus 1.
    ///
    /// # Errors
    /// [`TrainError::Store`]; earlier versions are untouched.
    pub fn save(&self, models: &Path, name: &str) -> Result<Version, TrainError> {
        let parameters = self.model().parameters();
        let states = self.optimizer().kind.dense().row_states().iter().zip(self.dense_states());
        let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for p in parameters {
            tensors.push((p.name.clone(), p.shape.clone(), p.read(&self.weights().values)));
        }
        for (shape, state) in states {
            for p in parameters {
                let name = format!("optimizer.{}.{}", shape.name, p.name);
                tensors.push((name, p.shape.clone(), p.read(state)));
            }
        }
        let dense = tensors.iter().map(|(name, shape, values)| DenseTensor {
            name: name.clone(),
            shape: shape.clone(),
            values,
        });
        let metadata = [
            ("optimizer", self.optimizer().kind.to_string()),
            ("lr", self.optimizer().lr.to_string()),
            ("eps", self.optimizer().eps.to_string()),
            ("steps", self.steps().to_string()),
        ];
        let metadata: BTreeMap<_, _> = metadata.map(|(key, value)| (key.to_owned(), value)).into();
        let model_toml = &self.schema().to_toml();
        let tables = self.tables().iter().collect();
        Ok(write(models, name, &Contents { model_toml, dense: dense.collect(), tables, metadata })?)
    }
}
