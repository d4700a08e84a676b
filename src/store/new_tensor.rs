//! The tensors of the table files of a version, and where their bytes come from.

use std::ops::Range;

use rayon::prelude::*;

use super::contents::{RowSource, TableRows};
use super::format::{self, Dtype, KEYS, WEIGHT};
use super::{BadRow, StateShape, StoreError, Table};
use crate::schema;
use crate::types::{Element, TableId};

/// Elements that one thread encodes at a time.
const PIECE_ELEMENTS: usize = 1 << 16;

/// A tensor to write.
pub(crate) struct NewTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: TensorData<'a>,
}

/// Where the bytes of a tensor come from.
pub(crate) enum TensorData<'a> {
    Bytes(&'a [u8]),
    /// The rows of the table, encoded in this element type while they are written.
    Encoded(&'a Table, Element),
    /// The state of this number of all rows of the table.
    State(&'a Table, usize),
    /// Some columns of a source's records, encoded while they are written.
    Streamed(Columns<'a>),
}

/// The columns of one tensor (the weights or one state) within the records of a source's table, and the
/// element type to write them in.
pub(crate) struct Columns<'a> {
    pub(crate) source: &'a dyn RowSource,
    pub(crate) table: TableId,
    /// Elements per record.
    width: usize,
    columns: Range<usize>,
    element: Element,
}

/// The tensors of a table's served file.
pub(crate) fn served_tensors<'a>(
    declared: &schema::TableSchema,
    rows: TableRows<'a>,
) -> Result<Vec<NewTensor<'a>>, StoreError> {
    let changed = rows.changed().map(|rows| NewTensor {
        name: KEYS,
        dtype: Dtype::U64,
        shape: vec![rows.len() as u64],
        data: TensorData::Bytes(bytemuck::cast_slice(rows)),
    });
    Ok(changed.into_iter().chain([weight(rows, declared.element)?]).collect())
}

/// The tensors of a table's file in the checkpoint.
pub(crate) fn checkpoint_tensors<'a>(
    declared: &schema::TableSchema,
    rows: TableRows<'a>,
) -> Result<Vec<NewTensor<'a>>, StoreError> {
    let shape = rows.shape()?;
    let mut tensors = Vec::new();
    // Rows that are not f32 were rounded before, so there is nothing more exact to keep.
    if shape.element == Element::F32 && declared.element != Element::F32 {
        tensors.push(weight(rows, Element::F32)?);
    }
    let (mut begin, record_width) = (shape.record.dim, shape.record.width());
    for (i, &StateShape { name, width }) in shape.record.states.iter().enumerate() {
        let data = match rows {
            TableRows::Table(table) => match table.as_bytes() {
                Some(_) => TensorData::Bytes(bytemuck::cast_slice(table.states()[i].as_slice())),
                None => TensorData::State(table, i),
            },
            TableRows::Source(source, table) | TableRows::Changed(_, source, table) => {
                let columns = begin..begin + width;
                TensorData::Streamed(Columns {
                    source,
                    table,
                    width: record_width,
                    columns,
                    element: Element::F32,
                })
            }
        };
        begin += width;
        tensors.push(NewTensor { name, dtype: Dtype::F32, shape: vec![shape.rows, width as u64], data });
    }
    Ok(tensors)
}

/// The rows as a tensor of this element type.
fn weight(rows: TableRows<'_>, element: Element) -> Result<NewTensor<'_>, StoreError> {
    let shape = rows.shape()?;
    let (dtype, row_width) = format::weight_type(element, shape.record.dim);
    let data = match rows {
        TableRows::Table(table) => match table.as_bytes().filter(|_| table.element() == element) {
            Some(bytes) => TensorData::Bytes(bytes),
            None => TensorData::Encoded(table, element),
        },
        TableRows::Source(source, table) | TableRows::Changed(_, source, table) => {
            let (width, columns) = (shape.record.width(), 0..shape.record.dim);
            TensorData::Streamed(Columns { source, table, width, columns, element })
        }
    };
    Ok(NewTensor { name: WEIGHT, dtype, shape: vec![shape.rows, row_width], data })
}

impl Columns<'_> {
    /// Encodes these columns of records into `out`. The first record is that of row `first`.
    ///
    /// # Errors
    /// [`BadRow`] with the first row that the element type cannot hold. f32 holds any value.
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
        // Collected first, so that the error is that of the first bad row and not of the first thread to
        // fail.
        encoded.collect::<Vec<_>>().into_iter().collect()
    }
}
