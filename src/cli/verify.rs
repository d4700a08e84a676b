//! `flechette verify`: trains on the data by the pipeline and by the sequential trainer, and compares every byte.

use std::io::Write;
use std::sync::Arc;

use crate::cli::scratchpad::{PipelineFlags, SizeFlag, pipeline_on, training_device, working_dir};
use crate::cli::train::read_schema;
use crate::cli::training::{TrainingFlags, compute_threads};
use crate::config::{Config, Flags};
use crate::device::cuda::Nvidia;
use crate::schema::Schema;
use crate::trainer::{self, Data, Difference, PlanStats, Sizes, Verifier};

/// Flags of `verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    training: TrainingFlags,
    /// Steps to take; fewer where the data ends
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// The scratchpad: min, a fraction of all rows, or bytes
    #[arg(long, value_name = "S", default_value = "0.1")]
    scratchpad: SizeFlag,
    #[command(flatten)]
    pipeline: PipelineFlags,
    /// Makes every stage sleep at random, from this seed
    #[arg(long, value_name = "SEED")]
    jitter: Option<u64>,
    /// Ends with one line of JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn flags(&self) -> Flags {
        self.training.flags(&self.pipeline)
    }
}

/// The bytes are not the same.
#[derive(Debug, thiserror::Error)]
#[error("trained bytes differ: {0}")]
pub(crate) struct Differs(Difference);

/// Trains both ways and compares.
///
/// # Errors
/// [`Differs`], and flags or data that cannot be used.
pub(crate) fn run(args: &Args, config: &Config) -> anyhow::Result<()> {
    args.training.optimizer()?;
    let schema = read_schema(&args.training.model_config)?;
    let device = training_device(config)?;
    compute_threads(config)?.install(|| verify(args, &schema, device.as_ref()))
}

/// What came of it.
struct Verified {
    steps: u64,
    stats: PlanStats,
    slots: usize,
    difference: Option<Difference>,
}

fn verify(args: &Args, schema: &Schema, device: Option<&Arc<Nvidia>>) -> anyhow::Result<()> {
    train_both_ways(args, schema, device)?.tell(args.json, &mut std::io::stdout())
}

impl Verified {
    /// Says it, on `out` in JSON where that is asked for.
    ///
    /// # Errors
    /// [`Differs`].
    fn tell(self, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
        let Verified { steps, stats, slots, difference } = self;
        let PlanStats { hits, fills, evictions, bubbles, splits, shrinks, .. } = stats;
        eprintln!(
            "{steps} steps on {slots} slots: {hits} hits, {fills} fills, {evictions} evictions; \
         {bubbles} bubbles, {splits} batches split, {shrinks} windows shrunk"
        );
        if json {
            let first = difference.as_ref().map(|difference| {
                let Difference { table, row, step } = difference;
                serde_json::json!({ "table": table, "row": row, "step": step })
            });
            let json = serde_json::json!({
                "equal": difference.is_none(), "steps": steps, "hits": hits, "fills": fills,
                "evictions": evictions, "first_difference": first, "slots": slots, "bubbles": bubbles,
                "splits": splits, "shrinks": shrinks,
            });
            writeln!(out, "{json}")?;
        }
        match difference {
            Some(difference) => Err(Differs(difference).into()),
            None => {
                eprintln!("every byte is the sequential trainer's");
                Ok(())
            }
        }
    }
}

fn train_both_ways(args: &Args, schema: &Schema, device: Option<&Arc<Nvidia>>) -> anyhow::Result<Verified> {
    let training = &args.training;
    let optimizer = training.optimizer()?;
    let samples = args.steps.saturating_mul(u64::from(training.batch));
    let sizes = Sizes::of(schema, optimizer.kind)?;
    let before = || training.open_before("--scratchpad min", schema);
    let size = args.scratchpad.resolve(&sizes, schema, before, samples)?;
    let settings =
        trainer::PipelineSettings { jitter: args.jitter, ..args.pipeline.settings(size, training.seed) };

    let oracle = trainer::initialise(schema, optimizer, training.seed)?;
    let temporary = std::env::temp_dir();
    let dir = working_dir(&args.pipeline, &temporary)?;
    let (mut network, store) = trainer::initialise_on_disk(schema, optimizer, training.seed, (dir, vec![]))?;
    let frequencies = args.pipeline.frequencies(schema)?;
    let mut pipeline = pipeline_on(device, &network, (store, frequencies), settings)?;
    let mut verifier = Verifier::new(oracle);
    let mut reader = training.open(&training.data, schema)?;
    let data = Data { reader: &mut *reader, batch: training.batch as usize, steps: args.steps };
    let samples = pipeline.run(&mut network, data, &mut verifier)?;
    if samples == 0 {
        return Err(training.no_samples());
    }
    pipeline.flush()?;
    let difference = verifier.finish(pipeline.store())?;
    Ok(Verified { steps: network.steps(), stats: pipeline.stats(), slots: pipeline.slots(), difference })
}

#[cfg(test)]
mod tests;
