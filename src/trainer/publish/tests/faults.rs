//! Runs whose disk fails at any call while versions are written.

use std::io;

use super::segments::{OnDisk, Slow, expected};
use super::*;
use crate::store::crash::{Fault, RecordingDisk, dir_in_memory};
use crate::trainer::pipeline::policy::Policy;
use crate::trainer::pipeline::tests::Case;
use crate::trainer::{ScratchpadSize, TrainState};

const EVERY: u64 = 2;

/// Trains some steps with this fault, and writes the last version. Asserts that training never ends, and
/// that every version on disk is the trainer after its step. If each version is awaited before the next is
/// due, every run makes the same calls. Returns the number of calls.
fn train(fault: Option<Fault>, awaited: bool) -> usize {
    let dir = dir_in_memory();
    let disk = Arc::new(RecordingDisk { fault, ..RecordingDisk::default() });
    let options = PublishOptions { disk: disk.clone(), ..options(dir.path(), Every::Steps(EVERY)) };
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(Kind::Adagrad), 3).unwrap();
    let mut run = Run::with(reference, None, options);
    run.publisher.retry_after = Duration::from_millis(1);
    for seed in 0..4 * EVERY {
        run.step(seed);
        if awaited {
            run.publisher.settle(&run.reference.state, &run.reference.tables, notes).unwrap();
        }
        while awaited && run.publisher.in_flight {
            run.publisher.collect(SLOW_WRITE);
        }
    }
    // If the disk is still full at the end, the run fails, and only what was not published is lost.
    let state = &run.reference.state;
    let last = run.publisher.finish(state, &run.reference.tables, &notes().unwrap());
    let last = last.unwrap_or_else(|_| run.finish());
    let steps_of = |version: Version| {
        let opened = store::open(dir.path(), "m", version, Purpose::Train).unwrap();
        let steps = opened.training.unwrap().steps;
        let resumed = resume(opened, optimizer(Kind::Adagrad)).unwrap();
        assert!(bits(&resumed) == run.after[steps as usize], "{fault:?}: version {version}");
        steps
    };
    let steps: Vec<u64> = store::versions(dir.path(), "m").unwrap().into_iter().map(steps_of).collect();
    assert!(steps.is_sorted() && steps.last() == Some(&(4 * EVERY)), "{fault:?}: {steps:?}");
    assert_eq!(steps_of(Version(last.version)), 4 * EVERY);
    let log = run.log.lock().unwrap();
    let reported = log.iter().filter_map(|outcome| outcome.as_ref().ok());
    assert!(reported.clone().all(|one| steps.contains(&one.steps)), "{fault:?}: {log:?}, found {steps:?}");
    disk.ops.lock().unwrap().len()
}

/// Each single call that fails, and one that takes effect although it reports a failure.
fn single_faults(calls: usize) -> impl Iterator<Item = Option<Fault>> {
    let fault = move |at| [false, true].map(|done| Fault { at, calls: 1, done, kind: io::ErrorKind::Other });
    (0..calls).flat_map(fault).map(Some)
}

#[test]
fn whichever_call_fails_training_goes_on_and_no_row_is_lost() {
    let calls = train(None, true);
    assert!(calls > 60, "{calls}");
    for fault in single_faults(calls) {
        train(fault, true);
    }
}

#[test]
fn whichever_call_fails_while_steps_are_taken_no_row_is_lost() {
    let calls = train(None, true);
    for fault in single_faults(calls) {
        train(fault, false);
    }
}

/// As [`train`], with a scratchpad, while versions are written.
fn train_on_disk(case: &Case, expected: &[Vec<u32>], fault: Option<Fault>) -> usize {
    let disk = Arc::new(RecordingDisk { fault, ..RecordingDisk::default() });
    let mut run = OnDisk::with(case.begin(None), 4, disk.clone());
    run.publisher.retry_after = Duration::from_millis(1);
    run.train_only(case, &mut Slow(Duration::from_millis(1), |_: &TrainState| notes()));
    let last = run.finish();
    let steps_of = |version: Version| {
        let resumed = run.resumed(version.0, case);
        assert!(bits(&resumed) == expected[resumed.steps() as usize], "{fault:?}: version {version}");
        resumed.steps()
    };
    let versions = store::versions(run.models.path(), "m").unwrap();
    let steps: Vec<u64> = versions.into_iter().map(steps_of).collect();
    assert!(steps.is_sorted() && steps.last() == Some(&(expected.len() as u64 - 1)), "{fault:?}: {steps:?}");
    assert_eq!(Some(&steps_of(Version(last.version))), steps.last());
    disk.ops.lock().unwrap().len()
}

#[test]
fn whichever_call_fails_in_training_with_a_scratchpad_no_row_is_lost() {
    let case = Case { samples: 20 * 16, ..Case::new(ScratchpadSize::Fraction(0.3), Policy::Lru) };
    let expected = expected(&case);
    let calls = train_on_disk(&case, &expected, None);
    assert!(calls > 40, "{calls}");
    for fault in single_faults(calls) {
        train_on_disk(&case, &expected, fault);
    }
}

#[test]
fn a_disk_that_is_full_for_a_while_costs_versions_but_no_row() {
    let calls = train(None, true);
    for at in (0..calls).step_by(7) {
        for full in [2, 5] {
            train(Some(Fault { at, calls: full, done: false, kind: io::ErrorKind::StorageFull }), true);
        }
    }
}

#[test]
fn a_version_that_could_not_be_written_is_tried_again_without_a_step() {
    let wait = Duration::from_millis(1);
    for every in [Every::Time(wait), Every::Steps(1)] {
        let first = retried(every, None);
        // Once while the first version is written, which has all rows, and once while the next one is.
        for at in [10, first + 10] {
            let fault = Fault { at, calls: 1, done: false, kind: io::ErrorKind::StorageFull };
            retried(every, Some(fault));
        }
    }
}

/// Takes two steps, and publishes each before the next one, without another step. Returns the calls of the
/// first version.
fn retried(every: Every, fault: Option<Fault>) -> usize {
    let dir = dir_in_memory();
    let disk = Arc::new(RecordingDisk { fault, ..RecordingDisk::default() });
    let options = PublishOptions { disk: disk.clone(), ..options(dir.path(), every) };
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(Kind::Adagrad), 3).unwrap();
    let mut run = Run::with(reference, None, options);
    run.publisher.retry_owed = Duration::from_millis(1);
    let mut calls = 0;
    for step in 1..=2 {
        run.step(step);
        while run.publisher.waits(run.reference.state.steps) {
            run.publisher.collect(Duration::from_millis(2));
            run.publisher.settle(&run.reference.state, &run.reference.tables, notes).unwrap();
        }
        let published = store::versions(dir.path(), "m").unwrap().pop();
        assert_eq!(published, Some(Version(step)), "{every:?}, {fault:?}");
        if step == 1 {
            calls = disk.ops.lock().unwrap().len();
        }
    }
    let failures = run.log.lock().unwrap().iter().filter(|outcome| outcome.is_err()).count();
    assert_eq!(failures, usize::from(fault.is_some()), "{every:?}, {fault:?}");
    run.assert_published(dir.path());
    calls
}
