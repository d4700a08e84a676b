//! Training with publishing: runs of a trainer between two cuts.
//!
//! The publisher acts between any two steps, so a run need not end for a cut. With a scratchpad there are
//! exceptions, because then only captured rows are at hand: the first version, which has all rows; the one
//! after a version that could not be written; and replicas that differ between averages. For these the run
//! ends, the scratchpad is written to the working file, and the next run goes on with the same reader.
//!
//! A reader may wait for data, for a followed directory's next file. Then no step is taken, and a [`Watch`]
//! ends the run, so that what was trained before is published in time. It also does so while a reader waits
//! at a full log, which gets room only from a version.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::cut::CutStart;
use super::{CutNotes, KeptRows, Publisher};
use crate::dataset::{Shortage, Stop};
use crate::trainer::in_memory::{AroundSteps, run_around};
use crate::trainer::pipeline::train::{RowObserver, StepObserver};
use crate::trainer::train_state::TrainState;
use crate::trainer::{Data, Pipeline, Progress, ReferenceTrainer, TrainError};
use crate::types::Batch;

/// What happens at each step of a run, and at its cuts.
pub(crate) trait RunObserver {
    /// After a step; with a scratchpad, just before its rows are updated.
    fn step(&mut self, progress: &Progress<'_>);

    /// What to add to a version that is cut after the last step.
    ///
    /// # Errors
    /// Why no version may be published now.
    fn notes(&mut self, state: &TrainState) -> Result<CutNotes, String>;
}

/// Who follows a run, and what ends it.
pub(crate) struct RunControl<'c> {
    pub observer: &'c mut dyn RunObserver,
    /// The publisher also pauses the run with it.
    pub stop: &'c Stop,
}

/// How often a [`Watch`] looks, and after how long without a step or data it ends a run.
const TICK: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_millis(250);
/// After how long a [`Watch`] ends a run that waits at a full log.
const FULL: Duration = Duration::from_secs(1);

impl Publisher {
    /// Trains on the data with all rows in memory. Returns the number of samples.
    ///
    /// # Errors
    /// [`TrainError`].
    pub(crate) fn train_in_memory(
        &mut self,
        reference: &mut ReferenceTrainer,
        data: Data<'_>,
        control: RunControl<'_>,
    ) -> Result<u64, TrainError> {
        let RunControl { observer, stop } = control;
        let Data { reader, batch, .. } = data;
        let (mut samples, watch) = (0, Watch::start(stop, &self.full_log.shortage)?);
        loop {
            let data = Data { reader: &mut *reader, batch, steps: u64::MAX };
            let mut cutting = Cutting { publisher: self, observer, watch: &watch, samples };
            samples += run_around(reference, data, &mut cutting)?;
            if !stop.paused() {
                return Ok(samples);
            }
            self.settle(&reference.state, &reference.tables, || observer.notes(&reference.state))?;
            watch.resume(self.waits(reference.state.steps));
        }
    }

    /// Trains on the data with the rows in a working file. Returns the number of samples.
    ///
    /// # Errors
    /// [`TrainError`].
    pub(crate) fn train_on_disk(
        &mut self,
        state: &mut TrainState,
        pipeline: &mut Pipeline,
        data: Data<'_>,
        control: RunControl<'_>,
    ) -> Result<u64, TrainError> {
        let RunControl { observer, stop } = control;
        let Data { reader, batch, .. } = data;
        let (mut samples, watch) = (0, Watch::start(stop, &self.full_log.shortage)?);
        // Otherwise an average of replicas also changes rows of earlier steps, which no observer gets.
        self.changed.may_capture = pipeline.settings().exact();
        self.begin_capture();
        loop {
            watch.resume(self.waits_on_disk());
            let (steps, before) = (self.steps_to_cut(state.steps), state.steps);
            let data = Data { reader: &mut *reader, batch, steps };
            let mut cutting = Cutting { publisher: self, observer, watch: &watch, samples };
            samples += pipeline.run(state, data, &mut cutting)?;
            let ended = !stop.paused() && state.steps - before < steps;
            self.cut_after_run(state, pipeline, observer)?;
            if ended {
                return Ok(samples);
            }
        }
    }

    /// Between two runs with a scratchpad: cuts if this is due.
    fn cut_after_run(
        &mut self,
        state: &TrainState,
        pipeline: &mut Pipeline,
        observer: &mut dyn RunObserver,
    ) -> Result<(), TrainError> {
        let notes = || observer.notes(state);
        if self.changed.capture.is_some() {
            return self.after_captured(state, notes);
        }
        self.poll()?;
        // Steps were taken while the pipeline was drained, so no step has waited for this cut yet.
        let begun = Instant::now();
        if !self.may_cut(state.steps) {
            return Ok(());
        }
        self.try_cut(state, notes, |publisher, start| {
            pipeline.flush()?;
            publisher.cut_file(state, pipeline.store(), CutStart { begun, ..start })
        })
    }
}

/// The steps of a run, for the publisher and the observer.
struct Cutting<'a> {
    publisher: &'a mut Publisher,
    observer: &'a mut dyn RunObserver,
    watch: &'a Watch,
    /// Samples of earlier runs.
    samples: u64,
}

impl Cutting<'_> {
    fn observe(&mut self, progress: &Progress<'_>) {
        self.observer.step(&Progress { samples: self.samples + progress.samples, ..*progress });
    }
}

impl AroundSteps for Cutting<'_> {
    fn kept(&mut self) -> impl Iterator<Item = KeptRows<'_>> + Send {
        self.publisher.kept()
    }

    fn after(&mut self, reference: &ReferenceTrainer, progress: &Progress<'_>) -> Result<(), TrainError> {
        self.observe(progress);
        let Self { publisher, observer, .. } = self;
        let state = &reference.state;
        publisher.after_step(state, &reference.tables, || observer.notes(state))?;
        self.watch.stepped(publisher.waits(state.steps));
        Ok(())
    }
}

impl StepObserver for Cutting<'_> {
    fn learnt(&mut self, _: &Batch, progress: &Progress<'_>) -> Result<(), TrainError> {
        self.publisher.changed.mark(progress.casting);
        self.observe(progress);
        Ok(())
    }

    fn row_observer(&mut self) -> Option<&mut dyn RowObserver> {
        self.publisher.changed.capture.as_mut().map(|capture| capture as _)
    }

    fn stepped(&mut self, state: &TrainState) -> Result<(), TrainError> {
        let Self { publisher, observer, watch, .. } = self;
        if publisher.changed.capture.is_some() {
            publisher.after_captured(state, || observer.notes(state))?;
        } else {
            publisher.poll()?;
            if publisher.may_cut(state.steps) {
                watch.stop.pause();
            }
        }
        watch.stepped(publisher.waits_on_disk());
        Ok(())
    }
}

/// Ends runs by a pause of the reader. A thread does this when a cut waits for a step, and the step for data.
struct Watch {
    stop: Stop,
    shared: Arc<WatchState>,
    thread: Option<JoinHandle<()>>,
}

struct WatchState {
    shortage: Shortage,
    steps: AtomicU64,
    /// Whether something waits for the next step.
    waits: AtomicBool,
    ended: AtomicBool,
}

impl Watch {
    fn start(stop: &Stop, shortage: &Shortage) -> Result<Self, TrainError> {
        let shared = Arc::new(WatchState {
            shortage: shortage.clone(),
            steps: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let (of_thread, flag) = (shared.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("cut-watch".to_owned());
        let thread = thread.spawn(move || of_thread.watch(&flag));
        let thread = thread.map_err(|e| TrainError::Threads { reason: e.to_string() })?;
        Ok(Self { stop: stop.clone(), shared, thread: Some(thread) })
    }

    fn stepped(&self, waits: bool) {
        self.shared.steps.fetch_add(1, Ordering::Relaxed);
        self.shared.waits.store(waits, Ordering::Relaxed);
    }

    /// Lets the reader go on.
    fn resume(&self, waits: bool) {
        self.stepped(waits);
        self.stop.resume();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches for cuts panicked");
        }
        self.stop.resume();
    }
}

impl WatchState {
    fn watch(&self, stop: &Stop) {
        let (mut steps, mut since) = (0, Instant::now());
        while !self.ended.load(Ordering::Relaxed) {
            sleep(TICK);
            let now = self.steps.load(Ordering::Relaxed);
            // A step may take longer than this waits for the next one.
            if now != steps || !stop.waiting() {
                (steps, since) = (now, Instant::now());
            }
            let waits = self.waits.load(Ordering::Relaxed) && since.elapsed() >= IDLE;
            if waits || self.shortage.limit().is_some() && since.elapsed() >= FULL {
                since = Instant::now();
                stop.pause();
            }
        }
    }
}

#[cfg(test)]
mod tests;
