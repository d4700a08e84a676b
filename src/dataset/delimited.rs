//! The reader for all formats with one sample per line. It chains files, splits lines into fields, selects
//! the columns of the schema and counts malformed lines. A [`Layout`] says which column is in which field.
//!
//! A line is appended whole or not at all: everything that can fail is parsed before a text column changes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::fields::{Fields, Row, number, shown};
use super::files::Next;
use super::lines::{Line, Lines};
use super::{DatasetError, FileRun, Input, ReadOptions, Reader, source};
use crate::schema::Schema;
use crate::types::{RawBatch, RawFeature, RawValues};

/// Malformed lines that are logged one by one; later ones are only counted.
const REPORTED: u64 = 5;
/// A batch ends after lines of this many bytes, because the ends of its strings are 32-bit numbers.
const BATCH_BYTES: usize = 1 << 30;

/// Where the schema's inputs are in a line: fields are indices from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    /// Number of fields of a line.
    pub(crate) count: usize,
    pub(crate) label: Option<usize>,
    /// The field of each dense feature of the schema.
    pub(crate) dense: Vec<usize>,
    /// The field of each categorical feature of the schema.
    pub(crate) features: Vec<usize>,
}

/// How the lines of a format are divided.
pub(crate) trait Layout: Send {
    /// The byte between two fields.
    const DELIMITER: u8;
    /// Whether a file's first line names its columns.
    const HEADER: bool;
    /// Whether a field may be in double quotes.
    const QUOTES: bool;

    /// The columns of a file, from its first line.
    fn columns(&self, path: &Path, first: &[u8]) -> Result<Columns, FirstLineError>;
}

/// Why the columns cannot be taken from a first line.
pub(crate) enum FirstLineError {
    /// The line is malformed; the next one may be good.
    Line(String),
    /// The file cannot be read at all.
    File(DatasetError),
}

/// Reads files of one layout, one after the other.
pub(crate) struct Delimited<L> {
    layout: L,
    input: Input,
    file: Option<OpenFile>,
    fields: Fields,
    options: ReadOptions,
    skipped: u64,
    /// How many of `skipped` do not count for the limit, because they are in earlier files.
    forgiven: u64,
    /// Bytes of all files, as on disk; `None` if that is not known.
    bytes: Option<u64>,
    /// Bytes that were read so far, as on disk.
    bytes_read: Arc<AtomicU64>,
    /// The files of the samples of the last read.
    runs: Vec<FileRun>,
    /// The beginning of a batch that was not handed out, because the reader was stopped.
    begun: Option<Begun>,
    /// For each line that the last read skipped: the number of samples before it.
    skips: Vec<usize>,
    /// Whether the files have labels; unknown before the first line.
    labelled: Option<bool>,
    /// Number of dense features of the schema.
    dense: usize,
    /// Number of categorical features of the schema.
    features: usize,
}

/// A batch whose first lines were read.
struct Begun {
    batch: RawBatch,
    labels: Vec<f32>,
    bytes: usize,
}

/// What was read after a line.
enum Taken {
    /// A good line of so many bytes.
    Line(usize),
    /// Nothing: the reader was told to stop.
    Stopped,
    End,
}

struct OpenFile {
    path: PathBuf,
    name: Arc<str>,
    lines: Lines,
    /// Samples that were read.
    samples: u64,
    columns: Option<Columns>,
    /// Number of the line that gave the columns. While `columns` is `None`: of the line that is read next.
    columns_line: u64,
    /// The first line without valid columns, and why it has none.
    refused: Option<(u64, String)>,
}

impl<L: Layout> Delimited<L> {
    /// Opens the first file of a list. If the layout has a header, the header must match the schema.
    pub(crate) fn open(
        layout: L,
        input: Input,
        schema: &Schema,
        options: ReadOptions,
    ) -> Result<Self, DatasetError> {
        let waits = input.files.endless();
        let mut reader = Self {
            layout,
            bytes: input.files.bytes(),
            bytes_read: Arc::default(),
            input,
            file: None,
            fields: Fields::default(),
            options,
            skipped: 0,
            forgiven: 0,
            runs: Vec::new(),
            begun: None,
            skips: Vec::new(),
            labelled: None,
            dense: schema.dense.len(),
            features: schema.features.len(),
        };
        if !waits {
            reader.open_next()?;
        }
        Ok(reader)
    }

    /// Opens the next file, if there is one, and reads its header, if the layout has one. Returns why no file
    /// was opened.
    ///
    /// # Errors
    /// Also when no line of the previous file had the right number of fields.
    fn open_next(&mut self) -> Result<Option<Taken>, DatasetError> {
        if let Some(OpenFile { path, columns: None, refused: Some((line, reason)), .. }) = self.file.take() {
            return Err(DatasetError::FieldCount { path, line, reason });
        }
        let path = match self.input.files.next(&self.input.stop)? {
            Next::File(path) => path,
            Next::Stopped => return Ok(Some(Taken::Stopped)),
            Next::End => return Ok(Some(Taken::End)),
        };
        let bytes = match source::open(&path, &self.bytes_read, &self.input.stop) {
            Err(DatasetError::Open { path, cause }) if is_stop(&cause) => {
                self.input.files.give_back(path);
                return Ok(Some(Taken::Stopped));
            }
            opened => opened?,
        };
        if self.input.files.endless() {
            self.forgiven = self.skipped;
        }
        let lines = Lines::new(bytes, self.options.line_bytes);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into();
        let file = OpenFile { path, name, lines, samples: 0, columns: None, columns_line: 1, refused: None };
        let file = self.file.insert(file);
        if L::HEADER {
            read_header(&self.layout, file, &mut self.labelled, self.options.line_bytes)?;
        }
        Ok(None)
    }

    /// Appends the next good line, if necessary of a later file.
    fn append_next(&mut self, out: &mut RawBatch, labels: &mut Vec<f32>) -> Result<Taken, DatasetError> {
        loop {
            let Some(OpenFile { path, lines, columns, columns_line, .. }) = &mut self.file else {
                match self.open_next()? {
                    None => continue,
                    Some(ended) => return Ok(ended),
                }
            };
            let before = lines.number();
            if columns.is_none() {
                *columns_line = before + 1;
            }
            let next = match lines.next() {
                Err(error) if is_stop(&error) => return Ok(Taken::Stopped),
                Err(cause) => return Err(DatasetError::Read { path: path.clone(), line: before, cause }),
                Ok(next) => next,
            };
            let taken = match next {
                None => match self.open_next()? {
                    None => continue,
                    Some(ended) => return Ok(ended),
                },
                Some(Line::TooLong) => Err(FirstLineError::Line(too_long(self.options.line_bytes))),
                Some(Line::Text(line)) => columns_of(columns, &mut self.labelled, &self.layout, path, line)
                    .and_then(|columns| {
                        self.fields.split(L::DELIMITER, L::QUOTES, line);
                        let row = self.fields.of(line);
                        if row.len() != columns.count {
                            let (expected, got) = (columns.count, row.len());
                            let reason =
                                format!("expected {expected} fields as in line {columns_line}, got {got}");
                            return Err(FirstLineError::Line(reason));
                        }
                        append(&row, columns, out, labels).map_err(FirstLineError::Line)?;
                        Ok(line.len())
                    }),
            };
            match taken {
                Ok(bytes) => {
                    self.count_sample();
                    return Ok(Taken::Line(bytes));
                }
                Err(FirstLineError::Line(reason)) => self.skip(reason, out.samples)?,
                Err(FirstLineError::File(error)) => return Err(error),
            }
        }
    }

    /// Counts a sample of the open file.
    fn count_sample(&mut self) {
        let Some(OpenFile { name, samples, .. }) = &mut self.file else { return };
        *samples += 1;
        FileRun::count(&mut self.runs, name, 1, *samples);
    }

    /// Empties the lists of the last read, and gives the batch columns of text.
    fn begin(&mut self, max_samples: usize, out: &mut RawBatch) -> Vec<f32> {
        let mut labels = out.labels.take().unwrap_or_default();
        labels.clear();
        self.skips.clear();
        self.runs.clear();
        out.clear();
        out.features.resize_with(self.features, RawFeature::text);
        for column in &mut out.features {
            if matches!(column.values, RawValues::Ids(_)) {
                *column = RawFeature::text();
            }
        }
        out.dense.reserve(max_samples.min(4096) * self.dense);
        labels
    }

    /// Counts and logs the malformed line that was just read. The batch has `samples` samples before it.
    fn skip(&mut self, reason: String, samples: usize) -> Result<(), DatasetError> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let (path, line, limit) = (&file.path, file.lines.number(), self.options.malformed_lines);
        if self.skipped - self.forgiven >= limit {
            return Err(DatasetError::TooManyMalformed { path: path.clone(), line, reason, limit });
        }
        self.skipped += 1;
        self.skips.push(samples);
        if self.skipped <= REPORTED {
            tracing::warn!("{}: line {line}: {reason}: skipped", path.display());
        } else if self.skipped == REPORTED + 1 {
            let path = path.display();
            tracing::warn!(
                "{path}: line {line}: {reason}: skipped; further malformed lines are not reported"
            );
        }
        if file.columns.is_none() {
            file.refused.get_or_insert((line, reason));
        }
        Ok(())
    }
}

impl<L: Layout> Reader for Delimited<L> {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let (mut labels, mut bytes) = match self.begun.take() {
            None => (self.begin(max_samples, out), 0),
            Some(begun) => {
                *out = begun.batch;
                (begun.labels, begun.bytes)
            }
        };
        while out.samples < max_samples && bytes < BATCH_BYTES {
            match self.append_next(out, &mut labels)? {
                Taken::Line(line_bytes) => bytes += line_bytes,
                Taken::End => break,
                Taken::Stopped => {
                    self.begun = Some(Begun { batch: std::mem::take(out), labels, bytes });
                    return Ok(0);
                }
            }
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

    fn runs(&self) -> &[FileRun] {
        &self.runs
    }

    /// The bytes of a pipe or a followed directory are not known.
    fn may_wait(&self) -> bool {
        self.bytes.is_none()
    }

    fn share(&self) -> Option<f64> {
        let bytes = self.bytes?;
        Some(self.bytes_read.load(Ordering::Relaxed) as f64 / bytes.max(1) as f64)
    }
}

/// Whether reading ended because the reader was told to stop.
fn is_stop(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// Takes a file's columns from its first line, unless the file is empty. A header is waited for without an
/// end, because a file without its columns cannot be left open.
fn read_header<L: Layout>(
    layout: &L,
    file: &mut OpenFile,
    labelled: &mut Option<bool>,
    limit: usize,
) -> Result<(), DatasetError> {
    let OpenFile { path, lines, columns, .. } = file;
    let found = loop {
        break match lines.next() {
            Err(error) if is_stop(&error) => continue,
            Err(cause) => return Err(DatasetError::Read { path: path.clone(), line: 0, cause }),
            Ok(None) => return Ok(()),
            Ok(Some(Line::TooLong)) => Err(FirstLineError::Line(too_long(limit))),
            Ok(Some(Line::Text(first))) => columns_of(columns, labelled, layout, path, first).map(|_| ()),
        };
    };
    match found {
        Ok(()) => Ok(()),
        Err(FirstLineError::Line(reason)) => Err(DatasetError::Header { path: path.clone(), reason }),
        Err(FirstLineError::File(error)) => Err(error),
    }
}

/// A file's columns. If they are not `known` yet, they are taken from this line: the header or the first good
/// line.
fn columns_of<'a, L: Layout>(
    known: &'a mut Option<Columns>,
    labelled: &mut Option<bool>,
    layout: &L,
    path: &Path,
    line: &[u8],
) -> Result<&'a Columns, FirstLineError> {
    match known {
        Some(columns) => Ok(columns),
        None => {
            let columns = layout.columns(path, line)?;
            agree(labelled, &columns, path).map_err(FirstLineError::File)?;
            let (path, count) = (path.display(), columns.count);
            match columns.label {
                None if !L::HEADER => tracing::info!("{path}: {count} fields per line, without a label"),
                label => tracing::debug!("{path}: {count} fields per line, label in field {label:?}"),
            }
            Ok(known.insert(columns))
        }
    }
}

/// Checks that this file has labels if and only if the files before it have labels.
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

/// Appends one line with the right number of fields. On an error the batch is unchanged.
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
