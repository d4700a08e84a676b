//! What a run does when its versions are refused for long, or its disk, its writer or its directory is gone:
//! memory and waiting are bounded, and no row is lost.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use super::runs::{OnDisk, Slow, expected};
use super::*;
use crate::dataset::Shortage;
use crate::store::stuck::StuckDisk;
use crate::trainer::pipeline::policy::ScratchpadPolicy;
use crate::trainer::pipeline::tests::Case;
use crate::trainer::{ScratchpadSize, TrainState};
use crate::types::TableId;

/// A run with a scratchpad that may copy few rows, and what it should train.
fn small_on_disk(disk: &Arc<StuckDisk>) -> (Case, Vec<Vec<u32>>, OnDisk) {
    let case = Case { samples: 64 * 16, ..Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru) };
    let expected = expected(&case);
    let mut run = OnDisk::with(case.begin(None), 8, disk.clone());
    run.publisher.changed.early_cut_bytes = 2000;
    (run.publisher.slow_write, run.publisher.due.retry_after) = (Duration::from_millis(1), Duration::ZERO);
    (case, expected, run)
}

/// Asserts that the last version is the trainer after the last step, and that it has all rows.
fn assert_ends_with_all_rows(run: &OnDisk, case: &Case, expected: &[Vec<u32>]) {
    let published = run.published();
    let last = published.last().unwrap();
    assert_eq!((last.steps, last.full), (64, true), "{published:?}");
    assert!(bits(&run.resumed(last.version, case)) == expected[64]);
}

#[test]
fn a_gate_that_keeps_refusing_ends_the_capture_and_the_next_version_has_all_rows() {
    let (case, expected, mut run) = small_on_disk(&Arc::default());
    let gate = |state: &TrainState| if state.steps == 8 { notes(state) } else { Err("refused".to_owned()) };
    run.train_only(&case, &mut Slow(Duration::ZERO, gate));
    assert_eq!(run.published().len(), 1);
    assert!(!run.captured && run.publisher.changed.spare.is_none(), "captured rows are released");
    run.finish();
    assert_ends_with_all_rows(&run, &case, &expected);
}

#[test]
fn a_disk_that_does_not_answer_ends_the_capture_and_no_row_is_lost() {
    let disk = Arc::<StuckDisk>::default();
    let (case, expected, mut run) = small_on_disk(&disk);
    let mut cuts = 0;
    let stuck = |state: &TrainState| {
        cuts += 1;
        disk.set_stuck(cuts > 1);
        notes(state)
    };
    run.train_only(&case, &mut Slow(Duration::ZERO, stuck));
    assert!(!run.captured && run.publisher.writer.in_flight);
    disk.set_stuck(false);
    run.finish();
    assert_ends_with_all_rows(&run, &case, &expected);
}

#[test]
fn after_a_long_refusal_the_next_version_has_all_rows_and_none_are_copied() {
    let dir = tempfile::tempdir().unwrap();
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let options = PublishOptions { compact_at: 1e9, ..options(dir.path(), Every::Steps(1)) };
    let mut run = Run::with(reference, None, options);
    run.publisher.changed.early_cut_bytes = 200;
    run.finish();
    (0..STEPS).for_each(|seed| run.step_with(seed, |_| Err("refused".to_owned())));
    assert!(run.publisher.changed.marked_bytes() > run.publisher.changed.copied_bytes_max());
    run.step(STEPS);
    assert!(run.publisher.cut.is_none() && !run.publisher.writer.in_flight);
    let last = run.log.lock().unwrap().last().cloned().unwrap().unwrap();
    assert_eq!((last.version, last.full, last.steps), (Version(2), true, STEPS + 1));
    run.assert_published(dir.path());
}

#[test]
fn a_gate_that_refuses_an_early_version_is_not_asked_again_before_the_next_one_is_due() {
    let refused_with_a_limit_of = |bytes: usize| {
        let dir = tempfile::tempdir().unwrap();
        let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
        let mut run = Run::with(reference, None, options(dir.path(), Every::Steps(1000)));
        run.publisher.due.retry_after = Duration::ZERO;
        run.finish();
        run.publisher.changed.early_cut_bytes = bytes;
        let mut asked = 0;
        for seed in 0..20 {
            run.step_with(seed, |_| {
                asked += 1;
                Err("refused".to_owned())
            });
        }
        (asked, run.publisher.changed.marked_bytes())
    };
    let (asked, marked) = refused_with_a_limit_of(1 << 40);
    assert_eq!(asked, 0);
    // The rows of several steps take more than this limit, and none take twice as much, after which versions
    // do not come early.
    assert_eq!(refused_with_a_limit_of(marked / 2 + 1), (1, marked));
}

#[test]
fn no_row_of_a_scratchpad_is_written_for_a_version_that_is_refused() {
    // With room for all rows, none is evicted.
    let case = Case { samples: 64 * 16, ..Case::new(ScratchpadSize::Fraction(1.0), ScratchpadPolicy::Lru) };
    let mut run = OnDisk::with(case.begin(None), 8, Arc::new(SystemDisk));
    let before = working_file(&run);
    let mut asked = 0;
    let refuses = |_: &TrainState| {
        asked += 1;
        Err("refused".to_owned())
    };
    run.train_only(&case, &mut Slow(Duration::ZERO, refuses));
    assert_eq!(asked, 8);
    assert!(working_file(&run) == before);
    run.finish();
    assert!(working_file(&run) != before);
}

/// The bits of all rows of the working file.
fn working_file(run: &OnDisk) -> Vec<u32> {
    let file = run.pipeline.store();
    let rows_of = |t: usize| {
        let table = &file.tables()[t];
        let rows: Vec<u64> = (0..table.rows()).collect();
        let mut records = vec![0.0; rows.len() * table.width()];
        file.read(TableId(t as u32), &rows, &mut records).unwrap();
        records
    };
    (0..file.tables().len()).flat_map(rows_of).map(f32::to_bits).collect()
}

#[test]
fn a_last_version_that_was_removed_is_written_again_at_the_end() {
    for lost in ["m", "m/1"] {
        let dir = tempfile::tempdir().unwrap();
        let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
        let options = PublishOptions { compact_at: 1e9, ..options(dir.path(), Every::Steps(1)) };
        let mut run = Run::with(reference, None, options);
        (0..3).for_each(|seed| run.step(seed));
        let before = run.finish();
        assert_eq!(run.finish(), before, "nothing is written twice");
        std::fs::remove_dir_all(dir.path().join(lost)).unwrap();
        let last = run.finish();
        assert!(last.version > before.version);
        let opened = store::open(dir.path(), "m", last.version, Purpose::Train).unwrap();
        assert!(opened.store.is_full(), "{lost}");
        let resumed = resume(opened, run.reference.state.optimizer).unwrap();
        assert!(bits(&resumed) == bits(&run.reference), "{lost}");
    }
}

/// Damages the first version of a chain of three while a run goes on.
fn damaged(damage: fn(&Path)) -> (tempfile::TempDir, Run, Base) {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), OptimizerKind::Adagrad, 1);
    run.publisher.due.retry_after = Duration::from_millis(1);
    (0..3).for_each(|seed| run.publish_step(seed));
    let before = run.finish();
    damage(&dir.path().join("m/1"));
    (3..40).for_each(|seed| run.publish_step(seed));
    (dir, run, before)
}

#[test]
fn no_delta_follows_a_chain_of_which_a_version_was_removed() {
    let (dir, mut run, before) = damaged(|version| fs::remove_dir_all(version).unwrap());
    run.finish();
    let log = run.log.lock().unwrap();
    let published: Vec<&Published> = log.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
    let later = published.iter().filter(|one| one.version > before.version);
    assert!(later.clone().any(|one| one.full) && later.clone().any(|one| !one.full), "{published:?}");
    for one in later {
        let opened = store::open(dir.path(), "m", one.version, Purpose::Train).unwrap();
        let resumed = resume(opened, run.reference.state.optimizer).unwrap();
        assert!(bits(&resumed) == run.after[one.steps as usize], "{one:?}");
    }
}

#[test]
fn no_delta_is_published_on_a_version_that_was_replaced_under_its_number() {
    let (dir, mut run, before) = damaged(|first| {
        let last = first.with_file_name("3");
        fs::remove_dir_all(&last).unwrap();
        assert!(std::process::Command::new("cp").arg("-r").args([first, &last]).status().unwrap().success());
    });
    assert_eq!(before.version, Version(3));
    run.finish();
    let log = run.log.lock().unwrap();
    let published: Vec<&Published> = log.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
    let later = published.iter().filter(|one| one.version > before.version);
    assert!(later.clone().count() > 10, "{published:?}");
    for one in later {
        let opened = store::open(dir.path(), "m", one.version, Purpose::Train).unwrap();
        let resumed = resume(opened, run.reference.state.optimizer).unwrap();
        assert!(bits(&resumed) == run.after[one.steps as usize], "{one:?}");
    }
}

#[test]
fn a_damaged_version_that_a_full_one_would_build_on_costs_no_later_version() {
    let (dir, mut run, _) = damaged(|version| {
        for file in fs::read_dir(version.join("tables")).unwrap() {
            File::options().write(true).open(file.unwrap().path()).unwrap().set_len(100).unwrap();
        }
    });
    let log = run.log.lock().unwrap().clone();
    assert!(log.iter().any(Result::is_err), "no full version was due: {log:?}");
    let last = run.finish();
    let opened = store::open(dir.path(), "m", last.version, Purpose::Train).unwrap();
    let resumed = resume(opened, run.reference.state.optimizer).unwrap();
    assert!(bits(&resumed) == bits(&run.reference));
}

#[test]
fn after_the_writing_thread_has_ended_another_one_writes_deltas_and_no_row_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let options = PublishOptions { compact_at: 1e9, ..options(dir.path(), Every::Steps(2)) };
    let mut run = Run::with(reference, None, options);
    let panics = Arc::new(AtomicBool::new(true));
    let poisoned = |state: &TrainState| {
        let panics = panics.clone();
        let quality = move || {
            // The thread `publish-0` of its pool.
            let on_writer = std::thread::current().name().is_some_and(|name| name.starts_with("publish"));
            assert!(!(on_writer && panics.swap(false, Ordering::SeqCst)), "the first delta's figures");
            BTreeMap::new()
        };
        Ok(CutNotes { quality: Arc::new(quality), ..notes(state)? })
    };
    for seed in 0..8 {
        run.step_with(seed, poisoned);
        let ReferenceTrainer { state, tables, .. } = &run.reference;
        run.publisher.settle(state, tables, || poisoned(state)).unwrap();
        run.publisher.collect(SLOW_WRITE);
    }
    let kinds = |log: &Log| -> Vec<Result<bool, ()>> {
        log.lock().unwrap().iter().map(|one| one.as_ref().map(|one| one.full).map_err(drop)).collect()
    };
    // A full version, the delta that failed, all rows again, and then a delta.
    assert_eq!(kinds(&run.log), [Ok(true), Err(()), Ok(true), Ok(false)]);
    run.step(8);
    run.finish();
    run.assert_published(dir.path());
}

#[test]
fn a_run_whose_disk_does_not_answer_ends_with_an_error_that_says_where_resume_continues() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::<StuckDisk>::default();
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let options = PublishOptions { disk: disk.clone(), ..options(dir.path(), Every::Steps(u64::MAX)) };
    let mut run = Run::with(reference, None, options);
    run.step(1);
    run.finish();
    run.publisher.writer.patience = Duration::from_millis(100);
    disk.set_stuck(true);
    run.step(2);
    let error = run.try_finish().unwrap_err().to_string();
    assert!(error.starts_with(dir.path().join("m").to_str().unwrap()), "{error}");
    let rest = "what was trained after step 1 is not published, and --resume continues from version 1";
    assert!(error.ends_with(rest), "{error}");
    // A disk that answers again is waited for as long as before.
    disk.set_stuck(false);
    let tries = (0..600).find_map(|_| run.try_finish().ok());
    assert_eq!(tries.map(|base| base.version), Some(Version(2)));
    disk.set_stuck(true);
    run.step(3);
    run.try_finish().unwrap_err();
    // It does not wait for the thread, which ends when the disk answers.
    drop(run);
    disk.set_stuck(false);
}

#[test]
fn a_model_whose_directory_disappears_gets_no_number_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), OptimizerKind::Adagrad, 100);
    for seed in 0..3 {
        run.step(seed);
        run.finish();
    }
    fs::remove_dir_all(dir.path().join("m")).unwrap();
    run.step(3);
    assert_eq!(run.finish().version, Version(4));
    let log = run.log.lock().unwrap().clone();
    let refused = log[3].as_ref().unwrap_err();
    let gone = dir.path().join("m/3");
    assert!(refused.ends_with(&format!("its base, version 3: {}: no such directory", gone.display())));
    assert!(log[4].as_ref().unwrap().full);
    // A publisher without a base knows the numbers from its start.
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let mut next = Run::on(dir.path(), reference, 100, None);
    fs::remove_dir_all(dir.path().join("m")).unwrap();
    next.step(1);
    assert_eq!(next.finish().version, Version(5));
}

#[test]
fn a_reader_that_waits_at_a_full_log_gets_a_version_before_its_step_or_the_reason_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), KINDS[1], 1000);
    let shortage = Shortage::default();
    run.publisher.full_log.shortage = shortage.clone();
    (0..3).for_each(|seed| run.step(seed));
    assert!(run.log.lock().unwrap().is_empty());
    shortage.set(Some(77));
    run.step_with(3, |_| Err("refused".to_owned()));
    let refused = run.log.lock().unwrap().pop().unwrap().unwrap_err();
    assert!(refused.starts_with("refused. The log of learned samples is full (learn.max_bytes, 77 bytes)"));
    // It is reported once for these steps, and again after a while.
    run.settle();
    assert!(run.log.lock().unwrap().is_empty());
    run.publisher.full_log.told = None;
    run.settle();
    run.settle();
    run.assert_published(dir.path());
    let log = run.log.lock().unwrap();
    assert!(matches!(&log[..], [Ok(published)] if published.steps == 4), "{log:?}");
}

#[test]
fn a_cut_without_memory_costs_a_version_but_neither_the_run_nor_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(dir.path(), &schema(ARCHITECTURES[0]), OptimizerKind::Adagrad, 1);
    run.publisher.due.retry_after = Duration::from_millis(1);
    (0..3).for_each(|seed| run.publish_step(seed));
    // There is no memory for an image of tables of this size, which is more than a process can address.
    let (tables, published) = (run.publisher.changed.rows.len(), run.log.lock().unwrap().len());
    let rows = std::mem::replace(&mut run.publisher.changed.rows, vec![1 << 52; tables]);
    run.publisher.changed.spare = None;
    (3..6).for_each(|seed| run.publish_step(seed));
    assert!(matches!(run.try_finish(), Err(TrainError::Memory(_))));
    let failed = run.log.lock().unwrap()[published..].iter().filter(|outcome| outcome.is_err()).count();
    assert_eq!((failed, run.log.lock().unwrap().len()), (3, published + 3));
    run.publisher.changed.rows = rows;
    (6..9).for_each(|seed| run.publish_step(seed));
    run.finish();
    run.assert_published(dir.path());
    assert_eq!(run.log.lock().unwrap().last().unwrap().as_ref().unwrap().steps, 9);
}
