//! `flechette plan`: the hit rates of caches of several sizes on a data set or an access trace, and how
//! often each row is used. With `--scores-per-s` also how many servers that rate needs.
//!
//! Simulated caches need every access in memory. Counts alone do not: with `--counts-bytes` the data is read
//! once and only counts are kept, within the given bytes.

mod input;
mod serve;

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use crate::cli::format_flags::{FieldFlags, MalformedFlag};
use crate::cli::training_flags::{compute_threads, data_path};
use crate::cli::{InputError, output, print, train::read_schema};
use crate::config::{BYTES_FORM, Config, Flags, parse_bytes};
use crate::dataset::{Format, Labels, ReadOptions};
use crate::planner::counts::{Counts, Ranked};
use crate::planner::plot;
use crate::planner::report::{DEFAULT_SIZES, Plan};
use crate::planner::trace::TraceBuilder;
use crate::schema::Schema;
use input::{AccessSource, Accesses, DataFiles, read_data, read_traces};
use serve::ServeFlags;

/// Flags of `plan`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The model.toml that `init` wrote
    #[arg(long, value_name = "FILE")]
    model_config: PathBuf,
    #[arg(long, value_name = "F")]
    #[arg(help = format!("Format of the data: {}; or trace, a server's access traces", Format::names()))]
    format: AccessSource,
    #[command(flatten)]
    fields: FieldFlags,
    /// Data files, the oldest accesses first
    #[arg(long, value_name = "FILE", num_args = 1.., required = true, value_parser = data_path)]
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
    #[arg(conflicts_with_all = ["sizes", "plot", "tables", "scores_per_s"])]
    counts_bytes: Option<usize>,
    /// File for a plot of hit rate against cache size, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Also prints the hit rates of per-table caches, and the hit rates of each table
    #[arg(long)]
    tables: bool,
    #[command(flatten)]
    serve: ServeFlags,
    /// Seed of the policy that evicts at random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads that compute [default: one for each core]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    #[command(flatten)]
    malformed: MalformedFlag,
    /// Prints one line of JSON at the end
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        Flags { threads: self.threads.clone(), ..Flags::default() }
    }
}

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
    let inputs = || args.data.iter().chain([&args.model_config]);
    for (flag, path) in [("--counts", &args.counts), ("--plot", &args.plot)] {
        if let Some(path) = path {
            output::check(flag, path, inputs())?;
        }
    }
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
    // Before the simulation, which takes long.
    let demand = args.serve.demand(&schema, &trace)?;
    if let Some(path) = &args.counts {
        Ranked::of(&trace).write(path).context("--counts")?;
    }
    let plan = compute_threads(config)?.install(|| Plan::of(&trace, &sizes, args.seed));
    let tables = if args.tables { plan.tables_text() } else { String::new() };
    args.print(&(plan.text(demand.as_ref()) + &tables), || plan.json(demand.as_ref()))?;
    // Last, so that the report is not lost if the plot cannot be written.
    let Some(path) = &args.plot else { return Ok(()) };
    std::fs::write(path, plot::svg(&plan)?).with_context(|| format!("--plot: {}", path.display()))
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

impl Args {
    /// Reads all data. Returns the share of the rows whose accesses the data contains: 1, or the rate of a
    /// trace.
    fn read(&self, schema: &Schema, accesses: &mut impl Accesses) -> anyhow::Result<f64> {
        match self.format {
            AccessSource::Dataset(format) => {
                let options = ReadOptions {
                    malformed_lines: self.malformed.max_malformed,
                    labels: Labels::unless(self.unlabelled),
                    fields: self.fields.options(),
                    ..ReadOptions::default()
                };
                read_data(DataFiles { format, paths: &self.data }, options, schema, accesses).map(|()| 1.0)
            }
            AccessSource::Trace => {
                self.fields.options().check_unused("the format trace")?;
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
        print(&if self.json { format!("{text}{}\n", json()) } else { text.to_owned() })
    }
}

fn parse_sizes(text: &str) -> Result<Vec<f64>, InputError> {
    let size = |part: &str| {
        let size = part.trim().parse().ok().filter(|size| (0.0..=1.0).contains(size));
        size.ok_or_else(|| InputError(anyhow!("--sizes: expected fractions from 0 to 1, got {part:?}")))
    };
    text.split(',').map(size).collect()
}
