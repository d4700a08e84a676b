//! The state with which training starts: fresh values, or those of a version.

use std::collections::BTreeMap;
use std::path::Path;

use super::TrainError;
use super::checkpoint::{notes, state_name};
use super::cursor::OtherRun;
use super::optim::{Optimizer, OptimizerKind};
use super::reference::ReferenceTrainer;
use super::train_state::{TrainState, TrainStateParts};
use crate::mem::OutOfHostMemory;
use crate::model::Model;
use crate::rowlog::{First, RowOrder, Uniform, WorkingFile, WorkingTable, table_code};
use crate::schema::{self, Schema};
use crate::store::{Dense, Opened, PlainMemory, RecordLayout, Table};
use crate::types::{Element, unix_ms};

/// A model with fresh weights, which depend only on the schema and the seed. Dense weights are those of
/// `Model::initialise`; rows are uniform within `sqrt(1 / rows)` of zero.
///
/// # Errors
/// [`TrainError::TableMemory`] when the tables do not fit in memory.
pub fn initialise(schema: &Schema, optimizer: Optimizer, seed: u64) -> Result<ReferenceTrainer, TrainError> {
    let tables = schema.tables.iter().map(|shape| {
        let RecordLayout { dim, states } = optimizer.kind.record_layout(shape.dim);
        let mut table = Table::zeroed(&PlainMemory, shape.stored_rows(), dim, &states)
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
    kind: OptimizerKind,
    firsts: impl Iterator<Item = First>,
    options: WorkingFileOptions<'_>,
) -> Result<WorkingFile, TrainError> {
    let WorkingFileOptions { dir, orders } = options;
    let orders = orders.into_iter().chain(std::iter::repeat_with(|| None));
    let tables = schema.tables.iter().zip(firsts).zip(orders).map(|((shape, first), order)| WorkingTable {
        rows: shape.stored_rows(),
        record: kind.record_layout(shape.dim),
        first,
        order,
    });
    Ok(WorkingFile::create(dir, tables.collect())?)
}

/// The error for a table that does not fit in memory. It names the table and the bytes of all tables.
fn table_memory(
    schema: &Schema,
    kind: OptimizerKind,
    shape: &schema::TableSchema,
    source: OutOfHostMemory,
) -> TrainError {
    let bytes = |shape: &schema::TableSchema| {
        shape.stored_rows().saturating_mul(kind.record_layout(shape.dim).bytes() as u64)
    };
    let total = schema.tables.iter().map(bytes).fold(0, u64::saturating_add);
    TrainError::TableMemory { table: shape.name.clone(), total, source }
}

/// The first values of the rows of a table.
fn first_rows(shape: &schema::TableSchema, seed: u64) -> Uniform {
    let bound = (1.0 / shape.stored_rows() as f64).sqrt() as f32;
    Uniform { seed, table_code: table_code(&shape.name), bound }
}

/// Fresh dense weights.
fn first_state(schema: &Schema, optimizer: Optimizer, seed: u64) -> TrainStateParts {
    let model = Model::new(schema);
    let weights = model.initialise(seed);
    let dense_states = zeroed_states(optimizer.kind, weights.values.len());
    let (schema, last_batch_unix_ms) = (schema.clone(), unix_ms());
    TrainStateParts {
        schema,
        model,
        weights,
        dense_states,
        optimizer,
        steps: 0,
        samples: 0,
        last_batch_unix_ms,
    }
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
        table.element() == Element::F32 && table.record_layout() == kind.record_layout(table.dim())
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
    check_optimizer_notes(&opened.metadata, optimizer)?;
    if is_exact(opened, optimizer) {
        return Ok(());
    }
    let expected = format!("{} with its state", optimizer.kind);
    Err(OtherRun { flag: "--optimizer", expected, got: "a version without it".to_owned() })
}

/// Checks that a version with these notes was trained with the same settings of the optimizer.
///
/// # Errors
/// The flag of the first difference.
pub(crate) fn check_optimizer_notes(
    before: &BTreeMap<String, String>,
    optimizer: Optimizer,
) -> Result<(), OtherRun> {
    let now = notes(optimizer);
    let differs = |(key, flag)| {
        let (before, now) = (before.get(key)?, now.get(key)?);
        (before != now).then(|| OtherRun { flag, expected: before.clone(), got: now.clone() })
    };
    let flags = [("optimizer", "--optimizer"), ("eps", "--eps"), ("beta1", "--beta1"), ("beta2", "--beta2")];
    flags.into_iter().find_map(differs).map_or(Ok(()), Err)
}

/// The state of a version except its rows, and its tables. The tables have optimizer state only if training
/// continues to the bit.
fn continued(opened: Opened, optimizer: Optimizer) -> Result<(TrainStateParts, Vec<Table>), TrainError> {
    let exact = is_exact(&opened, optimizer);
    let Opened { schema, dense, dense_states, store, metadata, training, .. } = opened;
    let found = |name: &str| dense.get(name).or_else(|| dense_states.get(name));
    let tensor = |name: &str| found(name).map(|t: &Dense| (t.shape().to_vec(), t.values().to_vec()));
    let model = Model::new(&schema);
    let weights = model.read_tensors(tensor)?;
    let (tables, kind) = (store.into_tables(), optimizer.kind);
    let last_batch_unix_ms = training.map_or_else(unix_ms, |training| training.last_batch_unix_ms);
    let (steps, samples, dense_states, tables) = if exact {
        // Format 1 notes the steps, and does not have the samples.
        let noted = || metadata.get("steps").and_then(|steps| steps.parse().ok());
        let steps = training.map(|training| training.steps).or_else(noted);
        let steps = steps.ok_or_else(|| TrainError::State("steps".into()))?;
        let samples = training.map_or(0, |training| training.samples);
        let state =
            |name| model.read_tensors(|of| tensor(&state_name(name, of))).map(|state| state.values.to_vec());
        let dense_states = kind.dense().row_states().iter().map(|shape| state(shape.name));
        (steps, samples, dense_states.collect::<Result<_, _>>()?, tables)
    } else {
        let tables = tables.into_iter().map(Table::without_states).collect();
        (0, 0, zeroed_states(kind, weights.values.len()), tables)
    };
    let parts = TrainStateParts {
        schema,
        model,
        weights,
        dense_states,
        optimizer,
        steps,
        samples,
        last_batch_unix_ms,
    };
    Ok((parts, tables))
}

/// A copy of a table in f32, with its states, or with zeroed states if it has none.
fn in_f32(table: &Table, kind: OptimizerKind) -> Result<Table, OutOfHostMemory> {
    if table.element() == Element::F32 && !table.states().is_empty() {
        return table.copied(&PlainMemory);
    }
    let RecordLayout { dim, states } = kind.record_layout(table.dim());
    let mut copy = Table::zeroed(&PlainMemory, table.rows(), dim, &states)?;
    if let Some(rows) = copy.rows_mut() {
        table.decode(rows);
    }
    Ok(copy)
}

/// Zeroed states of dense weights.
fn zeroed_states(kind: OptimizerKind, len: usize) -> Vec<Vec<f32>> {
    kind.dense().row_states().iter().map(|_| vec![0.0; len]).collect()
}
