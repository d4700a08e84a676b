//! The first values of a model in training, and how it is saved to and resumed from a version.
//!
//! A version holds everything that a step reads: dense weights, rows, and the optimizer state of both, so
//! that training can resume from it. Rows that the schema stores in a type other than f32 are rounded when
//! the version is written, and their state is omitted. The state of a dense tensor is stored as
//! `optimizer.<state>.<tensor>`.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;

use super::TrainError;
use super::optim::{Betas, Kind, Optimizer};
use super::reference::ReferenceTrainer;
use super::train_state::{Parts, TrainState};
use crate::mem::OutOfHostMemory;
use crate::model::Model;
use crate::rowlog::{First, RowOrder, Uniform, WorkingFile, WorkingTable, table_code};
use crate::schema::{self, Schema};
use crate::store::{Contents, Dense, DenseTensor, Opened, PlainMemory, Rows, Table, write};
use crate::types::{Element, Version};

/// Values that one thread checks at a time.
const CHECKED: usize = 1 << 16;

/// A model with fresh weights, which depend only on the schema and the seed. Dense weights are those of
/// `Model::initialise`; rows are uniform within `sqrt(1 / rows)` of zero.
///
/// # Errors
/// [`TrainError::TableMemory`] when the tables do not fit in memory.
pub fn initialise(schema: &Schema, optimizer: Optimizer, seed: u64) -> Result<ReferenceTrainer, TrainError> {
    let tables = schema.tables.iter().map(|shape| {
        let states = row_states(optimizer.kind, shape.dim);
        let mut table = Table::zeroed(&PlainMemory, shape.stored_rows(), shape.dim, &states)
            .map_err(|e| table_memory(schema, optimizer.kind, shape, e))?;
        if let Some(rows) = table.rows_mut() {
            first_rows(shape, seed).table(shape.dim, rows);
        }
        Ok(table)
    });
    let tables = tables.collect::<Result<_, TrainError>>()?;
    Ok(ReferenceTrainer::new(first_state(schema, optimizer, seed), tables))
}

/// [`initialise`] with the rows in a working file in the directory `dir`. A table with a row order keeps its
/// rows in this order in the file; a table without one is a log. Only trained rows are written.
///
/// # Errors
/// [`TrainError::Store`] when the file cannot be created.
pub fn initialise_on_disk(
    schema: &Schema,
    optimizer: Optimizer,
    seed: u64,
    (dir, orders): (&Path, Vec<Option<RowOrder>>),
) -> Result<(TrainState, WorkingFile), TrainError> {
    let firsts = schema.tables.iter().map(|shape| First::Uniform(first_rows(shape, seed)));
    let file = working_file(schema, optimizer.kind, firsts, (dir, orders))?;
    Ok((TrainState::new(first_state(schema, optimizer, seed)), file))
}

/// A working file in the directory `dir` for the tables of a schema, with these first values and row orders.
fn working_file(
    schema: &Schema,
    kind: Kind,
    firsts: impl Iterator<Item = First>,
    (dir, orders): (&Path, Vec<Option<RowOrder>>),
) -> Result<WorkingFile, TrainError> {
    let orders = orders.into_iter().chain(std::iter::repeat_with(|| None));
    let tables = schema.tables.iter().zip(firsts).zip(orders).map(|((shape, first), order)| WorkingTable {
        rows: shape.stored_rows(),
        dim: shape.dim,
        states: row_states(kind, shape.dim),
        first,
        order,
    });
    Ok(WorkingFile::create(dir, tables.collect())?)
}

/// The error for a table that does not fit in memory. It names the table and the bytes of all tables.
fn table_memory(schema: &Schema, kind: Kind, shape: &schema::Table, source: OutOfHostMemory) -> TrainError {
    let bytes = |shape: &schema::Table| {
        let width = row_states(kind, shape.dim).iter().map(|(_, width)| width).sum::<usize>() + shape.dim;
        shape.stored_rows().saturating_mul((width * size_of::<f32>()) as u64)
    };
    let total = schema.tables.iter().map(bytes).fold(0, u64::saturating_add);
    TrainError::TableMemory { table: shape.name.clone(), total, source }
}

/// The first values of the rows of a table.
fn first_rows(shape: &schema::Table, seed: u64) -> Uniform {
    let bound = (1.0 / shape.stored_rows() as f64).sqrt() as f32;
    Uniform { seed, table_code: table_code(&shape.name), bound }
}

/// Fresh dense weights.
fn first_state(schema: &Schema, optimizer: Optimizer, seed: u64) -> Parts {
    let model = Model::new(schema);
    let weights = model.initialise(seed);
    let dense_states = zeroed_states(optimizer.kind, weights.values.len());
    Parts { schema: schema.clone(), model, weights, dense_states, optimizer, steps: 0 }
}

/// Resumes from a version. If the same kind of optimizer wrote it and all its rows are f32, training
/// continues as if it had not stopped, to the bit. Otherwise the optimizer state and the step count start at
/// zero, and rows of other element types are decoded to f32 with their rounding errors.
///
/// # Errors
/// [`TrainError`] for dense tensors or optimizer state that are missing or malformed, and when the tables do
/// not fit in memory.
pub(crate) fn resume(opened: Opened, optimizer: Optimizer) -> Result<ReferenceTrainer, TrainError> {
    let (parts, tables) = continued(opened, optimizer)?;
    let copies = parts.schema.tables.iter().zip(&tables).map(|(shape, table)| {
        let copied = in_f32(table, optimizer.kind);
        copied.map_err(|e| table_memory(&parts.schema, optimizer.kind, shape, e))
    });
    let copies = copies.collect::<Result<_, _>>()?;
    Ok(ReferenceTrainer::new(parts, copies))
}

/// [`resume`] with the rows in a working file, as [`initialise_on_disk`] makes it. A row is read from the
/// version until it has been trained, so the version's files stay mapped.
///
/// # Errors
/// As [`resume`], and [`TrainError::Store`] when the file cannot be created.
pub(crate) fn resume_on_disk(
    opened: Opened,
    optimizer: Optimizer,
    (dir, orders): (&Path, Vec<Option<RowOrder>>),
) -> Result<(TrainState, WorkingFile), TrainError> {
    let (parts, tables) = continued(opened, optimizer)?;
    let firsts = tables.into_iter().map(First::Version);
    let file = working_file(&parts.schema, optimizer.kind, firsts, (dir, orders))?;
    Ok((TrainState::new(parts), file))
}

/// Whether training continues from a version to the bit: the same kind of optimizer wrote it, and no row was
/// rounded.
pub(crate) fn is_exact(opened: &Opened, optimizer: Optimizer) -> bool {
    let written_by = opened.metadata.get("optimizer");
    let in_f32 = opened.schema.tables.iter().all(|table| table.element == Element::F32);
    in_f32 && written_by.is_some_and(|kind| *kind == optimizer.kind.to_string())
}

/// The state of a version except its rows, and its tables. The tables have optimizer state only if training
/// continues to the bit.
fn continued(opened: Opened, optimizer: Optimizer) -> Result<(Parts, Vec<Table>), TrainError> {
    let exact = is_exact(&opened, optimizer);
    let Opened { schema, dense, store, metadata, .. } = opened;
    let tensor = |name: &str| dense.get(name).map(|t: &Dense| (t.shape().to_vec(), t.values().to_vec()));
    let model = Model::new(&schema);
    let weights = model.read_tensors(tensor)?;
    let (tables, kind) = (store.into_tables(), optimizer.kind);
    if !exact {
        let dense_states = zeroed_states(kind, weights.values.len());
        let tables = tables.into_iter().map(Table::without_states).collect();
        return Ok((Parts { schema, model, weights, dense_states, optimizer, steps: 0 }, tables));
    }
    let steps = metadata.get("steps").and_then(|steps| steps.parse().ok());
    let steps = steps.ok_or_else(|| TrainError::State("steps".into()))?;
    let state =
        |name| model.read_tensors(|of| tensor(&state_name(name, of))).map(|state| state.values.to_vec());
    let dense_states = kind.dense().row_states().iter().map(|shape| state(shape.name));
    let dense_states = dense_states.collect::<Result<_, _>>()?;
    for (shape, table) in schema.tables.iter().zip(&tables) {
        let got = table.states().iter().map(|s| (s.name(), s.width()));
        if !got.eq(row_states(kind, shape.dim)) {
            return Err(TrainError::State(format!("tables/{}", shape.name)));
        }
    }
    Ok((Parts { schema, model, weights, dense_states, optimizer, steps }, tables))
}

/// A copy of a table in f32, with its states, or with zeroed states if it has none.
fn in_f32(table: &Table, kind: Kind) -> Result<Table, OutOfHostMemory> {
    if table.element() == Element::F32 && !table.states().is_empty() {
        return table.copied(&PlainMemory);
    }
    let states = row_states(kind, table.dim());
    let mut copy = Table::zeroed(&PlainMemory, table.rows(), table.dim(), &states)?;
    if let Some(rows) = copy.rows_mut() {
        table.decode(rows);
    }
    Ok(copy)
}

/// Names and widths of the states of a row.
pub(crate) fn row_states(kind: Kind, dim: usize) -> Vec<(&'static str, usize)> {
    kind.row_states().iter().map(|s| (s.name, if s.rowwise { 1 } else { dim })).collect()
}

/// Zeroed states of dense weights.
fn zeroed_states(kind: Kind, len: usize) -> Vec<Vec<f32>> {
    kind.dense().row_states().iter().map(|_| vec![0.0; len]).collect()
}

/// The name that the state of a dense tensor has in a version.
fn state_name(state: &str, tensor: &str) -> String {
    format!("optimizer.{state}.{tensor}")
}

impl ReferenceTrainer {
    /// Writes a new version of the model. Its number is 1 more than the highest existing number.
    ///
    /// # Errors
    /// As [`TrainState::save`].
    pub fn save(&self, models: &Path, name: &str) -> Result<Version, TrainError> {
        self.state.save(models, name, self.tables.iter().map(Rows::from).collect())
    }
}

impl TrainState {
    /// Writes a new version of the model with these tables. Its number is 1 more than the highest existing
    /// number.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] for weights or rows that are not finite, and [`TrainError::Store`]. Earlier
    /// versions are untouched.
    pub(crate) fn save(&self, models: &Path, name: &str, rows: Vec<Rows<'_>>) -> Result<Version, TrainError> {
        let parameters = self.model.parameters();
        let states = self.optimizer.kind.dense().row_states().iter().zip(&self.dense_states);
        let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for p in parameters {
            tensors.push((p.name.clone(), p.shape.clone(), p.read(&self.weights.values)));
        }
        tensors.iter().try_for_each(|(name, _, values)| self.check_finite(name, values))?;
        for (shape, rows) in self.schema.tables.iter().zip(&rows) {
            match rows {
                Rows::Table(table) => self.check_finite(&shape.name, table.values().unwrap_or_default())?,
                Rows::Source(source, table) => {
                    let finite = source.first_not_finite(*table)?.is_none();
                    finite.then_some(()).ok_or_else(|| self.not_finite(&shape.name))?;
                }
            }
        }
        for (shape, state) in states {
            for p in parameters {
                tensors.push((state_name(shape.name, &p.name), p.shape.clone(), p.read(state)));
            }
        }
        let dense = tensors.iter().map(|(name, shape, values)| DenseTensor {
            name: name.clone(),
            shape: shape.clone(),
            values,
        });
        let metadata = [
            ("optimizer", self.optimizer.kind.to_string()),
            ("lr", self.optimizer.lr.to_string()),
            ("eps", self.optimizer.eps.to_string()),
            ("steps", self.steps.to_string()),
        ];
        let mut metadata: BTreeMap<_, _> = metadata.map(|(key, value)| (key.to_owned(), value)).into();
        if self.optimizer.kind == Kind::Adam {
            let Betas { first, second } = self.optimizer.betas;
            metadata.insert("beta1".to_owned(), first.to_string());
            metadata.insert("beta2".to_owned(), second.to_string());
        }
        let model_toml = &self.schema.to_toml();
        let contents = Contents { model_toml, dense: dense.collect(), tables: rows, metadata };
        Ok(write(models, name, &contents)?)
    }

    /// Checks weights after the last step. A step checks only the loss, which it computes before its update.
    fn check_finite(&self, tensor: &str, values: &[f32]) -> Result<(), TrainError> {
        let finite = values.par_chunks(CHECKED).all(|values| values.iter().all(|value| value.is_finite()));
        if finite { Ok(()) } else { Err(self.not_finite(tensor)) }
    }

    fn not_finite(&self, tensor: &str) -> TrainError {
        TrainError::NotFinite { tensor: tensor.to_owned(), steps: self.steps, lr: self.optimizer.lr }
    }
}
