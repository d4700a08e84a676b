//! The threads of stages: how they start, pass items on, and end.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, Scope, ScopedJoinHandle};

use super::BufferPools;
use super::collect::RowMover;
use crate::trainer::TrainError;
use crate::trainer::pipeline::clocks::{Clocks, StageName};
use crate::trainer::pipeline::item::{Item, ItemTransfers, Work};
use crate::trainer::pipeline::jitter::Jitter;
use crate::trainer::pipeline::train::Train;
use crate::trainer::pipeline::train_progress::TrainProgress;
use crate::trainer::read_ahead::{BatchGroup, EndReader, WAITING_GROUPS};

/// Starts a named thread for a stage.
pub(crate) fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<ScopedJoinHandle<'s, T>, TrainError> {
    let thread = thread::Builder::new().name(name.into());
    thread.spawn_scoped(scope, work).map_err(|e| TrainError::Threads { reason: e.to_string() })
}

/// The ends of the channels around a stage that passes items on: what it gets, and what it sends.
pub(crate) type Ends<T> = (Receiver<T>, SyncSender<Item>);

/// The ends of all channels, by stage.
pub(crate) struct StageEnds {
    pub load: SyncSender<BatchGroup>,
    pub plan: Ends<BatchGroup>,
    pub collect: Ends<Item>,
    pub exchange: Ends<Item>,
    pub insert: Ends<Item>,
    pub train: Receiver<Item>,
}

impl StageEnds {
    /// Up to `buffered` items wait in a channel.
    pub(crate) fn new(buffered: usize) -> Self {
        let (load, loaded) = sync_channel(WAITING_GROUPS);
        let channel = || sync_channel(buffered);
        let ((to_collect, planned), (to_exchange, collected)) = (channel(), channel());
        let ((to_insert, exchanged), (to_train, inserted)) = (channel(), channel());
        Self {
            load,
            plan: (loaded, to_collect),
            collect: (planned, to_exchange),
            exchange: (collected, to_insert),
            insert: (exchanged, to_train),
            train: inserted,
        }
    }
}

/// The thread of a stage.
pub(crate) type StageThread<'s> = ScopedJoinHandle<'s, Result<(), TrainError>>;

/// Starts the stages between Plan and Train, which work on one item after the other.
pub(crate) struct Stages<'s, 'e> {
    pub scope: &'s Scope<'s, 'e>,
    pub clocks: &'s Clocks,
    pub mover: RowMover<'s>,
    /// The seed of the stages' sleeps.
    pub jitter: Option<u64>,
}

impl<'s> Stages<'s, '_> {
    /// The sleeps of a stage.
    pub(crate) fn jitter_of(&self, name: StageName) -> Jitter {
        Jitter::new(self.jitter, name as u64)
    }

    /// Starts a stage that does `work` on every item.
    pub(crate) fn start(
        &self,
        name: StageName,
        (from, to): Ends<Item>,
        work: fn(&RowMover<'_>, &mut Item) -> Result<(), TrainError>,
    ) -> Result<StageThread<'s>, TrainError> {
        let (clocks, mover, mut jitter) = (self.clocks, self.mover, self.jitter_of(name));
        start(self.scope, name.name(), move || {
            for mut item in from {
                jitter.sleep();
                clocks.time(name, || work(&mover, &mut item))?;
                to.send(item).map_err(|_| TrainError::Stopped)?;
            }
            Ok(())
        })
    }
}

/// The threads of the stages from Plan to Insert.
pub(crate) struct Running<'s> {
    pub plan: StageThread<'s>,
    pub collect: StageThread<'s>,
    pub exchange: StageThread<'s>,
    pub insert: StageThread<'s>,
}

impl Running<'_> {
    /// Waits until all stages have ended, after Train has ended with `trained`.
    ///
    /// # Errors
    /// The error that ended the stages.
    pub(crate) fn join(self, trained: Result<(), TrainError>, reader: EndReader) -> Result<(), TrainError> {
        let Self { plan, collect, exchange, insert } = self;
        let results = [trained, end(insert), end(exchange), end(collect)];
        if results.iter().any(Result::is_err) {
            // Plan may wait for the next batch.
            reader.end();
        }
        first_cause(results.into_iter().chain([end(plan)])).inspect(|()| reader.has_ended())
    }
}

/// Waits for a stage's thread to end. If it panicked, the panic continues in the caller.
fn end(stage: StageThread<'_>) -> Result<(), TrainError> {
    stage.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The error that ended the stages, if there is one. A stage is stopped after another's error.
fn first_cause(results: impl Iterator<Item = Result<(), TrainError>>) -> Result<(), TrainError> {
    let errors = results.filter_map(Result::err);
    let (stopped, causes): (Vec<_>, Vec<_>) = errors.partition(|error| matches!(error, TrainError::Stopped));
    causes.into_iter().chain(stopped).next().map_or(Ok(()), Err)
}

/// The channels and buffers of Train.
pub(crate) struct TrainChannels<'a> {
    pub items: Receiver<Item>,
    pub buffers: &'a BufferPools,
    pub clocks: &'a Clocks,
    pub progress: &'a TrainProgress,
    pub jitter: Jitter,
}

impl TrainChannels<'_> {
    pub(crate) fn run(mut self, train: &mut Train<'_>) -> Result<(), TrainError> {
        for item in self.items {
            self.jitter.sleep();
            self.clocks.time(StageName::Train, || train.train(&item))?;
            self.progress.trained(item.number);
            self.buffers.transfers.give(ItemTransfers { fills: item.fills, evictions: item.evictions });
            if let Work::Steps(batches) = item.work {
                batches.into_iter().for_each(|batch| self.buffers.batches.give(batch));
            }
        }
        Ok(())
    }
}

/// Calls [`TrainProgress::stop`] when it is dropped.
pub(crate) struct StopOnDrop<'a>(pub &'a TrainProgress);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}
