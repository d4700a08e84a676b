//! `flechette verify`: trains with the pipeline and with the sequential reference trainer, and compares every
//! byte.

use std::path::PathBuf;
use std::sync::Arc;

use crate::cli::flags::whole;
use crate::cli::pipeline_flags::{PipelineFlags, SizeFlag, pipeline_on, training_device, working_dir};
use crate::cli::train::read_schema;
use crate::cli::training_flags::{ComputeFlags, TrainingFlags, compute_threads, data_path, no_samples};
use crate::cli::{note, print_and_end};
use crate::config::{Config, Flags};
use crate::device::cuda::Nvidia;
use crate::schema::Schema;
use crate::trainer::{self, Data, Difference, PipelineRows, PlanStats, Sizes, Verifier, WorkingFileOptions};

/// Flags of `verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The model.toml that `init` wrote
    #[arg(long, value_name = "FILE")]
    model_config: PathBuf,
    /// Files to train on, read in this order; - is standard input. With --format synthetic a
    /// description, such as rows=100000,seed=1
    #[arg(long, value_name = "FILE", num_args = 1.., required = true, value_parser = data_path)]
    data: Vec<PathBuf>,
    #[command(flatten)]
    training: TrainingFlags,
    /// Most steps to train; fewer if the data ends earlier
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = whole::<u64>(1, u64::MAX))]
    steps: u64,
    /// Size of the scratchpad: min (room for the largest sample), a fraction of all rows, or bytes
    #[arg(long, value_name = "S", default_value = "0.1")]
    scratchpad: SizeFlag,
    #[command(flatten)]
    pipeline: PipelineFlags,
    #[command(flatten)]
    compute: ComputeFlags,
    /// Makes every stage of the pipeline sleep for random times, drawn with this seed
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>(0, u64::MAX))]
    jitter: Option<u64>,
    /// Prints one line of JSON at the end
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        self.compute.flags()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("trained bytes differ: {0}")]
pub(crate) struct Differs(Difference);

/// Trains both ways and compares.
///
/// # Errors
/// [`Differs`], or when flags or data are wrong.
pub(crate) fn run(args: &Args, config: &Config) -> anyhow::Result<()> {
    let schema = read_schema(&args.model_config)?;
    let device = training_device(config)?;
    compute_threads(config)?.install(|| verify(args, &schema, device.as_ref()))
}

/// The result of both trainings.
struct Verified {
    steps: u64,
    stats: PlanStats,
    slots: usize,
    difference: Option<Difference>,
}

fn verify(args: &Args, schema: &Schema, device: Option<&Arc<Nvidia>>) -> anyhow::Result<()> {
    let verified = train_both_ways(args, schema, device)?;
    note(&verified.text());
    let json = if args.json { format!("{}\n", verified.json()) } else { String::new() };
    print_and_end(&json, verified.result().map_err(Into::into))?;
    note("every byte is equal to the sequential trainer's");
    Ok(())
}

impl Verified {
    fn text(&self) -> String {
        let Verified { steps, stats, slots, .. } = self;
        let PlanStats { hits, fills, evictions, bubbles, splits, shrinks, .. } = stats;
        format!(
            "{steps} steps with {slots} slots: {hits} hits, {fills} fills, {evictions} evictions, \
             {bubbles} bubbles, {splits} batches split, {shrinks} windows shrunk"
        )
    }

    fn json(&self) -> serde_json::Value {
        let PlanStats { hits, fills, evictions, bubbles, splits, shrinks, .. } = self.stats;
        let first = self.difference.as_ref().map(|difference| {
            let Difference { table, row, step } = difference;
            serde_json::json!({ "table": table, "row": row, "step": step })
        });
        serde_json::json!({
            "equal": first.is_none(), "steps": self.steps, "hits": hits, "fills": fills,
            "evictions": evictions, "first_difference": first, "slots": self.slots,
            "bubbles": bubbles, "splits": splits, "shrinks": shrinks,
        })
    }

    fn result(self) -> Result<(), Differs> {
        self.difference.map_or(Ok(()), |difference| Err(Differs(difference)))
    }
}

fn train_both_ways(args: &Args, schema: &Schema, device: Option<&Arc<Nvidia>>) -> anyhow::Result<Verified> {
    let training = &args.training;
    let optimizer = training.optimizer()?;
    let samples = args.steps.saturating_mul(u64::from(training.batch));
    let sizes = Sizes::of(schema, optimizer.kind);
    let before = || training.open_before("--scratchpad min", &args.data, schema);
    let size = args.scratchpad.resolve(&sizes, schema, before, samples)?;
    let settings =
        trainer::PipelineSettings { jitter: args.jitter, ..args.pipeline.settings(size, training.seed) };

    let oracle = trainer::initialise(schema, optimizer, training.seed)?;
    let temporary = std::env::temp_dir();
    let dir = working_dir(&args.pipeline, &temporary)?;
    let (mut state, file) =
        trainer::initialise_on_disk(schema, optimizer, training.seed, WorkingFileOptions::logs(dir))?;
    let rows = PipelineRows { file, frequencies: args.pipeline.frequencies(schema)? };
    let mut pipeline = pipeline_on(device, &state, rows, settings)?;
    let mut verifier = Verifier::new(oracle);
    let mut reader = training.open(&args.data, schema)?;
    let data = Data { reader: &mut *reader, batch: training.batch as usize, steps: args.steps };
    let samples = pipeline.run(&mut state, data, &mut verifier)?;
    if samples == 0 {
        return Err(no_samples("--data", &args.data[0]));
    }
    pipeline.flush()?;
    let difference = verifier.finish(pipeline.store())?;
    Ok(Verified { steps: state.steps, stats: pipeline.stats(), slots: pipeline.slots(), difference })
}

#[cfg(test)]
mod tests;
