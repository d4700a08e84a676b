//! The pipeline: Load, Plan, Collect, Exchange, Insert and Train, each a thread, with bounded channels
//! between them (ScratchPipe, section IV-C).
//!
//! ```text
//!           batches      items          items           items         items
//!    Load ---------> Plan ----> Collect ----> Exchange ----> Insert ----> Train
//!      ^              ^                                                     |
//!      |              +------------------ progress, buffers ----------------+
//!      +------------------------------ buffers -----------------------------+
//! ```
//!
//! All rows are in the working file. While a window of batches needs a row, the scratchpad has a copy of it,
//! and that copy is the current one. Train finds every row of its item in the scratchpad, so it waits only
//! for items. The trained bytes are those of the sequential [`super::ReferenceTrainer`] for any sizes of
//! scratchpad and buffers, and any speeds of the stages: `plan` explains why, and `flechette verify` checks
//! it.
//!
//! A stage that fails ends the run: its channels close, later stages finish the items that they have, and
//! earlier stages can send no more. The run returns the error of the failed stage, not the
//! [`TrainError::Stopped`] of other stages.

use std::sync::Arc;
use std::thread::{self, Scope};
use std::time::Duration;

pub(crate) mod clocks;
mod collect;
mod exchange;
pub(crate) mod gpu;
mod hit_map;
mod insert;
pub(crate) mod item;
pub(crate) mod jitter;
pub(crate) mod plan;
pub(crate) mod policy;
mod score;
pub(crate) mod scratchpad;
mod settings;
mod slot_directory;
pub(crate) mod slot_flags;
pub(crate) mod slots;
pub(crate) mod stage;
pub(crate) mod train;
mod train_progress;
mod use_counts;
pub(crate) mod verify;

use self::clocks::StageName::{Collect, Exchange, Insert};
use self::clocks::{Clocks, StageName};
use self::collect::RowMover;
use self::exchange::exchange;
use self::item::{BufferPool, Item, ItemTransfers, PreparedBatch};
use self::plan::{HazardWindows, PlanChannels, PlanSettings, PlanStats, Planner};
use self::policy::ScratchpadPolicy;
use self::scratchpad::{ScratchpadMemory, Sizes};
pub use self::settings::PipelineSettings;
pub(crate) use self::stage::start;
use self::stage::{Running, StageEnds, StageThread, Stages, StopOnDrop, TrainChannels};
use self::train::{StepObserver, Train};
use self::train_progress::TrainProgress;
use self::use_counts::UseCounts;
use super::TrainError;
use super::read_ahead::{EndReader, ReadAhead};
use super::replicas::Replicas;
use super::train_state::TrainState;
use crate::dataset::Reader;
use crate::device::cuda::Driver;
use crate::rowlog::WorkingFile;
use crate::store::TableRows;
use crate::types::{RowId, TableId};

/// Trains a model whose rows are in a working file.
pub struct Pipeline {
    planner: Planner,
    sizes: Sizes,
    scratchpad: ScratchpadMemory,
    store: WorkingFile,
    settings: PipelineSettings,
    threads: rayon::ThreadPool,
    /// Rows to fetch before the first batch.
    hottest: Vec<RowId>,
    buffers: BufferPools,
    clocks: Clocks,
}

/// Buffers that Train has finished with, to reuse.
#[derive(Default)]
pub(crate) struct BufferPools {
    transfers: BufferPool<ItemTransfers>,
    batches: BufferPool<PreparedBatch>,
}

/// How often a row is used in a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFrequency {
    /// The row's table.
    pub table: TableId,
    /// The row.
    pub row: u64,
    /// The number of uses.
    pub count: u64,
}

/// The rows that a pipeline trains.
pub struct PipelineRows {
    /// Holds all rows.
    pub file: WorkingFile,
    /// The frequencies of rows, the most frequent row first. If they are known, the first run begins by
    /// fetching the most frequent rows.
    pub frequencies: Option<Vec<RowFrequency>>,
}

impl From<WorkingFile> for PipelineRows {
    fn from(file: WorkingFile) -> Self {
        Self { file, frequencies: None }
    }
}

impl Pipeline {
    /// A pipeline with a scratchpad in host memory.
    ///
    /// # Errors
    /// [`TrainError`] for settings that are invalid or do not fit the model.
    pub fn new(
        train_state: &TrainState,
        rows: PipelineRows,
        settings: PipelineSettings,
    ) -> Result<Self, TrainError> {
        Self::with(train_state, rows, settings, |sizes, counts, _| {
            Ok(ScratchpadMemory::Host(sizes.slots(counts)?))
        })
    }

    /// A pipeline with a scratchpad in device memory. The device pools and updates rows, and dense layers
    /// run on the host. The trained bytes are those of [`Self::new`]. Only one replica is possible.
    ///
    /// # Errors
    /// As [`Self::new`]; [`TrainError::Replicas`] for several replicas; [`TrainError::Device`] when an
    /// allocation fails.
    pub(crate) fn on_device<D: Driver>(
        driver: &Arc<D>,
        train_state: &TrainState,
        rows: PipelineRows,
        settings: PipelineSettings,
    ) -> Result<Self, TrainError> {
        if settings.replicas > 1 {
            return Err(TrainError::Replicas { got: settings.replicas, most: 1 });
        }
        Self::with(train_state, rows, settings, |sizes, counts, words| sizes.on_device(driver, counts, words))
    }

    /// `scratchpad` allocates the slots and the staging buffers. It gets the number of slots of each size,
    /// and the words that a staging buffer holds in each direction.
    fn with(
        train_state: &TrainState,
        rows: PipelineRows,
        settings: PipelineSettings,
        scratchpad: impl FnOnce(&Sizes, &[usize], usize) -> Result<ScratchpadMemory, TrainError>,
    ) -> Result<Self, TrainError> {
        settings.check()?;
        let PipelineRows { file: store, frequencies } = rows;
        let (lambda, apart) = (settings.lambda, settings.steps_apart());
        if settings.replicas > 1 && lambda > apart {
            tracing::warn!(
                "lambda: {lambda} steps, but replicas also average at the end of a window, after at most \
                 {apart} steps"
            );
        }
        let sizes = Sizes::of(&train_state.schema, train_state.optimizer.kind);
        let counts = sizes.counts(&settings.scratchpad);
        // Twice the items that can be in the six stages and the four channels between them, as a margin.
        // Each item stages rows in both directions.
        let items = 2 * (6 + 4 * settings.buffered);
        let item_words = settings.staging_bytes / (2 * items) / size_of::<f32>();
        let scratchpad = scratchpad(&sizes, &counts, item_words)?;
        let hottest = frequencies.iter().flatten().map(|used| RowId::new(used.table, used.row)).collect();
        let plan = PlanSettings {
            policy: settings.policy,
            seed: settings.seed,
            lookahead: settings.lookahead,
            windows: HazardWindows::of(settings.buffered),
            item_words,
            overlap: settings.overlap,
            frequencies: use_counts(settings.policy, frequencies)?,
        };
        let planner = Planner::new(train_state, plan, &counts, sizes.tables.clone())?;
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(settings.threads.max(1))
            .thread_name(|at| format!("rows-{at}"));
        let threads = threads.build().map_err(|e| TrainError::Threads { reason: e.to_string() })?;
        let (buffers, clocks) = (BufferPools::default(), Clocks::default());
        Ok(Self { planner, sizes, scratchpad, store, settings, threads, hottest, buffers, clocks })
    }

    /// What Plan has done so far.
    #[must_use]
    pub fn stats(&self) -> PlanStats {
        self.planner.stats()
    }

    /// Slots of all sizes together.
    #[must_use]
    pub(crate) fn slots(&self) -> usize {
        self.scratchpad.counts().iter().sum()
    }

    /// Bytes of the scratchpad and its bookkeeping.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.bytes(&self.scratchpad.counts())
    }

    /// How long each stage has worked so far, without the time in which it waited for other stages. The
    /// stage with the longest time limits the speed of training.
    pub fn worked(&self) -> impl Iterator<Item = (StageName, Duration)> + '_ {
        StageName::ALL.into_iter().map(|stage| (stage, self.clocks.of(stage)))
    }

    #[must_use]
    pub(crate) fn settings(&self) -> &PipelineSettings {
        &self.settings
    }

    /// The working file. Its rows are current only after [`Self::flush`].
    #[must_use]
    pub fn store(&self) -> &WorkingFile {
        &self.store
    }

    /// The rows of every table, to save. They are current only after [`Self::flush`].
    #[must_use]
    pub(crate) fn rows(&self) -> Vec<TableRows<'_>> {
        (0..self.sizes.tables.len()).map(|t| TableRows::Source(&self.store, TableId(t as u32))).collect()
    }

    /// Trains on every sample of the data, on the threads of the caller's rayon pool. Returns the number of
    /// samples.
    ///
    /// # Errors
    /// [`TrainError`]. The pipeline must not be used after an error.
    pub fn run(
        &mut self,
        train_state: &mut TrainState,
        data: Data<'_>,
        observer: &mut dyn StepObserver,
    ) -> Result<u64, TrainError> {
        let (schema, jitter) = (train_state.schema.clone(), self.settings.jitter);
        let hottest = std::mem::take(&mut self.hottest);
        let Self { planner, scratchpad, store, threads, settings, buffers, clocks, .. } = self;
        let (scratchpad, buffers, clocks) = (&*scratchpad, &*buffers, &*clocks);
        let tables = planner.tables().to_vec();
        let mover = RowMover { store, scratchpad, tables: &tables, threads };
        let progress = &TrainProgress::at(planner.item);
        let several = settings.replicas > 1;
        let replicas = several.then(|| Replicas::new(train_state, settings.replicas, settings.lambda));
        let mut train = Train {
            train_state,
            scratchpad,
            stepper: scratchpad.stepper()?,
            tables: &tables,
            observer,
            samples: 0,
            logits: Vec::new(),
            replicas,
        };
        thread::scope(|scope| {
            // However the scope ends, Plan must not wait for items that will not train.
            let stop = StopOnDrop(progress);
            let (stages, ends) = (Stages { scope, clocks, mover, jitter }, StageEnds::new(settings.buffered));
            let read_ahead = ReadAhead::new(&schema, data).with_jitter(stages.jitter_of(StageName::Load));
            let reader = EndReader::of(&read_ahead);
            start(scope, "load", move || read_ahead.run(&ends.load, &buffers.batches, clocks))?;
            let (batches, items) = ends.plan;
            let (transfers, jitter) = (&buffers.transfers, stages.jitter_of(StageName::Plan));
            let channels = PlanChannels { batches, items, transfers, progress, clocks, jitter };
            let running = Running {
                plan: start_plan(scope, planner, hottest, channels)?,
                collect: stages.start(Collect, ends.collect, |mover, item| mover.collect(item))?,
                exchange: stages.start(Exchange, ends.exchange, |_, item| exchange(item))?,
                insert: stages.start(Insert, ends.insert, |mover, item| mover.insert(item))?,
            };
            let jitter = stages.jitter_of(StageName::Train);
            let trained =
                TrainChannels { items: ends.train, buffers, clocks, progress, jitter }.run(&mut train);
            drop(stop);
            running.join(trained, reader)
        })?;
        Ok(train.samples)
    }

    /// Writes every row of the scratchpad to the working file. The rows stay in the scratchpad, and training
    /// can continue.
    ///
    /// # Errors
    /// [`TrainError::Store`] when a row cannot be written. Training can continue then, too: each row of the
    /// file is the old one or the new one. Or the error of a device that has failed.
    pub(crate) fn flush(&mut self) -> Result<(), TrainError> {
        let Self { planner, scratchpad, store, threads, .. } = self;
        let tables = planner.tables();
        let mover = RowMover { store, scratchpad, tables, threads };
        let (mut item, mut rows) = (Item::default(), Vec::new());
        for (directory, size) in planner.directories().iter().zip(&self.sizes.sizes) {
            // No more rows than an item of a run may stage.
            let staged = planner.item_words() / size.words.max(1);
            let staged = staged.clamp(1, FLUSHED_ROWS);
            let mut after = None;
            loop {
                directory.rows_after(after, &mut rows);
                let Some(last) = rows.last() else { break };
                after = Some(last.row);
                for rows in rows.chunks_mut(staged) {
                    item.evictions.set(rows, tables);
                    mover.collect(&mut item)?;
                    exchange(&mut item)?;
                    mover.insert(&mut item)?;
                }
            }
        }
        Ok(())
    }

    /// Runs [`Self::flush`] and empties the scratchpad. Tests compare a run that continues from an empty one
    /// with one that does not; the program keeps the rows.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub fn clear(&mut self) -> Result<(), TrainError> {
        self.flush()?;
        self.planner.clear();
        Ok(())
    }
}

/// Starts Plan, which first fetches the `hottest` rows.
fn start_plan<'s>(
    scope: &'s Scope<'s, '_>,
    planner: &'s mut Planner,
    hottest: Vec<RowId>,
    mut channels: PlanChannels<'s>,
) -> Result<StageThread<'s>, TrainError> {
    start(scope, "plan", move || {
        if !hottest.is_empty() {
            channels.clocks.time(StageName::Plan, || planner.fill(&hottest, &mut channels))?;
        }
        planner.run(&mut channels)
    })
}

/// The frequencies as a lookup table; `None` unless the policy is LFU.
fn use_counts(
    policy: ScratchpadPolicy,
    rows: Option<Vec<RowFrequency>>,
) -> Result<Option<Arc<UseCounts>>, TrainError> {
    let Some(rows) = rows.filter(|_| policy == ScratchpadPolicy::Lfu) else { return Ok(None) };
    let counts = rows.iter().map(|&RowFrequency { table, row, count }| {
        (RowId::new(table, row), u32::try_from(count).unwrap_or(u32::MAX))
    });
    Ok(Some(Arc::new(UseCounts::new(counts)?)))
}

/// The most rows that a flush moves at a time.
const FLUSHED_ROWS: usize = 16 << 10;

/// The data of a training run.
pub struct Data<'a> {
    /// Reads the samples.
    pub reader: &'a mut (dyn Reader + Send),
    /// Samples per step; the last step may have fewer.
    pub batch: usize,
    /// The maximum number of steps.
    pub steps: u64,
}

#[cfg(test)]
pub(crate) mod tests;
