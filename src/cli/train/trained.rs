//! A model in training: with all its rows in memory, or on disk behind a scratchpad.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;

use super::Args;
use crate::cli::scratchpad::{SizeFlag, orders, pipeline_on, working_dir};
use crate::device::cuda::Nvidia;
use crate::schema::Schema;
use crate::store::hot_rows::STATE;
use crate::store::{self, RowOrder, read_orders, write_orders};
use crate::trainer::{
    self, Data, Frequencies, Learner, Network, Pipeline, PipelineSettings, PlanStats, Progress,
    ScratchpadSize, Sizes, TrainError,
};
use crate::types::Version;

/// What is being trained, and where its rows are.
pub(super) enum Trained {
    InMemory(Box<Learner>),
    OnDisk { network: Box<Network>, pipeline: Box<Pipeline> },
}

impl Trained {
    /// Fresh weights, with the rows where the flags want them.
    pub fn begin(args: &Args, schema: &Schema, device: Option<Arc<Nvidia>>) -> anyhow::Result<Self> {
        let (optimizer, seed) = (args.training.optimizer()?, args.training.seed);
        let frequencies = args.pipeline.frequencies(schema)?;
        let slots = match args.scratchpad.map(|size| slots(args, schema, size)).transpose()?.flatten() {
            // Replicas take rows from a scratchpad, and a device has them in one: if need be, in one of all rows.
            None if args.replicas != 1 || device.is_some() => Some(ScratchpadSize::Fraction(1.0)),
            slots => slots.map(ScratchpadSize::Slots),
        };
        let Some(scratchpad) = slots else {
            if args.scratchpad.is_some() {
                tracing::info!("scratchpad: has room for every row, so they are all kept in memory");
            }
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
        let (replicas, lambda) = (args.replicas, args.lambda);
        let settings = args.pipeline.settings(scratchpad, seed);
        let settings = PipelineSettings { replicas, lambda, ..settings };
        let pipeline = pipeline_on(device.as_ref(), &network, (store, frequencies), settings)?;
        Ok(Self::OnDisk { network: Box::new(network), pipeline: Box::new(pipeline) })
    }

    pub fn network(&self) -> &Network {
        match self {
            Self::InMemory(learner) => learner.network(),
            Self::OnDisk { network, .. } => network,
        }
    }

    pub fn network_mut(&mut self) -> &mut Network {
        match self {
            Self::InMemory(learner) => learner.network_mut(),
            Self::OnDisk { network, .. } => network,
        }
    }

    /// Trains on the data once. Gives the number of samples.
    pub fn epoch(
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
    pub fn save(&mut self, models: &Path, name: &str) -> Result<Version, TrainError> {
        match self {
            Self::InMemory(learner) => learner.save(models, name),
            Self::OnDisk { network, pipeline } => {
                pipeline.flush()?;
                network.save(models, name, pipeline.rows())
            }
        }
    }

    /// What the scratchpad did, where there is one.
    pub fn scratchpad_json(&self) -> serde_json::Value {
        let Self::OnDisk { pipeline, .. } = self else { return serde_json::Value::Null };
        let PlanStats { hits, fills, evictions, bubbles, splits, shrinks, .. } = pipeline.stats();
        serde_json::json!({
            "slots": pipeline.slots(), "exact": pipeline.exact(), "bytes": pipeline.bytes(), "hits": hits, "fills": fills,
            "evictions": evictions, "bubbles": bubbles, "splits": splits, "shrinks": shrinks,
        })
    }
}

/// Slots of each size of records in a scratchpad of this size; none where all rows would be in it.
fn slots(args: &Args, schema: &Schema, size: SizeFlag) -> anyhow::Result<Option<Vec<usize>>> {
    let sizes = Sizes::of(schema, args.training.optimizer)?;
    let size = size.resolve(&sizes, schema, || args.training.open(&args.training.data, schema), u64::MAX)?;
    let counts = sizes.counts(&size);
    Ok((!sizes.hold_all(&counts)).then_some(counts))
}

/// The order of the rows that an earlier run has kept, if one has.
fn kept_orders(args: &Args, schema: &Schema) -> anyhow::Result<Vec<Option<RowOrder>>> {
    let path = args.models.join(&args.name).join(STATE).join(store::order::FILE);
    let mut kept = read_orders(&path)?.unwrap_or_default();
    Ok(schema.tables.iter().map(|table| kept.remove(&table.name)).collect())
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
    write_orders(&state.join(store::order::FILE), &named)?;
    Ok(orders)
}
