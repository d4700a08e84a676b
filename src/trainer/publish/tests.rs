//! Versions published while training goes on equal those of a trainer that stops to write them.

mod faults;
mod limits;
mod runs;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::cut::CutStart;
use super::*;
use crate::cache::{self, AdmissionOption, CacheOptions, CacheShape, FlatCache};
use crate::engine::switch::{Changes, NextVersion};
use crate::engine::{Engine, EngineParts, LookupTier};
use crate::metrics::Metrics;
use crate::predict::Predict;
use crate::schema::{self, Schema};
use crate::store::disk::SystemDisk;
use crate::store::tests::entries;
use crate::store::tests::footprint::{measured_alone, memory};
use crate::store::{self, Opened, Purpose};
use crate::trainer::casting::Casting;
use crate::trainer::optim::OptimizerKind;
use crate::trainer::tests::samples::{ARCHITECTURES, generate, schema};
use crate::trainer::tests::{KINDS, bits, optimizer};
use crate::trainer::train_state::Labelled;
use crate::trainer::{ReferenceTrainer, initialise, resume};
use crate::types::Element;

const STEPS: u64 = 24;
const COMPACT_AT: f64 = 1.5;

/// What was published, and why other versions were not.
type Log = Arc<Mutex<Vec<Result<Published, String>>>>;

struct Run {
    reference: ReferenceTrainer,
    publisher: Publisher,
    log: Log,
    /// The numbers of the trainer after each step.
    after: Vec<Vec<u32>>,
}

impl Run {
    fn new(models: &Path, schema: &Schema, kind: OptimizerKind, every: u64) -> Self {
        Self::on(models, initialise(schema, optimizer(kind), 3).unwrap(), every, None)
    }

    fn on(models: &Path, reference: ReferenceTrainer, every: u64, base: Option<Base>) -> Self {
        Self::with(reference, base, options(models, Every::Steps(every)))
    }

    fn with(reference: ReferenceTrainer, base: Option<Base>, options: PublishOptions) -> Self {
        let log = Log::default();
        let (seen, after) = (log.clone(), vec![bits(&reference)]);
        let on_publish = Box::new(move |outcome| seen.lock().unwrap().push(outcome));
        let mut publisher = Publisher::new(options, &reference.state, base, on_publish).unwrap();
        // Most rows are copied by a step that updates them.
        publisher.copy_pace = CopyPace { per_update: 0, least: 1 };
        Self { reference, publisher, log, after }
    }

    fn step(&mut self, seed: u64) {
        self.step_with(seed, notes);
    }

    fn step_with(&mut self, seed: u64, notes: impl FnOnce(&TrainState) -> Result<CutNotes, String>) {
        let (batch, labels) = generate(&self.reference.state.schema.clone(), 5, seed);
        let mut casting = Casting::default();
        let lookups = self.reference.state.lookups.clone();
        casting.fill(&self.reference.state.schema.clone(), &lookups, &batch).unwrap();
        let labelled = Labelled { batch: &batch, labels: &labels };
        self.reference.step_casted(labelled, &casting, &mut Vec::new(), self.publisher.kept());
        let ReferenceTrainer { state, tables, .. } = &self.reference;
        self.publisher.after_step(state, tables, || notes(state)).unwrap();
        self.after.push(bits(&self.reference));
    }

    /// Takes a step, and waits until the version that is due is written.
    fn publish_step(&mut self, seed: u64) {
        self.step(seed);
        self.settle();
        while self.publisher.writer.in_flight {
            self.publisher.collect(SLOW_WRITE);
        }
    }

    fn settle(&mut self) {
        let ReferenceTrainer { state, tables, .. } = &self.reference;
        self.publisher.settle(state, tables, || notes(state)).unwrap();
    }

    fn finish(&mut self) -> Base {
        self.try_finish().unwrap()
    }

    fn try_finish(&mut self) -> Result<Base, TrainError> {
        let ReferenceTrainer { state, tables, .. } = &self.reference;
        self.publisher.finish(state, tables, &notes(state).unwrap())
    }

    /// Asserts that every version has the numbers after its steps. Returns how many were full.
    fn assert_published(&self, models: &Path) -> usize {
        let log = self.log.lock().unwrap();
        let published: Vec<&Published> = log.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
        for one in &published {
            let opened = store::open(models, "m", one.version, Purpose::Train).unwrap();
            assert_eq!(opened.training.unwrap().steps, one.steps);
            assert_has_its_cursor(&opened);
            let resumed = resume(opened, self.reference.state.optimizer).unwrap();
            let first = self.reference.steps() + 1 - self.after.len() as u64;
            assert!(bits(&resumed) == self.after[(one.steps - first) as usize], "{one:?}");
            let all: u64 = self.reference.state.schema.tables.iter().map(|table| table.stored_rows()).sum();
            assert!(if one.full { one.rows == all } else { one.rows <= all }, "{one:?}, {all} rows");
        }
        published.iter().filter(|one| one.full).count()
    }
}

fn options(models: &Path, every: Every) -> PublishOptions {
    let (models, name, disk) = (models.to_owned(), "m".to_owned(), Arc::new(SystemDisk));
    PublishOptions { models, name, disk, every, keep: 100, compact_at: COMPACT_AT }
}

/// Notes with a cursor that no other step has.
fn notes(state: &TrainState) -> Result<CutNotes, String> {
    Ok(CutNotes { cursor: Some(cursor_after(state.steps)), ..CutNotes::default() })
}

fn cursor_after(steps: u64) -> String {
    format!("after step {steps}")
}

/// Asserts that a version has the cursor of its step.
fn assert_has_its_cursor(opened: &Opened) {
    assert_eq!(opened.cursor, Some(cursor_after(opened.training.unwrap().steps)));
}

#[test]
fn every_published_version_is_the_trainer_after_its_step() {
    for (n, kind) in KINDS.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let mut schema = schema(ARCHITECTURES[n]);
        schema.tables[1].element = [Element::F16, Element::Int8][n % 2];
        let mut run = Run::new(dir.path(), &schema, kind, 3);
        run.publisher.copy_pace.per_update = n % 2;
        (0..STEPS).for_each(|seed| run.step(seed));
        assert_eq!(run.finish().version, Version(run.log.lock().unwrap().len() as u64));
        let full = run.assert_published(dir.path());
        let published = run.log.lock().unwrap().len();
        assert!(published >= 3 && full >= 1 && full < published, "{full} full of {published}");
        // Nothing has changed since.
        let last = run.finish();
        assert_eq!(Version(run.log.lock().unwrap().len() as u64), last.version);
        // Training goes on from the last version.
        let opened = store::open(dir.path(), "m", last.version, Purpose::Train).unwrap();
        let reference = resume(opened, optimizer(kind)).unwrap();
        let mut next = Run::on(dir.path(), reference, 2, Some(last));
        (0..5).for_each(|seed| next.step(seed));
        next.finish();
        next.assert_published(dir.path());
    }
}

#[test]
fn rows_that_no_step_updates_again_are_copied_by_the_next_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), OptimizerKind::Adagrad, 1000);
    run.step(1);
    run.finish();
    run.step(2);
    let Run { reference: ReferenceTrainer { state, tables, .. }, publisher, .. } = &mut run;
    publisher.begin_cut(state, tables, CutStart::now(notes(state).unwrap())).unwrap();
    let image = &publisher.cut.as_ref().unwrap().image;
    let most = (0..image.tables()).map(|t| image.all_rows(t).count()).max().unwrap();
    run.step(3);
    assert!(run.publisher.cut.is_some(), "some rows wait");
    // Each step copies a row of each table.
    (1..most).for_each(|_| run.step(3));
    assert!(run.publisher.cut.is_none());
    run.finish();
    run.assert_published(dir.path());
}

#[test]
fn a_run_removes_old_versions_only_when_it_has_published_one() {
    let dir = tempfile::tempdir().unwrap();
    let schema = schema(ARCHITECTURES[0]);
    for seed in 1..=4 {
        initialise(&schema, optimizer(OptimizerKind::Sgd), seed).unwrap().save(dir.path(), "m").unwrap();
    }
    let versions = || store::versions(dir.path(), "m").unwrap();
    let reference = initialise(&schema, optimizer(OptimizerKind::Sgd), 3).unwrap();
    let with_keep = |every| PublishOptions { keep: 2, ..options(dir.path(), Every::Steps(every)) };
    let mut run = Run::with(reference, None, with_keep(2));
    run.publish_step(1);
    // The thread that writes has ended, so whatever it does at its start is done.
    drop(run);
    assert_eq!(versions(), [1, 2, 3, 4].map(Version));
    let reference = initialise(&schema, optimizer(OptimizerKind::Sgd), 3).unwrap();
    Run::with(reference, None, with_keep(1)).publish_step(1);
    assert_eq!(versions(), [4, 5].map(Version));
}

#[test]
fn a_version_that_cannot_be_written_does_not_end_training_and_the_next_one_has_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let models = dir.path().join("models");
    let mut run = Run::new(&models, &schema(ARCHITECTURES[0]), OptimizerKind::Adagrad, 2);
    fs::write(&models, "a file in the place of the directory").unwrap();
    (0..6).for_each(|seed| run.step(seed));
    assert!(run.log.lock().unwrap().iter().all(|outcome| outcome.is_err()));
    fs::remove_file(&models).unwrap();
    (6..12).for_each(|seed| run.step(seed));
    // Now a delta fails: the base is moved away.
    fs::rename(models.join("m"), dir.path().join("aside")).unwrap();
    fs::write(models.join("m"), "").unwrap();
    (12..18).for_each(|seed| run.step(seed));
    run.publisher.collect(SLOW_WRITE);
    assert!(run.log.lock().unwrap().iter().filter(|outcome| outcome.is_err()).count() > 3);
    fs::remove_file(models.join("m")).unwrap();
    fs::rename(dir.path().join("aside"), models.join("m")).unwrap();
    (18..22).for_each(|seed| run.step(seed));
    run.finish();
    run.assert_published(&models);
}

#[test]
fn after_another_writer_the_next_version_has_all_rows() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), OptimizerKind::Adam, 100);
    run.step(1);
    run.finish();
    let other = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adam), 8).unwrap();
    assert_eq!(other.save(dir.path(), "m").unwrap(), Version(2));
    run.step(2);
    assert_eq!(run.finish().version, Version(3));
    let log = run.log.lock().unwrap().clone();
    assert!(log[1].as_ref().unwrap_err().contains("made from version 1, but the highest version is 2"));
    assert!(log[2].as_ref().unwrap().full);
    run.assert_published(dir.path());
}

#[test]
fn a_chain_with_a_row_that_is_not_finite_is_not_merged_into_a_full_version_and_the_rows_stay_changed() {
    let dir = tempfile::tempdir().unwrap();
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let options = PublishOptions { compact_at: 0.0, ..options(dir.path(), Every::Steps(u64::MAX)) };
    let mut run = Run::with(reference, None, options);
    run.step(1);
    run.finish();
    run.step(2);
    let changed = |run: &Run| -> Vec<Vec<u64>> {
        run.publisher.changed.marked.iter().map(|table| table.iter().collect()).collect()
    };
    let before = changed(&run);
    let poison = |run: &mut Run, value: f32| {
        let row = run.reference.tables[0].row_mut(before[0][0]).unwrap();
        std::mem::replace(&mut row[0], value)
    };
    let value = poison(&mut run, f32::NAN);
    let Run { reference, publisher, .. } = &mut run;
    let ReferenceTrainer { state, tables, .. } = &*reference;
    publisher.begin_cut(state, tables, CutStart::now(notes(state).unwrap())).unwrap();
    publisher.settle(state, tables, || notes(state)).unwrap();
    let refused = std::iter::repeat_with(|| {
        std::thread::sleep(Duration::from_millis(1));
        publisher.poll().err()
    });
    let refused = refused.take(60_000).find_map(|refused| refused);
    let name = &reference.state.schema.tables[0].name;
    assert!(
        matches!(&refused, Some(TrainError::NotFinite { what, .. }) if what.contains(name)),
        "{refused:?}"
    );
    assert_eq!(entries(dir.path()), 1, "nothing was written");
    assert_eq!(changed(&run), before);
    poison(&mut run, value);
    assert_eq!(run.finish().version, Version(2));
    assert_eq!(run.assert_published(dir.path()), 2);
}

const CHILD: &str = "FLECHETTE_TEST_PUBLISH_MEMORY";

/// Open files and mappings of this process.
fn files_and_mappings() -> [usize; 2] {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    [fs::read_dir("/proc/self/fd").unwrap().count(), maps.lines().count()]
}

/// An engine of a version, with a cache on the host of half the rows.
fn engine(opened: Opened) -> Engine {
    let table = |t: &schema::TableSchema| cache::TableShape { rows: t.rows, row_bytes: t.row_bytes() };
    let shape = CacheShape::from_fraction(0.5, opened.schema.tables.iter().map(table).collect());
    let version = opened.store.version();
    let options = CacheOptions { admission: AdmissionOption::ALL, version, ..CacheOptions::default() };
    let parts = EngineParts {
        name: "m".to_owned(),
        lookup_tier: LookupTier::Host(FlatCache::new(&shape, &options).unwrap()),
        metrics: Metrics::new().unwrap().model("m", &opened.schema),
        threads: Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap()),
        max_samples: 64,
    };
    Engine::new(opened, parts).unwrap()
}

/// Lets an engine take over the version after its own, as a server does.
fn take_over(engine: &Engine, models: &Path, version: Version) {
    let served = engine.served();
    let opened = store::open_beside(models, "m", version, &[&served.store]).unwrap();
    let changes = opened.store.changed_since(&served.store).map_or(Changes::Unknown, Changes::Rows);
    // The switch waits until the old version is released.
    drop(served);
    let version = engine.accept(opened).unwrap();
    engine.switch(NextVersion { version, changes, switch_bytes: u64::MAX, old_stays: false }).unwrap();
}

/// Does nothing as a test. The next test runs it in a child process, because it measures its process.
#[test]
fn child_that_publishes_and_serves_500_versions() {
    let Some(models) = std::env::var_os(CHILD) else { return };
    let models = Path::new(&models);
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let options = PublishOptions { keep: 1, compact_at: 1e9, ..options(models, Every::Steps(u64::MAX)) };
    let mut run = Run::with(reference, None, options);
    let mut served: Option<Engine> = None;
    let (mut warm, mut most) = ([0; 3], [0; 3]);
    for step in 1..=500 {
        run.step(step);
        run.after.clear();
        run.log.lock().unwrap().clear();
        let version = run.finish().version;
        match &served {
            None => served = Some(engine(store::open(models, "m", version, Purpose::Serve).unwrap())),
            Some(engine) => take_over(engine, models, version),
        }
        let engine = served.as_ref().unwrap();
        assert_eq!(engine.predict(&engine.generate_batch(step)).unwrap().version, version);
        let [files, mappings] = files_and_mappings();
        let now = [files, mappings, memory("RssAnon") as usize];
        // A chain has at most 100 deltas, so the first 250 versions have the longest one.
        let of = if step <= 250 { &mut warm } else { &mut most };
        of.iter_mut().zip(now).for_each(|(of, now)| *of = now.max(*of));
    }
    let versions = store::versions(models, "m").unwrap();
    assert!(versions.len() <= 202, "{} versions stay on disk", versions.len());
    let slack = [8, 64, 8 << 20];
    let grown = (0..3).any(|at| most[at] > warm[at] + slack[at]);
    assert!(!grown, "files, mappings, bytes: {warm:?} in the first half, {most:?} in the second");
    println!("measured");
}

#[test]
fn memory_open_files_and_versions_on_disk_stay_bounded_over_500_versions() {
    let dir = tempfile::tempdir().unwrap();
    let child = "trainer::publish::tests::child_that_publishes_and_serves_500_versions";
    measured_alone(child, CHILD, dir.path());
}

#[test]
fn a_version_is_cut_before_its_time_when_the_changed_rows_take_their_share_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), OptimizerKind::Adagrad, 1000);
    run.publisher.copy_pace.least = usize::MAX;
    run.step(STEPS);
    // No step changes so many rows that they would not be copied.
    run.publisher.changed.early_cut_bytes = run.publisher.changed.marked_bytes();
    run.finish();
    (0..STEPS).for_each(|seed| run.step(seed));
    // Train has waited for each version before the next one was due.
    let published = run.log.lock().unwrap().len();
    assert!(published >= 3, "{published}");
    run.finish();
    run.assert_published(dir.path());
}
