//! The rows of a table in one version: collected from the tensors of its files, whose names, types and shapes
//! must be those of the schema.

use std::path::{Path, PathBuf};

use super::StoreError;
use super::bytes::{Bytes, FileBytes};
use super::contents::check_ascending;
use super::finite::{all_finite, not_finite};
use super::format::{self, Dtype, FormatError, KEYS, WEIGHT};
use super::snapshot::Purpose;
use super::table::State;
use crate::schema;
use crate::types::Element;

/// The rows of a table in one version.
pub(crate) struct TableParts {
    /// The changed rows of a delta; `None` in a full version, which has all rows.
    pub keys: Option<Bytes>,
    pub element: Element,
    pub weight: Bytes,
    pub states: Vec<State>,
}

impl TableParts {
    /// How many rows a delta changed; `None` for a full version.
    pub(crate) fn rows(&self) -> Option<usize> {
        self.keys.as_ref().map(|keys| keys.as_slice().len() / size_of::<u64>())
    }
}

/// A file that was checked, and its tensors.
pub(super) type TensorFile = (PathBuf, FileBytes, Vec<format::Tensor>);

/// One of the two files of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableFile {
    /// What is served: rows of the table's element type, and the keys of a delta. In format 1, also the
    /// states.
    Served,
    /// What training needs besides: optimizer state, and the f32 rows if the served ones are rounded.
    Checkpoint,
}

/// Collects the tensors of a table from its files.
pub(super) struct TableReader<'a> {
    declared: &'a schema::TableSchema,
    delta: bool,
    /// The served file, for errors about missing tensors.
    pub path: PathBuf,
    /// The file that was read last.
    last: PathBuf,
    rows: u64,
    keys: Option<Bytes>,
    served: Option<Bytes>,
    /// The rows as trained, if the served ones are rounded.
    trained: Option<Bytes>,
    states: Vec<State>,
}

impl<'a> TableReader<'a> {
    pub(super) fn new(declared: &'a schema::TableSchema, delta: bool, path: PathBuf) -> Self {
        let rows = declared.stored_rows();
        let (last, states) = (path.clone(), Vec::new());
        Self { declared, delta, path, last, rows, keys: None, served: None, trained: None, states }
    }

    /// Reads a file, the served one first.
    pub(super) fn read(
        &mut self,
        (path, data, mut tensors): TensorFile,
        part: TableFile,
    ) -> Result<(), StoreError> {
        // The keys give the number of rows of the other tensors.
        tensors.sort_by_key(|tensor| tensor.name != KEYS);
        for tensor in tensors {
            match tensor.name.as_str() {
                KEYS => self.read_keys(&path, &data, &tensor, part)?,
                WEIGHT => self.read_weight(&path, &data, tensor, part)?,
                _ => self.read_state(&path, &data, tensor)?,
            }
        }
        self.last = path;
        Ok(())
    }

    fn read_keys(
        &mut self,
        path: &Path,
        data: &FileBytes,
        tensor: &format::Tensor,
        part: TableFile,
    ) -> Result<(), StoreError> {
        let wrong = |expected: String, got: String| StoreError::Tensor {
            path: path.to_owned(),
            tensor: KEYS.to_owned(),
            expected,
            got,
        };
        if !self.delta || part == TableFile::Checkpoint {
            let place = if self.delta { "the checkpoint of a delta" } else { "a full version" };
            return Err(wrong(format!("no tensor of this name in {place}"), "one".to_owned()));
        }
        expect_dtype(path, tensor, Dtype::U64)?;
        let [rows] = tensor.shape[..] else {
            return Err(wrong("shape [ROWS]".to_owned(), format!("shape {:?}", tensor.shape)));
        };
        let keys = Bytes::of_file(data, tensor.begin as usize..tensor.end as usize);
        let keys = keys.filter(|keys| bytemuck::try_cast_slice::<u8, u64>(keys.as_slice()).is_ok());
        let keys = keys.ok_or_else(|| unaligned(path, tensor))?;
        let limit = self.declared.stored_rows();
        check_ascending(bytemuck::cast_slice(keys.as_slice()), limit)
            .map_err(|got| wrong(format!("ascending rows below {limit}"), got))?;
        (self.rows, self.keys) = (rows, Some(keys));
        Ok(())
    }

    fn read_weight(
        &mut self,
        path: &Path,
        data: &FileBytes,
        tensor: format::Tensor,
        part: TableFile,
    ) -> Result<(), StoreError> {
        let element = match part {
            TableFile::Served => self.declared.element,
            TableFile::Checkpoint => Element::F32,
        };
        let (dtype, width) = format::weight_type(element, self.declared.dim);
        expect_dtype(path, &tensor, dtype)?;
        self.expect_shape(path, &tensor, &[width])?;
        let bytes = match element {
            Element::F32 => floats(path, data, &tensor)?,
            // The header parser has checked that the tensor is within the file.
            _ => Bytes::of_file(data, tensor.begin as usize..tensor.end as usize)
                .ok_or_else(|| unaligned(path, &tensor))?,
        };
        match part {
            TableFile::Served => self.served = Some(bytes),
            TableFile::Checkpoint => self.trained = Some(bytes),
        }
        Ok(())
    }

    fn read_state(
        &mut self,
        path: &Path,
        data: &FileBytes,
        tensor: format::Tensor,
    ) -> Result<(), StoreError> {
        expect_dtype(path, &tensor, Dtype::F32)?;
        let width = self.expect_shape(path, &tensor, &[self.declared.dim as u64, 1])?;
        let data = floats(path, data, &tensor)?;
        self.states.push(State::new(tensor.name, width as usize, data));
        Ok(())
    }

    /// Checks the shape of a tensor with one of these widths. Returns the width.
    fn expect_shape(&self, path: &Path, tensor: &format::Tensor, widths: &[u64]) -> Result<u64, StoreError> {
        if let [rows, width] = tensor.shape[..]
            && rows == self.rows
            && widths.contains(&width)
        {
            return Ok(width);
        }
        let shapes: Vec<_> = widths.iter().map(|width| format!("[{}, {width}]", self.rows)).collect();
        let expected = format!("shape {}", shapes.join(" or "));
        let got = format!("shape {:?}", tensor.shape);
        Err(StoreError::Tensor { path: path.to_owned(), tensor: tensor.name.clone(), expected, got })
    }

    /// The row at this position of the file.
    pub(super) fn row_at(&self, position: u64) -> u64 {
        let keys: &[u64] = self.keys.as_ref().map_or(&[], |keys| bytemuck::cast_slice(keys.as_slice()));
        keys.get(position as usize).copied().unwrap_or(position)
    }

    pub(super) fn finish(self, purpose: Purpose) -> Result<TableParts, StoreError> {
        let missing = |path: &Path, tensor: &str| StoreError::Tensor {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            expected: "a tensor".to_owned(),
            got: "nothing".to_owned(),
        };
        if self.delta && self.keys.is_none() {
            return Err(missing(&self.path, KEYS));
        }
        let served = self.served.ok_or_else(|| missing(&self.path, WEIGHT))?;
        let is_trained = self.trained.is_some();
        let (element, weight) = match self.trained {
            Some(trained) => (Element::F32, trained),
            None => (self.declared.element, served),
        };
        // In format 1, the served file has the states.
        let states = if purpose == Purpose::Train { self.states } else { Vec::new() };
        let bad = states.iter().find(|state| !all_finite(state.as_slice()));
        if let Some(bad) = bad {
            return Err(not_finite(&self.last, bad.shape().name));
        }
        // Served rows were checked with the bytes of their file.
        if is_trained && !all_finite(weight.floats()) {
            return Err(not_finite(&self.last, WEIGHT));
        }
        Ok(TableParts { keys: self.keys, element, weight, states })
    }
}

pub(super) fn expect_dtype(path: &Path, tensor: &format::Tensor, expected: Dtype) -> Result<(), StoreError> {
    let (tensor, got) = (tensor.name.clone(), tensor.dtype);
    let source = FormatError::Dtype { tensor, expected, got };
    if got == expected { Ok(()) } else { Err(StoreError::Format { path: path.to_owned(), source }) }
}

pub(super) fn floats(path: &Path, data: &FileBytes, tensor: &format::Tensor) -> Result<Bytes, StoreError> {
    // The header parser has checked that the tensor is within the file, so only alignment can fail here. In
    // the files of our writer, data begins on a page and each tensor is a multiple of 4 bytes.
    let bytes = Bytes::floats_of_file(data, tensor.begin as usize..tensor.end as usize);
    bytes.ok_or_else(|| unaligned(path, tensor))
}

fn unaligned(path: &Path, tensor: &format::Tensor) -> StoreError {
    StoreError::Format { path: path.to_owned(), source: FormatError::Unaligned { got: tensor.begin } }
}
