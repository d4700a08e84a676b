//! The reader for all text formats: one sample per line. It chains files, splits lines into fields, selects
//! the columns of the schema and counts malformed lines. A [`Layout`] says which column is in which field.

mod columns;
mod sample;

use std::io;
use std::iter::repeat_n;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::fields::Fields;
use super::files::{Files, Next};
use super::layout::{Columns, FirstLineError, Layout};
use super::lines::{Line, Lines};
use super::source::WaitingFile;
use super::{DataFile, DatasetError, FileRun, Format, Input, ReadOptions, Reader, in_line};
use crate::pace::give_way;
use crate::schema::Schema;
use crate::types::{RawBatch, RawKind};
use columns::Header;
use sample::append;

/// Malformed lines that are logged one by one; later ones are only counted.
const REPORTED: u64 = 5;
/// An interrupt is looked for before the first of this many samples of a batch.
const CHECKED_SAMPLES: usize = 4096;
/// A batch ends after lines of this many bytes, because the ends of its strings are 32-bit numbers.
const BATCH_BYTES: usize = 1 << 30;

/// Reads files of one layout, one after the other.
pub(crate) struct Delimited {
    header: Header,
    input: Input,
    /// The next file, if the reader was stopped before its first bytes came.
    waiting: Option<WaitingFile>,
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
    /// A good line; its length in bytes.
    Line(usize),
    /// Nothing: the reader was told to stop.
    Stopped,
    End,
}

struct OpenFile {
    path: PathBuf,
    file: Arc<DataFile>,
    lines: Lines,
    /// Samples that were read.
    samples: u64,
    columns: Option<Columns>,
    /// Number of the line that gave the columns. While `columns` is `None`: of the line that is read next.
    columns_line: u64,
    /// The first line without valid columns, and why it has none.
    refused: Option<(u64, String)>,
}

impl Delimited {
    /// Opens the first file of a list. If the format has a header, the header must match the schema.
    pub(crate) fn open(
        format: Format,
        input: Input,
        schema: &Schema,
        options: ReadOptions,
    ) -> Result<Self, DatasetError> {
        let waits = input.files.endless();
        let mut reader = Self {
            header: Header { layout: Layout::new(format, schema, &options)?, labelled: None },
            bytes: input.files.bytes(),
            bytes_read: Arc::default(),
            input,
            waiting: None,
            file: None,
            fields: Fields::default(),
            options,
            skipped: 0,
            forgiven: 0,
            runs: Vec::new(),
            begun: None,
            skips: Vec::new(),
            dense: schema.dense.len(),
            features: schema.features.len(),
        };
        if !waits && reader.open_next()?.is_none() {
            reader.read_header()?;
        }
        Ok(reader)
    }

    /// Opens this file, and skips the first samples of it. Returns how many it had. The next file is not
    /// touched, also if this one has fewer samples.
    pub(crate) fn skip_in(&mut self, path: PathBuf, samples: u64) -> Result<u64, DatasetError> {
        let files = std::mem::replace(&mut self.input.files, Files::List([path].into()));
        let skipped = match self.open_next()? {
            None => Reader::skip(self, samples)?,
            Some(_) => 0,
        };
        self.waiting = None;
        self.input.files = files;
        Ok(skipped)
    }

    /// Notes whether the file of the last sample ends after it. A list of files may have a pipe, which would
    /// be waited for, and has no use for the note.
    fn note_end(&mut self) {
        let Some(run) = self.runs.last_mut().filter(|_| self.input.files.endless()) else { return };
        run.ends_file = match &mut self.file {
            Some(file) if Arc::ptr_eq(&file.file, &run.file) => file.lines.at_end(),
            _ => true,
        };
    }

    /// Opens the next file, if there is one. Returns why no file was opened.
    ///
    /// # Errors
    /// Also when no line of the previous file had the right number of fields.
    fn open_next(&mut self) -> Result<Option<Taken>, DatasetError> {
        if let Some(OpenFile { path, columns: None, refused: Some((line, reason)), .. }) = self.file.take() {
            return Err(DatasetError::FieldCount { path, line, reason });
        }
        let mut waiting = match self.waiting.take() {
            Some(waiting) => waiting,
            None => match self.input.files.next(&self.input.stop)? {
                Next::File(path) => WaitingFile::open(path, &self.bytes_read, &self.input.stop)?,
                Next::Stopped => return Ok(Some(Taken::Stopped)),
                Next::End => return Ok(Some(Taken::End)),
            },
        };
        let Some(first) = waiting.first_bytes()? else {
            self.waiting = Some(waiting);
            return Ok(Some(Taken::Stopped));
        };
        let path = waiting.path().to_owned();
        let bytes = waiting.bytes(first);
        if self.input.files.endless() {
            self.forgiven = self.skipped;
        }
        let lines = Lines::new(bytes, self.options.line_bytes);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let file = DataFile { name, log: None }.into();
        let file = OpenFile { path, file, lines, samples: 0, columns: None, columns_line: 1, refused: None };
        self.file = Some(file);
        Ok(None)
    }

    /// Takes the open file's columns from its header, if it has one and it was not read yet. Returns false if
    /// the reader was told to stop before.
    fn read_header(&mut self) -> Result<bool, DatasetError> {
        let Some(OpenFile { path, lines, columns, .. }) = &mut self.file else { return Ok(true) };
        if !self.header.layout.has_header() || lines.number() > 0 {
            return Ok(true);
        }
        let found = match lines.next() {
            Err(error) if is_stop(&error) => return Ok(false),
            Err(cause) => return Err(DatasetError::Read { path: path.clone(), line: 0, cause }),
            Ok(None) => return Ok(true),
            Ok(Some(Line::TooLong)) => Err(FirstLineError::Line(too_long(self.options.line_bytes))),
            Ok(Some(Line::Text(first))) => {
                let row = self.fields.split(self.header.layout.division, first);
                let row = row.map_err(FirstLineError::Line);
                row.and_then(|row| self.header.columns_of(columns, path, &row).map(|_| true))
            }
        };
        found.map_err(|error| match error {
            FirstLineError::Line(reason) => DatasetError::Header { path: path.clone(), reason },
            FirstLineError::File(error) => error,
        })
    }

    /// Appends the next good line, if necessary of a later file.
    fn append_next(&mut self, out: &mut RawBatch, labels: &mut Vec<f32>) -> Result<Taken, DatasetError> {
        loop {
            if let Some(ended) = self.next_line()? {
                return Ok(ended);
            }
            match self.append_line(out, labels) {
                Ok(bytes) => {
                    self.count_sample();
                    return Ok(Taken::Line(bytes));
                }
                Err(FirstLineError::Line(reason)) => self.skip(reason, out.samples)?,
                Err(FirstLineError::File(error)) => return Err(error),
            }
        }
    }

    /// Goes to the next line, if necessary of a later file. Returns why there is none.
    fn next_line(&mut self) -> Result<Option<Taken>, DatasetError> {
        loop {
            if !self.read_header()? {
                return Ok(Some(Taken::Stopped));
            }
            if let Some(OpenFile { path, lines, columns, columns_line, .. }) = &mut self.file {
                let before = lines.number();
                if columns.is_none() {
                    *columns_line = before + 1;
                }
                match lines.next() {
                    Ok(Some(_)) => return Ok(None),
                    Ok(None) => {}
                    Err(error) if is_stop(&error) => return Ok(Some(Taken::Stopped)),
                    Err(cause) => return Err(DatasetError::Read { path: path.clone(), line: before, cause }),
                }
            }
            if let Some(ended) = self.open_next()? {
                return Ok(Some(ended));
            }
        }
    }

    /// Appends the line that was read last. Returns its bytes. On an error the batch is unchanged.
    fn append_line(&mut self, out: &mut RawBatch, labels: &mut Vec<f32>) -> Result<usize, FirstLineError> {
        let Some(OpenFile { path, lines, columns, columns_line, .. }) = &mut self.file else { return Ok(0) };
        let Some(Line::Text(line)) = lines.line() else {
            return Err(FirstLineError::Line(too_long(self.options.line_bytes)));
        };
        let row = self.fields.split(self.header.layout.division, line).map_err(FirstLineError::Line)?;
        let columns = self.header.columns_of(columns, path, &row)?;
        if row.len() != columns.count {
            let (expected, got) = (columns.count, row.len());
            let reason = format!("expected {expected} fields as in line {columns_line}, got {got}");
            return Err(FirstLineError::Line(reason));
        }
        append(&row, columns, out, labels).map_err(FirstLineError::Line)?;
        Ok(line.len())
    }

    /// Counts a sample of the open file.
    fn count_sample(&mut self) {
        let Some(OpenFile { file, samples, .. }) = &mut self.file else { return };
        *samples += 1;
        FileRun::count(&mut self.runs, file, 1, *samples);
    }

    /// Empties the lists of the last read, and gives the batch columns of text.
    fn begin(&mut self, max_samples: usize, out: &mut RawBatch) -> Vec<f32> {
        self.skips.clear();
        self.runs.clear();
        out.begin(repeat_n(RawKind::Text, self.features), true);
        out.dense.reserve(max_samples.min(4096) * self.dense);
        out.labels.take().unwrap_or_default()
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
            tracing::warn!("{}: line {line}: {reason}: skipped", in_line(path));
        } else if self.skipped == REPORTED + 1 {
            let path = in_line(path);
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

impl Reader for Delimited {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let (mut labels, mut bytes) = match self.begun.take() {
            None => (self.begin(max_samples, out), 0),
            Some(begun) => {
                *out = begun.batch;
                (begun.labels, begun.bytes)
            }
        };
        while out.samples < max_samples && bytes < BATCH_BYTES {
            give_way();
            // A regular file never waits, but to skip its samples may take minutes.
            let stopped = out.samples.is_multiple_of(CHECKED_SAMPLES) && self.input.stop.interrupted();
            let taken = if stopped { Taken::Stopped } else { self.append_next(out, &mut labels)? };
            match taken {
                Taken::Line(line_bytes) => bytes += line_bytes,
                Taken::End => break,
                Taken::Stopped => {
                    self.begun = Some(Begun { batch: std::mem::take(out), labels, bytes });
                    return Ok(0);
                }
            }
        }
        self.note_end();
        out.labels = (self.header.labelled == Some(true)).then_some(labels);
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

fn too_long(limit: usize) -> String {
    format!("longer than {limit} bytes")
}
