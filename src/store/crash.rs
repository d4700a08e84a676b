//! Tests of the writer on a disk with failing calls, and on a disk that crashes.
//!
//! The calls of the writer are recorded. A crash is any prefix of them, replayed on a model of a disk that
//! only guarantees synced data. Each directory entry is as it was at the last sync, or as it is now. Each
//! file has its synced bytes, followed by all of its unsynced bytes, some of them, or zeros in their place.
//! Journaling file systems guarantee more, so a property that holds here also holds on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::disk::{Disk, SystemDisk, lock_until};
use super::link::read_manifest;
use super::version_files::MANIFEST;
use super::{
    Base, Checkpoint, Contents, DenseTensor, Numbering, Opened, PlainMemory, Purpose, RowSource, SourceShape,
    StateShape, StoreError, Table, TableRows, TakeChunk, open, open_latest, publish, versions,
};
use crate::rowlog::Uniform;
use crate::types::{Element, TableId, Version};

/// How long a reader tries to lock a version.
const LOCK_LIMIT: Duration = Duration::from_secs(5);

const MODEL_TOML: &str = r#"
[architecture]
kind = "dcn"
cross_layers = 1
deep = [4]

[[dense]]
name = "d"

[[features]]
name = "f"
table = "t"

[[tables]]
name = "t"
rows = 50
dim = 3

[[tables]]
name = "q"
rows = 50
dim = 3
element = "int8"
"#;

fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Uniform { seed, table_code: 0, bound: 1.0 }.row(0, &mut values);
    values
}

/// The records of a table, as the rows of a delta.
#[derive(Debug)]
struct Records(Table);

impl RowSource for Records {
    fn shape(&self, _: TableId) -> Result<SourceShape<'_>, StoreError> {
        Ok(SourceShape { rows: self.0.rows(), element: Element::F32, record: self.0.record_layout() })
    }

    fn for_each_chunk(&self, _: TableId, take: &mut TakeChunk<'_>) -> Result<(), StoreError> {
        for row in 0..self.0.rows() {
            take(row, &[self.0.row_values(row).unwrap(), self.0.state(0, row)].concat())?;
        }
        Ok(())
    }

    fn first_not_finite(&self, _: TableId) -> Result<Option<u64>, StoreError> {
        Ok(None)
    }
}

/// Writes a version with the values of a seed. If the version before an even seed exists, it is a delta that
/// changes every row.
fn write_seed(disk: &dyn Disk, models: &Path, seed: u64) -> Result<Version, StoreError> {
    let mut table = Table::zeroed(&PlainMemory, 50, 3, &[StateShape::new("sum", 1)]).unwrap();
    table.rows_mut().unwrap().copy_from_slice(&values(seed, 150));
    let (dense, all) = (values(seed, 6), (0..50).collect::<Vec<u64>>());
    let before = models.join("m").join((seed - 1).to_string());
    let base = (seed.is_multiple_of(2) && before.is_dir()).then(|| {
        let (_, xxh3_128) = read_manifest(&before).unwrap();
        Base { version: Version(seed - 1), xxh3_128 }
    });
    let table = Records(table);
    let rows = match base {
        Some(_) => TableRows::Changed(&all, &table, TableId(0)),
        None => TableRows::Table(&table.0),
    };
    let contents = Contents {
        model_toml: MODEL_TOML,
        numbering: base.map_or(Numbering::Next, Numbering::DeltaOf),
        dense: vec![DenseTensor { name: "w".to_owned(), shape: vec![2, 3], values: &dense }],
        tables: vec![rows, rows],
        checkpoint: Some(Checkpoint { cursor: Some("here"), ..Checkpoint::default() }),
        ..Contents::default()
    };
    Ok(publish(disk, models, "m", &contents)?.base.version)
}

fn is_seed(opened: &Opened, seed: u64) -> bool {
    let [rows, rounded] = opened.store.tables() else { panic!("two tables") };
    let (expected, mut decoded) = (values(seed, 150), vec![0.0; 150]);
    let mut encoded = vec![0; rounded.element().row_bytes(3)];
    rows.decode(&mut decoded);
    let rounds = |(row, values): (usize, &[f32])| {
        Element::Int8.encode(values, &mut encoded).unwrap();
        rounded.row(row as u64) == Some(&encoded[..])
    };
    decoded == expected
        && expected.chunks_exact(3).enumerate().all(rounds)
        && opened.dense["w"].values() == values(seed, 6)
}

/// Asserts that exactly these versions exist, and that version n holds the values of seed n.
fn assert_versions_hold(models: &Path, seeds: std::ops::RangeInclusive<u64>, what: &str) {
    let found: Vec<u64> = versions(models, "m").unwrap().iter().map(|version| version.0).collect();
    assert_eq!(found, seeds.clone().collect::<Vec<_>>(), "{what}");
    for seed in seeds {
        assert!(is_seed(&open(models, "m", Version(seed), Purpose::Serve).unwrap(), seed), "{what}");
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    CreateDir(PathBuf),
    Create(PathBuf),
    Append(PathBuf, Vec<u8>),
    Sync(PathBuf),
    SyncDir(PathBuf),
    Rename(PathBuf, PathBuf),
    /// Only the log of learned samples has the last two.
    Truncate(PathBuf, u64),
    Remove(PathBuf),
}

impl Op {
    fn synced(&self) -> Option<&Path> {
        match self {
            Self::Sync(path) | Self::SyncDir(path) => Some(path),
            _ => None,
        }
    }
}

/// Calls that fail, and their error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    /// The index of the first one.
    pub at: usize,
    pub calls: usize,
    /// What they do nevertheless.
    pub effect: Effect,
    pub kind: io::ErrorKind,
}

/// What a call does although it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Nothing,
    /// A write writes the first half of its bytes, as on a disk that is full then. Other calls do nothing.
    Half,
    All,
}

impl Effect {
    pub(crate) const ALL: [Self; 3] = [Self::Nothing, Self::Half, Self::All];

    /// Whether it changes anything on the disk.
    pub(crate) fn is_seen(self, op: &Op) -> bool {
        match self {
            Self::Nothing => false,
            Self::Half => matches!(op, Op::Append(..)),
            Self::All => true,
        }
    }
}

/// The real disk, with a record of its calls and faults. Syncs are only recorded, because no test
/// here cuts the power.
#[derive(Debug, Default)]
pub(crate) struct RecordingDisk {
    pub ops: Mutex<Vec<Op>>,
    pub fault: Option<Fault>,
    /// Simulates another writer that takes a staging name as soon as it is free.
    pub crowded: bool,
}

impl RecordingDisk {
    pub(crate) fn step<T>(&self, op: Op, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let mut ops = self.ops.lock().unwrap();
        let fault = self.fault_of(ops.len());
        let seen = fault.is_some_and(|fault| fault.effect.is_seen(&op));
        ops.push(op);
        match fault {
            Some(Fault { kind, .. }) if seen => run().and(Err(io::Error::from(kind))),
            Some(Fault { kind, .. }) => Err(io::Error::from(kind)),
            None => run(),
        }
    }

    fn fault_of(&self, call: usize) -> Option<Fault> {
        self.fault.filter(|fault| (fault.at..fault.at + fault.calls).contains(&call))
    }
}

impl Disk for RecordingDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step(Op::CreateDir(path.to_owned()), || SystemDisk.create_dir(path))
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.step(Op::Create(path.to_owned()), || SystemDisk.create(path))
    }

    fn append(&self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let fault = self.fault_of(self.ops.lock().unwrap().len());
        let half = fault.is_some_and(|fault| fault.effect == Effect::Half);
        let bytes = if half { &bytes[..bytes.len() / 2] } else { bytes };
        self.step(Op::Append(path.to_owned(), bytes.to_owned()), || SystemDisk.append(file, path, bytes))
    }

    fn sync(&self, _file: &File, path: &Path) -> io::Result<()> {
        self.step(Op::Sync(path.to_owned()), || Ok(()))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        // A sync may take long. Meanwhile readers can open the new version. A process that another test
        // starts has the writer's lock for an instant, but this thread is the writer, which must not have it.
        for version in fs::read_dir(path)?.map(|entry| entry.unwrap().path().join(MANIFEST)) {
            if let Some(dir) = version.parent().filter(|_| version.is_file()) {
                let dir = File::open(dir)?;
                lock_until(Instant::now() + LOCK_LIMIT, || dir.try_lock_shared()).unwrap();
            }
        }
        self.step(Op::SyncDir(path.to_owned()), || Ok(()))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(Op::Rename(from.to_owned(), to.to_owned()), || {
            SystemDisk.rename(from, to)?;
            if self.crowded { SystemDisk.create_dir(from) } else { Ok(()) }
        })
    }
}

/// The calls that write the values of seed 2.
fn recorded(root: &Path) -> Vec<Op> {
    let disk = RecordingDisk::default();
    write_seed(&disk, &root.join("models"), 2).unwrap();
    disk.ops.into_inner().unwrap()
}

#[test]
fn whichever_call_fails_readers_see_the_old_version_or_the_whole_new_one() {
    let root = dir_in_memory();
    write_seed(&RecordingDisk::default(), &root.path().join("models"), 1).unwrap();
    let ops = recorded(root.path());
    let renamed = ops.iter().position(|op| matches!(op, Op::Rename(..))).unwrap();
    assert!(ops.len() > 20, "{ops:#?}");
    for at in 0..ops.len() {
        for effect in Effect::ALL {
            for kind in [io::ErrorKind::StorageFull, io::ErrorKind::PermissionDenied, io::ErrorKind::Other] {
                let what = format!("call {at} ({kind}, effect: {effect:?})");
                let root = dir_in_memory();
                let models = root.path().join("models");
                write_seed(&RecordingDisk::default(), &models, 1).unwrap();
                let fault = Some(Fault { at, calls: 1, effect, kind });
                let disk = RecordingDisk { fault, ..Default::default() };
                let published = at > renamed || (at == renamed && effect == Effect::All);
                match write_seed(&disk, &models, 2) {
                    Ok(version) => panic!("{what}: wrote {version}"),
                    Err(StoreError::DiskFull { .. }) => {
                        assert_eq!(kind, io::ErrorKind::StorageFull, "{what}")
                    }
                    Err(StoreError::Permission { .. }) => {
                        assert_eq!(kind, io::ErrorKind::PermissionDenied, "{what}");
                    }
                    Err(StoreError::Io { .. }) => assert_eq!(kind, io::ErrorKind::Other, "{what}"),
                    Err(error) => panic!("{what}: {error}"),
                }
                assert_versions_hold(&models, 1..=if published { 2 } else { 1 }, &what);
                // The next write succeeds nevertheless.
                let next =
                    write_seed(&RecordingDisk::default(), &models, if published { 3 } else { 2 }).unwrap();
                assert_versions_hold(&models, 1..=next.0, &what);
                assert_eq!(entries(&models) as u64, next.0, "{what}: something was left behind");
            }
        }
    }
}

/// The entries of a model's directory, without that of its state.
pub(crate) fn entries(models: &Path) -> usize {
    let names = fs::read_dir(models.join("m")).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name != "state").count()
}

/// A file or directory: its present state, and the state that is durable.
#[derive(Clone, Debug)]
enum Node {
    Dir { durable: BTreeMap<String, usize>, current: BTreeMap<String, usize> },
    File { durable: Vec<u8>, current: Vec<u8> },
}

#[derive(Clone, Debug)]
pub(crate) struct CrashingDisk {
    root: PathBuf,
    /// Node 0 is the root directory.
    nodes: Vec<Node>,
}

impl CrashingDisk {
    /// Loads all files under `root` as durable.
    pub(crate) fn load(root: &Path) -> Self {
        let mut disk = Self { root: root.to_owned(), nodes: Vec::new() };
        disk.load_node(root);
        disk
    }

    /// The same files below another root, for calls that were recorded there.
    pub(crate) fn at(self, root: &Path) -> Self {
        Self { root: root.to_owned(), ..self }
    }

    fn load_node(&mut self, path: &Path) -> usize {
        let id = self.nodes.len();
        if path.is_file() {
            let bytes = fs::read(path).unwrap();
            self.nodes.push(Node::File { durable: bytes.clone(), current: bytes });
            return id;
        }
        self.nodes.push(Node::Dir { durable: BTreeMap::new(), current: BTreeMap::new() });
        let mut entries = BTreeMap::new();
        for entry in fs::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            entries.insert(entry.file_name().into_string().unwrap(), self.load_node(&entry.path()));
        }
        self.nodes[id] = Node::Dir { durable: entries.clone(), current: entries };
        id
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::CreateDir(path) => {
                self.add(path, Node::Dir { durable: BTreeMap::new(), current: BTreeMap::new() });
            }
            Op::Create(path) => self.add(path, Node::File { durable: Vec::new(), current: Vec::new() }),
            Op::Append(path, bytes) => match self.find(path) {
                Node::File { current, .. } => current.extend_from_slice(bytes),
                Node::Dir { .. } => panic!("{} is a directory", path.display()),
            },
            Op::Sync(path) | Op::SyncDir(path) => match self.find(path) {
                Node::File { current, durable } => durable.clone_from(current),
                Node::Dir { current, durable } => durable.clone_from(current),
            },
            Op::Rename(from, to) => {
                let id = self.entries(from).remove(name(from)).unwrap();
                self.entries(to).insert(name(to).to_owned(), id);
            }
            Op::Truncate(path, bytes) => match self.find(path) {
                Node::File { current, .. } => current.truncate(*bytes as usize),
                Node::Dir { .. } => panic!("{} is a directory", path.display()),
            },
            // The file may not exist: a log removes what a failed call may have left.
            Op::Remove(path) => drop(self.entries(path).remove(name(path))),
        }
    }

    fn find(&mut self, path: &Path) -> &mut Node {
        let mut id = 0;
        for part in path.strip_prefix(&self.root).unwrap() {
            let Node::Dir { current, .. } = &self.nodes[id] else {
                panic!("{} is not a directory", path.display())
            };
            id = current[part.to_str().unwrap()];
        }
        &mut self.nodes[id]
    }

    fn entries(&mut self, path: &Path) -> &mut BTreeMap<String, usize> {
        match self.find(path.parent().unwrap()) {
            Node::Dir { current, .. } => current,
            Node::File { .. } => panic!("{} is in a file", path.display()),
        }
    }

    fn add(&mut self, path: &Path, node: Node) {
        let id = self.nodes.len();
        self.nodes.push(node);
        assert!(self.entries(path).insert(name(path).to_owned(), id).is_none());
    }

    /// Writes what a crash leaves to `to`.
    pub(crate) fn crash(&self, id: usize, to: &Path, fate: &mut Fate) {
        match &self.nodes[id] {
            Node::File { durable, current } => fs::write(to, fate.bytes(durable, current)).unwrap(),
            Node::Dir { durable, current } => {
                fs::create_dir_all(to).unwrap();
                let names: BTreeSet<&String> = durable.keys().chain(current.keys()).collect();
                for name in names {
                    let entries = if fate.keeps_unsynced() { current } else { durable };
                    if let Some(&id) = entries.get(name) {
                        self.crash(id, &to.join(name), fate);
                    }
                }
            }
        }
    }
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

/// What happens to unsynced data.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    AllLost,
    AllKept,
    Random(u64),
}

impl Fate {
    fn roll(&mut self, sides: u64) -> u64 {
        let Self::Random(state) = self else { return 0 };
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % sides
    }

    fn keeps_unsynced(&mut self) -> bool {
        match self {
            Self::AllLost => false,
            Self::AllKept => true,
            Self::Random(_) => self.roll(2) == 0,
        }
    }

    fn bytes(&mut self, durable: &[u8], current: &[u8]) -> Vec<u8> {
        if !current.starts_with(durable) {
            // The file was cut off after it was durable.
            return if self.keeps_unsynced() { current.to_vec() } else { durable.to_vec() };
        }
        let pending = current.len() - durable.len();
        match (*self, self.roll(3)) {
            (Self::AllLost, _) => durable.to_vec(),
            (Self::AllKept, _) | (Self::Random(_), 0) => current.to_vec(),
            (Self::Random(_), 1) => [durable, &vec![0; pending]].concat(),
            (Self::Random(_), _) => {
                current[..durable.len() + self.roll(pending as u64 + 1) as usize].to_vec()
            }
        }
    }
}

/// A new directory in memory, if the system has such a file system. Tests that create and delete thousands of
/// files take half as long there: ext4 does not reuse the inodes of the last seconds but searches for others.
pub(crate) fn dir_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

pub(crate) fn fates() -> impl Iterator<Item = Fate> {
    [Fate::AllLost, Fate::AllKept].into_iter().chain((0..10).map(Fate::Random))
}

#[test]
fn a_writer_that_has_published_does_not_remove_the_staging_directory_of_another() {
    let dir = dir_in_memory();
    let disk = RecordingDisk { crowded: true, ..RecordingDisk::default() };
    assert_eq!(write_seed(&disk, dir.path(), 1).unwrap(), Version(1));
    assert!(dir.path().join("m").read_dir().unwrap().flatten().any(|entry| {
        let name = entry.file_name();
        name.to_str().unwrap().ends_with(".tmp")
    }));
}

#[test]
fn after_a_crash_anywhere_readers_see_the_old_version_or_the_whole_new_one() {
    let root = dir_in_memory();
    write_seed(&RecordingDisk::default(), &root.path().join("models"), 1).unwrap();
    let mut disk = CrashingDisk::load(root.path());
    let ops = recorded(root.path());
    let mut seen = BTreeMap::new();
    for done in 0..=ops.len() {
        if done > 0 {
            disk.apply(&ops[done - 1]);
        }
        for mut fate in fates() {
            let what = format!("{done} of {} calls, {fate:?}", ops.len());
            let after = dir_in_memory();
            disk.crash(0, after.path(), &mut fate);
            let models = after.path().join("models");
            assert!(is_seed(&open(&models, "m", Version(1), Purpose::Serve).unwrap(), 1), "{what}");
            let latest = open_latest(&models, "m", Purpose::Serve).unwrap();
            // The writer syncs before it renames, so a version that is found is complete.
            assert!(latest.refused.is_empty(), "{what}: {:?}", latest.refused);
            let version = latest.opened.store.version().0;
            assert!(is_seed(&latest.opened, version), "{what}");
            assert!(version == 2 || done < ops.len(), "{what}: acknowledged and lost");
            *seen.entry(version).or_insert(0) += 1;
            let next = write_seed(&RecordingDisk::default(), &models, version + 1).unwrap();
            assert_eq!(next.0, version + 1, "{what}");
            assert_versions_hold(&models, 1..=next.0, &what);
        }
    }
    assert!(seen[&1] > 100 && seen[&2] > 12, "{seen:?}");
}

#[test]
fn leaving_out_any_sync_loses_the_version_in_some_crash() {
    let root = dir_in_memory();
    fs::create_dir(root.path().join("models")).unwrap();
    let empty = CrashingDisk::load(root.path());
    let ops = recorded(root.path());
    let survives = |without: Option<&Path>| {
        let mut disk = empty.clone();
        let kept = ops.iter().filter(|op| without.is_none() || op.synced() != without);
        kept.for_each(|op| disk.apply(op));
        let after = dir_in_memory();
        disk.crash(0, after.path(), &mut Fate::AllLost);
        let models = after.path().join("models");
        let opened = |purpose| open(&models, "m", Version(1), purpose);
        opened(Purpose::Train).is_ok() && opened(Purpose::Serve).is_ok_and(|opened| is_seed(&opened, 2))
    };
    assert!(survives(None));
    let synced: BTreeSet<&Path> = ops.iter().filter_map(Op::synced).collect();
    assert_eq!(synced.len(), 14, "eight files, the directories models, m, the version's and its three");
    for path in synced {
        assert!(!survives(Some(path)), "{} need not be synced", path.display());
    }
}
