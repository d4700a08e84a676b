//! One reader for every format of one sample a line: it chains files, splits lines into fields,
//! takes the columns of the schema and accounts for malformed lines. What differs between formats,
//! which column stands where, is a [`Layout`].
//!
//! A line is taken whole or not at all: everything about it that can fail is parsed before
//! anything is appended to a text column.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use super::fields::{Fields, Row, number, shown};
use super::lines::{Line, Lines};
use super::{DatasetError, Limits, Reader, source};
use crate::types::{RawBatch, RawFeature, RawValues};

/// Malformed lines that are reported one by one.
const REPORTED: u64 = 5;
/// Bytes of lines after which a batch ends: their strings' ends are 32-bit.
const BATCH_BYTES: usize = 1 << 30;

/// Where the schema's inputs stand in a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    /// How many fields a line has.
    pub(crate) count: usize,
    /// The label's field.
    pub(crate) label: Option<usize>,
    /// One field a dense feature of the schema.
    pub(crate) dense: Vec<usize>,
    /// One field a categorical feature of the schema.
    pub(crate) features: Vec<usize>,
}

/// How the lines of a format are divided.
pub(crate) trait Layout: Send {
    /// Between two fields.
    const DELIMITER: u8;
    /// Whether a file's first line names its columns.
    const HEADER: bool;
    /// Whether a field may stand in double quotes.
    const QUOTES: bool;

    /// The columns of a file, from its first line.
    fn columns(&self, path: &Path, first: &[u8]) -> Result<Columns, Fault>;
}

/// What is wrong with a file's first line.
pub(crate) enum Fault {
    /// It is one malformed line of data.
    Line(String),
    /// The file cannot be read at all.
    File(DatasetError),
}

/// Reads files of one layout, one after the other.
pub(crate) struct Delimited<L> {
    layout: L,
    paths: VecDeque<PathBuf>,
    file: Option<OpenFile>,
    fields: Fields,
    limits: Limits,
    skipped: u64,
    /// Of the last read: for each skipped line, the number of samples before it.
    skips: Vec<usize>,
    /// Whether the files have labels; unknown before the first line.
    labelled: Option<bool>,
    dense_width: usize,
    features: usize,
}

struct OpenFile {
    path: PathBuf,
    lines: Lines,
    columns: Option<Columns>,
    /// The line that told the columns, or the one that is to.
    told_by: u64,
}

impl<L: Layout> Delimited<L> {
    /// A reader whose first file is open and, where the layout has headers, matched to the schema.
    pub(crate) fn open(
        layout: L,
        paths: &[PathBuf],
        (dense_width, features): (usize, usize),
        limits: Limits,
    ) -> Result<Self, DatasetError> {
        let mut reader = Self {
            layout,
            paths: paths.iter().cloned().collect(),
            file: None,
            fields: Fields::default(),
            limits,
            skipped: 0,
            skips: Vec::new(),
            labelled: None,
            dense_width,
            features,
        };
        reader.open_next()?;
        Ok(reader)
    }

    /// Opens the next file, if there is one, and reads its header, if the layout has headers.
    fn open_next(&mut self) -> Result<(), DatasetError> {
        self.file = None;
        let Some(path) = self.paths.pop_front() else { return Ok(()) };
        let lines = Lines::new(source::open(&path)?, self.limits.line_bytes);
        let mut file = OpenFile { path, lines, columns: None, told_by: 1 };
        if L::HEADER {
            self.read_header(&mut file)?;
        }
        self.file = Some(file);
        Ok(())
    }

    fn read_header(&mut self, file: &mut OpenFile) -> Result<(), DatasetError> {
        let OpenFile { path, lines, columns, .. } = file;
        let read = |source| DatasetError::Read { path: path.clone(), line: 0, source };
        let found = match lines.next().map_err(read)? {
            None => return Ok(()),
            Some(Line::TooLong) => Err(Fault::Line(too_long(self.limits.line_bytes))),
            Some(Line::Text(first)) => columns_of(columns, &mut self.labelled, &self.layout, path, first),
        };
        match found {
            Ok(_) => Ok(()),
            Err(Fault::Line(reason)) => Err(DatasetError::Header { path: path.clone(), reason }),
            Err(Fault::File(error)) => Err(error),
        }
    }

    /// Appends the next good line of any file, and tells its length; None at the end.
    fn append_next(
        &mut self,
        out: &mut RawBatch,
        labels: &mut Vec<f32>,
    ) -> Result<Option<usize>, DatasetError> {
        loop {
            let Some(OpenFile { path, lines, columns, told_by }) = &mut self.file else { return Ok(None) };
            let before = lines.number();
            if columns.is_none() {
                *told_by = before + 1;
            }
            let read = |source| DatasetError::Read { path: path.clone(), line: before, source };
            let taken = match lines.next().map_err(read)? {
                None => {
                    self.open_next()?;
                    continue;
                }
                Some(Line::TooLong) => Err(Fault::Line(too_long(self.limits.line_bytes))),
                Some(Line::Text(line)) => columns_of(columns, &mut self.labelled, &self.layout, path, line)
                    .and_then(|columns| {
                        self.fields.split(L::DELIMITER, L::QUOTES, line);
                        let row = self.fields.of(line);
                        if row.len() != columns.count {
                            let (expected, got) = (columns.count, row.len());
                            let reason =
                                format!("expected {expected} fields as in line {told_by}, got {got}");
                            return Err(Fault::Line(reason));
                        }
                        append(&row, columns, out, labels).map_err(Fault::Line)?;
                        Ok(line.len())
                    }),
            };
            match taken {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(Fault::Line(reason)) => self.skip(reason, out.samples)?,
                Err(Fault::File(error)) => return Err(error),
            }
        }
    }

    /// Accounts for the malformed line that was just read, after so many samples of the batch.
    fn skip(&mut self, reason: String, samples: usize) -> Result<(), DatasetError> {
        let Some(file) = &self.file else { return Ok(()) };
        let (path, line, limit) = (&file.path, file.lines.number(), self.limits.malformed_lines);
        if self.skipped >= limit {
            return Err(DatasetError::TooManyMalformed { path: path.clone(), line, reason, limit });
        }
        self.skipped += 1;
        self.skips.push(samples);
        if self.skipped <= REPORTED {
            tracing::warn!("{}: line {line}: {reason}: skipped", path.display());
        } else if self.skipped == REPORTED + 1 {
            tracing::warn!("{}: line {line}: {reason}: skipped, and so are more, unreported", path.display());
        }
        Ok(())
    }
}

impl<L: Layout> Reader for Delimited<L> {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let mut labels = out.labels.take().unwrap_or_default();
        labels.clear();
        self.skips.clear();
        out.clear();
        out.features.resize_with(self.features, RawFeature::text);
        for column in &mut out.features {
            if matches!(column.values, RawValues::Ids(_)) {
                *column = RawFeature::text();
            }
        }
        out.dense.reserve(max_samples.min(4096) * self.dense_width);
        let mut bytes = 0;
        while out.samples < max_samples && bytes < BATCH_BYTES {
            let Some(line_bytes) = self.append_next(out, &mut labels)? else { break };
            bytes += line_bytes;
        }
        out.labels = (self.labelled == Some(true)).then_some(labels);
        Ok(out.samples)
    }

    fn skipped(&self) -> u64 {
        self.skipped
    }

    fn skips(&self) -> &[usize] {
        &self.skips
    }
}

/// A file's columns: those of its header, or those told by its first good line.
fn columns_of<'a, L: Layout>(
    known: &'a mut Option<Columns>,
    labelled: &mut Option<bool>,
    layout: &L,
    path: &Path,
    line: &[u8],
) -> Result<&'a Columns, Fault> {
    match known {
        Some(columns) => Ok(columns),
        None => {
            let columns = layout.columns(path, line)?;
            agree(labelled, &columns, path).map_err(Fault::File)?;
            Ok(known.insert(columns))
        }
    }
}

/// All files have labels or none has.
fn agree(labelled: &mut Option<bool>, columns: &Columns, path: &Path) -> Result<(), DatasetError> {
    let here = columns.label.is_some();
    if *labelled.get_or_insert(here) != here {
        return Err(DatasetError::MixedLabels { path: path.to_owned(), labelled: here });
    }
    Ok(())
}

fn too_long(limit: usize) -> String {
    format!("longer than {limit} bytes")
}

/// Appends one line of as many fields as there are columns, or says why not and leaves the batch as it was.
fn append(row: &Row<'_>, columns: &Columns, out: &mut RawBatch, labels: &mut Vec<f32>) -> Result<(), String> {
    let label = match columns.label.map(|i| row.field(i)) {
        None => None,
        Some(b"0") => Some(0.0),
        Some(b"1") => Some(1.0),
        Some(other) => return Err(format!("expected label 0 or 1, got {}", shown(other))),
    };
    let before = out.dense.len();
    for &i in &columns.dense {
        let Some(value) = number(row.field(i)) else {
            out.dense.truncate(before);
            return Err(format!("field {}: expected a number, got {}", i + 1, shown(row.field(i))));
        };
        out.dense.push(value);
    }
    for (column, &i) in out.features.iter_mut().zip(&columns.features) {
        let RawValues::Text { bytes, ends } = &mut column.values else { continue };
        bytes.extend_from_slice(row.field(i));
        ends.push(bytes.len() as u32);
        column.offsets.push(ends.len() as u32);
    }
    labels.extend(label);
    out.samples += 1;
    Ok(())
}
