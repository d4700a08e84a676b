//! `flechette verify`: trains on the data by the pipeline and by the sequential trainer, and compares every byte.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, anyhow};

use crate::cli::scratchpad::{PipelineFlags, SizeFlag, pipeline_on, training_device, working_dir};
use crate::cli::{InputError, train::read_schema};
use crate::config::{Config, Flags};
use crate::dataset::{self, Format, Limits, Reader};
use crate::device::cuda::Nvidia;
use crate::schema::Schema;
use crate::trainer::optim::{Kind, Optimizer};
use crate::trainer::{self, Data, Difference, PlanStats, Sizes, Verifier};

/// Flags of `verify`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's schema, as `init` writes it
    #[arg(long, value_name = "FILE")]
    model_config: PathBuf,
    /// Format of the data: criteo-tsv, avazu-csv or synthetic
    #[arg(long, value_name = "F")]
    format: Format,
    /// Files to train on, in this order
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Steps to take; fewer where the data ends
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Samples a step
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    batch: u32,
    /// sgd, adagrad, rowwise_adagrad or adam
    #[arg(long, value_name = "O", default_value = "adagrad")]
    optimizer: Kind,
    /// Learning rate
    #[arg(long, value_name = "L", default_value_t = 0.02)]
    lr: f64,
    /// Seed of the first weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The scratchpad: min, a fraction of all rows, or bytes
    #[arg(long, value_name = "S", default_value = "0.1")]
    scratchpad: SizeFlag,
    /// Threads that compute; all cores when 0 or absent
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    #[command(flatten)]
    pipeline: PipelineFlags,
    /// Makes every stage sleep at random, from this seed
    #[arg(long, value_name = "SEED")]
    jitter: Option<u64>,
    /// Malformed lines that are skipped before the data is refused
    #[arg(long, value_name = "N", default_value_t = Limits::default().malformed_lines)]
    max_malformed: u64,
    /// Ends with one line of JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn flags(&self) -> Flags {
        Flags { threads: self.threads.clone(), device: self.pipeline.device.clone(), ..Flags::default() }
    }
}

/// The bytes are not the same.
#[derive(Debug, thiserror::Error)]
#[error("trained bytes differ: {0}")]
pub struct Differs(Difference);

/// Trains both ways and compares.
///
/// # Errors
/// [`Differs`], and flags or data that cannot be used.
pub fn run(args: &Args, config: &Config) -> anyhow::Result<()> {
    if !(args.lr.is_finite() && args.lr > 0.0) {
        return Err(InputError(anyhow!("--lr: expected a positive number, got {}", args.lr)).into());
    }
    let schema = read_schema(&args.model_config)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads.compute).build();
    let pool = pool.context("threads.compute")?;
    let device = training_device(config)?;
    pool.install(|| verify(args, &schema, device.as_ref()))
}

/// What came of it.
struct Verified {
    steps: u64,
    stats: PlanStats,
    slots: usize,
    difference: Option<Difference>,
}

fn verify(args: &Args, schema: &Schema, device: Option<&Arc<Nvidia>>) -> anyhow::Result<()> {
    let verified = train_both_ways(args, schema, device)?;
    let Verified { steps, stats, slots, difference } = verified;
    let PlanStats { hits, fills, evictions, bubbles, splits, shrinks, .. } = stats;
    eprintln!(
        "{steps} steps on {slots} slots: {hits} hits, {fills} fills, {evictions} evictions; \
         {bubbles} bubbles, {splits} batches split, {shrinks} windows shrunk"
    );
    if args.json {
        let first = difference.as_ref().map(|difference| {
            let Difference { table, row, step } = difference;
            serde_json::json!({ "table": table, "row": row, "step": step })
        });
        let json = serde_json::json!({
            "equal": difference.is_none(), "steps": steps, "hits": hits, "fills": fills,
            "evictions": evictions, "first_difference": first, "slots": slots, "bubbles": bubbles,
            "splits": splits, "shrinks": shrinks,
        });
        writeln!(std::io::stdout(), "{json}")?;
    }
    match difference {
        Some(difference) => Err(Differs(difference).into()),
        None => {
            eprintln!("every byte is the sequential trainer's");
            Ok(())
        }
    }
}

fn train_both_ways(args: &Args, schema: &Schema, device: Option<&Arc<Nvidia>>) -> anyhow::Result<Verified> {
    let optimizer = Optimizer { kind: args.optimizer, lr: args.lr, eps: super::train::EPS };
    let samples = args.steps.saturating_mul(u64::from(args.batch));
    let sizes = Sizes::of(schema, args.optimizer)?;
    let size = args.scratchpad.resolve(&sizes, schema, || open(args, schema), samples)?;
    let settings =
        trainer::PipelineSettings { jitter: args.jitter, ..args.pipeline.settings(size, args.seed) };

    let oracle = trainer::initialise(schema, optimizer, args.seed)?;
    let temporary = std::env::temp_dir();
    let dir = working_dir(&args.pipeline, &temporary)?;
    let (mut network, store) = trainer::initialise_on_disk(schema, optimizer, args.seed, (dir, vec![]))?;
    let frequencies = args.pipeline.frequencies(schema)?;
    let mut pipeline = pipeline_on(device, &network, (store, frequencies), settings)?;
    let mut verifier = Verifier::new(oracle);
    let mut reader = open(args, schema)?;
    let data = Data { reader: &mut *reader, batch: args.batch as usize, steps: args.steps };
    let samples = pipeline.run(&mut network, data, &mut verifier)?;
    if samples == 0 {
        return Err(InputError(anyhow!("--data: no samples in {}", args.data[0].display())).into());
    }
    pipeline.flush()?;
    let difference = verifier.finish(pipeline.store())?;
    Ok(Verified { steps: network.steps(), stats: pipeline.stats(), slots: pipeline.slots(), difference })
}

fn open(args: &Args, schema: &Schema) -> anyhow::Result<Box<dyn Reader + Send>> {
    let limits = Limits { malformed_lines: args.max_malformed, ..Limits::default() };
    Ok(dataset::open(args.format, &args.data, schema, limits)?)
}
