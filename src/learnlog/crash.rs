//! The log on a disk with failing calls, and on a disk that crashes (`store/crash.rs`).

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::task::Poll;
use std::thread::sleep;
use std::time::Duration;

use super::log::{Log, LogDisk};
use super::tests::{LONG, numbered, numbers, schema};
use super::*;
use crate::metrics::Metrics;
use crate::store::crash::{CrashingDisk, Effect, Fault, Op, RecordingDisk, dir_in_memory, fates};
use crate::store::disk::SystemDisk;
use crate::store::stuck::StuckDisk;

/// Small segments, so that records are in several.
const SEGMENT_BYTES: u64 = 200;

impl LogDisk for RecordingDisk {
    fn create_log(&self, path: &Path) -> io::Result<File> {
        self.step(Op::Create(path.to_owned()), || SystemDisk.create_log(path))
    }

    fn open_log(&self, path: &Path) -> io::Result<File> {
        SystemDisk.open_log(path)
    }

    fn truncate(&self, file: &File, path: &Path, bytes: u64) -> io::Result<()> {
        let op = Op::Truncate(path.to_owned(), bytes);
        self.step(op, || SystemDisk.truncate(file, path, bytes))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(Op::Remove(path.to_owned()), || SystemDisk.remove(path))
    }
}

impl LogDisk for StuckDisk {
    fn create_log(&self, path: &Path) -> io::Result<File> {
        SystemDisk.create_log(path)
    }

    fn open_log(&self, path: &Path) -> io::Result<File> {
        SystemDisk.open_log(path)
    }

    fn truncate(&self, file: &File, path: &Path, bytes: u64) -> io::Result<()> {
        SystemDisk.truncate(file, path, bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        SystemDisk.remove(path)
    }
}

/// A learner on a disk that may hang.
fn learner_on(disk: &'static StuckDisk, dir: &Path) -> Learner {
    measured_learner_on(disk, dir, &Metrics::new().unwrap())
}

fn measured_learner_on(disk: &'static StuckDisk, dir: &Path, metrics: &Metrics) -> Learner {
    let log = Log::open(disk, dir, u64::MAX).unwrap();
    let options = LearnerOptions { dir: dir.to_owned(), max_bytes: 400 << 10, segment_bytes: 1 };
    Learner::with_log(log, options, metrics.model("m", &schema())).unwrap()
}

#[test]
fn requests_that_wait_for_a_sync_together_share_the_next_one() {
    static DISK: StuckDisk = StuckDisk::new();
    let dir = dir_in_memory();
    let learner = learner_on(&DISK, dir.path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    // The first request also syncs the beginning of the segment.
    runtime.block_on(learner.learn(numbered(0..1), LONG)).unwrap();
    let before = DISK.syncs();
    DISK.set_stuck(true);
    let request = |number| Box::pin(learner.learn(numbered(number..number + 1), LONG));
    let mut waiting: Vec<_> = (1..=10).map(request).collect();
    runtime.block_on(poll_fn(|context| {
        assert!(waiting.iter_mut().all(|request| request.as_mut().poll(context).is_pending()));
        Poll::Ready(())
    }));
    DISK.set_stuck(false);
    for request in waiting {
        runtime.block_on(request).unwrap();
    }
    // One for those that the thread had taken before the disk answered, and one for those that waited.
    let syncs = DISK.syncs() - before;
    assert!((1..=2).contains(&syncs), "{syncs} syncs for 10 requests");
    learner.join();
    drop(Log::open(&SystemDisk, dir.path(), u64::MAX).unwrap());
    assert_eq!(numbers(dir.path()).unwrap(), (0..=10).collect::<Vec<u32>>());
}

#[test]
fn a_request_does_not_wait_for_ever_for_a_disk_that_does_not_answer_and_counts_as_refused() {
    static DISK: StuckDisk = StuckDisk::new();
    let dir = dir_in_memory();
    let metrics = Metrics::new().unwrap();
    let learner = measured_learner_on(&DISK, dir.path(), &metrics);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let learn = |number, most| {
        let most = Duration::from_millis(most);
        runtime.block_on(learner.learn(numbered(number..number + 1), most))
    };
    learn(1, 600_000).unwrap();
    DISK.set_stuck(true);
    let error = learn(2, 100).unwrap_err().to_string();
    let text =
        format!("not on disk after 0.1 s, so they may be stored later, or never: {}", dir.path().display());
    assert!(error.contains(&text), "{error}");
    // The deadline of its call comes first.
    let mut ended = Box::pin(learner.learn(numbered(0..7), LONG));
    runtime.block_on(poll_fn(|context| {
        assert!(ended.as_mut().poll(context).is_pending());
        Poll::Ready(())
    }));
    sleep(Duration::from_millis(50));
    drop(ended);
    let refused = "flechette_learn_refused_total{model=\"m\"} 8";
    assert!(metrics.render().contains(refused), "{}", metrics.render());
    DISK.set_stuck(false);
    learn(3, 600_000).unwrap();
    assert_eq!(numbers(dir.path()).unwrap(), [1, 2, 3]);
}

#[test]
fn while_the_disk_hangs_requests_are_refused_at_a_limit_and_wait_without_a_thread() {
    static DISK: StuckDisk = StuckDisk::new();
    let dir = dir_in_memory();
    let learner = learner_on(&DISK, dir.path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let learn = |most| runtime.block_on(learner.learn(numbered(0..100), most));
    learn(LONG).unwrap();
    DISK.set_stuck(true);
    let mut sent = 0;
    let refused = loop {
        match learn(Duration::from_millis(1)).unwrap_err() {
            LearnError::Slow { .. } => sent += 1,
            refused => break refused.to_string(),
        }
    };
    assert!(refused.contains("limit 262144 bytes that wait for the disk"), "{refused}");
    assert!(sent > 10, "{sent}");
    // The log has no room, which only the thread could find out. The runtime has one thread, and goes on.
    let large = learner.learn(numbered(0..25_500), Duration::from_millis(50));
    let error = runtime.block_on(async { tokio::join!(large, tokio::time::sleep(Duration::ZERO)).0 });
    assert!(matches!(error, Err(LearnError::Slow { .. })), "{error:?}");
    DISK.set_stuck(false);
    // The queue is taken at once.
    assert!((0..1000).any(|_| learn(LONG).inspect_err(|_| sleep(Duration::from_millis(5))).is_ok()));
    // A request that was given up is stored only if the thread had already taken it.
    assert!(numbers(dir.path()).unwrap().len() <= 400);
    let large = || runtime.block_on(learner.learn(numbered(0..25_500), LONG));
    large().unwrap();
    let error = large().unwrap_err().to_string();
    assert!(error.contains("limit 409600 bytes (learn.max_bytes)"), "{error}");
}

/// What a writer did.
struct Written {
    root: PathBuf,
    ops: Vec<Op>,
    /// For each number that was acknowledged: how many calls were done then.
    acked: Vec<(u32, usize)>,
    /// Numbers that were tried.
    tried: u32,
}

/// Appends groups of one to three records, and opens the log twice.
fn write(root: &Path, fault: Option<Fault>) -> Written {
    let disk: &'static RecordingDisk =
        Box::leak(Box::new(RecordingDisk { fault, ..RecordingDisk::default() }));
    fs::create_dir(root.join("models")).unwrap();
    let dir = folder(&root.join("models"), "m");
    let (mut acked, mut tried) = (Vec::new(), 0);
    for _ in 0..2 {
        let Ok(mut log) = Log::open(disk, &dir, SEGMENT_BYTES) else { continue };
        for group in [1, 3, 2, 1, 2] {
            let records: Vec<_> = (tried..tried + group).map(|n| numbered(n..n + 1)).collect();
            let (positions, result) = log.append(&records);
            assert_eq!(result.is_ok(), positions.len() == records.len());
            let done = disk.ops.lock().unwrap().len();
            acked.extend((tried..).take(positions.len()).map(|n| (n, done)));
            tried += group;
        }
    }
    let mut ops = disk.ops.lock().unwrap().clone();
    if let Some(Fault { at, effect, .. }) = fault
        && ops.get(at).is_some_and(|op| !effect.is_seen(op))
    {
        ops.remove(at);
        acked.iter_mut().filter(|(_, done)| *done > at).for_each(|(_, done)| *done -= 1);
    }
    Written { root: root.to_owned(), ops, acked, tried }
}

/// Asserts that after a crash anywhere all acknowledged samples are there, and the rest is in order.
/// Crashes before the call `from` are left out, and so are all kinds of loss but the first `kinds`.
fn assert_survives(written: &Written, from: usize, kinds: usize, what: &str) -> usize {
    let root = dir_in_memory();
    let Written { ops, acked, tried, .. } = written;
    // The paths of the calls are below the root of the writer, so the model of the disk has the same root.
    fs::create_dir(root.path().join("models")).unwrap();
    let mut disk = CrashingDisk::load(root.path()).at(&written.root);
    // Opens the log without real syncs.
    let system: &'static RecordingDisk = Box::leak(Box::default());
    let mut cut = 0;
    for done in 0..=ops.len() {
        if done > 0 {
            disk.apply(&ops[done - 1]);
        }
        for mut fate in fates().take(if done < from { 0 } else { kinds }) {
            let what = format!("{what}: {done} of {} calls, {fate:?}", ops.len());
            let after = dir_in_memory();
            disk.crash(0, after.path(), &mut fate);
            let dir = folder(&after.path().join("models"), "m");
            let mut log = Log::open(system, &dir, SEGMENT_BYTES).unwrap_or_else(|e| panic!("{what}: {e}"));
            let found = numbers(&dir).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(found.is_sorted_by(|a, b| a < b), "{what}: {found:?}");
            for (number, when) in acked {
                assert!(found.contains(number) || *when > done, "{what}: {number} is lost: {found:?}");
            }
            cut += usize::from(found.len() < *tried as usize);
            log.append(&[numbered(100..101)]).1.unwrap();
            assert_eq!(numbers(&dir).unwrap(), [&found[..], &[100]].concat(), "{what}");
        }
    }
    cut
}

#[test]
fn acknowledged_samples_survive_a_crash_after_any_call() {
    let root = dir_in_memory();
    let written = write(root.path(), None);
    assert_eq!(written.acked.len(), written.tried as usize);
    assert!(written.ops.len() > 30, "{:?}", written.ops);
    assert!(assert_survives(&written, 0, 12, "no fault") > 100);
}

#[test]
fn whichever_call_fails_the_log_has_what_was_acknowledged_and_nothing_else() {
    let root = dir_in_memory();
    let calls = write(root.path(), None).ops.len();
    for at in 0..calls {
        for effect in Effect::ALL {
            let what = format!("call {at} fails, effect: {effect:?}");
            let root = dir_in_memory();
            let fault = Fault { at, calls: 1, effect, kind: io::ErrorKind::StorageFull };
            let written = write(root.path(), Some(fault));
            let dir = folder(&root.path().join("models"), "m");
            let acked: Vec<u32> = written.acked.iter().map(|(number, _)| *number).collect();
            assert!(acked.len() >= written.tried as usize - 9, "{what}: later requests succeed");
            assert_eq!(numbers(&dir).unwrap(), acked, "{what}");
            assert_survives(&written, at, 2, &what);
        }
    }
}
