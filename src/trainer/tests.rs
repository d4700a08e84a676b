//! The promises of the trainer: equal bytes on any number of threads, the same steps as a naive trainer in
//! f64, refused batches that change nothing, and versions that are served and resumed to the bit.

mod naive;
pub(crate) mod samples;
mod torch;

use std::sync::Arc;
use std::time::Duration;

use crate::cache::{CacheOptions, CacheShape, FlatCache, TableShape};
use crate::dataset::{DataFile, DatasetError, FileRun, Reader};
use crate::engine::{Engine, EngineParts, LookupTier};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::predict::{Predict, PredictError, finite};
use crate::schema::Schema;
use crate::store::tests::entries;
use crate::store::tests::forged::forge_infinity;
use crate::store::{self, Purpose};
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::{self, ReferenceTrainer, TrainError};
use crate::types::{AbsentId, Batch, Element, RawBatch, Version};

use naive::Naive;
use samples::{ARCHITECTURES, ODD, generate, odd_schema, raw, schema};

pub(crate) const KINDS: [OptimizerKind; 4] =
    [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::RowwiseAdagrad, OptimizerKind::Adam];

pub(crate) fn optimizer(kind: OptimizerKind) -> Optimizer {
    Optimizer { eps: 1e-10, ..Optimizer::new(kind, 0.01) }
}

/// All numbers of a trainer: dense weights, rows, and the state of both.
pub(crate) fn bits(reference: &ReferenceTrainer) -> Vec<u32> {
    let dense = reference.dense_states().iter().flatten().chain(reference.weights().values.iter());
    let states = reference.tables().iter().flat_map(|t| t.states()).flat_map(|s| s.as_slice());
    let rows = reference.tables().iter().flat_map(|t| t.values().unwrap());
    dense.chain(states).chain(rows).map(|x| x.to_bits()).collect()
}

fn threads(count: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap()
}

/// A trainer that has trained on a batch of each size, and the logits and losses of all batches.
fn trained(schema: &Schema, kind: OptimizerKind, sizes: &[usize]) -> (ReferenceTrainer, Vec<f32>) {
    let mut reference = trainer::initialise(schema, optimizer(kind), 5).unwrap();
    let (mut outputs, mut logits) = (Vec::new(), Vec::new());
    for (i, &size) in sizes.iter().enumerate() {
        let (batch, labels) = generate(schema, size, i as u64);
        let loss = reference.step(&batch, &labels, &mut logits).unwrap();
        outputs.extend_from_slice(&logits);
        outputs.push(loss as f32);
    }
    (reference, outputs)
}

#[test]
fn a_version_has_the_time_of_its_last_batch_and_not_of_its_checkpoint() {
    let mut trainer =
        trainer::initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Sgd), 1).unwrap();
    let time_of = |trainer: &ReferenceTrainer| {
        std::thread::sleep(Duration::from_millis(5));
        trainer.state.checkpoint().training.last_batch_unix_ms
    };
    let before = time_of(&trainer);
    let (batch, labels) = generate(&trainer.state.schema.clone(), 5, 1);
    trainer.step(&batch, &labels, &mut Vec::new()).unwrap();
    let after = time_of(&trainer);
    assert!(after > before && time_of(&trainer) == after);
}

#[test]
fn any_number_of_threads_trains_the_same_bytes() {
    for architecture in ARCHITECTURES {
        let schema = schema(architecture);
        for kind in KINDS {
            let run = |count: usize| {
                let (reference, outputs) =
                    threads(count).install(|| trained(&schema, kind, &[1, 63, 64, 65, 128, 300]));
                (bits(&reference), outputs)
            };
            let one = run(1);
            assert!(one.1.iter().all(|p| p.is_finite()));
            for count in [2, 3, 4] {
                assert!(run(count) == one, "{architecture}, {kind}, {count} threads");
            }
        }
    }
    let schema = schema(ARCHITECTURES[0]);
    let run = |count: usize| {
        bits(&threads(count).install(|| trained(&schema, OptimizerKind::Adagrad, &[2048, 7])).0)
    };
    assert_eq!(run(1), run(4));
}

#[test]
fn a_step_equals_that_of_a_naive_trainer_in_f64() {
    for (what, schema) in
        ARCHITECTURES.map(|a| (a, schema(a))).into_iter().chain(ODD.map(|odd| (odd, odd_schema(odd))))
    {
        for kind in KINDS {
            let mut reference = trainer::initialise(&schema, optimizer(kind), 9).unwrap();
            for (i, size) in [65, 1, 130, 64].into_iter().enumerate() {
                let (batch, labels) = generate(&schema, size, 100 + i as u64);
                let before = bits(&reference);
                let mut naive = Naive::of(&reference);
                let expected = naive.step(&batch, &labels);
                let loss = reference.step(&batch, &labels, &mut Vec::new()).unwrap();
                assert!((loss - expected).abs() < 1e-5 * expected.max(1.0), "{what}, {kind}");
                naive.assert_matches(&reference, &format!("{what}, {kind}, step {i}"));
                assert_ne!(bits(&reference), before, "{what}, {kind}: no weight changed");
            }
        }
    }
}

/// Makes a batch invalid.
type Spoil<'a> = &'a dyn Fn(&mut Batch, &mut Vec<f32>);

#[test]
fn a_refused_batch_changes_nothing() {
    let schema = schema(ARCHITECTURES[0]);
    let strict = schema.features.iter().position(|f| f.name == "strict").unwrap();
    let (mut reference, _) = trained(&schema, OptimizerKind::Adam, &[70]);
    let before = (bits(&reference), reference.steps());
    let (batch, labels) = generate(&schema, 66, 1);
    let spoilt = |spoil: Spoil<'_>| {
        let (mut batch, mut labels) = (batch.clone(), labels.clone());
        spoil(&mut batch, &mut labels);
        (batch, labels)
    };
    let refused: [(&str, Spoil<'_>); 6] = [
        ("dense: expected 198, got 197", &|b, _| b.dense.truncate(197)),
        ("features: expected 5, got 4", &|b, _| b.features.truncate(4)),
        ("user: expected 67, got 66", &|b, _| b.features[0].offsets.truncate(66)),
        ("user: expected 66, got 65", &|b, _| b.features[0].ids.truncate(65)),
        ("labels: expected 66, got 65", &|_, l| l.truncate(65)),
        ("feature \"strict\": id 9 is not in table", &|b, _| b.features[strict].ids[65] = 9),
    ];
    for (words, spoil) in refused {
        let (batch, labels) = spoilt(spoil);
        let error = reference.step(&batch, &labels, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains(words), "expected {words:?}, got {error}");
        assert_eq!((bits(&reference), reference.steps()), before, "{words}");
    }
    let mut logits = vec![0.5];
    let empty = Batch { samples: 0, ..Batch::empty(schema.features.len()) };
    assert_eq!(reference.step(&empty, &[], &mut logits).unwrap(), 0.0);
    assert!(logits.is_empty());
    assert_eq!((bits(&reference), reference.steps()), before, "no samples");
    reference.step(&batch, &labels, &mut logits).unwrap();
    assert_eq!(reference.steps(), before.1 + 1);
}

/// A reader of these batches.
struct Batches(Vec<RawBatch>);

impl Reader for Batches {
    fn read(&mut self, _: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        if self.0.is_empty() {
            return Ok(0);
        }
        *out = self.0.remove(0);
        Ok(out.samples)
    }
}

#[test]
fn data_without_labels_is_scored_but_not_trained_on() {
    let schema = schema(ARCHITECTURES[0]);
    let mut reference = trainer::initialise(&schema, optimizer(OptimizerKind::Adagrad), 0).unwrap();
    let data = || {
        let mut batches = vec![raw(&schema, 8, 0), raw(&schema, 8, 1), raw(&schema, 8, 2)];
        batches[1].labels = None;
        Batches(batches)
    };
    let error = reference.train_sequentially(&mut data(), 8, |_| ()).unwrap_err();
    assert!(matches!(error, TrainError::NoLabels { sample: 8 }), "{error}");
    assert_eq!(error.to_string(), "data: training needs labels, and sample 8 has none");
    assert_eq!(reference.steps(), 1, "the previous batch was trained on");
    let mut scored = 0;
    let quality = trainer::evaluate(&schema, &mut data(), 8, |batch, logits| {
        scored += batch.samples;
        reference.logits(batch, logits)
    });
    let quality = quality.unwrap();
    assert_eq!((scored, quality), (24, None));
}

#[test]
fn a_loss_that_is_not_finite_stops_training_and_keeps_the_last_good_weights() {
    for architecture in ARCHITECTURES {
        let schema = schema(architecture);
        let wild = Optimizer::new(OptimizerKind::Sgd, 1e30);
        let mut reference = trainer::initialise(&schema, wild, 0).unwrap();
        let mut data = Batches((0..20).map(|seed| raw(&schema, 70, seed)).collect());
        let mut losses = Vec::new();
        let error = reference.train_sequentially(&mut data, 70, |p| losses.push(p.loss)).unwrap_err();
        let TrainError::Diverged { step, lr, .. } = error else { panic!("{architecture}: {error}") };
        assert_eq!((step, lr), (reference.steps() + 1, 1e30));
        assert!(losses.iter().all(|loss| loss.is_finite()));
        assert_eq!(losses.len() as u64, reference.steps());
        assert!(error.to_string().starts_with("loss: not finite at step"), "{error}");
    }
}

#[test]
fn a_loss_that_is_not_finite_names_the_samples() {
    let schema = schema("kind = \"dcnv2\"\ncross_layers = 2\ndeep = [8]");
    let mut reference = trainer::initialise(&schema, optimizer(OptimizerKind::Adagrad), 0).unwrap();
    let mut batches: Vec<_> = (0..3).map(|seed| raw(&schema, 8, seed)).collect();
    batches[1].dense[4] = 3e38;
    let mut data = InFile(Batches(batches), Vec::new());
    let error = reference.train_sequentially(&mut data, 8, |_| ()).unwrap_err().to_string();
    let expected = "loss: not finite at step 2 in log, samples 9 to 16; a smaller lr than 0.01 may help";
    assert_eq!(error, expected);
}

/// Batches of one file.
struct InFile(Batches, Vec<FileRun>);

impl Reader for InFile {
    fn read(&mut self, max: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let samples = self.0.read(max, out)?;
        let before = self.1.last().map_or(0, |run| run.of_file);
        let file = DataFile { name: "log".to_owned(), log: None }.into();
        self.1 = vec![FileRun { file, samples, of_file: before + samples as u64, ends_file: false }];
        Ok(samples)
    }

    fn runs(&self) -> &[FileRun] {
        &self.1
    }
}

/// Engines for the highest version: without a cache, with a cache for every row, and with a small one.
pub(crate) fn engines(models: &std::path::Path, name: &str) -> Vec<Engine> {
    let metrics = Metrics::new().unwrap();
    let engine = |fraction: Option<f64>| {
        let opened = store::open_latest(models, name, Purpose::Serve).unwrap().opened;
        let shapes =
            opened.schema.tables.iter().map(|t| TableShape { rows: t.rows, row_bytes: t.row_bytes() });
        let shape = |fraction| CacheShape::from_fraction(fraction, shapes.clone().collect());
        let options = CacheOptions { version: opened.store.version(), ..CacheOptions::default() };
        let cache = fraction.map(|f| FlatCache::new(&shape(f), &options).unwrap());
        let parts = EngineParts {
            name: name.to_owned(),
            lookup_tier: cache.map_or(LookupTier::Store, LookupTier::Host),
            metrics: metrics.model(name, &opened.schema),
            threads: Arc::new(threads(2)),
            max_samples: 2048,
        };
        Engine::new(opened, parts).unwrap()
    };
    [None, Some(1.0), Some(0.05)].map(engine).into()
}

/// Asserts that the engine, which serves the trainer's last saved version, gives the trainer's scores to the
/// bit.
fn assert_scores_alike(engine: &Engine, reference: &mut ReferenceTrainer, batch: &Batch, what: &str) {
    let mut expected = Vec::new();
    reference.score(batch, &mut expected).unwrap();
    let scores = engine.predict(batch).unwrap();
    assert_eq!(scores.version, engine.version());
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&scores.probabilities), bits(&expected), "{what}, {} samples", batch.samples);
    reference.logits(batch, &mut expected).unwrap();
    let scores = engine.predict(&Batch { logits: true, ..batch.clone() }).unwrap();
    assert_eq!(bits(&scores.logits), bits(&expected), "{what}, {} samples", batch.samples);
}

#[test]
fn a_version_with_rounded_rows_is_served_as_evaluated_and_training_resumes_from_its_rows() {
    let models = tempfile::tempdir().unwrap();
    for (n, element) in [Element::F16, Element::Int8].into_iter().enumerate() {
        for (a, architecture) in ARCHITECTURES.into_iter().enumerate() {
            let (exact, mut schema) = (schema(architecture), schema(architecture));
            // One table stays f32.
            schema.tables.iter_mut().skip(1).for_each(|table| table.element = element);
            let kind = KINDS[n % KINDS.len()];
            let ((mut reference, _), (twin, _)) =
                (trained(&schema, kind, &[64, 65, 20]), trained(&exact, kind, &[64, 65, 20]));
            assert!(bits(&reference) == bits(&twin), "training is in f32 with every element type");
            let name = format!("rounded{n}_{a}");
            let version = reference.save(models.path(), &name).unwrap();
            let opened = |purpose| store::open(models.path(), &name, version, purpose).unwrap();
            for (size, seed) in [(1, 50), (130, 51), (64, 52), (0, 53)] {
                let batch = generate(&schema, size, seed).0;
                let mut expected = Vec::new();
                reference.score_rows_of(&opened(Purpose::Serve).store, &batch, &mut expected).unwrap();
                for engine in engines(models.path(), &name) {
                    let scores = engine.predict(&batch).unwrap().probabilities;
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&scores), bits(&expected), "{name}, {size} samples");
                }
            }
            let resumed = trainer::resume(opened(Purpose::Train), optimizer(kind)).unwrap();
            assert!(bits(&resumed) == bits(&reference), "the checkpoint has the rows as trained");
            let mut resumed = trainer::resume(opened(Purpose::Serve), optimizer(kind)).unwrap();
            assert_eq!(resumed.steps(), 0, "rounded rows do not continue training");
            for (table, stored) in resumed.tables().iter().zip(opened(Purpose::Serve).store.tables()) {
                let mut values = vec![0.0; table.values().unwrap().len()];
                stored.decode(&mut values);
                assert_eq!(table.values().unwrap(), values);
                assert!(table.states().iter().all(|s| s.as_slice().iter().all(|x| *x == 0.0)));
            }
            let (batch, labels) = generate(&schema, 33, 77);
            resumed.step(&batch, &labels, &mut Vec::new()).unwrap();
            // The resumed trainer has the decoded rows of the version, and can take a step and save it.
            assert!(resumed.save(models.path(), &name).unwrap() > version);
        }
    }
}

#[test]
fn a_saved_version_gives_the_trainers_scores_and_resumes_to_the_bit() {
    let models = tempfile::tempdir().unwrap();
    for (n, (what, schema)) in ARCHITECTURES
        .map(|a| (a, schema(a)))
        .into_iter()
        .chain(ODD.map(|odd| (odd, odd_schema(odd))))
        .enumerate()
    {
        let kind = KINDS[n % KINDS.len()];
        let (mut reference, _) = trained(&schema, kind, &[64, 65, 20]);
        let name = format!("model{n}");
        let version = reference.save(models.path(), &name).unwrap();
        for engine in engines(models.path(), &name) {
            assert_eq!(engine.version(), version);
            for (size, seed) in [(1, 50), (130, 51), (130, 51), (64, 52), (0, 53)] {
                assert_scores_alike(&engine, &mut reference, &generate(&schema, size, seed).0, what);
            }
        }
        let opened = || store::open(models.path(), &name, version, Purpose::Train).unwrap();
        let mut resumed = trainer::resume(opened(), optimizer(kind)).unwrap();
        assert_eq!(resumed.steps(), 3);
        assert!(bits(&resumed) == bits(&reference), "{what}, {kind}: resumed");
        let (batch, labels) = generate(&schema, 33, 77);
        for reference in [&mut reference, &mut resumed] {
            reference.step(&batch, &labels, &mut Vec::new()).unwrap();
        }
        assert!(bits(&resumed) == bits(&reference), "{what}, {kind}: one step on");
        // A trainer with another optimizer resumes only from the weights, not from the state.
        let other = trainer::resume(opened(), optimizer(KINDS[(n + 1) % KINDS.len()])).unwrap();
        assert_eq!(other.steps(), 0);
        assert!(other.dense_states().iter().flatten().all(|x| *x == 0.0));
        assert!(
            other.tables().iter().flat_map(|t| t.states()).all(|s| s.as_slice().iter().all(|x| *x == 0.0))
        );
    }
}

#[test]
fn a_table_that_does_not_fit_memory_is_an_error_with_its_name_and_the_memory_of_all_tables() {
    let mut schema = schema(ARCHITECTURES[0]);
    let table = &mut schema.tables[1];
    table.rows = 1 << 46;
    let (name, dim) = (table.name.clone(), table.dim as u64);
    let error = trainer::initialise(&schema, optimizer(OptimizerKind::Adam), 0).err().unwrap();
    let TrainError::TableMemory { table, total, .. } = &error else { panic!("{error}") };
    assert_eq!(table, &name);
    assert!(*total >= (3 * 4 * dim) << 46, "rows and two states: {total}");
    let message = error.to_string();
    assert!(message.contains("bytes refused") && message.contains("--scratchpad"), "{message}");
}

#[test]
fn a_model_too_wide_for_tapes_of_64_rows_trains_and_scores_like_others() {
    let models = tempfile::tempdir().unwrap();
    let schema = schema("kind = \"wide_deep\"\ndeep = [21000]");
    let model: Model<f32> = Model::new(&schema);
    assert_eq!(model.chunk(), 8);
    let run = |count| threads(count).install(|| trained(&schema, OptimizerKind::Adagrad, &[1, 7, 8, 9, 30]));
    let ((mut reference, outputs), (other, same)) = (run(1), run(2));
    assert!(bits(&reference) == bits(&other) && outputs == same, "threads");
    let (batch, labels) = generate(&schema, 30, 40);
    let mut naive = Naive::of(&reference);
    naive.step(&batch, &labels);
    reference.step(&batch, &labels, &mut Vec::new()).unwrap();
    naive.assert_matches(&reference, "wide");
    reference.save(models.path(), "wide").unwrap();
    for engine in engines(models.path(), "wide") {
        for size in [1, 8, 9, 30] {
            assert_scores_alike(&engine, &mut reference, &generate(&schema, size, 60).0, "wide");
        }
    }
}

#[test]
fn weights_that_are_not_finite_are_not_saved() {
    let models = tempfile::tempdir().unwrap();
    for (n, architecture) in ARCHITECTURES.into_iter().enumerate() {
        let schema = schema(architecture);
        let wild = Optimizer::new(OptimizerKind::Sgd, f64::from(f32::MAX));
        let mut reference = trainer::initialise(&schema, wild, 0).unwrap();
        let (mut batch, labels) = generate(&schema, 70, 0);
        batch.dense.iter_mut().for_each(|value| *value *= 1000.0);
        let loss = reference.step(&batch, &labels, &mut Vec::new()).unwrap();
        assert!(loss.is_finite() && reference.steps() == 1, "{architecture}: {loss}");
        let error = reference.save(models.path(), &format!("m{n}")).unwrap_err();
        assert!(matches!(error, TrainError::NotFinite { steps: 1, .. }), "{architecture}: {error}");
        assert!(error.to_string().contains("is not finite after step 1"), "{error}");
    }
    assert_eq!(models.path().read_dir().unwrap().count(), 0);
}

#[test]
fn optimizer_state_that_is_not_finite_is_neither_saved_nor_continued() {
    let models = tempfile::tempdir().unwrap();
    let schema = schema("kind = \"dcnv2\"\ncross_layers = 2\ndeep = [8]");
    let mut reference = trainer::initialise(&schema, optimizer(OptimizerKind::Adam), 0).unwrap();
    let (mut batch, labels) = generate(&schema, 70, 0);
    reference.save(models.path(), "m").unwrap();
    forge_infinity(&models.path().join("m/1"), "checkpoint/dense.safetensors");
    let error = store::open(models.path(), "m", Version(1), Purpose::Train).unwrap_err().to_string();
    assert!(error.ends_with("expected finite values, got NaN or infinity"), "{error}");
    // The loss and the weights stay finite, but not the squares of the gradients.
    batch.dense.iter_mut().for_each(|value| *value = 1e8);
    let loss = reference.step(&batch, &labels, &mut Vec::new()).unwrap();
    assert!(loss.is_finite(), "{loss}");
    let error = reference.save(models.path(), "m").unwrap_err().to_string();
    assert!(error.contains("optimizer.exp_avg_sq.* is not finite after step 1"), "{error}");
    assert_eq!(entries(models.path()), 1);
}

#[test]
fn a_sample_whose_score_is_not_finite_is_refused_with_its_number() {
    let models = tempfile::tempdir().unwrap();
    let mut refused = Vec::new();
    for (n, architecture) in ARCHITECTURES.into_iter().enumerate() {
        let schema = schema(architecture);
        let reference = trainer::initialise(&schema, optimizer(OptimizerKind::Sgd), 3).unwrap();
        let name = format!("m{n}");
        reference.save(models.path(), &name).unwrap();
        let (mut batch, _) = generate(&schema, 70, 3);
        batch.dense[66 * 3..67 * 3].copy_from_slice(&[f32::MAX, f32::MAX, -f32::MAX]);
        for engine in engines(models.path(), &name) {
            match engine.predict(&batch).and_then(finite) {
                Err(PredictError::NotFinite { sample }) => assert_eq!(sample, 66, "{architecture}"),
                // An infinite logit has a finite score, so some architectures do not fail.
                other => {
                    let scores = other.unwrap().probabilities;
                    assert!(scores.iter().all(|p| (0.0..=1.0).contains(p)), "{architecture}");
                    continue;
                }
            }
            refused.push(architecture);
        }
    }
    assert!(refused.iter().any(|architecture| architecture.contains("\"dcn\"")), "{refused:?}");
}

#[test]
fn an_id_past_a_table_is_reported_once_per_feature_even_if_only_the_wide_table_lacks_it() {
    let mut schema = schema("kind = \"wide_deep\"\ndeep = [4]");
    for table in &mut schema.tables {
        if table.name == "wide_shared" {
            table.rows = 3;
        }
    }
    schema.check().unwrap();
    let models = tempfile::tempdir().unwrap();
    let reference = trainer::initialise(&schema, optimizer(OptimizerKind::Sgd), 0).unwrap();
    reference.save(models.path(), "wide").unwrap();
    let (mut batch, _) = generate(&schema, 3, 0);
    batch.features[0].ids = vec![2, 3, 99];
    batch.features[1].ids = vec![0, 0, 0];
    for feature in &mut batch.features[2..4] {
        *feature = crate::types::Jagged { offsets: vec![0, 0, 0, 0], ids: vec![] };
    }
    for engine in engines(models.path(), "wide") {
        let absent = engine.predict(&batch).unwrap().absent;
        assert_eq!(absent, [1, 2].map(|sample| AbsentId { sample, feature: 0 }));
        let (mut short, _) = generate(&schema, 3, 0);
        short.features.truncate(1);
        assert!(matches!(engine.predict(&short), Err(PredictError::Shape { .. })));
        let (many, _) = generate(&schema, 2049, 0);
        assert!(matches!(engine.predict(&many), Err(PredictError::Capacity { .. })));
    }
}
