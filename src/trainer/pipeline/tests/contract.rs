//! The contract of the trainer's pipeline on a device, for any driver: it trains the same bytes as the
//! sequential trainer, also with evictions, bubbles and split batches. The batch's rows are compared after
//! every step, and all rows at the end.

use std::path::Path;
use std::sync::Arc;

use super::{Case, Samples, schema_of};
use crate::device::cuda::Driver;
use crate::mem::mix64;
use crate::schema::Schema;
use crate::trainer::optim::OptimizerKind;
use crate::trainer::{
    self, Data, Pipeline, PipelineRows, PipelineSettings, PlanStats, RowFrequency, ScratchpadPolicy,
    ScratchpadSize, TrainError, TrainState, Verifier, WorkingFileOptions,
};
use crate::types::TableId;

/// The rows of the two larger tables.
const ROWS: [u64; 2] = [120, 80];

fn schema() -> Schema {
    schema_of(ROWS, 5)
}

/// A case with an optimizer of this kind and a scratchpad of this size.
pub(crate) fn case(kind: OptimizerKind, scratchpad: ScratchpadSize) -> Case {
    Case { kind, samples: 150, batch: 10, ..Case::new(scratchpad, ScratchpadPolicy::Lru) }
}

impl Case {
    /// The parts of a pipeline. Even seeds have frequencies, so rows are loaded before the first batch.
    fn parts(&self, dir: &Path) -> (TrainState, PipelineRows) {
        let schema = schema();
        let (train_state, file) =
            trainer::initialise_on_disk(&schema, self.optimizer(), 7, WorkingFileOptions::logs(dir)).unwrap();
        let frequent = (0..20).map(|row| RowFrequency { table: TableId(0), row, count: 100 - row }).collect();
        let frequencies = self.seed.is_multiple_of(2).then_some(frequent);
        (train_state, PipelineRows { file, frequencies })
    }

    /// A pipeline on the device, and the state that it trains.
    pub(crate) fn start<D: Driver>(
        &self,
        driver: &Arc<D>,
        dir: &Path,
    ) -> Result<(TrainState, Pipeline), TrainError> {
        let (train_state, rows) = self.parts(dir);
        let pipeline = Pipeline::on_device(driver, &train_state, rows, self.settings.clone())?;
        Ok((train_state, pipeline))
    }

    /// Plan's counts after the same training with a scratchpad on the host.
    fn on_host(&self) -> PlanStats {
        let dir = tempfile::tempdir().unwrap();
        let (mut train_state, rows) = self.parts(dir.path());
        let mut pipeline = Pipeline::new(&train_state, rows, self.settings.clone()).unwrap();
        self.run(&mut train_state, &mut pipeline).unwrap();
        pipeline.stats()
    }

    /// Trains, and takes every step with the sequential trainer too.
    pub(crate) fn run(
        &self,
        train_state: &mut TrainState,
        pipeline: &mut Pipeline,
    ) -> Result<Verifier, TrainError> {
        let schema = schema();
        let oracle = trainer::initialise(&schema, self.optimizer(), 7).unwrap();
        let mut verifier = Verifier::new(oracle);
        let reader = &mut Samples { left: self.samples, draws: self.seed + 1, rows: ROWS };
        let data = Data { reader, batch: self.batch, steps: u64::MAX };
        assert_eq!(pipeline.run(train_state, data, &mut verifier)?, self.samples as u64);
        Ok(verifier)
    }

    /// Trains, and asserts that every byte is equal to the sequential trainer's.
    pub(crate) fn check_on<D: Driver>(&self, driver: &Arc<D>) -> PlanStats {
        let dir = tempfile::tempdir().unwrap();
        let (mut train_state, mut pipeline) = self.start(driver, dir.path()).unwrap();
        let verifier = self.run(&mut train_state, &mut pipeline).unwrap();
        assert_eq!(verifier.first_difference(), None, "{self:?}");
        pipeline.flush().unwrap();
        assert_eq!(verifier.finish(pipeline.store()).unwrap(), None, "{self:?}: at the end");
        pipeline.stats()
    }
}

/// The scratchpad holds a part of the rows, or all of them; then nothing is evicted.
pub(crate) fn a_scratchpad_of_any_size_trains_the_sequential_bytes<D: Driver>(
    driver: &Arc<D>,
    kind: OptimizerKind,
    seed: u64,
) {
    for fraction in [0.55, 1.0] {
        let mut case = Case { seed, ..case(kind, ScratchpadSize::Fraction(fraction)) };
        case.settings.policy = ScratchpadPolicy::ALL[seed as usize % ScratchpadPolicy::ALL.len()];
        let stats = case.check_on(driver);
        assert_eq!(stats.evictions == 0, fraction == 1.0, "{case:?}: {stats:?}");
        assert!(stats.hits > 0 && stats.fills > 0, "{stats:?}");
    }
}

/// The scratchpad is so small that Plan must wait for batches to train (bubbles).
pub(crate) fn a_window_that_does_not_fit_trains_the_sequential_bytes<D: Driver>(
    driver: &Arc<D>,
    kind: OptimizerKind,
    seed: u64,
) {
    let mut case = Case { seed, ..case(kind, ScratchpadSize::Slots(vec![62, 62])) };
    case.settings.jitter = Some(seed);
    let stats = case.check_on(driver);
    assert!(stats.bubbles > 0 && stats.evictions > 0 && stats.splits == 0, "{stats:?}");
}

/// The scratchpad is so small that batches do not fit and are split.
pub(crate) fn a_batch_that_is_split_trains_the_sequential_bytes<D: Driver>(
    driver: &Arc<D>,
    kind: OptimizerKind,
    seed: u64,
) {
    let case = Case { seed, samples: 60, ..case(kind, ScratchpadSize::Slots(vec![12, 9])) };
    let stats = case.check_on(driver);
    assert!(stats.splits > 0 && stats.evictions > 0, "{stats:?}");
}

/// An item can move only few rows, and several items wait between stages.
pub(crate) fn small_staging_and_buffers_train_the_sequential_bytes<D: Driver>(
    driver: &Arc<D>,
    kind: OptimizerKind,
    seed: u64,
) {
    let mut case = Case { seed, ..case(kind, ScratchpadSize::Fraction(0.9)) };
    case.settings = PipelineSettings {
        staging_bytes: 4000,
        buffered: 1,
        lookahead: 1 + seed as usize % 2,
        jitter: Some(seed),
        ..case.settings
    };
    case.check_on(driver);
}

/// Random settings. Plan must make the same decisions as on the host.
pub(crate) fn any_settings_train_the_sequential_bytes<D: Driver>(driver: &Arc<D>, seed: u64) {
    let mut draws = seed << 32;
    let mut draw = |from: usize, to: usize| {
        draws += 1;
        from + (mix64(draws) >> 16) as usize % (to - from)
    };
    let kind =
        [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::RowwiseAdagrad, OptimizerKind::Adam]
            [draw(0, 4)];
    let slots = ScratchpadSize::Slots(vec![draw(8, 200), draw(8, 200)]);
    let mut case = case(kind, slots);
    (case.samples, case.batch, case.seed) = (draw(1, 150), draw(1, 30), seed);
    case.settings = PipelineSettings {
        policy: ScratchpadPolicy::ALL[draw(0, ScratchpadPolicy::ALL.len())],
        lookahead: draw(1, 4),
        buffered: draw(0, 3),
        staging_bytes: draw(500, 60_000),
        overlap: draw(0, 4) > 0,
        jitter: (draw(0, 2) > 0).then_some(seed),
        ..case.settings
    };
    assert_eq!(case.check_on(driver), case.on_host(), "{case:?}");
}
