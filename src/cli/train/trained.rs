//! A model in training: its rows are all in memory, or on disk behind a scratchpad.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};

use super::interrupt::Interrupted;
use super::{Args, NO_STEP};
use crate::cli::InputError;
use crate::cli::pipeline_flags::{SizeFlag, orders, pipeline_on, working_dir};
use crate::dataset::{Feed, Reader, Stoppable};
use crate::device::cuda::Nvidia;
use crate::rowlog::{RowOrder, read_orders, write_orders};
use crate::schema::{Schema, TableSchema};
use crate::store::disk::SystemDisk;
use crate::store::hot_rows::STATE;
use crate::store::{Base, Numbering, Opened};
use crate::trainer::publish::CutNotes;
use crate::trainer::{
    self, Data, Pipeline, PipelineRows, PipelineSettings, PlanStats, Progress, ReferenceTrainer,
    RowFrequency, ScratchpadSize, Sizes, StageName, TrainError, TrainState, VersionParts, WorkingFileOptions,
};
use crate::types::{Batch, Version};

pub(crate) enum Trained {
    InMemory(Box<ReferenceTrainer>),
    OnDisk { state: Box<TrainState>, pipeline: Box<Pipeline> },
}

impl Trained {
    /// Initialises the weights, or continues from a version. The flags decide whether the rows are in memory
    /// or on disk.
    pub(crate) fn begin(
        args: &Args,
        feed: &Feed,
        from: Option<Opened>,
        device: Option<Arc<Nvidia>>,
    ) -> anyhow::Result<Self> {
        let schema = &feed.schema;
        let (optimizer, seed) = (args.run.training.optimizer()?, args.run.training.seed);
        if let Some(opened) = &from {
            super::from::log(&args.name, opened, optimizer);
        }
        let frequencies = args.run.pipeline.frequencies(schema)?;
        let (replicas, lambda) = (args.run.replicas, args.run.lambda);
        if replicas == 1 && lambda != 1 {
            tracing::warn!("--lambda: has no effect, because there is one replica");
        }
        let flags = args.run.pipeline.settings(ScratchpadSize::Fraction(1.0), seed);
        let settings = PipelineSettings { replicas, lambda, ..flags };
        settings.check()?;
        let slots = match args.run.scratchpad.map(|size| slots(args, feed, size)).transpose()?.flatten() {
            // Replicas and a device need a scratchpad, even if it holds all rows.
            None if args.run.replicas != 1 || device.is_some() => Some(ScratchpadSize::Fraction(1.0)),
            slots => slots.map(ScratchpadSize::Slots),
        };
        let Some(scratchpad) = slots else {
            if args.run.scratchpad.is_some() {
                tracing::info!(
                    "scratchpad: it would hold all rows, so they are kept in memory without a working file"
                );
            }
            warn_of_unused_flags(args);
            let reference = match from {
                None => trainer::initialise(schema, optimizer, seed)?,
                Some(opened) => trainer::resume(opened, optimizer)?,
            };
            return Ok(Self::InMemory(Box::new(reference)));
        };
        let orders = match args.run.reorder {
            true => save_orders(args, schema, frequencies.as_deref())?,
            false => saved_orders(args, schema)?,
        };
        let model = args.models.join(&args.name);
        let options = WorkingFileOptions { dir: working_dir(&args.run.pipeline, &model)?, orders };
        let (state, file) = match from {
            None => trainer::initialise_on_disk(schema, optimizer, seed, options)?,
            Some(opened) => trainer::resume_on_disk(opened, optimizer, options)?,
        };
        let settings = PipelineSettings { scratchpad, ..settings };
        let pipeline = pipeline_on(device.as_ref(), &state, PipelineRows { file, frequencies }, settings)?;
        Ok(Self::OnDisk { state: Box::new(state), pipeline: Box::new(pipeline) })
    }

    pub(crate) fn state(&self) -> &TrainState {
        match self {
            Self::InMemory(reference) => &reference.state,
            Self::OnDisk { state, .. } => state,
        }
    }

    pub(crate) fn state_mut(&mut self) -> &mut TrainState {
        match self {
            Self::InMemory(reference) => &mut reference.state,
            Self::OnDisk { state, .. } => state,
        }
    }

    /// Trains on the data once. Returns the number of samples.
    pub(crate) fn epoch(
        &mut self,
        data: Data<'_>,
        mut on_step: impl FnMut(&Progress<'_>),
    ) -> Result<u64, TrainError> {
        match self {
            Self::InMemory(reference) => trainer::run_in_memory(reference, data, on_step),
            Self::OnDisk { state, pipeline } => pipeline.run(state, data, &mut on_step),
        }
    }

    /// Makes the trained rows current for [`Self::logits`].
    ///
    /// # Errors
    /// Those of the working file.
    pub(crate) fn prepare_logits(&mut self) -> Result<(), TrainError> {
        match self {
            Self::InMemory(_) => Ok(()),
            Self::OnDisk { pipeline, .. } => pipeline.flush(),
        }
    }

    /// Writes the logit of every sample to `logits`, with the trained rows and dense weights.
    ///
    /// # Errors
    /// When the batch does not fit the schema, and those of the working file.
    pub(crate) fn logits(&mut self, batch: &Batch, logits: &mut Vec<f32>) -> Result<(), TrainError> {
        match self {
            Self::InMemory(reference) => Ok(reference.logits(batch, logits)?),
            Self::OnDisk { state, pipeline } => pipeline.logits(state, batch, logits),
        }
    }

    /// Writes a full version, whose number is above `highest`.
    ///
    /// # Errors
    /// When numbers are not finite, or the version cannot be written.
    pub(crate) fn save(
        &mut self,
        models: &Path,
        name: &str,
        notes: &CutNotes,
        highest: Option<Version>,
    ) -> Result<Base, TrainError> {
        let (dense, rows) = match self {
            Self::InMemory(reference) => (reference.state.checkpoint(), reference.rows()),
            Self::OnDisk { state, pipeline } => {
                pipeline.flush()?;
                (state.checkpoint(), pipeline.rows())
            }
        };
        let (cursor, quality) = (notes.cursor.as_deref(), (notes.quality)());
        let numbering = highest.map_or(Numbering::Next, Numbering::Above);
        let parts = VersionParts { rows, numbering, cursor, quality };
        Ok(dense.publish(&SystemDisk, models, name, parts)?.base)
    }

    /// The statistics of the scratchpad, or null without one.
    pub(crate) fn scratchpad_json(&self) -> serde_json::Value {
        let Self::OnDisk { pipeline, .. } = self else { return serde_json::Value::Null };
        let seconds =
            |(stage, time): (StageName, Duration)| (stage.name().to_owned(), time.as_secs_f64().into());
        let worked: serde_json::Map<_, _> = pipeline.worked().map(seconds).collect();
        let PlanStats { hits, fills, filled_before, evictions, bubbles, splits, shrinks } = pipeline.stats();
        serde_json::json!({
            "slots": pipeline.slots(), "exact": pipeline.settings().exact(), "bytes": pipeline.bytes(),
            "hits": hits, "fills": fills, "filled_before": filled_before, "evictions": evictions,
            "bubbles": bubbles, "splits": splits, "shrinks": shrinks, "worked_s": worked,
        })
    }
}

/// The slots of a scratchpad of this size, by size of a row with its optimizer state; `None` if all rows fit.
fn slots(args: &Args, feed: &Feed, size: SizeFlag) -> anyhow::Result<Option<Vec<usize>>> {
    let Feed { schema, stop, .. } = feed;
    let sizes = Sizes::of(schema, args.run.training.optimizer);
    let before = || match args.data.follows() {
        false => {
            let reader = args.run.training.open_before("--scratchpad min", &args.data.data, schema)?;
            let reader: Box<dyn Reader + Send> = Box::new(Stoppable::new(reader, stop.clone()));
            Ok(reader)
        }
        true => {
            let reason = "reads the data twice, so not with --follow or learned samples";
            Err(InputError(anyhow!("--scratchpad min: {reason}")).into())
        }
    };
    let size = size.resolve(&sizes, schema, before, u64::MAX)?;
    if stop.interrupted() {
        // Not all data may have been read.
        return Err(Interrupted(NO_STEP.to_owned()).into());
    }
    let counts = sizes.counts(&size);
    Ok((!sizes.hold_all(&counts)).then_some(counts))
}

/// Warns of flags that have no effect because all rows are in memory.
fn warn_of_unused_flags(args: &Args) {
    let reorder = args.run.reorder.then_some("--reorder");
    let unused: Vec<_> = args.run.pipeline.given().into_iter().chain(reorder).collect();
    if !unused.is_empty() {
        let unused = unused.join(", ");
        tracing::warn!("scratchpad: all rows are kept in memory, so these flags have no effect: {unused}");
    }
}

/// For each table the row order that an earlier run saved; `None` if there is no saved order.
fn saved_orders(args: &Args, schema: &Schema) -> anyhow::Result<Vec<Option<RowOrder>>> {
    let path = args.models.join(&args.name).join(STATE).join(crate::rowlog::order::FILE);
    let mut saved = read_orders(&path)?.unwrap_or_default();
    let of = |table: &TableSchema| {
        let order = saved.remove(&table.name);
        if let Some(order) = order.as_ref().filter(|order| order.rows() != table.stored_rows()) {
            let (path, name, got, rows) = (path.display(), &table.name, order.rows(), table.stored_rows());
            let error = anyhow!("{path}: table {name:?}: expected an order of {rows} rows, got one of {got}");
            return Err(InputError(error).into());
        }
        Ok(order)
    };
    schema.tables.iter().map(of).collect()
}

/// Orders the rows by their counts, and saves that order in the model's directory.
fn save_orders(
    args: &Args,
    schema: &Schema,
    frequencies: Option<&[RowFrequency]>,
) -> anyhow::Result<Vec<Option<RowOrder>>> {
    let orders = orders(schema, frequencies.unwrap_or(&[]))?;
    let state = args.models.join(&args.name).join(STATE);
    std::fs::create_dir_all(&state).with_context(|| format!("{}", state.display()))?;
    let named = schema.tables.iter().zip(&orders);
    let named: Vec<_> = named.filter_map(|(table, order)| Some((&*table.name, order.as_ref()?))).collect();
    write_orders(&state.join(crate::rowlog::order::FILE), &named)?;
    Ok(orders)
}
