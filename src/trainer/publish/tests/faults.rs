//! Runs whose disk fails at any call while versions are written.

use std::io;

use super::runs::{OnDisk, Slow, expected};
use super::*;
use crate::store::crash::{Effect, Fault, Op, RecordingDisk, dir_in_memory};
use crate::trainer::ScratchpadSize;
use crate::trainer::pipeline::policy::ScratchpadPolicy;
use crate::trainer::pipeline::tests::Case;

const EVERY: u64 = 2;

/// A delta takes about the bytes of a full version here, so every second version is full: the third one is
/// merged from the first, the second and the changed rows.
const COMPACT_AT: f64 = 0.5;

/// Trains some steps with this fault, and writes the last version. Asserts that training never ends, and
/// that every version on disk is the trainer after its step. If each version is awaited before the next is
/// due, every run makes the same calls. Returns the calls.
fn train(fault: Option<Fault>, awaited: bool) -> Vec<Op> {
    let dir = dir_in_memory();
    let disk = Arc::new(RecordingDisk { fault, ..RecordingDisk::default() });
    let options = options(dir.path(), Every::Steps(EVERY));
    let options = PublishOptions { disk: disk.clone(), compact_at: COMPACT_AT, ..options };
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let mut run = Run::with(reference, None, options);
    run.publisher.due.retry_after = Duration::from_millis(1);
    for seed in 0..4 * EVERY {
        run.step(seed);
        if awaited {
            run.settle();
        }
        while awaited && run.publisher.writer.in_flight {
            run.publisher.collect(SLOW_WRITE);
        }
    }
    // If the disk is still full at the end, the run fails, and only what was not published is lost.
    let last = run.try_finish().unwrap_or_else(|_| run.finish());
    let steps_of = |version: Version| {
        let opened = store::open(dir.path(), "m", version, Purpose::Train).unwrap();
        assert_has_its_cursor(&opened);
        let steps = opened.training.unwrap().steps;
        let resumed = resume(opened, optimizer(OptimizerKind::Adagrad)).unwrap();
        assert!(bits(&resumed) == run.after[steps as usize], "{fault:?}: version {version}");
        steps
    };
    let steps: Vec<u64> = store::versions(dir.path(), "m").unwrap().into_iter().map(steps_of).collect();
    assert!(steps.is_sorted() && steps.last() == Some(&(4 * EVERY)), "{fault:?}: {steps:?}");
    assert_eq!(steps_of(last.version), 4 * EVERY);
    let log = run.log.lock().unwrap();
    let reported = log.iter().filter_map(|outcome| outcome.as_ref().ok());
    assert!(reported.clone().all(|one| steps.contains(&one.steps)), "{fault:?}: {log:?}, found {steps:?}");
    let full: Vec<bool> = reported.map(|one| one.full).collect();
    assert!(fault.is_some() || full == [true, false, true, false], "{full:?}");
    disk.ops.lock().unwrap().clone()
}

/// Each single call that fails, a call that takes effect although it reports a failure, and a write that
/// fills the disk.
fn single_faults(calls: &[Op]) -> impl Iterator<Item = Option<Fault>> {
    let faults = |(at, op): (usize, &Op)| {
        let fault = move |effect, kind| Some(Fault { at, calls: 1, effect, kind });
        let half = Effect::Half.is_seen(op).then(|| fault(Effect::Half, io::ErrorKind::StorageFull));
        let whole = [Effect::Nothing, Effect::All].map(|effect| fault(effect, io::ErrorKind::Other));
        whole.into_iter().chain(half)
    };
    calls.iter().enumerate().flat_map(faults)
}

#[test]
fn whichever_call_fails_training_goes_on_and_no_row_is_lost() {
    let calls = train(None, true);
    assert!(calls.len() > 60, "{}", calls.len());
    for fault in single_faults(&calls) {
        train(fault, true);
    }
}

#[test]
fn whichever_call_fails_while_steps_are_taken_no_row_is_lost() {
    let calls = train(None, true);
    for fault in single_faults(&calls) {
        train(fault, false);
    }
}

/// As [`train`], with a scratchpad, while versions are written.
fn train_on_disk(case: &Case, expected: &[Vec<u32>], fault: Option<Fault>) -> Vec<Op> {
    let disk = Arc::new(RecordingDisk { fault, ..RecordingDisk::default() });
    let mut run = OnDisk::compacting(case.begin(None), (4, COMPACT_AT), disk.clone());
    run.publisher.due.retry_after = Duration::from_millis(1);
    run.train_only(case, &mut Slow(Duration::from_millis(1), notes));
    let last = run.finish();
    let steps_of = |version: Version| {
        let resumed = run.resumed(version, case);
        assert!(bits(&resumed) == expected[resumed.steps() as usize], "{fault:?}: version {version}");
        resumed.steps()
    };
    let versions = store::versions(run.models.path(), "m").unwrap();
    let steps: Vec<u64> = versions.into_iter().map(steps_of).collect();
    assert!(steps.is_sorted() && steps.last() == Some(&(expected.len() as u64 - 1)), "{fault:?}: {steps:?}");
    assert_eq!(Some(&steps_of(last.version)), steps.last());
    let full: Vec<bool> = run.published().iter().map(|one| one.full).collect();
    assert!(fault.is_some() || full.starts_with(&[true, false, true]), "{full:?}");
    disk.ops.lock().unwrap().clone()
}

#[test]
fn whichever_call_fails_in_training_with_a_scratchpad_no_row_is_lost() {
    let case = Case { samples: 20 * 16, ..Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru) };
    let expected = expected(&case);
    let calls = train_on_disk(&case, &expected, None);
    assert!(calls.len() > 40, "{}", calls.len());
    for fault in single_faults(&calls) {
        train_on_disk(&case, &expected, fault);
    }
}

#[test]
fn a_disk_that_is_full_for_a_while_costs_versions_but_no_row() {
    let calls = train(None, true);
    for at in (0..calls.len()).step_by(7) {
        for full in [2, 5] {
            let kind = io::ErrorKind::StorageFull;
            train(Some(Fault { at, calls: full, effect: Effect::Half, kind }), true);
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
            let fault = Fault { at, calls: 1, effect: Effect::Nothing, kind: io::ErrorKind::StorageFull };
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
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let mut run = Run::with(reference, None, options);
    run.publisher.due.retry_owed = Duration::from_millis(1);
    let mut calls = 0;
    for step in 1..=2 {
        run.step(step);
        while run.publisher.waits(run.reference.state.steps) {
            run.publisher.collect(Duration::from_millis(2));
            run.settle();
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

/// Publishes two full versions, the first of which is in use meanwhile, and takes a step whose version may
/// fail. Returns the calls for the two, and the versions on disk at the end.
fn with_a_version_in_use(fault: Option<Fault>) -> (usize, Vec<Version>) {
    let dir = dir_in_memory();
    let disk = Arc::new(RecordingDisk { fault, ..RecordingDisk::default() });
    let options = options(dir.path(), Every::Steps(1));
    let options = PublishOptions { disk: disk.clone(), compact_at: 0.0, keep: 1, ..options };
    let reference = initialise(&schema(ARCHITECTURES[0]), optimizer(OptimizerKind::Adagrad), 3).unwrap();
    let mut run = Run::with(reference, None, options);
    let mut publish = |seed| {
        run.step(seed);
        run.settle();
        while run.publisher.writer.in_flight {
            run.publisher.collect(SLOW_WRITE);
        }
        store::versions(dir.path(), "m").unwrap()
    };
    publish(1);
    let used = store::open(dir.path(), "m", Version(1), Purpose::Serve).unwrap();
    assert_eq!(publish(2), [1, 2].map(Version));
    drop(used);
    let calls = disk.ops.lock().unwrap().len();
    (calls, publish(3))
}

#[test]
fn a_full_disk_gets_room_from_a_version_that_was_in_use_when_the_last_one_was_published() {
    let (at, without_fault) = with_a_version_in_use(None);
    assert_eq!(without_fault, [Version(3)]);
    for (kind, left) in [(io::ErrorKind::StorageFull, vec![2]), (io::ErrorKind::Other, vec![1, 2])] {
        let fault = Fault { at, calls: 1, effect: Effect::Nothing, kind };
        let left: Vec<Version> = left.into_iter().map(Version).collect();
        assert_eq!(with_a_version_in_use(Some(fault)).1, left, "{kind}");
    }
}
