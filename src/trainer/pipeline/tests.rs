//! Compares the pipeline with the sequential trainer. The bytes must be the same for any sizes, order of
//! events and speeds of the stages.

use proptest::prelude::*;

use super::*;
use crate::dataset::DatasetError;
use crate::mem::mix64;
use crate::schema::Schema;
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::{
    Progress, ReferenceTrainer, ScratchpadSize, WorkingFileOptions, initialise, initialise_on_disk,
};
use crate::types::{RawBatch, RawFeature, RawValues, TableId};

pub(crate) mod contract;
mod hazards;

/// A schema with a shared table, two slot sizes and mean pooling. Absent ids get a default row in one table
/// and zeros in the others.
const TOML: &str = r#"
    [architecture]
    kind = "deepfm"
    deep = [4]
    [[dense]]
    name = "d"
    [[features]]
    name = "a"
    table = "t"
    wide_table = "w"
    arity = { multi_hot = { max = 6 } }
    pooling = "mean"
    [[features]]
    name = "b"
    table = "t"
    wide_table = "w"
    [[features]]
    name = "c"
    table = "u"
    wide_table = "v"
"#;

/// The rows of the two larger tables.
const ROWS: [u64; 2] = [300, 200];

pub(crate) fn schema() -> Schema {
    schema_of(ROWS, 3)
}

/// As [`schema`], with these rows and this dim.
fn schema_of([first, second]: [u64; 2], dim: usize) -> Schema {
    let table = |name, rows, dim| format!("[[tables]]\nname = \"{name}\"\nrows = {rows}\ndim = {dim}\n");
    let tables = [
        table("t", first, dim) + "default = { row = 1 }\n",
        table("u", second, dim),
        table("w", first, 1),
        table("v", second, 1),
    ];
    Schema::parse(&(TOML.to_owned() + &tables.concat())).unwrap()
}

/// Samples drawn from a seed, with skewed ids: some rows are in almost every batch and others are rare.
pub(crate) struct Samples {
    left: usize,
    draws: u64,
    rows: [u64; 2],
}

impl Samples {
    fn draw(&mut self, below: u64) -> u64 {
        self.draws = mix64(self.draws);
        (self.draws >> 8) % below
    }

    fn id(&mut self, rows: u64) -> u64 {
        let u = self.draw(1 << 20) as f64 / (1 << 20) as f64;
        // A few ids are past the end.
        (u * u * (rows + 3) as f64) as u64
    }
}

impl Reader for Samples {
    fn read(&mut self, batch: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let samples = batch.min(self.left);
        self.left -= samples;
        let mut features = vec![RawFeature::ids(); 3];
        let mut push = |feature: usize, ids: &[u64]| {
            let RawValues::Ids(values) = &mut features[feature].values else { unreachable!() };
            values.extend_from_slice(ids);
            let end = values.len() as u32;
            features[feature].offsets.push(end);
        };
        let (mut dense, mut labels) = (Vec::new(), Vec::new());
        for _ in 0..samples {
            let bag: Vec<u64> = (0..self.draw(7)).map(|_| self.id(self.rows[0])).collect();
            push(0, &bag);
            push(1, &[self.id(self.rows[0])]);
            push(2, &[self.id(self.rows[1])]);
            dense.push(self.draw(100) as f32 / 50.0);
            labels.push(self.draw(2) as f32);
        }
        *out = RawBatch { samples, dense, features, labels: Some(labels) };
        Ok(samples)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub settings: PipelineSettings,
    pub kind: OptimizerKind,
    pub samples: usize,
    pub batch: usize,
    pub seed: u64,
}

/// A pipeline that has trained a case and was flushed, and all logits that it reported.
pub(crate) struct Trained {
    pub train_state: TrainState,
    pub pipeline: Pipeline,
    pub logits: Vec<f32>,
    _dir: tempfile::TempDir,
}

impl Case {
    pub(crate) fn new(scratchpad: ScratchpadSize, policy: ScratchpadPolicy) -> Self {
        let settings = PipelineSettings { scratchpad, policy, threads: 2, ..PipelineSettings::default() };
        Self { settings, kind: OptimizerKind::Adagrad, samples: 300, batch: 16, seed: 3 }
    }

    pub(crate) fn optimizer(&self) -> Optimizer {
        Optimizer { eps: 1e-10, ..Optimizer::new(self.kind, 0.05) }
    }

    pub(crate) fn data(&self) -> Samples {
        Samples { left: self.samples, draws: self.seed, rows: ROWS }
    }

    /// The sequential trainer after the case, and all logits that it reported.
    pub(crate) fn expected(&self) -> (ReferenceTrainer, Vec<f32>) {
        let mut reference = initialise(&schema(), self.optimizer(), 7).unwrap();
        let mut logits = Vec::new();
        let mut data = self.data();
        reference.train_sequentially(&mut data, self.batch, |p| logits.extend_from_slice(p.logits)).unwrap();
        (reference, logits)
    }

    /// A new pipeline, and the directory of its working file.
    pub(crate) fn begin(
        &self,
        frequencies: Option<Vec<RowFrequency>>,
    ) -> (TrainState, Pipeline, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let made =
            initialise_on_disk(&schema(), self.optimizer(), 7, WorkingFileOptions::logs(dir.path())).unwrap();
        let (train_state, file) = made;
        let rows = PipelineRows { file, frequencies };
        let pipeline = Pipeline::new(&train_state, rows, self.settings.clone()).unwrap();
        (train_state, pipeline, dir)
    }

    /// Trains the case with a new pipeline and flushes it.
    pub(crate) fn train(&self) -> Trained {
        let (mut train_state, mut pipeline, dir) = self.begin(None);
        let mut logits = Vec::new();
        let mut data = self.data();
        let data = Data { reader: &mut data, batch: self.batch, steps: u64::MAX };
        let mut observer = |p: &Progress<'_>| logits.extend_from_slice(p.logits);
        let samples = pipeline.run(&mut train_state, data, &mut observer).unwrap();
        assert_eq!(samples, self.samples as u64);
        pipeline.flush().unwrap();
        Trained { train_state, pipeline, logits, _dir: dir }
    }

    /// Trains with the pipeline, and asserts that every byte equals the sequential trainer's.
    fn check(&self) -> PlanStats {
        self.check_against(self.expected())
    }

    /// As [`Self::check`], but compares with this trainer and the logits that it reported.
    pub(crate) fn check_against(
        &self,
        (expected, expected_logits): (ReferenceTrainer, Vec<f32>),
    ) -> PlanStats {
        let Trained { train_state, pipeline, logits, .. } = self.train();
        assert!(bits(&logits) == bits(&expected_logits), "{self:?}: logits");
        assert_same(&train_state, pipeline.store(), &expected, &format!("{self:?}"));
        pipeline.stats()
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn assert_same(
    train_state: &TrainState,
    store: &WorkingFile,
    expected: &ReferenceTrainer,
    what: &str,
) {
    assert_eq!(train_state.steps, expected.steps(), "{what}");
    assert!(bits(&train_state.weights.values) == bits(&expected.weights().values), "{what}: dense");
    for (state, expected) in train_state.dense_states.iter().zip(expected.dense_states()) {
        assert!(bits(state) == bits(expected), "{what}: dense state");
    }
    for (t, table) in expected.tables().iter().enumerate() {
        let rows: Vec<u64> = (0..table.rows()).collect();
        let width = store.tables()[t].width();
        let mut records = vec![0.0; rows.len() * width];
        store.read(TableId(t as u32), &rows, &mut records).unwrap();
        for row in rows {
            let mut expected = table.row_values(row).unwrap().to_vec();
            for state in table.states() {
                expected
                    .extend_from_slice(&state.as_slice()[row as usize * state.width()..][..state.width()]);
            }
            let got = &records[row as usize * width..][..width];
            assert!(
                bits(got) == bits(&expected),
                "{what}: table {t} row {row}: {got:?}, expected {expected:?}"
            );
        }
    }
}

#[test]
fn every_policy_and_optimizer_trains_the_sequential_bytes_in_a_scratchpad_of_any_size() {
    for kind in
        [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::RowwiseAdagrad, OptimizerKind::Adam]
    {
        for policy in ScratchpadPolicy::ALL {
            for fraction in [0.1, 0.4, 1.0] {
                let mut case = Case { kind, ..Case::new(ScratchpadSize::Fraction(fraction), policy) };
                case.settings.jitter = (fraction == 0.4).then_some(kind as u64);
                let stats = case.check();
                assert_eq!(stats.evictions == 0, fraction == 1.0, "{policy}, {fraction}: {stats:?}");
                assert!(stats.hits > 0 && stats.fills > 0, "{stats:?}");
            }
        }
    }
}

#[test]
fn a_batch_whose_rows_do_not_fit_is_split_down_to_single_samples() {
    for policy in ScratchpadPolicy::ALL {
        // A sample has up to eight rows of the first two tables, and up to eight of the other two.
        let case = Case::new(ScratchpadSize::Slots(vec![8, 8]), policy);
        let stats = case.check();
        assert_eq!(stats.splits, 19, "{stats:?}");
    }
    let case = Case { batch: 3, ..Case::new(ScratchpadSize::Slots(vec![12, 9]), ScratchpadPolicy::Lru) };
    let stats = case.check();
    assert!(
        stats.splits > 0 && stats.splits < 100,
        "expected some batches to be split and some not: {stats:?}"
    );
}

#[test]
fn a_sample_whose_rows_do_not_fit_is_refused_after_the_samples_before_it_are_trained() {
    // A sample has up to eight rows of the first size.
    let case = Case { seed: 5, ..Case::new(ScratchpadSize::Slots(vec![7, 8]), ScratchpadPolicy::Lru) };
    let (mut train_state, mut pipeline, _dir) = case.begin(None);
    let mut data = case.data();
    let data = Data { reader: &mut data, batch: 1, steps: u64::MAX };
    let error = pipeline.run(&mut train_state, data, &mut |_: &Progress<'_>| ()).unwrap_err().to_string();
    let expected = "scratchpad: a sample needs 8 rows of 6 f32 (with optimizer state) at the same time, \
                    but there are only 7 slots of that size";
    assert_eq!(error, expected);
    assert!(train_state.steps > 0, "some samples are small enough");
    pipeline.flush().unwrap();
    let before = Case { samples: train_state.steps as usize, batch: 1, ..case };
    assert_same(&train_state, pipeline.store(), &before.expected().0, "the samples before the refused one");
}

#[test]
fn a_scratchpad_that_is_full_of_frequent_rows_has_room_for_the_first_batches() {
    for policy in ScratchpadPolicy::ALL {
        let case = Case::new(ScratchpadSize::Fraction(0.7), policy);
        assert_eq!(case.check().bubbles, 0, "the window fits");
        let tables = schema().tables.into_iter().zip(0..);
        let counts = tables.flat_map(|(table, t)| {
            (0..table.rows).map(move |row| RowFrequency { table: TableId(t), row, count: 1 })
        });
        let counts: Vec<RowFrequency> = counts.collect();
        let (mut train_state, mut pipeline, _dir) = case.begin(Some(counts));
        let mut data = case.data();
        let data = Data { reader: &mut data, batch: case.batch, steps: u64::MAX };
        pipeline.run(&mut train_state, data, &mut |_: &Progress<'_>| ()).unwrap();
        let stats = pipeline.stats();
        assert_eq!((stats.filled_before, stats.bubbles), (pipeline.slots() as u64, 0), "{policy}: {stats:?}");
        pipeline.flush().unwrap();
        assert_same(&train_state, pipeline.store(), &case.expected().0, "filled with frequent rows");
    }
}

#[test]
fn plan_waits_if_the_window_does_not_fit_and_shrinks_a_window_of_several_batches() {
    let stats = Case::new(ScratchpadSize::Slots(vec![110, 110]), ScratchpadPolicy::Lru).check();
    assert!(stats.bubbles > 0 && stats.splits == 0, "{stats:?}");
    let mut case = Case::new(ScratchpadSize::Slots(vec![110, 110]), ScratchpadPolicy::Optimal);
    case.settings.lookahead = 4;
    let stats = case.check();
    assert!(stats.shrinks > 0 && stats.splits == 0, "{stats:?}");
}

#[test]
fn counts_are_the_same_in_every_run() {
    let mut case = Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Random);
    let first = case.check();
    case.settings.jitter = Some(1);
    assert_eq!(case.check(), first);
}

#[test]
fn a_run_continues_where_the_last_one_ended_also_from_an_emptied_scratchpad() {
    let case = Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru);
    let (mut train_state, mut pipeline, _dir) = case.begin(None);
    let mut data = case.data();
    for clear in [false, true, false, true] {
        let data = Data { reader: &mut data, batch: case.batch, steps: 5 };
        pipeline.run(&mut train_state, data, &mut |_: &Progress<'_>| ()).unwrap();
        if clear {
            pipeline.clear().unwrap();
        }
    }
    assert_same(&train_state, pipeline.store(), &case.expected().0, "four runs");
}

#[test]
fn each_row_is_fetched_once_if_the_scratchpad_holds_all_rows() {
    let stats = Case::new(ScratchpadSize::Fraction(1.0), ScratchpadPolicy::Lru).check();
    let again = Case::new(ScratchpadSize::Fraction(1.0), ScratchpadPolicy::Optimal).check();
    assert_eq!((stats.fills, stats.hits, stats.evictions), (again.fills, again.hits, 0));
}

pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let size = prop_oneof![
        (8usize..300, 8usize..300).prop_map(|(a, b)| ScratchpadSize::Slots(vec![a, b])),
        (0.05f64..1.0).prop_map(ScratchpadSize::Fraction),
    ];
    let settings =
        (size, 0usize..4, any::<u64>(), 1usize..5, 0usize..3, 500usize..60_000, any::<Option<u64>>());
    let settings =
        settings.prop_map(|(scratchpad, policy, seed, lookahead, buffered, staging_bytes, jitter)| {
            let policy = ScratchpadPolicy::ALL[policy];
            PipelineSettings {
                scratchpad,
                policy,
                seed,
                lookahead,
                buffered,
                staging_bytes,
                threads: 2,
                overlap: seed % 8 > 0,
                jitter,
                ..PipelineSettings::default()
            }
        });
    (settings, 0usize..4, 1usize..40, 1usize..40, any::<u64>()).prop_map(
        |(settings, kind, steps, batch, seed)| {
            let kind = [
                OptimizerKind::Sgd,
                OptimizerKind::Adagrad,
                OptimizerKind::RowwiseAdagrad,
                OptimizerKind::Adam,
            ][kind];
            Case { settings, kind, samples: steps * batch - batch / 3, batch, seed }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_settings_train_the_sequential_bytes(case in cases()) {
        case.check();
    }
}
