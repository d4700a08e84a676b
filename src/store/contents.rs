//! What a version is made of: its contents, whether they are of their schema, and the tensors of a table's file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use rayon::prelude::*;

use super::format::{self, Dtype};
use super::snapshot::{DENSE, KEYS, MODEL, WEIGHT, parse_schema, table_file};
use super::{BadRow, StoreError, Table, check_name};
use crate::rowlog::WorkingFile;
use crate::schema::{self, Schema};
use crate::types::{Element, TableId};

/// Elements that one thread encodes at a time.
const PIECE_ELEMENTS: usize = 1 << 16;

/// Everything that makes a version.
#[derive(Clone, Debug, Default)]
pub struct Contents<'a> {
    /// The schema's text, kept as it is.
    pub model_toml: &'a str,
    /// Dense weights, and their optimizer state under names of its own.
    pub dense: Vec<DenseTensor<'a>>,
    /// One table for each of the schema's, in its order: of f32, or of the schema's element type already.
    /// Rows of f32 are encoded as they are written, and where that rounds them their table is written
    /// without its optimizer state, which is of the f32 ones.
    pub tables: Vec<Rows<'a>>,
    /// Anything to note, such as how many steps were trained.
    pub metadata: BTreeMap<String, String>,
}

/// A table to write. Where it lies makes no difference to the bytes of the version.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// In memory, or mapped.
    Table(&'a Table),
    /// In a working file: read a chunk at a time, once for the weights and once for each state. No row of
    /// it may be written meanwhile.
    Working(&'a WorkingFile, TableId),
}

impl<'a> From<&'a Table> for Rows<'a> {
    fn from(table: &'a Table) -> Self {
        Self::Table(table)
    }
}

/// A dense tensor to write.
#[derive(Clone, Debug)]
pub struct DenseTensor<'a> {
    /// Its name, unique among them.
    pub name: String,
    /// Elements along each axis, slowest first.
    pub shape: Vec<usize>,
    /// The elements, row-major.
    pub values: &'a [f32],
}

/// What a table is, wherever it lies.
struct Shape<'a> {
    rows: u64,
    dim: usize,
    element: Element,
    /// Names of the states, and elements a row of each.
    states: Vec<(&'a str, usize)>,
}

impl<'a> Rows<'a> {
    fn shape(self) -> Result<Shape<'a>, StoreError> {
        Ok(match self {
            Self::Table(table) => Shape {
                rows: table.rows(),
                dim: table.dim(),
                element: table.element(),
                states: table.states().iter().map(|state| (state.name(), state.width())).collect(),
            },
            Self::Working(file, table) => {
                let table = file.table(table)?;
                let (rows, dim, states) = (table.rows(), table.dim(), table.states().to_vec());
                Shape { rows, dim, element: Element::F32, states }
            }
        })
    }
}

impl Contents<'_> {
    /// The schema, once everything here is of its shape.
    pub(crate) fn checked(&self) -> Result<Schema, StoreError> {
        let schema = parse_schema(self.model_toml)
            .map_err(|reason| StoreError::Schema { path: PathBuf::from(MODEL), reason })?;
        if self.tables.len() != schema.tables.len() {
            return Err(StoreError::Tables { expected: schema.tables.len(), got: self.tables.len() });
        }
        for (declared, table) in schema.tables.iter().zip(&self.tables) {
            check_name("table", &declared.name)?;
            let mismatch = |tensor: &str, expected: String, got: String| StoreError::Tensor {
                path: PathBuf::from(table_file(&declared.name)),
                tensor: tensor.to_owned(),
                expected,
                got,
            };
            let table = table.shape()?;
            let (expected, got) =
                ([declared.stored_rows(), declared.dim as u64], [table.rows, table.dim as u64]);
            if expected != got {
                return Err(mismatch(WEIGHT, format!("shape {expected:?}"), format!("shape {got:?}")));
            }
            if ![Element::F32, declared.element].contains(&table.element) {
                let got = table.element.to_string();
                return Err(mismatch(WEIGHT, format!("f32 or {}", declared.element), got));
            }
            for (state, width) in table.states {
                if state == KEYS || state == WEIGHT {
                    return Err(mismatch(state, "another name".to_owned(), "a reserved one".to_owned()));
                }
                if width != 1 && width != table.dim {
                    let expected = format!("width {} or 1", table.dim);
                    return Err(mismatch(state, expected, format!("width {}", width)));
                }
            }
        }
        for tensor in &self.dense {
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
        Ok(schema)
    }
}

/// A tensor of a file.
pub(crate) struct Tensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Data<'a>,
}

/// The bytes of a tensor.
pub(crate) enum Data<'a> {
    Bytes(&'a [u8]),
    /// The table's rows, encoded as they are written.
    Encoded(&'a Table, Element),
    /// Read and encoded as they are written.
    Streamed(Columns<'a>),
}

/// Some columns of the records of a working file's table, in a type of element.
pub(crate) struct Columns<'a> {
    pub(crate) file: &'a WorkingFile,
    pub(crate) table: TableId,
    /// Words of a record.
    width: usize,
    columns: Range<usize>,
    element: Element,
}

/// The tensors of a table's file.
pub(crate) fn table_tensors<'a>(
    declared: &schema::Table,
    rows: Rows<'a>,
) -> Result<Vec<Tensor<'a>>, StoreError> {
    let shape = rows.shape()?;
    let (dtype, row_width) = format::weight_type(declared.element, shape.dim);
    let width = shape.dim + shape.states.iter().map(|(_, width)| width).sum::<usize>();
    let streamed =
        |file, table, columns, element| Data::Streamed(Columns { file, table, width, columns, element });
    let encoded = shape.element != declared.element;
    let data = match rows {
        Rows::Table(table) if encoded => Data::Encoded(table, declared.element),
        Rows::Table(table) => Data::Bytes(table.as_bytes()),
        Rows::Working(file, table) => streamed(file, table, 0..shape.dim, declared.element),
    };
    let mut tensors = vec![Tensor { name: WEIGHT, dtype, shape: vec![shape.rows, row_width], data }];
    let mut begin = shape.dim;
    for (i, &(name, width)) in shape.states.iter().enumerate().filter(|_| !encoded) {
        let data = match rows {
            Rows::Table(table) => Data::Bytes(bytemuck::cast_slice(table.states()[i].as_slice())),
            Rows::Working(file, table) => streamed(file, table, begin..begin + width, Element::F32),
        };
        begin += width;
        tensors.push(Tensor { name, dtype: Dtype::F32, shape: vec![shape.rows, width as u64], data });
    }
    Ok(tensors)
}

impl Columns<'_> {
    /// Writes these columns of the records from row `first` on over `out`.
    ///
    /// # Errors
    /// [`BadRow`] with the first row that the type of element cannot hold. f32 holds any.
    pub(crate) fn encode(&self, first: u64, records: &[f32], out: &mut Vec<u8>) -> Result<(), BadRow> {
        let (width, element) = (self.width.max(1), self.element);
        let row_bytes = element.row_bytes(self.columns.len()).max(1);
        out.resize(records.len() / width * row_bytes, 0);
        let piece_rows = PIECE_ELEMENTS.div_ceil(width);
        let pieces = records.par_chunks(piece_rows * width).zip(out.par_chunks_mut(piece_rows * row_bytes));
        let encoded = pieces.enumerate().map(|(piece, (records, out))| {
            let rows = first + (piece * piece_rows) as u64..;
            let records = records.chunks_exact(width).zip(out.chunks_exact_mut(row_bytes));
            for (row, (record, out)) in rows.zip(records) {
                let values = &record[self.columns.clone()];
                match element {
                    Element::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
                    _ => element.encode(values, out).map_err(|reason| BadRow { row, reason })?,
                }
            }
            Ok(())
        });
        // All of them, and then the first that failed in the order of rows.
        encoded.collect::<Vec<_>>().into_iter().collect()
    }
}

#[cfg(test)]
mod tests;
