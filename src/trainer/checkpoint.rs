//! The first values of a model in training, and how it is saved to and resumed from a version.
//!
//! A version holds everything that a step reads: dense weights, f32 rows, and the optimizer state of both, so
//! that training can resume from it. The state of a dense tensor is stored as `optimizer.<state>.<tensor>`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::TrainError;
use super::cursor::OtherRun;
use super::optim::{Betas, Kind, Optimizer};
use super::reference::ReferenceTrainer;
use super::train_state::{Parts, TrainState};
use crate::mem::OutOfHostMemory;
use crate::model::{Model, Parameter};
use crate::rowlog::{First, RowOrder, Uniform, WorkingFile, WorkingTable, table_code};
use crate::schema::{self, Schema};
use crate::store::disk::{Disk, SystemDisk};
use crate::store::{
    Base, Checkpoint, Contents, Dense, DenseTensor, Opened, PlainMemory, Rows, Table, Training, Written,
    publish,
};
use crate::types::{Element, Version, unix_ms};

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

/// Where a working file is made, and how it arranges its rows.
pub struct WorkingFileOptions<'a> {
    /// Its directory.
    pub dir: &'a Path,
    /// The order of the rows of each table. A table without one, as are those at the end that are left out,
    /// is a log.
    pub orders: Vec<Option<RowOrder>>,
}

impl<'a> WorkingFileOptions<'a> {
    /// A working file in this directory in which every table is a log.
    pub(crate) fn logs(dir: &'a Path) -> Self {
        Self { dir, orders: Vec::new() }
    }
}

/// [`initialise`] with the rows in a working file. Only trained rows are written.
///
/// # Errors
/// [`TrainError::Store`] when the file cannot be created.
pub fn initialise_on_disk(
    schema: &Schema,
    optimizer: Optimizer,
    seed: u64,
    options: WorkingFileOptions<'_>,
) -> Result<(TrainState, WorkingFile), TrainError> {
    let firsts = schema.tables.iter().map(|shape| First::Uniform(first_rows(shape, seed)));
    let file = working_file(schema, optimizer.kind, firsts, options)?;
    Ok((TrainState::new(first_state(schema, optimizer, seed)), file))
}

/// A working file for the tables of a schema, with these first values.
fn working_file(
    schema: &Schema,
    kind: Kind,
    firsts: impl Iterator<Item = First>,
    options: WorkingFileOptions<'_>,
) -> Result<WorkingFile, TrainError> {
    let WorkingFileOptions { dir, orders } = options;
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
    let (schema, last_batch_unix_ms) = (schema.clone(), unix_ms());
    Parts { schema, model, weights, dense_states, optimizer, steps: 0, samples: 0, last_batch_unix_ms }
}

/// Resumes from a version that was opened for training. If the same kind of optimizer wrote it, with a
/// checkpoint, training continues as if it had not stopped, to the bit. Otherwise the optimizer state and the
/// step count start at zero, and rounded rows are decoded to f32 with their rounding errors.
///
/// # Errors
/// [`TrainError`] for dense tensors that are missing or malformed, and when the tables do
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
    options: WorkingFileOptions<'_>,
) -> Result<(TrainState, WorkingFile), TrainError> {
    let (parts, tables) = continued(opened, optimizer)?;
    let firsts = tables.into_iter().map(First::Version);
    let file = working_file(&parts.schema, optimizer.kind, firsts, options)?;
    Ok((TrainState::new(parts), file))
}

/// Whether training continues from a version to the bit: the same kind of optimizer wrote it, and it has a
/// checkpoint.
pub(crate) fn is_exact(opened: &Opened, optimizer: Optimizer) -> bool {
    let kind = optimizer.kind;
    let has_states = |table: &Table| {
        let states = table.states().iter().map(|s| (s.name(), s.width()));
        table.element() == Element::F32 && states.eq(row_states(kind, table.dim()))
    };
    let written_by = opened.metadata.get("optimizer");
    written_by.is_some_and(|by| *by == kind.to_string()) && opened.store.tables().iter().all(has_states)
}

/// Checks that an optimizer continues from a version to the bit: the version has its state, and was trained
/// with the same settings.
///
/// # Errors
/// The flag of the first difference.
pub(crate) fn check_optimizer(opened: &Opened, optimizer: Optimizer) -> Result<(), OtherRun> {
    let now = notes(optimizer);
    let differs = |(key, flag)| {
        let (before, now) = (opened.metadata.get(key)?, now.get(key)?);
        (before != now).then(|| OtherRun { flag, expected: before.clone(), got: now.clone() })
    };
    let flags = [("optimizer", "--optimizer"), ("eps", "--eps"), ("beta1", "--beta1"), ("beta2", "--beta2")];
    match flags.into_iter().find_map(differs) {
        Some(other) => Err(other),
        None if !is_exact(opened, optimizer) => {
            let expected = format!("{} with its state", optimizer.kind);
            Err(OtherRun { flag: "--optimizer", expected, got: "a version without it".to_owned() })
        }
        None => Ok(()),
    }
}

/// The state of a version except its rows, and its tables. The tables have optimizer state only if training
/// continues to the bit.
fn continued(opened: Opened, optimizer: Optimizer) -> Result<(Parts, Vec<Table>), TrainError> {
    let exact = is_exact(&opened, optimizer);
    let Opened { schema, dense, dense_states, store, metadata, training, .. } = opened;
    let found = |name: &str| dense.get(name).or_else(|| dense_states.get(name));
    let tensor = |name: &str| found(name).map(|t: &Dense| (t.shape().to_vec(), t.values().to_vec()));
    let model = Model::new(&schema);
    let weights = model.read_tensors(tensor)?;
    let (tables, kind) = (store.into_tables(), optimizer.kind);
    let last_batch_unix_ms = training.map_or_else(unix_ms, |training| training.last_batch_unix_ms);
    if !exact {
        let dense_states = zeroed_states(kind, weights.values.len());
        let tables = tables.into_iter().map(Table::without_states).collect();
        let (steps, samples) = (0, 0);
        let parts =
            Parts { schema, model, weights, dense_states, optimizer, steps, samples, last_batch_unix_ms };
        return Ok((parts, tables));
    }
    // Format 1 notes the steps, and does not have the samples.
    let noted = || metadata.get("steps").and_then(|steps| steps.parse().ok());
    let steps = training.map(|training| training.steps).or_else(noted);
    let steps = steps.ok_or_else(|| TrainError::State("steps".into()))?;
    let samples = training.map_or(0, |training| training.samples);
    let state =
        |name| model.read_tensors(|of| tensor(&state_name(name, of))).map(|state| state.values.to_vec());
    let dense_states = kind.dense().row_states().iter().map(|shape| state(shape.name));
    let dense_states = dense_states.collect::<Result<_, _>>()?;
    let parts = Parts { schema, model, weights, dense_states, optimizer, steps, samples, last_batch_unix_ms };
    Ok((parts, tables))
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

/// A copy of a model in training except its rows, taken between two batches.
pub(crate) struct DenseCheckpoint {
    schema: Arc<Schema>,
    parameters: Vec<Parameter>,
    /// As the model has them. Their tensors are made when they are written, so that Train does not wait.
    weights: Vec<f32>,
    /// One vector per state of the dense optimizer.
    states: Vec<Vec<f32>>,
    pub training: Training,
    optimizer: Optimizer,
}

/// A dense tensor with its name and shape.
type NamedTensor = (String, Vec<usize>, Vec<f32>);

/// The parts of a version besides a [`DenseCheckpoint`].
#[derive(Default)]
pub(crate) struct VersionParts<'a> {
    /// All rows, or the changed rows of a delta.
    pub rows: Vec<Rows<'a>>,
    /// The version that a delta changes.
    pub base: Option<Base>,
    /// As [`Contents::above`].
    pub above: Option<Version>,
    /// The position of training in its data, as JSON.
    pub cursor: Option<&'a str>,
    /// Figures by name.
    pub quality: BTreeMap<String, f64>,
}

impl DenseCheckpoint {
    /// Writes a version.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] for rows that are not finite, and [`TrainError::Store`]. Earlier versions
    /// are untouched.
    pub(crate) fn publish(
        &self,
        disk: &dyn Disk,
        models: &Path,
        name: &str,
        parts: VersionParts<'_>,
    ) -> Result<Written, TrainError> {
        for (shape, rows) in self.schema.tables.iter().zip(&parts.rows) {
            let finite = match *rows {
                // The base rows behind deltas were checked when their version was published.
                Rows::Table(table) => table.values().into_iter().chain(table.delta_values()).all(all_finite),
                Rows::Source(source, table) | Rows::Changed(_, source, table) => {
                    source.first_not_finite(table)?.is_none()
                }
            };
            if !finite {
                return Err(not_finite(&shape.name, self.training.steps, self.optimizer));
            }
        }
        let (weights, states) = (self.weight_tensors(), self.state_tensors());
        let contents = Contents {
            model_toml: &self.schema.to_toml(),
            base: parts.base,
            above: parts.above,
            only_after: None,
            dense: named(&weights),
            tables: parts.rows,
            checkpoint: Some(Checkpoint { dense_states: named(&states), cursor: parts.cursor }),
            training: Some(self.training),
            quality: parts.quality,
            metadata: notes(self.optimizer),
        };
        Ok(publish(disk, models, name, &contents)?)
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
fn notes(optimizer: Optimizer) -> BTreeMap<String, String> {
    let Optimizer { kind, lr, eps, betas: Betas { first, second }, .. } = optimizer;
    let mut notes = vec![("optimizer", kind.to_string()), ("lr", lr.to_string()), ("eps", eps.to_string())];
    if kind == Kind::Adam {
        notes.extend([("beta1", first.to_string()), ("beta2", second.to_string())]);
    }
    notes.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

impl ReferenceTrainer {
    /// Writes a new version of the model. Its number is 1 more than the highest existing number.
    ///
    /// # Errors
    /// As [`TrainState::checkpoint`] and [`DenseCheckpoint::publish`].
    pub fn save(&self, models: &Path, name: &str) -> Result<Version, TrainError> {
        let parts = VersionParts { rows: self.rows(), ..VersionParts::default() };
        Ok(Version(self.state.checkpoint()?.publish(&SystemDisk, models, name, parts)?.base.version))
    }

    /// The rows of every table, to save.
    pub(crate) fn rows(&self) -> Vec<Rows<'_>> {
        self.tables.iter().map(Rows::from).collect()
    }
}

impl TrainState {
    /// Copies the dense weights and their optimizer state.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] for weights that are not finite. (A step checks only the loss, which it
    /// computes before its update.)
    pub(crate) fn checkpoint(&self) -> Result<DenseCheckpoint, TrainError> {
        let (parameters, weights) = (self.model.parameters(), &self.weights.values);
        if !all_finite(weights) {
            let bad = parameters.iter().find(|p| !all_finite(&p.read(weights)));
            let name = bad.map_or("dense weights", |parameter| &parameter.name);
            return Err(not_finite(name, self.steps, self.optimizer));
        }
        Ok(DenseCheckpoint {
            schema: self.schema.clone(),
            parameters: parameters.to_vec(),
            weights: weights.to_vec(),
            states: self.dense_states.clone(),
            training: Training {
                steps: self.steps,
                samples: self.samples,
                last_batch_unix_ms: self.last_batch_unix_ms,
            },
            optimizer: self.optimizer,
        })
    }
}

fn all_finite(values: &[f32]) -> bool {
    values.par_chunks(CHECKED).all(|values| values.iter().all(|value| value.is_finite()))
}

fn not_finite(tensor: &str, steps: u64, optimizer: Optimizer) -> TrainError {
    TrainError::NotFinite { tensor: tensor.to_owned(), steps, lr: optimizer.lr }
}
