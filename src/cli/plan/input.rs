//! What `plan` reads: click logs, or a server's access traces.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;

use crate::cli::InputError;
use crate::dataset::{self, DatasetError, Format, ReadOptions};
use crate::planner::counts::Counts;
use crate::planner::trace::{TooLong, TraceBuilder};
use crate::schema::Schema;
use crate::trace::format::{FileEnd, Header, OpenedTrace, TraceFormatError, TraceReader};
use crate::types::{Batch, RawBatch, TableId};

/// What the accesses are read from.
#[derive(Clone, Copy, Debug)]
pub(super) enum AccessSource {
    Dataset(Format),
    /// A server's access traces.
    Trace,
}

impl FromStr for AccessSource {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match (name, name.parse()) {
            ("trace", _) => Ok(Self::Trace),
            (_, Ok(format)) => Ok(Self::Dataset(format)),
            (_, Err(DatasetError::UnknownFormat { .. })) => {
                let known = Format::ALL.map(Format::name).join(", ");
                Err(format!("unknown format {name:?}, expected {known} or trace"))
            }
            (_, Err(error)) => Err(error.to_string()),
        }
    }
}

/// Samples of one batch.
const BATCH_SAMPLES: usize = 4096;

/// Receives accesses.
pub(super) trait Accesses {
    /// Receives the accesses of every sample of a batch.
    fn append(&mut self, batch: &Batch) -> Result<(), TooLong>;
    /// Receives one access.
    fn push(&mut self, table: TableId, row: u64) -> Result<(), TooLong>;
}

impl Accesses for TraceBuilder {
    fn append(&mut self, batch: &Batch) -> Result<(), TooLong> {
        self.append(batch)
    }

    fn push(&mut self, table: TableId, row: u64) -> Result<(), TooLong> {
        self.push(table, row)
    }
}

impl Accesses for Counts {
    fn append(&mut self, batch: &Batch) -> Result<(), TooLong> {
        self.append(batch);
        Ok(())
    }

    fn push(&mut self, table: TableId, row: u64) -> Result<(), TooLong> {
        self.push(table, row);
        Ok(())
    }
}

/// Files with click logs.
pub(super) struct DataFiles<'a> {
    pub format: Format,
    pub paths: &'a [PathBuf],
}

/// Reads data files with accesses to all rows.
pub(super) fn read_data(
    files: DataFiles<'_>,
    options: ReadOptions,
    schema: &Schema,
    accesses: &mut impl Accesses,
) -> anyhow::Result<()> {
    let mut reader = dataset::open(files.format, files.paths, schema, options)?;
    let (mut raw, mut batch) = (RawBatch::default(), Batch::default());
    while reader.read(BATCH_SAMPLES, &mut raw)? > 0 {
        let refused = |error: anyhow::Error| InputError(error.context("--data"));
        schema.encode(&raw, &mut batch).map_err(|e| refused(e.into()))?;
        schema.check_absent(&batch).map_err(|e| refused(e.into()))?;
        accesses.append(&batch).map_err(|e| refused(e.into()))?;
    }
    if reader.skipped() > 0 {
        tracing::warn!("{} malformed lines skipped", reader.skipped());
    }
    Ok(())
}

/// Reads access traces one after the other and returns their rate. A truncated file is read up to its last
/// whole block.
pub(super) fn read_traces(
    files: &[PathBuf],
    schema: &Schema,
    accesses: &mut impl Accesses,
) -> anyhow::Result<f64> {
    let mut rate = None;
    for path in files {
        let (shown, named) = (path.display(), || format!("--data: {}", path.display()));
        let file = BufReader::new(File::open(path).with_context(named)?);
        let reader = match TraceReader::open(file).with_context(named)? {
            OpenedTrace::Whole(reader) => reader,
            OpenedTrace::Truncated { bytes } => {
                tracing::warn!("{shown}: ends within its header, after {bytes} bytes: no accesses were read");
                continue;
            }
        };
        check_header(reader.header(), schema, &mut rate).with_context(named)?;
        let mut count = 0_u64;
        let ended = reader.read(|table, row| {
            count += 1;
            Ok::<(), RecordError>(accesses.push(table, row)?)
        });
        if let FileEnd::Truncated { read, rest } = ended.with_context(named)? {
            tracing::warn!(
                "{shown}: ends within a block: {count} accesses in the first {read} bytes were read, the \
                 last {rest} bytes were not"
            );
        }
    }
    Ok(rate.unwrap_or(1.0))
}

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
enum RecordError {
    #[error(transparent)]
    Format(#[from] TraceFormatError),
    #[error(transparent)]
    Long(#[from] TooLong),
}

/// Checks that a recording has this schema's tables and the rate of the files before it.
fn check_header(header: &Header, schema: &Schema, rate: &mut Option<f64>) -> anyhow::Result<()> {
    let wanted = Header::of(schema, header.rate).tables;
    let (got, expected) = (header.tables.len(), wanted.len());
    anyhow::ensure!(got == expected, "recorded for {got} tables, but the schema has {expected}");
    if let Some((got, wanted)) = header.tables.iter().zip(&wanted).find(|(got, wanted)| got != wanted) {
        anyhow::bail!(
            "recorded for table {:?} of {} rows, but the schema has {:?} of {}",
            got.name,
            got.rows,
            wanted.name,
            wanted.rows
        );
    }
    match rate.replace(header.rate) {
        Some(before) if before != header.rate => {
            anyhow::bail!("recorded at rate {}, but the files before it at {before}", header.rate)
        }
        _ => Ok(()),
    }
}
