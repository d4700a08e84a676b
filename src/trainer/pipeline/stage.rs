//! Threads of stages: how one starts, takes items and hands them on, and ends.

use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::{self, Scope, ScopedJoinHandle};

use super::Buffers;
use crate::trainer::TrainError;
use crate::trainer::pipeline::clocks::{Clocks, StageName};
use crate::trainer::pipeline::item::{Item, Work};
use crate::trainer::pipeline::jitter::Jitter;
use crate::trainer::pipeline::train::Train;
use crate::trainer::pipeline::train_progress::TrainProgress;

/// Starts a stage's thread, which tools for looking at threads show by its name.
pub(crate) fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<ScopedJoinHandle<'s, T>, TrainError> {
    let thread = thread::Builder::new().name(name.into());
    thread.spawn_scoped(scope, work).map_err(|e| TrainError::Threads { reason: e.to_string() })
}

/// The end of a stage's thread. A panic goes on.
pub(crate) fn end(stage: ScopedJoinHandle<'_, Result<(), TrainError>>) -> Result<(), TrainError> {
    stage.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A stage that works on items in order.
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

/// Train's ends of the pipeline.
pub(crate) struct TrainEnds<'a> {
    pub items: Receiver<Item>,
    pub spare: &'a Buffers,
    pub clocks: &'a Clocks,
    pub headway: &'a TrainProgress,
    pub jitter: Jitter,
}

impl TrainEnds<'_> {
    pub(crate) fn run(mut self, train: &mut Train<'_>) -> Result<(), TrainError> {
        for item in self.items {
            self.jitter.sleep();
            self.clocks.time(StageName::Train, || train.train(&item))?;
            self.headway.trained(item.number);
            self.spare.transfers.give((item.fills, item.evictions));
            if let Work::Steps(casts) = item.work {
                casts.into_iter().for_each(|cast| self.spare.casts.give(cast));
            }
        }
        Ok(())
    }
}

/// Ends all waiting for Train, when it is dropped.
pub(crate) struct Stop<'a>(pub &'a TrainProgress);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}
