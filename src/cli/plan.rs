//! `flechette plan`: the hit rates of caches of several sizes on a data set or a recorded trace, and how
//! often each row is used.
//!
//! Simulated caches need every access in memory. Counts alone do not: with `--counts-bytes` the data is read
//! once and only counts are kept, within the given bytes.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow};

use crate::cli::format::FieldFlags;
use crate::cli::{InputError, train::read_schema};
use crate::config::{BYTES_FORM, Config, Flags, parse_bytes};
use crate::dataset::{self, DatasetError, Format, Labels, ReadOptions};
use crate::planner::counts::{Counts, Ranked};
use crate::planner::plot;
use crate::planner::report::{DEFAULT_SIZES, Plan};
use crate::planner::trace::{TooLong, TraceBuilder};
use crate::schema::Schema;
use crate::trace::format::{Ended, FormatError, Header, Opened, TraceReader};
use crate::types::{Batch, RawBatch, TableId};

/// Flags of `plan`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The model.toml that `init` wrote
    #[arg(long, value_name = "FILE")]
    model_config: PathBuf,
    #[arg(long, value_name = "F")]
    #[arg(help = format!("Format of the data: {}; or trace, a server's recordings", Format::names()))]
    format: Source,
    #[command(flatten)]
    fields: FieldFlags,
    /// Data files, the oldest accesses first
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// The files have no label column: a line of criteo-tsv has 39 fields, and a line of --columns no label
    #[arg(long)]
    unlabelled: bool,
    /// Cache sizes, as fractions of the distinct rows [default: 0.01,0.02,0.05,0.1,0.2,0.5]
    #[arg(long, value_name = "SIZES")]
    sizes: Option<String>,
    /// File for the counts, which say how often each row is used, as safetensors
    #[arg(long, value_name = "FILE")]
    counts: Option<PathBuf>,
    /// Simulates nothing and only counts, in these bytes of memory (256Mi, 4G), for data of any length. A row
    /// takes 24 bytes. Counts are exact while all rows fit; beyond that the report says by how much a count
    /// may be too high
    #[arg(long, value_name = "BYTES", value_parser = counts_bytes, requires = "counts")]
    #[arg(conflicts_with_all = ["sizes", "plot"])]
    counts_bytes: Option<usize>,
    /// File for a plot of hit rate against cache size, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Seed of the policy that evicts at random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads that compute [default: one for each core]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Most malformed lines to skip; with more, the data is refused
    #[arg(long, value_name = "N", default_value_t = ReadOptions::default().malformed_lines)]
    max_malformed: u64,
    /// Prints one line of JSON at the end
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        Flags { threads: self.threads.clone(), ..Flags::default() }
    }
}

/// What the accesses are read from.
#[derive(Clone, Copy, Debug)]
enum Source {
    Dataset(Format),
    /// A server's recordings.
    Trace,
}

impl FromStr for Source {
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
const READ: usize = 4096;

/// Least value of `--counts-bytes`.
const LEAST_COUNTS_BYTES: u64 = 1024;

fn counts_bytes(text: &str) -> Result<usize, String> {
    let bytes = parse_bytes(text).filter(|bytes| *bytes >= LEAST_COUNTS_BYTES);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| format!("expected {BYTES_FORM}, at least {LEAST_COUNTS_BYTES}"))
}

/// Reads the accesses, simulates or counts, and reports.
///
/// # Errors
/// When flags or data are invalid, or a file cannot be written.
pub(crate) fn run(args: Args, config: &Config) -> anyhow::Result<()> {
    match (&args.counts, args.counts_bytes) {
        (Some(path), Some(bytes)) => count(&args, path, bytes),
        _ => simulate(&args, config),
    }
}

fn simulate(args: &Args, config: &Config) -> anyhow::Result<()> {
    let sizes = args.sizes.as_deref().map_or(Ok(DEFAULT_SIZES.to_vec()), parse_sizes)?;
    if let Some(plot) = args.plot.as_ref().filter(|path| path.extension().is_none_or(|end| end != "svg")) {
        let error = anyhow!("--plot: expected a name that ends in .svg, got {}", plot.display());
        return Err(InputError(error).into());
    }
    let schema = read_schema(&args.model_config)?;
    let mut accesses = TraceBuilder::new(&schema);
    let rate = args.read(&schema, &mut accesses)?;
    let trace = accesses.finish(rate);
    args.check_accesses(trace.accesses.len() as u64)?;
    if let Some(path) = &args.counts {
        Ranked::of(&trace).write(path).context("--counts")?;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads.compute).build();
    let plan = pool.context("threads.compute")?.install(|| Plan::of(&trace, &sizes, args.seed));
    if let Some(path) = &args.plot {
        std::fs::write(path, plot::svg(&plan)?).with_context(|| format!("--plot: {}", path.display()))?;
    }
    args.print(&plan.text(), || plan.json())
}

fn count(args: &Args, path: &Path, bytes: usize) -> anyhow::Result<()> {
    let schema = read_schema(&args.model_config)?;
    let mut counts = Counts::within(&schema, bytes).context("--counts-bytes")?;
    let rate = args.read(&schema, &mut counts)?;
    args.check_accesses(counts.accesses())?;
    let (text, json) = (counts.text(rate), counts.json());
    counts.write(path).context("--counts")?;
    args.print(&text, || json)
}

/// Receives accesses.
trait Accesses {
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

impl Args {
    /// Reads all data. Returns the share of the rows whose accesses the data contains: 1, or the rate of a
    /// trace.
    fn read(&self, schema: &Schema, accesses: &mut impl Accesses) -> anyhow::Result<f64> {
        match self.format {
            Source::Dataset(format) => read_data(self, format, schema, accesses).map(|()| 1.0),
            Source::Trace => {
                self.fields.options().check_unused("trace")?;
                Ok(read_traces(&self.data, schema, accesses).map_err(InputError)?)
            }
        }
    }

    fn check_accesses(&self, accesses: u64) -> Result<(), InputError> {
        if accesses == 0 {
            return Err(InputError(anyhow!("--data: no accesses in {}", self.data[0].display())));
        }
        Ok(())
    }

    fn print(&self, text: &str, json: impl FnOnce() -> serde_json::Value) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        if self.json {
            writeln!(out, "{}", json())?;
        }
        Ok(out.flush()?)
    }
}

fn parse_sizes(text: &str) -> Result<Vec<f64>, InputError> {
    let size = |part: &str| {
        let size = part.trim().parse().ok().filter(|size| (0.0..=1.0).contains(size));
        size.ok_or_else(|| InputError(anyhow!("--sizes: expected fractions from 0 to 1, got {part:?}")))
    };
    text.split(',').map(size).collect()
}

fn read_data(
    args: &Args,
    format: Format,
    schema: &Schema,
    accesses: &mut impl Accesses,
) -> anyhow::Result<()> {
    let options = ReadOptions {
        malformed_lines: args.max_malformed,
        labels: Labels::unless(args.unlabelled),
        fields: args.fields.options(),
        ..ReadOptions::default()
    };
    let mut reader = dataset::open(format, &args.data, schema, options)?;
    let (mut raw, mut batch) = (RawBatch::default(), Batch::default());
    while reader.read(READ, &mut raw)? > 0 {
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

/// Reads recordings one after the other and returns their rate. A truncated file is read up to its last whole
/// block.
fn read_traces(files: &[PathBuf], schema: &Schema, accesses: &mut impl Accesses) -> anyhow::Result<f64> {
    let mut rate = None;
    for path in files {
        let (shown, named) = (path.display(), || format!("--data: {}", path.display()));
        let file = BufReader::new(File::open(path).with_context(named)?);
        let reader = match TraceReader::open(file).with_context(named)? {
            Opened::Whole(reader) => reader,
            Opened::Cut { bytes } => {
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
        if let Ended::Cut { read, rest } = ended.with_context(named)? {
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
    Format(#[from] FormatError),
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
