//! The pipeline: Load, Plan, Collect, Exchange, Insert, Train, each a thread, with bounded channels between them
//! (ScratchPipe, section IV-C).
//!
//! ```text
//!           batches      items          items           items         items
//!    Load ---------> Plan ----> Collect ----> Exchange ----> Insert ----> Train
//!      ^              ^                                                     |
//!      |              +--------------- how far it is, buffers --------------+
//!      +------------------------------ buffers -----------------------------+
//! ```
//!
//! Rows live in the working file and, while a window needs them, in the scratchpad: the only copy that counts is the
//! scratchpad's where there is one. Train finds every row there, so it waits for nothing but its turn. What is
//! trained is to the byte what the sequential [`super::ReferenceTrainer`] trains, whatever the sizes and speeds: `plan` says why, and
//! `flechette verify` shows it.
//!
//! A stage that fails ends the run: its channels close, the stages after it finish what they have, and those before it find nobody
//! to hand to. The first real error is the run's.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

pub(crate) mod clocks;
mod collect;
mod exchange;
pub mod gpu;
mod hit_map;
mod insert;
pub(crate) mod item;
pub(crate) mod jitter;
pub(crate) mod key;
pub(crate) mod load;
pub(crate) mod plan;
pub(crate) mod policy;
pub(crate) mod scratchpad;
mod settings;
mod slot_directory;
pub mod slot_flags;
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
use self::item::{Item, PreparedBatch, Spare, Transfers};
use self::jitter::Jitter;
use self::key::Key;
use self::load::Load;
use self::plan::{PlanEnds, PlanSettings, PlanStats, Planner, Windows};
use self::policy::Policy;
use self::scratchpad::{ScratchpadMemory, Sizes};
pub use self::settings::PipelineSettings;
pub(crate) use self::stage::start;
use self::stage::{Stage, Stop, TrainEnds, end};
use self::train::{StepObserver, Train};
use self::train_progress::TrainProgress;
use self::use_counts::UseCounts;
use super::replicas::Replicas;
use super::train_state::TrainState;
use super::{READ_AHEAD, TrainError};
use crate::dataset::Reader;
use crate::device::cuda::Driver;
use crate::rowlog::WorkingFile;
use crate::store::Rows;
use crate::types::TableId;

/// Trains a network on rows in a working file.
pub struct Pipeline {
    planner: Planner,
    sizes: Sizes,
    pad: ScratchpadMemory,
    store: WorkingFile,
    settings: PipelineSettings,
    threads: rayon::ThreadPool,
    /// Rows to bring in before the first batch.
    hottest: Vec<Key>,
    spare: Buffers,
    clocks: Clocks,
}

/// What Train has done with.
#[derive(Default)]
pub(crate) struct Buffers {
    transfers: Spare<(Transfers, Transfers)>,
    casts: Spare<PreparedBatch>,
}

/// Rows and how often each is used, the most frequent first.
pub type Frequencies = Vec<(TableId, u64, u64)>;

impl Pipeline {
    /// With an empty scratchpad in memory of the host, or with one that is to be filled with the most frequent rows first.
    ///
    /// # Errors
    /// [`TrainError`] for settings that cannot be met.
    pub fn new(
        network: &TrainState,
        store: WorkingFile,
        settings: PipelineSettings,
        frequencies: Option<Frequencies>,
    ) -> Result<Self, TrainError> {
        Self::with(network, (store, frequencies), settings, |sizes, counts, _| {
            Ok(ScratchpadMemory::Host(sizes.slots(counts)?))
        })
    }

    /// The same with a scratchpad in memory of a device, which pools and updates rows. What is trained has the same bytes; dense
    /// layers run on the host, and there is one replica.
    ///
    /// # Errors
    /// [`TrainError`] for settings that cannot be met, [`TrainError::Replicas`] for several replicas, or [`TrainError::Device`] where
    /// the device has not the memory.
    pub fn on_device<D: Driver>(
        driver: &Arc<D>,
        network: &TrainState,
        rows: (WorkingFile, Option<Frequencies>),
        settings: PipelineSettings,
    ) -> Result<Self, TrainError> {
        if settings.replicas > 1 {
            return Err(TrainError::Replicas { got: settings.replicas, most: 1 });
        }
        Self::with(network, rows, settings, |sizes, counts, words| sizes.on_device(driver, counts, words))
    }

    /// `pad` makes so many slots of each size, with staging for so many words an item.
    fn with(
        network: &TrainState,
        (store, frequencies): (WorkingFile, Option<Frequencies>),
        settings: PipelineSettings,
        pad: impl FnOnce(&Sizes, &[usize], usize) -> Result<ScratchpadMemory, TrainError>,
    ) -> Result<Self, TrainError> {
        settings.check()?;
        let (lambda, apart) = (settings.lambda, settings.steps_apart());
        if settings.replicas > 1 && lambda > apart {
            tracing::warn!("lambda: {lambda} steps, but a window's end averages too, after {apart} at most");
        }
        let windows = Windows::of(settings.buffered);
        let sizes = Sizes::of(network.schema(), network.optimizer().kind)?;
        let counts = sizes.counts(&settings.scratchpad);
        // An item in each stage and between them, and as many in Plan's hands; each moves rows in and out.
        let items = 2 * (6 + 4 * settings.buffered);
        let item_words = settings.staging_bytes / (2 * items) / size_of::<f32>();
        let pad = pad(&sizes, &counts, item_words)?;
        let hottest: Vec<Key> = frequencies.iter().flatten().map(|&(t, row, _)| Key::new(t, row)).collect();
        let count_of = |&(t, row, count): &(TableId, u64, u64)| {
            (Key::new(t, row), u32::try_from(count).unwrap_or(u32::MAX))
        };
        let rows = frequencies.filter(|_| settings.policy == Policy::Lfu);
        let counts_of = rows.map(|rows| UseCounts::new(rows.iter().map(count_of)).map(Arc::new));
        let plan = PlanSettings {
            policy: settings.policy,
            seed: settings.seed,
            ahead: settings.lookahead,
            windows,
            item_words,
            overlap: settings.overlap,
            frequencies: counts_of.transpose()?,
        };
        let planner = Planner::new(
            (network.schema.clone(), network.lookups.clone()),
            plan,
            &counts,
            sizes.tables.clone(),
        )?;
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(settings.threads.max(1))
            .thread_name(|at| format!("rows-{at}"));
        let threads = threads.build().map_err(|e| TrainError::Threads { reason: e.to_string() })?;
        Ok(Self {
            planner,
            sizes,
            pad,
            store,
            settings,
            threads,
            hottest,
            spare: Buffers::default(),
            clocks: Clocks::default(),
        })
    }

    /// What Plan has done so far.
    #[must_use]
    pub fn stats(&self) -> PlanStats {
        self.planner.stats()
    }

    /// Slots of all sizes together.
    #[must_use]
    pub(crate) fn slots(&self) -> usize {
        self.pad.counts().iter().sum()
    }

    /// Bytes of the scratchpad and of what is kept of it.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.bytes(&self.pad.counts())
    }

    /// How long each stage has worked so far, what it waited for others left out. The longest of the stages, if it is not Train, is
    /// what Train waits for.
    pub fn worked(&self) -> impl Iterator<Item = (StageName, Duration)> + '_ {
        StageName::ALL.into_iter().map(|stage| (stage, self.clocks.of(stage)))
    }

    /// How it was made.
    #[must_use]
    pub(crate) fn settings(&self) -> &PipelineSettings {
        &self.settings
    }

    /// Where the rows are that [`Self::flush`] has written.
    #[must_use]
    pub fn store(&self) -> &WorkingFile {
        &self.store
    }

    /// The rows of every table, as [`Self::flush`] has written them: to save.
    #[must_use]
    pub(crate) fn rows(&self) -> Vec<Rows<'_>> {
        (0..self.sizes.tables.len()).map(|t| Rows::Source(&self.store, TableId(t as u32))).collect()
    }

    /// Trains on every sample that `reader` gives, in batches of `batch`, at most `steps` of them. Gives the number of samples.
    /// It computes on the threads of the caller's rayon pool.
    ///
    /// # Errors
    /// [`TrainError`]; the pipeline is of no more use then.
    pub fn run(
        &mut self,
        network: &mut TrainState,
        data: Data<'_>,
        watch: &mut dyn StepObserver,
    ) -> Result<u64, TrainError> {
        let (schema, jitter) = (network.schema.clone(), self.settings.jitter);
        let hottest = std::mem::take(&mut self.hottest);
        let Self { planner, pad, store, threads, settings, spare, clocks, .. } = self;
        let (pad, spare, clocks) = (&*pad, &*spare, &*clocks);
        let tables = planner.tables().to_vec();
        let places = RowMover { store, pad, tables: &tables, threads };
        let headway = &TrainProgress::at(planner.item);
        let several = settings.replicas > 1;
        let replicas = several.then(|| Replicas::new(network, settings.replicas, settings.lambda));
        let (stepper, samples, probabilities) = (pad.stepper()?, 0, Vec::new());
        let mut train =
            Train { network, pad, stepper, tables: &tables, watch, samples, probabilities, replicas };

        let (loaded, batches) = sync_channel(READ_AHEAD);
        let stage = || sync_channel::<Item>(settings.buffered);
        let jitter_of = |stage: StageName| Jitter::new(jitter, stage as u64);
        let ((planned, to_collect), (collected, to_exchange)) = (stage(), stage());
        let ((exchanged, to_insert), (inserted, to_train)) = (stage(), stage());
        let mut ends = PlanEnds {
            batches,
            items: planned,
            spare: &spare.transfers,
            headway,
            clocks,
            jitter: jitter_of(StageName::Plan),
        };
        thread::scope(|scope| {
            // However this ends, Plan is not to wait for what will not train.
            let stop = Stop(headway);
            let load = Load::new(schema, data, jitter_of(StageName::Load));
            start(scope, "load", move || load.run(&loaded, &spare.casts, clocks))?;
            let plan = start(scope, "plan", move || {
                if !hottest.is_empty() {
                    clocks.time(StageName::Plan, || planner.fill(&hottest, &mut ends))?;
                }
                planner.run(&mut ends)
            })?;
            type Work = fn(&RowMover<'_>, &mut Item) -> Result<(), TrainError>;
            let pass = |name: StageName, from, to, work: Work| {
                let stage = Stage { name, clocks, from, to, jitter: jitter_of(name) };
                start(scope, name.name(), move || stage.run(|item| work(&places, item)))
            };
            let collect = pass(Collect, to_collect, collected, |places, item| places.collect(item))?;
            let exchange = pass(Exchange, to_exchange, exchanged, |_, item| exchange(item))?;
            let insert = pass(Insert, to_insert, inserted, |places, item| places.insert(item))?;

            let ends =
                TrainEnds { items: to_train, spare, clocks, headway, jitter: jitter_of(StageName::Train) };
            let trained = ends.run(&mut train);
            drop(stop);
            let results = [trained, end(insert), end(exchange), end(collect), end(plan)];
            let (stopped, others): (Vec<_>, Vec<_>) = results
                .into_iter()
                .filter_map(Result::err)
                .partition(|error| matches!(error, TrainError::Stopped));
            others.into_iter().chain(stopped).next().map_or(Ok(()), Err)
        })?;
        Ok(train.samples)
    }

    /// Writes every row of the scratchpad to the store. They stay where they are, and training goes on from them.
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn flush(&mut self) -> Result<(), TrainError> {
        let Self { planner, pad, store, threads, .. } = self;
        let tables = planner.tables();
        let places = RowMover { store, pad, tables, threads };
        let (mut item, mut rows) = (Item::default(), Vec::new());
        for (size, hold) in planner.holds().iter().enumerate() {
            // What items stage is enough for this too.
            let staged = planner.item_words() / self.sizes.sizes[size].0.max(1);
            let staged = staged.clamp(1, FLUSHED_ROWS);
            let mut after = None;
            loop {
                hold.rows_after(after, &mut rows);
                let Some(&(last, _)) = rows.last() else { break };
                after = Some(last);
                for rows in rows.chunks_mut(staged) {
                    item.evictions.set(rows, |table| tables[table.index()].1);
                    places.collect(&mut item)?;
                    exchange(&mut item)?;
                    places.insert(&mut item)?;
                }
            }
        }
        Ok(())
    }

    /// [`Self::flush`], and then the scratchpad is empty.
    ///
    /// # Errors
    /// As above.
    pub fn clear(&mut self) -> Result<(), TrainError> {
        self.flush()?;
        self.planner.clear();
        Ok(())
    }
}

/// Rows that a flush moves at a time.
const FLUSHED_ROWS: usize = 16 << 10;

/// What is trained on.
pub struct Data<'a> {
    /// The samples.
    pub reader: &'a mut (dyn Reader + Send),
    /// Samples a step.
    pub batch: usize,
    /// The most steps.
    pub steps: u64,
}

#[cfg(test)]
pub(crate) mod tests;
