//! The input of [`super::write()`]: the contents of a version, and their check against the schema.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use super::format::{Base, KEYS, TrainingTotals, WEIGHT};
use super::snapshot::parse_schema;
use super::version_files::{DENSE, MODEL, table_file};
use super::{RecordLayout, StateShape, StoreError, Table, check_name};
use crate::schema::{self, Schema};
use crate::types::{Element, TableId, Version};

/// The contents of a version.
#[derive(Clone, Debug, Default)]
pub struct Contents<'a> {
    /// The text of `model.toml`, stored unchanged.
    pub model_toml: &'a str,
    /// Whether the version is full or a delta, and which number it gets.
    pub numbering: Numbering,
    /// Dense weights.
    pub dense: Vec<DenseTensor<'a>>,
    /// One entry per table of the schema, in schema order. Rows are f32, or already of the element type that
    /// the schema declares. f32 rows are encoded while they are written.
    pub tables: Vec<TableRows<'a>>,
    /// What training needs to continue. With it, the optimizer state of the rows is written too, and f32 rows
    /// where encoding rounds them.
    pub checkpoint: Option<Checkpoint<'a>>,
    /// How far training has come.
    pub training: Option<TrainingTotals>,
    /// Figures of training or validation, by name. Those that are not finite are left out.
    pub quality: BTreeMap<String, f64>,
    /// Notes of the writer, such as the optimizer.
    pub metadata: BTreeMap<String, String>,
}

/// Which number a version gets, and whether it is a full version or a delta.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numbering {
    /// A full version with the number after the highest that a version of the model has had.
    #[default]
    Next,
    /// As `Next`, but above this number, even if the version with this number is no longer on disk.
    Above(Version),
    /// As `Next`, but the version is refused unless this is the highest version on disk when it gets its
    /// number.
    OnlyAfter(Version),
    /// A delta of this version, with the next number. It is refused unless this is the highest version.
    DeltaOf(Base),
}

impl Numbering {
    /// The version that a delta changes; `None` for a full version.
    #[must_use]
    pub(crate) fn base(self) -> Option<Base> {
        match self {
            Self::DeltaOf(base) => Some(base),
            Self::Next | Self::Above(_) | Self::OnlyAfter(_) => None,
        }
    }
}

/// What training needs to continue, besides the tables.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint<'a> {
    /// Optimizer state of the dense weights.
    pub dense_states: Vec<DenseTensor<'a>>,
    /// The position of training in its data, as JSON.
    pub cursor: Option<&'a str>,
}

/// A table to write. The bytes of the version do not depend on the variant.
#[derive(Clone, Copy, Debug)]
pub enum TableRows<'a> {
    /// In memory, or mapped.
    Table(&'a Table),
    /// A table of a source, read in chunks: once for the weights and once for each state.
    Source(&'a dyn RowSource, TableId),
    /// In a delta: the numbers of the changed rows, ascending, and a source's table of only these rows, in
    /// the same order.
    Changed(&'a [u64], &'a dyn RowSource, TableId),
}

/// Tables that are read a chunk at a time because they may exceed memory, such as the trainer's working file.
/// No row of a table may be written while one of these methods reads it.
pub trait RowSource: fmt::Debug + Sync {
    /// The shape of a table.
    ///
    /// # Errors
    /// [`StoreError::Working`] when the table does not exist.
    fn shape(&self, table: TableId) -> Result<SourceShape<'_>, StoreError>;

    /// Calls `take` for each chunk of rows in ascending order, with the number of the first row and the
    /// records of all rows of the chunk. A record is the weights of a row, followed by each of its states.
    ///
    /// # Errors
    /// [`StoreError::Working`] when the table does not exist, errors of the file system, and those of `take`.
    fn for_each_chunk(&self, table: TableId, take: &mut TakeChunk<'_>) -> Result<(), StoreError>;

    /// The first row with a weight or a state that is not finite.
    ///
    /// # Errors
    /// [`StoreError::Working`] when the table does not exist, and errors of the file system.
    fn first_not_finite(&self, table: TableId) -> Result<Option<u64>, StoreError>;
}

/// Receives the number of a chunk's first row, and the records of the chunk.
pub(crate) type TakeChunk<'a> = dyn FnMut(u64, &[f32]) -> Result<(), StoreError> + 'a;

/// The shape of a table to write.
#[derive(Clone, Debug)]
pub struct SourceShape<'a> {
    /// Number of rows.
    pub rows: u64,
    /// Element type of the weights. A [`RowSource`] has f32 weights.
    pub element: Element,
    /// The weights and the states of a row.
    pub record: RecordLayout<'a>,
}

impl<'a> From<&'a Table> for TableRows<'a> {
    fn from(table: &'a Table) -> Self {
        Self::Table(table)
    }
}

/// A dense tensor to write.
#[derive(Clone, Debug)]
pub struct DenseTensor<'a> {
    /// Unique among the dense tensors.
    pub name: String,
    /// Elements along each axis, slowest first.
    pub shape: Vec<usize>,
    /// Row-major.
    pub values: &'a [f32],
}

impl<'a> TableRows<'a> {
    pub(super) fn shape(self) -> Result<SourceShape<'a>, StoreError> {
        match self {
            Self::Table(table) => Ok(SourceShape {
                rows: table.rows(),
                element: table.element(),
                record: table.record_layout(),
            }),
            Self::Source(source, table) | Self::Changed(_, source, table) => source.shape(table),
        }
    }

    /// The changed rows of a delta.
    pub(super) fn changed(self) -> Option<&'a [u64]> {
        match self {
            Self::Changed(rows, ..) => Some(rows),
            Self::Table(_) | Self::Source(..) => None,
        }
    }
}

impl Contents<'_> {
    /// Parses the schema and checks that all contents match it.
    pub(crate) fn checked(&self) -> Result<Schema, StoreError> {
        let schema = parse_schema(self.model_toml)
            .map_err(|reason| StoreError::Schema { path: PathBuf::from(MODEL), reason })?;
        if self.tables.len() != schema.tables.len() {
            return Err(StoreError::Tables { expected: schema.tables.len(), got: self.tables.len() });
        }
        for (declared, &rows) in schema.tables.iter().zip(&self.tables) {
            check_name("table", &declared.name)?;
            self.check_table(declared, rows)?;
        }
        self.check_dense()?;
        Ok(schema)
    }

    /// Checks that a table has the rows, the shape and the states that the schema declares.
    fn check_table(&self, declared: &schema::TableSchema, rows: TableRows<'_>) -> Result<(), StoreError> {
        let refused = |tensor, expected, got| Err(mismatch(declared, tensor, expected, got));
        let (stored, changed) = (declared.stored_rows(), rows.changed());
        let is_delta = self.numbering.base().is_some();
        if changed.is_some() != is_delta {
            let names = ["all rows, as in every full version", "changed rows, as in every delta"];
            let name = |delta: bool| names[usize::from(delta)].to_owned();
            return refused(WEIGHT, name(is_delta), name(changed.is_some()));
        }
        if let Some(Err(got)) = changed.map(|rows| check_ascending(rows, stored)) {
            return refused(KEYS, format!("ascending rows below {stored}"), got);
        }
        let shape = rows.shape()?;
        let rows = changed.map_or(stored, |rows| rows.len() as u64);
        let (expected, got) = ([rows, declared.dim as u64], [shape.rows, shape.record.dim as u64]);
        if expected != got {
            return refused(WEIGHT, format!("shape {expected:?}"), format!("shape {got:?}"));
        }
        if ![Element::F32, declared.element].contains(&shape.element) {
            return refused(WEIGHT, format!("f32 or {}", declared.element), shape.element.to_string());
        }
        check_states(declared, &shape.record)
    }

    /// Checks that dense tensors have the elements of their shapes.
    fn check_dense(&self) -> Result<(), StoreError> {
        let states = self.checkpoint.iter().flat_map(|checkpoint| &checkpoint.dense_states);
        for tensor in self.dense.iter().chain(states) {
            let elements = tensor.shape.iter().try_fold(1_usize, |n, &axis| n.checked_mul(axis));
            if elements != Some(tensor.values.len()) {
                return Err(StoreError::Tensor {
                    path: PathBuf::from(DENSE),
                    tensor: tensor.name.clone(),
                    expected: format!("elements for shape {:?}", tensor.shape),
                    got: tensor.values.len().to_string(),
                });
            }
        }
        Ok(())
    }
}

/// Checks the names and widths of a table's states.
fn check_states(declared: &schema::TableSchema, record: &RecordLayout<'_>) -> Result<(), StoreError> {
    for &StateShape { name: state, width } in &record.states {
        if state == KEYS || state == WEIGHT {
            let expected = "a name that is not reserved".to_owned();
            return Err(mismatch(declared, state, expected, "a reserved name".to_owned()));
        }
        if width != 1 && width != record.dim {
            let expected = format!("width {} or 1", record.dim);
            return Err(mismatch(declared, state, expected, format!("width {width}")));
        }
    }
    Ok(())
}

/// A tensor of a table is not as the schema declares.
fn mismatch(declared: &schema::TableSchema, tensor: &str, expected: String, got: String) -> StoreError {
    let path = PathBuf::from(table_file(&declared.name));
    StoreError::Tensor { path, tensor: tensor.to_owned(), expected, got }
}

/// Checks that rows ascend and are below `rows`. The error says what was found instead.
pub(crate) fn check_ascending(changed: &[u64], rows: u64) -> Result<(), String> {
    if let Some(pair) = changed.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(format!("row {} after row {}", pair[1], pair[0]));
    }
    changed.last().filter(|&&last| last >= rows).map_or(Ok(()), |last| Err(format!("row {last}")))
}

#[cfg(test)]
mod tests;
