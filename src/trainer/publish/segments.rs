//! Training with publishing: runs of a trainer between two cuts.
//!
//! With rows in memory, the publisher acts between any two steps, so a run need not end for a cut. With a
//! scratchpad, the current rows of the model are spread over the stages of the pipeline. So a run ends at
//! each cut, the scratchpad is written to the working file, and the next run goes on with the same reader.
//!
//! A reader may wait for data, for a followed directory's next file. Then no step is taken, and a [`Watch`]
//! ends the run, so that what was trained before is published in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::{CutNotes, Publisher};
use crate::dataset::Stop;
use crate::store::Table;
use crate::trainer::casting::Casting;
use crate::trainer::in_memory::{AroundSteps, run_around};
use crate::trainer::pipeline::train::StepObserver;
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

/// How often a [`Watch`] looks, and after how long without a step it ends a run.
const TICK: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_millis(250);

impl Publisher {
    /// Trains on the data with all rows in memory. Returns the number of samples.
    ///
    /// # Errors
    /// [`TrainError`].
    pub(crate) fn train_in_memory(
        &mut self,
        reference: &mut ReferenceTrainer,
        data: Data<'_>,
        observer: &mut dyn RunObserver,
        stop: &Stop,
    ) -> Result<u64, TrainError> {
        let Data { reader, batch, .. } = data;
        let (mut samples, watch) = (0, Watch::start(stop)?);
        loop {
            let data = Data { reader: &mut *reader, batch, steps: u64::MAX };
            let mut cutting = Cutting { publisher: self, observer, watch: &watch, samples };
            samples += run_around(reference, data, &mut cutting)?;
            if !watch.paused() {
                return Ok(samples);
            }
            self.settle(&reference.state, &reference.tables, || observer.notes(&reference.state))?;
            watch.resume(self.waits(reference.state.steps), None);
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
        (observer, stop): (&mut dyn RunObserver, &Stop),
    ) -> Result<u64, TrainError> {
        let Data { reader, batch, .. } = data;
        let (mut samples, watch) = (0, Watch::start(stop)?);
        loop {
            watch.resume(self.waits(state.steps), self.cut_at());
            let steps = self.steps_to_cut(state.steps).unwrap_or(u64::MAX);
            let before = state.steps;
            let data = Data { reader: &mut *reader, batch, steps };
            let mut cutting = Cutting { publisher: self, observer, watch: &watch, samples };
            samples += pipeline.run(state, data, &mut cutting)?;
            let ended = !watch.paused() && state.steps - before < steps;
            if !ended && state.steps > before || self.is_due(state.steps) {
                let begun = Instant::now();
                pipeline.flush()?;
                self.after_segment(state, pipeline.store(), || observer.notes(state), begun)?;
            }
            if ended {
                return Ok(samples);
            }
        }
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
    fn step(&mut self, progress: &Progress<'_>) {
        self.publisher.mark(progress.casting);
        self.observer.step(&Progress { samples: self.samples + progress.samples, ..*progress });
    }
}

impl AroundSteps for Cutting<'_> {
    fn before(&mut self, tables: &[Table], casting: &Casting) {
        self.publisher.before_step(tables, casting);
    }

    fn after(&mut self, reference: &ReferenceTrainer, progress: &Progress<'_>) -> Result<(), TrainError> {
        self.step(progress);
        let Self { publisher, observer, .. } = self;
        let state = &reference.state;
        publisher.after_step(state, &reference.tables, || observer.notes(state))?;
        self.watch.stepped(publisher.waits(state.steps));
        Ok(())
    }
}

impl StepObserver for Cutting<'_> {
    fn learnt(&mut self, _: &Batch, progress: &Progress<'_>) -> Result<(), TrainError> {
        self.step(progress);
        self.watch.stepped(true);
        Ok(())
    }
}

/// A thread that pauses the reader at a time, or when no step is taken although a cut waits.
struct Watch {
    stop: Stop,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    begun: Instant,
    steps: AtomicU64,
    /// Whether something waits for the next step.
    waits: AtomicBool,
    /// When to pause, in milliseconds after `begun`.
    deadline: AtomicU64,
    paused: AtomicBool,
    ended: AtomicBool,
}

impl Watch {
    fn start(stop: &Stop) -> Result<Self, TrainError> {
        let shared = Arc::new(Shared {
            begun: Instant::now(),
            steps: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            deadline: AtomicU64::new(u64::MAX),
            paused: AtomicBool::new(false),
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

    /// Whether the watch, and not an interrupt or the end of the data, ended the run.
    fn paused(&self) -> bool {
        self.shared.paused.load(Ordering::SeqCst) && !self.stop.interrupted()
    }

    fn resume(&self, waits: bool, deadline: Option<Instant>) {
        let after = |at: Instant| at.saturating_duration_since(self.shared.begun).as_millis() as u64;
        // Not at once, so that a cut that must wait for the writer does not keep training from going on.
        let deadline = deadline.map_or(u64::MAX, |at| after(at.max(Instant::now() + IDLE)));
        self.shared.deadline.store(deadline, Ordering::Relaxed);
        self.stepped(waits);
        self.shared.paused.store(false, Ordering::SeqCst);
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

impl Shared {
    fn watch(&self, stop: &Stop) {
        let (mut steps, mut since) = (0, Instant::now());
        while !self.ended.load(Ordering::Relaxed) {
            sleep(TICK);
            let now = self.steps.load(Ordering::Relaxed);
            if now != steps {
                (steps, since) = (now, Instant::now());
            }
            let idle = self.waits.load(Ordering::Relaxed) && since.elapsed() >= IDLE;
            let due = self.begun.elapsed().as_millis() as u64 >= self.deadline.load(Ordering::Relaxed);
            if idle || due {
                self.deadline.store(u64::MAX, Ordering::Relaxed);
                since = Instant::now();
                self.paused.store(true, Ordering::SeqCst);
                stop.pause();
            }
        }
    }
}
