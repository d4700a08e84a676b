//! A model in training: with all its rows in memory, or on disk behind a scratchpad.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};

use super::Args;
use crate::cli::InputError;
use crate::cli::scratchpad::{SizeFlag, orders, pipeline_on, working_dir};
use crate::device::cuda::Nvidia;
use crate::rowlog::{RowOrder, read_orders, write_orders};
use crate::schema::{Schema, Table};
use crate::store::hot_rows::STATE;
use crate::trainer::{
    self, Data, Frequencies, Pipeline, PipelineSettings, PlanStats, Progress, ReferenceTrainer,
    ScratchpadSize, Sizes, StageName, TrainError, TrainState,
};
use crate::types::Version;

/// What is being trained, and where its rows are.
pub(crate) enum Trained {
    InMemory(Box<ReferenceTrainer>),
    OnDisk { network: Box<TrainState>, pipeline: Box<Pipeline> },
}

impl Trained {
    /// Fresh weights, with the rows where the flags want them.
    pub(crate) fn begin(args: &Args, schema: &Schema, device: Option<Arc<Nvidia>>) -> anyhow::Result<Self> {
        let (optimizer, seed) = (args.training.optimizer()?, args.training.seed);
        let frequencies = args.pipeline.frequencies(schema)?;
        let (replicas, lambda) = (args.replicas, args.lambda);
        let flags = args.pipeline.settings(ScratchpadSize::Fraction(1.0), seed);
        let settings = PipelineSettings { replicas, lambda, ..flags };
        settings.check()?;
        let slots = match args.scratchpad.map(|size| slots(args, schema, size)).transpose()?.flatten() {
            // Replicas take rows from a scratchpad, and a device has them in one: if need be, in one of all rows.
            None if args.replicas != 1 || device.is_some() => Some(ScratchpadSize::Fraction(1.0)),
            slots => slots.map(ScratchpadSize::Slots),
        };
        let Some(scratchpad) = slots else {
            if args.scratchpad.is_some() {
                tracing::info!("scratchpad: has room for every row, so they are all kept in memory");
            }
            warn_of_idle_flags(args);
            let learner = trainer::initialise(schema, optimizer, seed)?;
            return Ok(Self::InMemory(Box::new(learner)));
        };
        let orders = match args.reorder {
            true => keep_orders(args, schema, frequencies.as_ref())?,
            false => kept_orders(args, schema)?,
        };
        let model = args.models.join(&args.name);
        let dir = working_dir(&args.pipeline, &model)?;
        let (network, store) = trainer::initialise_on_disk(schema, optimizer, seed, (dir, orders))?;
        let settings = PipelineSettings { scratchpad, ..settings };
        let pipeline = pipeline_on(device.as_ref(), &network, (store, frequencies), settings)?;
        Ok(Self::OnDisk { network: Box::new(network), pipeline: Box::new(pipeline) })
    }

    pub(crate) fn network(&self) -> &TrainState {
        match self {
            Self::InMemory(learner) => learner.state(),
            Self::OnDisk { network, .. } => network,
        }
    }

    pub(crate) fn network_mut(&mut self) -> &mut TrainState {
        match self {
            Self::InMemory(learner) => learner.state_mut(),
            Self::OnDisk { network, .. } => network,
        }
    }

    /// Trains on the data once. Gives the number of samples.
    pub(crate) fn epoch(
        &mut self,
        data: Data<'_>,
        mut on_step: impl FnMut(&Progress<'_>),
    ) -> Result<u64, TrainError> {
        match self {
            Self::InMemory(learner) => trainer::run_in_memory(learner, data, on_step),
            Self::OnDisk { network, pipeline } => pipeline.run(network, data, &mut on_step),
        }
    }

    /// Writes a version.
    pub(crate) fn save(&mut self, models: &Path, name: &str) -> Result<Version, TrainError> {
        match self {
            Self::InMemory(learner) => learner.save(models, name),
            Self::OnDisk { network, pipeline } => {
                pipeline.flush()?;
                network.save(models, name, pipeline.rows())
            }
        }
    }

    /// What the scratchpad did, where there is one.
    pub(crate) fn scratchpad_json(&self) -> serde_json::Value {
        let Self::OnDisk { pipeline, .. } = self else { return serde_json::Value::Null };
        let seconds =
            |(stage, time): (StageName, Duration)| (stage.name().to_owned(), time.as_secs_f64().into());
        let worked: serde_json::Map<_, _> = pipeline.worked().map(seconds).collect();
        let PlanStats { hits, fills, evictions, bubbles, splits, shrinks, .. } = pipeline.stats();
        serde_json::json!({
            "slots": pipeline.slots(), "exact": pipeline.settings().exact(), "bytes": pipeline.bytes(), "hits": hits, "fills": fills,
            "evictions": evictions, "bubbles": bubbles, "splits": splits, "shrinks": shrinks,
            "worked_s": worked,
        })
    }
}

/// Slots of each size of records in a scratchpad of this size; none where all rows would be in it.
fn slots(args: &Args, schema: &Schema, size: SizeFlag) -> anyhow::Result<Option<Vec<usize>>> {
    let sizes = Sizes::of(schema, args.training.optimizer)?;
    let before = || args.training.open_before("--scratchpad min", schema);
    let size = size.resolve(&sizes, schema, before, u64::MAX)?;
    let counts = sizes.counts(&size);
    Ok((!sizes.hold_all(&counts)).then_some(counts))
}

/// Says which flags do nothing where all rows are in memory.
fn warn_of_idle_flags(args: &Args) {
    let others = [("--reorder", args.reorder), ("--lambda", args.lambda != 1)];
    let others = others.into_iter().filter_map(|(name, given)| given.then_some(name));
    let idle: Vec<_> = args.pipeline.given().into_iter().chain(others).collect();
    if !idle.is_empty() {
        let idle = idle.join(", ");
        tracing::warn!("scratchpad: all rows are kept in memory, where there is nothing for {idle} to do");
    }
}

/// The order of the rows that an earlier run has kept, if one has.
fn kept_orders(args: &Args, schema: &Schema) -> anyhow::Result<Vec<Option<RowOrder>>> {
    let path = args.models.join(&args.name).join(STATE).join(crate::rowlog::order::FILE);
    let mut kept = read_orders(&path)?.unwrap_or_default();
    let of = |table: &Table| {
        let order = kept.remove(&table.name);
        if let Some(order) = order.as_ref().filter(|order| order.rows() != table.stored_rows()) {
            let (path, name, got, rows) = (path.display(), &table.name, order.rows(), table.stored_rows());
            let error = anyhow!("{path}: table {name:?}: expected an order of {rows} rows, got one of {got}");
            return Err(InputError(error).into());
        }
        Ok(order)
    };
    schema.tables.iter().map(of).collect()
}

/// The order of the rows by their counts, kept in the model's directory.
fn keep_orders(
    args: &Args,
    schema: &Schema,
    frequencies: Option<&Frequencies>,
) -> anyhow::Result<Vec<Option<RowOrder>>> {
    let orders = orders(schema, frequencies.unwrap_or(&vec![]))?;
    let state = args.models.join(&args.name).join(STATE);
    std::fs::create_dir_all(&state).with_context(|| format!("{}", state.display()))?;
    let named = schema.tables.iter().zip(&orders);
    let named: Vec<_> = named.filter_map(|(table, order)| Some((&*table.name, order.as_ref()?))).collect();
    write_orders(&state.join(crate::rowlog::order::FILE), &named)?;
    Ok(orders)
}
