//! Versions published in training with a scratchpad, whose rows are captured or read from the working file.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::dataset::Stop;
use crate::dataset::Stoppable;
use crate::store::crash::dir_in_memory;
use crate::trainer::in_memory::{AroundSteps, run_around};
use crate::trainer::pipeline::policy::ScratchpadPolicy;
use crate::trainer::pipeline::tests::{Case, assert_same, cases, schema};
use crate::trainer::{Data, Pipeline, PipelineSettings, Progress, ScratchpadSize, TrainState};

/// An observer whose steps take some time, so that versions are written between them.
pub(super) struct Slow<N>(pub Duration, pub N);

impl<N: FnMut(&TrainState) -> Result<CutNotes, String>> RunObserver for Slow<N> {
    fn step(&mut self, _: &Progress<'_>) {
        std::thread::sleep(self.0);
    }

    fn notes(&mut self, state: &TrainState) -> Result<CutNotes, String> {
        self.1(state)
    }
}

/// The numbers of the sequential trainer before the first step and after each step.
pub(super) fn expected(case: &Case) -> Vec<Vec<u32>> {
    struct After(Vec<Vec<u32>>);
    impl AroundSteps for After {
        fn after(&mut self, reference: &ReferenceTrainer, _: &Progress<'_>) -> Result<(), TrainError> {
            self.0.push(bits(reference));
            Ok(())
        }
    }
    let mut reference = initialise(&schema(), case.optimizer(), 7).unwrap();
    let mut after = After(vec![bits(&reference)]);
    let mut data = case.data();
    let data = Data { reader: &mut data, batch: case.batch, steps: u64::MAX };
    run_around(&mut reference, data, &mut after).unwrap();
    after.0
}

/// A run of a case that publishes.
pub(super) struct OnDisk {
    pub models: tempfile::TempDir,
    pub state: TrainState,
    pub pipeline: Pipeline,
    pub publisher: Publisher,
    pub log: Log,
    /// Whether rows were captured up to the last step.
    pub captured: bool,
    _dir: tempfile::TempDir,
}

impl OnDisk {
    fn new(case: &Case, every: u64) -> Self {
        Self::with(case.begin(None), every, Arc::new(SystemDisk))
    }

    pub(super) fn with(
        begun: (TrainState, Pipeline, tempfile::TempDir),
        every: u64,
        disk: Arc<dyn Disk + Send>,
    ) -> Self {
        Self::compacting(begun, (every, COMPACT_AT), disk)
    }

    /// A run that writes a full version when the deltas exceed this share of the last one.
    pub(super) fn compacting(
        (state, pipeline, dir): (TrainState, Pipeline, tempfile::TempDir),
        (every, compact_at): (u64, f64),
        disk: Arc<dyn Disk + Send>,
    ) -> Self {
        let models = dir_in_memory();
        let log = Log::default();
        let seen = log.clone();
        let on_publish = Box::new(move |outcome| seen.lock().unwrap().push(outcome));
        let options = PublishOptions { disk, compact_at, ..options(models.path(), Every::Steps(every)) };
        let publisher = Publisher::new(options, &state, None, on_publish).unwrap();
        Self { models, state, pipeline, publisher, log, captured: false, _dir: dir }
    }

    /// Trains the case and writes the last version. Returns the versions.
    fn train(&mut self, case: &Case, each_step: Duration) -> Vec<Published> {
        self.train_only(case, &mut Slow(each_step, notes));
        self.finish();
        self.published()
    }

    /// Trains the case.
    pub(super) fn train_only(&mut self, case: &Case, observer: &mut dyn RunObserver) {
        let mut data = case.data();
        let data = Data { reader: &mut data, batch: case.batch, steps: u64::MAX };
        let Self { state, pipeline, publisher, .. } = self;
        let control = RunControl { observer, stop: &Stop::default() };
        let samples = publisher.train_on_disk(state, pipeline, data, control).unwrap();
        assert_eq!(samples, case.samples as u64);
        self.captured = publisher.changed.capture.is_some();
    }

    /// Writes the last version.
    pub(super) fn finish(&mut self) -> Base {
        let Self { state, pipeline, publisher, .. } = self;
        publisher.finish_on_disk(state, pipeline, &notes(state).unwrap()).unwrap()
    }

    pub(super) fn published(&self) -> Vec<Published> {
        let log = self.log.lock().unwrap();
        log.iter().filter_map(|outcome| outcome.clone().ok()).collect()
    }

    /// A trainer that continues from a version.
    pub(super) fn resumed(&self, version: Version, case: &Case) -> ReferenceTrainer {
        let opened = store::open(self.models.path(), "m", version, Purpose::Train).unwrap();
        assert_has_its_cursor(&opened);
        resume(opened, case.optimizer()).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    #[test]
    fn every_version_of_a_run_with_a_scratchpad_is_the_sequential_trainer_after_its_step(
        case in cases(), every in 1_u64..9
    ) {
        let expected = expected(&case);
        let mut run = OnDisk::new(&case, every);
        for published in run.train(&case, Duration::ZERO) {
            let resumed = run.resumed(published.version, &case);
            prop_assert!(bits(&resumed) == expected[published.steps as usize], "{published:?}");
        }
    }
}

#[test]
fn a_run_with_a_scratchpad_goes_on_while_deltas_are_published_at_their_steps() {
    let case = Case { samples: 64 * 16, ..Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru) };
    let expected = expected(&case);
    let mut run = OnDisk::new(&case, 16);
    let published = run.train(&case, Duration::from_millis(4));
    let steps: Vec<u64> = published.iter().map(|one| one.steps).collect();
    assert!(steps.len() >= 3 && steps[0] == 16 && steps.ends_with(&[64]), "{steps:?}");
    for one in &published {
        assert!(bits(&run.resumed(one.version, &case)) == expected[one.steps as usize], "{one:?}");
    }
    // Deltas had captured rows, so they did not make a run end.
    assert!(run.captured && published[0].full && !published[1].full);
}

#[cfg(feature = "cusim")]
#[test]
fn a_scratchpad_on_a_cusim_device_publishes_its_rows_after_a_step() {
    use crate::device::cusim::SimDriver;
    use crate::trainer::initialise_on_disk;

    let case = Case { samples: 20 * 16, ..Case::new(ScratchpadSize::Fraction(0.5), ScratchpadPolicy::Lru) };
    let expected = expected(&case);
    let driver = std::sync::Arc::new(SimDriver::new(1, 1 << 30).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (state, store) = initialise_on_disk(
        &schema(),
        case.optimizer(),
        7,
        crate::trainer::WorkingFileOptions::logs(dir.path()),
    )
    .unwrap();
    let pipeline = Pipeline::on_device(&driver, &state, store.into(), case.settings.clone()).unwrap();
    let mut run = OnDisk::with((state, pipeline, dir), 5, Arc::new(SystemDisk));
    let published = run.train(&case, Duration::from_millis(4));
    assert!(run.captured && published.len() >= 2, "{published:?}");
    for one in &published {
        assert!(bits(&run.resumed(one.version, &case)) == expected[one.steps as usize], "{one:?}");
    }
}

#[test]
fn replicas_publish_what_they_have_after_a_step() {
    let case = Case::new(ScratchpadSize::Fraction(0.4), ScratchpadPolicy::Lru);
    let settings = PipelineSettings { replicas: 3, lambda: 1, ..case.settings.clone() };
    let case = Case { settings, ..case };
    let mut run = OnDisk::new(&case, 4);
    for published in run.train(&case, Duration::from_millis(4)) {
        let (mut state, mut pipeline, _dir) = case.begin(None);
        let mut data = case.data();
        let data = Data { reader: &mut data, batch: case.batch, steps: published.steps };
        pipeline.run(&mut state, data, &mut |_: &Progress<'_>| ()).unwrap();
        pipeline.flush().unwrap();
        let resumed = run.resumed(published.version, &case);
        assert_same(&state, pipeline.store(), &resumed, &format!("{published:?}"));
    }
}

/// An observer that hides the model's directory after version 2, until another one could not be written.
struct Hides {
    model: PathBuf,
    aside: PathBuf,
    log: Log,
}

impl RunObserver for Hides {
    fn step(&mut self, progress: &Progress<'_>) {
        // The next steps see what the writer has done meanwhile.
        let pause = || std::thread::sleep(Duration::from_millis(500));
        let Self { model, aside, log } = &*self;
        let outcomes = log.lock().unwrap();
        let failed = outcomes.iter().any(Result::is_err);
        if aside.exists() {
            if failed {
                fs::remove_file(model).unwrap();
                fs::rename(aside, model).unwrap();
            } else {
                pause();
            }
        } else if outcomes.len() >= 2 && !failed {
            // A file in the place of the directory: nothing can be written.
            fs::rename(model, aside).unwrap();
            fs::write(model, "").unwrap();
        } else if outcomes.len() < 2 && progress.samples > 8 * 16 {
            // Version 2 is of step 8.
            pause();
        }
    }

    fn notes(&mut self, state: &TrainState) -> Result<CutNotes, String> {
        notes(state)
    }
}

#[test]
fn rows_of_a_version_that_cannot_be_written_are_in_the_next_one_also_with_a_scratchpad() {
    let case = Case { samples: 40 * 16, ..Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru) };
    let expected = expected(&case);
    let mut run = OnDisk::new(&case, 4);
    let (model, aside) = (run.models.path().join("m"), run.models.path().join("aside"));
    run.train_only(&case, &mut Hides { model, aside, log: run.log.clone() });
    run.finish();
    let published = run.published();
    assert!(run.log.lock().unwrap().iter().any(|outcome| outcome.is_err()));
    for one in &published {
        assert!(bits(&run.resumed(one.version, &case)) == expected[one.steps as usize], "{one:?}");
    }
    assert_eq!(published.last().map(|one| one.steps), Some(40));
}

#[test]
fn a_pause_of_the_reader_never_ends_training_whoever_asks_for_it() {
    let case = Case { samples: 40 * 16, ..Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru) };
    let stop = Stop::default();
    let mut data = Stoppable::new(Box::new(case.data()), stop.clone());
    let ended = std::sync::atomic::AtomicBool::new(false);
    let mut run = OnDisk::new(&case, 16);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::SeqCst) {
                stop.pause();
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let OnDisk { state, pipeline, publisher, .. } = &mut run;
        let data = Data { reader: &mut data, batch: case.batch, steps: u64::MAX };
        let control = RunControl { observer: &mut Slow(Duration::ZERO, notes), stop: &stop };
        let samples = publisher.train_on_disk(state, pipeline, data, control);
        ended.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(samples.unwrap(), case.samples as u64);
    });
}
