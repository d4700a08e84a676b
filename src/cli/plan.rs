//! `flechette plan`: what caches of several sizes would hit on a data set or a recorded trace.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, anyhow};

use crate::cli::{InputError, train::read_schema};
use crate::config::{Config, Flags};
use crate::dataset::{self, DatasetError, Format, Limits};
use crate::planner::counts::Ranked;
use crate::planner::plot;
use crate::planner::report::{DEFAULT_SIZES, Plan};
use crate::planner::trace::{TooLong, Trace, TraceBuilder};
use crate::schema::Schema;
use crate::trace::format::{Ended, FormatError, Header, TraceReader};
use crate::types::{Batch, RawBatch};

/// Flags of `plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's schema, as `init` writes it
    #[arg(long, value_name = "FILE")]
    model_config: PathBuf,
    /// Format of the data: criteo-tsv, avazu-csv, synthetic, or trace for what a server recorded
    #[arg(long, value_name = "F")]
    format: Source,
    /// Files in the order of their accesses
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Cache sizes, as fractions of the distinct rows [default: 0.01,0.02,0.05,0.1,0.2,0.5]
    #[arg(long, value_name = "SIZES")]
    sizes: Option<String>,
    /// Writes how often each row is asked for here, as safetensors
    #[arg(long, value_name = "FILE")]
    counts: Option<PathBuf>,
    /// Draws hit rate against size here, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Seed of the policy that evicts at random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads that compute; all cores when 0 or absent
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Malformed lines that are skipped before the data is refused
    #[arg(long, value_name = "N", default_value_t = Limits::default().malformed_lines)]
    max_malformed: u64,
    /// Ends with one line of JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn flags(&self) -> Flags {
        Flags { threads: self.threads.clone(), ..Flags::default() }
    }
}

/// What the accesses are read from.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// Click logs.
    Dataset(Format),
    /// What a server recorded.
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

/// Samples read at once.
const READ: usize = 4096;

/// Reads the accesses, simulates, reports.
///
/// # Errors
/// Flags or data that cannot be used, and files that cannot be written.
pub fn run(args: Args, config: &Config) -> anyhow::Result<()> {
    let sizes = args.sizes.as_deref().map_or(Ok(DEFAULT_SIZES.to_vec()), parse_sizes)?;
    if let Some(plot) = args.plot.as_ref().filter(|path| path.extension().is_none_or(|end| end != "svg")) {
        let error = anyhow!("--plot: expected a name that ends in .svg, got {}", plot.display());
        return Err(InputError(error).into());
    }
    let schema = read_schema(&args.model_config)?;
    let trace = match args.format {
        Source::Dataset(format) => read_data(&args, format, &schema)?,
        Source::Trace => read_traces(&args.data, &schema).map_err(InputError)?,
    };
    if trace.accesses.is_empty() {
        return Err(InputError(anyhow!("--data: no accesses in {}", args.data[0].display())).into());
    }
    if let Some(path) = &args.counts {
        Ranked::of(&trace).write(path).context("--counts")?;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads.compute).build();
    let plan = pool.context("threads.compute")?.install(|| Plan::of(&trace, &sizes, args.seed));
    if let Some(path) = &args.plot {
        std::fs::write(path, plot::svg(&plan)).with_context(|| format!("--plot: {}", path.display()))?;
    }
    let mut out = std::io::stdout().lock();
    out.write_all(plan.text().as_bytes())?;
    if args.json {
        writeln!(out, "{}", plan.json())?;
    }
    Ok(out.flush()?)
}

fn parse_sizes(text: &str) -> Result<Vec<f64>, InputError> {
    let size = |part: &str| {
        let size = part.trim().parse().ok().filter(|size| (0.0..=1.0).contains(size));
        size.ok_or_else(|| InputError(anyhow!("--sizes: expected fractions from 0 to 1, got {part:?}")))
    };
    text.split(',').map(size).collect()
}

fn read_data(args: &Args, format: Format, schema: &Schema) -> anyhow::Result<Trace> {
    let limits = Limits { malformed_lines: args.max_malformed, ..Limits::default() };
    let mut reader = dataset::open(format, &args.data, schema, limits)?;
    let (mut raw, mut batch) = (RawBatch::default(), Batch::default());
    let mut trace = TraceBuilder::new(schema);
    while reader.read(READ, &mut raw)? > 0 {
        let refused = |error: anyhow::Error| InputError(error.context("--data"));
        schema.encode(&raw, &mut batch).map_err(|e| refused(e.into()))?;
        schema.check_absent(&batch).map_err(|e| refused(e.into()))?;
        trace.append(&batch).map_err(|e| refused(e.into()))?;
    }
    if reader.skipped() > 0 {
        tracing::warn!("{} malformed lines skipped", reader.skipped());
    }
    Ok(trace.finish(1.0))
}

/// Reads recordings, one after the other, as one trace.
fn read_traces(files: &[PathBuf], schema: &Schema) -> anyhow::Result<Trace> {
    let (mut trace, mut rate) = (TraceBuilder::new(schema), None);
    for path in files {
        let named = || format!("--data: {}", path.display());
        let reader = TraceReader::new(BufReader::new(File::open(path).with_context(named)?));
        let reader = reader.with_context(named)?;
        check_header(reader.header(), schema, &mut rate).with_context(named)?;
        let ended = reader.read(|table, row| Ok::<(), RecordError>(trace.push(table, row)?));
        if let Ended::Cut(bytes) = ended.with_context(named)? {
            tracing::warn!("{}: ends within a block: its last {bytes} bytes do not count", path.display());
        }
    }
    Ok(trace.finish(rate.unwrap_or(1.0)))
}

/// Why a recording gives no trace.
#[derive(Debug, thiserror::Error)]
enum RecordError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Long(#[from] TooLong),
}

/// Whether a recording is of this schema's tables and of the same rate as those before it.
fn check_header(header: &Header, schema: &Schema, rate: &mut Option<f64>) -> anyhow::Result<()> {
    let wanted = Header::of(schema, header.rate).tables;
    let (got, expected) = (header.tables.len(), wanted.len());
    anyhow::ensure!(got == expected, "recorded of {got} tables, the schema has {expected}");
    if let Some((got, wanted)) = header.tables.iter().zip(&wanted).find(|(got, wanted)| got != wanted) {
        anyhow::bail!(
            "recorded of table {:?} of {} rows, the schema has {:?} of {}",
            got.name,
            got.rows,
            wanted.name,
            wanted.rows
        );
    }
    match rate.replace(header.rate) {
        Some(before) if before != header.rate => {
            anyhow::bail!("recorded at rate {}, the files before it at {before}", header.rate)
        }
        _ => Ok(()),
    }
}
