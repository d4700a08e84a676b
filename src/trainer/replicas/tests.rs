//! Replicas compared with one worker, to the bit or within rounding, and with a naive implementation, to the
//! bit.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::model::loss::sigmoid;
use crate::trainer::optim::OptimizerKind;
use crate::trainer::pipeline::item::{Item, Transfers, Work};
use crate::trainer::pipeline::scratchpad::{ScratchpadMemory, Sizes, SlotLayout};
use crate::trainer::pipeline::tests::{Case, Trained, assert_same, bits, cases, schema};
use crate::trainer::pipeline::train::{RowObserver, StepObserver, Train, UpdatedRows};
use crate::trainer::{
    Pipeline, Progress, ReferenceTrainer, ScratchpadPolicy, ScratchpadSize, WorkingFileOptions, initialise,
    initialise_on_disk,
};
use crate::types::RowId;

mod naive;

const KINDS: [OptimizerKind; 4] =
    [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::RowwiseAdagrad, OptimizerKind::Adam];

fn case(kind: OptimizerKind, replicas: usize, lambda: u64) -> Case {
    let mut case =
        Case { kind, samples: 320, ..Case::new(ScratchpadSize::Fraction(1.0), ScratchpadPolicy::Lru) };
    (case.settings.replicas, case.settings.lambda, case.settings.lookahead) = (replicas, lambda, 3);
    case
}

/// Takes the steps of a case without a pipeline, window by window, on slots that hold every row. Uses
/// `Replicas` even for a single replica. Calls `each` after each window. Returns the state, and the records
/// of each table.
fn by_replicas(case: &Case, mut each: impl FnMut(&TrainState, &Replicas)) -> (TrainState, Vec<Vec<f32>>) {
    let sizes = Sizes::of(&schema(), case.kind);
    let slots = sizes.slots(&sizes.counts(&ScratchpadSize::Fraction(1.0))).unwrap();
    let fresh = initialise(&schema(), case.optimizer(), 7).unwrap();
    let mut taken = vec![0; slots.len()];
    let mut lists = Vec::new();
    for (t, &SlotLayout { size: class, .. }) in sizes.tables.iter().enumerate() {
        let list: Vec<u32> = (taken[class]..).take(fresh.tables[t].rows() as usize).collect();
        taken[class] += list.len() as u32;
        slots[class].claim(&list).unwrap().write(&records_of(&fresh, t));
        lists.push(list);
    }
    let (mut network, pad) = (fresh.state, ScratchpadMemory::Host(slots));
    let casts = naive::batches(case).into_iter().map(|(batch, labels)| {
        let mut cast = PreparedBatch { batch, labels, ..PreparedBatch::default() };
        cast.prepare(&network.schema, &network.lookups).unwrap();
        cast.slots = cast.rows().map(|row| lists[row.table().index()][row.row() as usize]).collect();
        cast
    });
    let mut casts = casts.collect::<Vec<_>>().into_iter();
    let replicas = Some(Replicas::new(&network, case.settings.replicas, case.settings.lambda));
    let (watch, tables) = (&mut |_: &Progress<'_>| (), &sizes.tables[..]);
    let mut train = Train {
        train_state: &mut network,
        scratchpad: &pad,
        stepper: None,
        tables,
        observer: watch,
        samples: 0,
        logits: vec![],
        replicas,
    };
    while casts.len() > 0 {
        let work = Work::Steps(casts.by_ref().take(case.settings.lookahead).collect());
        let (fills, evictions) = (Transfers::default(), Transfers::default());
        train.train(&Item { number: 1, fills, evictions, staging: None, work }).unwrap();
        each(train.train_state, train.replicas.as_ref().unwrap());
    }
    let rows = lists.iter().zip(tables).map(|(list, layout)| pad.read(layout.size, list).unwrap());
    let rows = rows.collect();
    (network, rows)
}

/// The records of a table in memory.
fn records_of(learner: &ReferenceTrainer, t: usize) -> Vec<f32> {
    let table = &learner.tables[t];
    let mut records = Vec::new();
    for row in 0..table.rows() {
        records.extend_from_slice(table.row_values(row).unwrap());
        for state in table.states() {
            records.extend_from_slice(&state.as_slice()[row as usize * state.width()..][..state.width()]);
        }
    }
    records
}

/// The largest difference of two runs in dense weights, dense states, rows or row states, relative to the
/// largest update in the second run.
fn distance(ours: &Trained, theirs: &ReferenceTrainer) -> f64 {
    let fresh = initialise(&schema(), theirs.optimizer(), 7).unwrap();
    let largest = |a: &[f32], b: &[f32]| {
        assert_eq!(a.len(), b.len());
        let differences = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        differences.fold(0.0, f64::max)
    };
    let mut worst = 0.0f64;
    let mut compare = |ours: &[f32], theirs: &[f32], fresh: &[f32]| {
        let update = largest(theirs, fresh);
        assert!(update > 0.0, "no weight has changed");
        worst = worst.max(largest(ours, theirs) / update);
    };
    let network = &ours.train_state;
    compare(&network.weights.values, &theirs.weights().values, &fresh.weights().values);
    for (n, state) in network.dense_states.iter().enumerate() {
        compare(state, &theirs.dense_states()[n], &fresh.dense_states()[n]);
    }
    for (t, table) in theirs.tables().iter().enumerate() {
        let rows: Vec<u64> = (0..table.rows()).collect();
        let width = ours.pipeline.store().tables()[t].width();
        let mut records = vec![0.0; rows.len() * width];
        ours.pipeline.store().read(TableId(t as u32), &rows, &mut records).unwrap();
        // Weights and each state are compared separately, because their magnitudes differ.
        let part = |from: usize, to: usize| -> Vec<f32> {
            records.chunks(width).flat_map(|record| record[from..to].to_vec()).collect()
        };
        let (dim, mut from) = (table.dim(), table.dim());
        compare(&part(0, dim), table.values().unwrap(), fresh.tables()[t].values().unwrap());
        for (state, fresh) in table.states().iter().zip(fresh.tables()[t].states()) {
            compare(&part(from, from + state.width()), state.as_slice(), fresh.as_slice());
            from += state.width();
        }
    }
    worst
}

/// The largest change that rounding may cause in twenty steps, relative to the largest update. Measured: at
/// most 4e-6. A sum that is split differently changes by about 2^-24 (6e-8) of the size of its terms, which
/// is a larger share of the sum if terms cancel. In the first steps of Adagrad and Adam a small gradient
/// moves a weight as far as a large one, so its relative error counts in full. SGD's updates are small, so
/// the rounding of weights is large relative to them. A gradient that is left out, counted twice or scaled
/// wrongly changes the result by percents.
const ROUNDING: f64 = 1e-5;

#[test]
fn one_replica_trains_the_bytes_of_one_worker_at_any_lambda() {
    for kind in KINDS {
        for lambda in [1, 2, 5] {
            let case = case(kind, 1, lambda);
            let (expected, _) = case.expected();
            // With one replica the pipeline does not use `Replicas`, so `by_replicas` tests it separately.
            case.check_against(case.expected());
            let (network, rows) = by_replicas(&case, |_, _| ());
            assert!(bits(&network.weights.values) == bits(&expected.weights().values), "{case:?}");
            for (t, rows) in rows.iter().enumerate() {
                assert!(bits(rows) == bits(&records_of(&expected, t)), "{case:?}: table {t}");
            }
        }
    }
}

#[test]
fn at_lambda_one_any_number_of_replicas_trains_the_weights_of_one_worker_except_for_rounding() {
    for kind in KINDS {
        for replicas in [2, 3, 5] {
            // Batches of one and three samples are smaller than the number of replicas.
            for (batch, samples) in [(16, 320), (1, 20), (3, 60), (130, 2600)] {
                let case = Case { batch, samples, ..case(kind, replicas, 1) };
                let (expected, logits) = case.expected();
                let got = case.train();
                assert!(got.pipeline.settings().exact());
                assert_eq!(got.train_state.steps, 20);
                let off = distance(&got, &expected);
                assert!(off < ROUNDING, "{kind}, {replicas} replicas, batches of {batch}: {off:e}");
                assert_eq!(got.logits.len(), logits.len());
                let apart = got
                    .logits
                    .iter()
                    .zip(&logits)
                    .map(|(&a, &b)| (sigmoid(a) - sigmoid(b)).abs())
                    .fold(0.0, f32::max);
                assert!(apart < 1e-6, "{kind}, {replicas} replicas, batches of {batch}: {apart:e}");
            }
        }
    }
}

#[test]
fn at_a_larger_lambda_training_differs_and_is_reported_as_not_exact() {
    for kind in KINDS {
        let case = case(kind, 3, 3);
        let got = case.train();
        assert!(!got.pipeline.settings().exact());
        let off = distance(&got, &case.expected().0);
        assert!(off > 100.0 * ROUNDING && off < 10.0, "{kind}: {off:e}");
    }
}

#[test]
fn a_step_of_sgd_followed_by_an_average_is_the_step_on_the_whole_batch() {
    for replicas in [2, 3, 5] {
        let mut case = case(OptimizerKind::Sgd, replicas, 2);
        // Every window has one batch, and its end averages.
        case.settings.lookahead = 1;
        let off = distance(&case.train(), &case.expected().0);
        // Here weights are rounded when they are averaged. Relative to SGD's small updates, that is a larger
        // error than the rounding of gradients.
        assert!(off < 10.0 * ROUNDING, "{replicas} replicas: {off:e}");
    }
}

#[test]
fn replicas_are_equal_at_the_end_of_a_window() {
    for (kind, lambda, lookahead) in
        [(OptimizerKind::Adagrad, 1, 3), (OptimizerKind::Adam, 2, 2), (OptimizerKind::RowwiseAdagrad, 4, 3)]
    {
        let mut case = case(kind, 4, lambda);
        case.settings.lookahead = lookahead;
        let mut windows = 0;
        by_replicas(&case, |network, Replicas { others, replicas, .. }| {
            windows += 1;
            for (other, replica) in others.iter().zip(&replicas[1..]) {
                assert_eq!(other.steps, network.steps);
                assert!(bits(&other.weights.values) == bits(&network.weights.values), "{case:?}");
                assert!(bits(&other.weights.transposed) == bits(&network.weights.transposed), "{case:?}");
                assert!(
                    other
                        .dense_states
                        .iter()
                        .map(|s| bits(s))
                        .eq(network.dense_states.iter().map(|s| bits(s)))
                );
                assert!(bits(&replica.cache) == bits(&replicas[0].cache), "{case:?}: rows");
            }
        });
        assert_eq!(windows, 20_usize.div_ceil(lookahead));
    }
}

#[test]
fn averages_and_exchanged_sums_equal_those_of_the_naive_implementation() {
    for kind in KINDS {
        for (replicas, lambda, lookahead) in [(2, 1, 1), (3, 1, 4), (3, 2, 3), (4, 3, 5), (2, 8, 4)] {
            let mut case = case(kind, replicas, lambda);
            case.settings.lookahead = lookahead;
            case.check_against(naive::trained(&case));
        }
    }
}

#[test]
fn a_split_batch_is_trained_as_by_one_worker_and_the_others_continue_from_it() {
    let split = ScratchpadSize::Slots(vec![8, 8]);
    let mut case = Case { samples: 300, ..case(OptimizerKind::Adam, 3, 1) };
    case.settings.scratchpad = split;
    let stats = case.check_against(case.expected());
    assert_eq!(stats.splits, 19, "every batch is split, so one worker trains all");
    let mut case = Case { samples: 300, batch: 3, ..case };
    case.settings.scratchpad = ScratchpadSize::Slots(vec![12, 9]);
    let stats = case.check_against(naive::trained(&case));
    assert!(
        stats.splits > 0 && stats.splits < 100,
        "expected some batches to be split and some not: {stats:?}"
    );
}

#[test]
fn the_bytes_are_the_same_on_any_number_of_threads() {
    for lambda in [1, 2] {
        let case = Case { batch: 70, samples: 700, ..case(OptimizerKind::Adam, 3, lambda) };
        let expected = naive::trained(&case);
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let Trained { train_state: network, pipeline, logits, .. } = pool.install(|| case.train());
            assert!(bits(&logits) == bits(&expected.1), "{threads} threads");
            assert_same(&network, pipeline.store(), &expected.0, &format!("{threads} threads"));
        }
    }
}

/// Keeps the last reported record of each row.
#[derive(Default)]
struct Observed {
    rows: HashMap<RowId, Vec<f32>>,
    steps: u64,
}

impl StepObserver for Observed {
    fn learnt(&mut self, _: &Batch, _: &Progress<'_>) -> Result<(), TrainError> {
        Ok(())
    }

    fn row_observer(&mut self) -> Option<&mut dyn RowObserver> {
        Some(self)
    }

    fn stepped(&mut self, network: &TrainState) -> Result<(), TrainError> {
        self.steps += 1;
        assert_eq!(network.steps, self.steps);
        Ok(())
    }
}

impl RowObserver for Observed {
    fn rows(&mut self, tables: &[UpdatedRows<'_>]) {
        for UpdatedRows { table, rows, record } in tables {
            let updated = |(k, &row): (usize, &u64)| (RowId::new(*table, row), record(k).to_vec());
            self.rows.extend(rows.iter().enumerate().map(updated));
        }
    }
}

#[test]
fn an_observer_gets_every_updated_row_with_its_new_values() {
    let mut case = case(OptimizerKind::RowwiseAdagrad, 3, 1);
    case.settings.scratchpad = ScratchpadSize::Fraction(0.5);
    let (mut network, mut pipeline, _dir) = case.begin(None);
    let (mut data, mut observed) = (case.data(), Observed::default());
    let data = crate::trainer::Data { reader: &mut data, batch: 16, steps: u64::MAX };
    pipeline.run(&mut network, data, &mut observed).unwrap();
    pipeline.flush().unwrap();
    assert!(observed.steps == 20 && observed.rows.len() > 500, "{} rows", observed.rows.len());
    for (row_id, record) in observed.rows {
        let (table, row) = (row_id.table(), row_id.row());
        let mut stored = vec![0.0; record.len()];
        pipeline.store().read(table, &[row], &mut stored).unwrap();
        assert!(bits(&stored) == bits(&record), "{table:?} row {row}");
    }
}

#[test]
fn the_loss_falls_at_a_large_lambda_too() {
    let mut case = case(OptimizerKind::Adagrad, 4, 4);
    (case.samples, case.settings.lookahead) = (128, 4);
    let (mut network, mut pipeline, _dir) = case.begin(None);
    let mut losses = Vec::new();
    for _ in 0..10 {
        let (mut data, mut sum) = (case.data(), 0.0);
        let data = crate::trainer::Data { reader: &mut data, batch: 16, steps: u64::MAX };
        pipeline.run(&mut network, data, &mut |p: &Progress<'_>| sum += p.loss).unwrap();
        losses.push(sum / 8.0);
    }
    assert!(losses[9] < 0.8 * losses[0], "{losses:?}");
}

#[test]
fn settings_out_of_range_are_refused_with_their_limits() {
    let refused = |replicas, lambda| {
        let case = case(OptimizerKind::Sgd, replicas, lambda);
        let dir = tempfile::tempdir().unwrap();
        let made =
            initialise_on_disk(&schema(), case.optimizer(), 7, WorkingFileOptions::logs(dir.path())).unwrap();
        Pipeline::new(&made.0, made.1.into(), case.settings).err().map(|error| error.to_string())
    };
    assert_eq!(refused(0, 1).unwrap(), "replicas: expected 1 to 64, got 0");
    assert_eq!(refused(65, 1).unwrap(), "replicas: expected 1 to 64, got 65");
    assert_eq!(refused(2, 0).unwrap(), "lambda: expected at least 1 step, got 0");
    assert_eq!(refused(64, u64::MAX), None);
}

#[test]
fn shards_are_consecutive_and_cover_the_batch_and_differ_by_at_most_one_sample() {
    for (samples, count) in [(0, 3), (2, 5), (7, 3), (12, 4), (129, 64)] {
        let shards: Vec<Range<usize>> = (0..count).map(|r| shard(samples, count, r)).collect();
        assert_eq!((shards[0].start, shards[count - 1].end), (0, samples));
        assert!(shards.windows(2).all(|two| two[0].end == two[1].start), "{shards:?}");
        let (least, most) = (samples / count, samples.div_ceil(count));
        assert!(shards.iter().all(|shard| (least..=most).contains(&shard.len())), "{shards:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_settings_train_the_bytes_of_naive_replicas(
        mut case in cases(), replicas in 1usize..6, lambda in 1u64..5
    ) {
        (case.settings.replicas, case.settings.lambda) = (replicas, lambda);
        case.check_against(naive::trained(&case));
    }
}
