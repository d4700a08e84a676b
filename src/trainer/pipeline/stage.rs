//! The threads of stages: how they start, pass items on, and end.

use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::{self, Scope, ScopedJoinHandle};

use super::BufferPools;
use crate::trainer::TrainError;
use crate::trainer::pipeline::clocks::{Clocks, StageName};
use crate::trainer::pipeline::item::{Item, ItemTransfers, Work};
use crate::trainer::pipeline::jitter::Jitter;
use crate::trainer::pipeline::train::Train;
use crate::trainer::pipeline::train_progress::TrainProgress;

/// Starts a named thread for a stage.
pub(crate) fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<ScopedJoinHandle<'s, T>, TrainError> {
    let thread = thread::Builder::new().name(name.into());
    thread.spawn_scoped(scope, work).map_err(|e| TrainError::Threads { reason: e.to_string() })
}

/// Waits for a stage's thread to end. If it panicked, the panic continues in the caller.
pub(crate) fn end(stage: ScopedJoinHandle<'_, Result<(), TrainError>>) -> Result<(), TrainError> {
    stage.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A stage that works on items in order, and the channels around it.
pub(crate) struct Stage<'a> {
    pub name: StageName,
    pub clocks: &'a Clocks,
    pub from: Receiver<Item>,
    pub to: SyncSender<Item>,
    pub jitter: Jitter,
}

impl Stage<'_> {
    pub(crate) fn run(
        mut self,
        work: impl Fn(&mut Item) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        for mut item in self.from {
            self.jitter.sleep();
            self.clocks.time(self.name, || work(&mut item))?;
            self.to.send(item).map_err(|_| TrainError::Stopped)?;
        }
        Ok(())
    }
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
