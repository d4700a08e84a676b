//! One version on disk: its manifest, and its files, each checked before it is used. A chain is a list of
//! them.
//!
//! A reader holds a shared lock on the directory of every version that it reads (`flock`), so that retention
//! does not remove the version. The lock is released when the last user of the version is dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::bytes::{FileBytes, open_regular};
use super::disk::{is_at, lock_if_free, lock_until};
use super::finite::{RowCheck, all_finite, not_finite};
use super::format::{self, Base, Checksum, Dtype, FileEntry, Manifest};
use super::record::RowFormat;
use super::snapshot::{Dense, Purpose, parse_schema};
use super::table::BadRow;
use super::table_reader::{TableFile, TableParts, TableReader, TensorFile, expect_dtype, floats};
use super::version_files::{
    CHECKPOINT, CURSOR, DENSE, DENSE_STATES, MANIFEST, MODEL, TABLES, require_dir, states_file, table_file,
    version_dir,
};
use super::{StoreError, check_name};
use crate::pace;
use crate::schema::{self, Schema};
use crate::types::Version;

/// Bytes read and hashed at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// How long a reader waits for the lock of a version. Its writer unlocks it soon after the rename.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// How often a lock must be found taken for its version to be served.
const LOOKS_AT_LOCK: u32 = 2;

/// A version that is in use: its directory stays while this exists.
#[derive(Debug)]
pub(crate) struct LinkHold {
    /// What a delta of this version names as its base.
    pub base: Base,
    /// Locked for reading; `None` on a file system without locks.
    _lock: Option<File>,
    dir: PathBuf,
}

impl LinkHold {
    /// Says that the version is served, while the file is open, by a shared lock on its manifest. `None` on a
    /// file system without locks.
    pub(crate) fn mark_served(&self) -> Option<File> {
        let manifest = File::open(self.dir.join(MANIFEST)).ok()?;
        lock_shared(&manifest).ok().filter(|&locked| locked).map(|_| manifest)
    }
}

/// Whether a process serves a version.
pub(crate) fn is_served(dir: &Path) -> bool {
    let Ok(manifest) = File::open(dir.join(MANIFEST)) else { return false };
    // Another process may ask the same, and has the lock for an instant.
    (0..LOOKS_AT_LOCK).all(|look| {
        thread::sleep(if look == 0 { Duration::ZERO } else { LOCK_RETRY });
        !lock_if_free(&manifest)
    })
}

/// A version whose manifest was read.
pub(crate) struct Link {
    pub manifest: Manifest,
    pub hold: Arc<LinkHold>,
    /// Whether the files of tables are read into memory; otherwise they are mapped, like all other files.
    pub in_ram: bool,
}

/// What a version says of the run that wrote it.
pub(crate) struct RunNotes {
    /// The position of training, if the version has one.
    pub cursor: Option<String>,
    /// The notes of the optimizer.
    pub metadata: BTreeMap<String, String>,
}

impl RunNotes {
    /// Those of a version, whose tables are not read.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn read(models: &Path, name: &str, version: Version) -> Result<Self, StoreError> {
        let link = Link::open(version_dir(&models.join(name), version), version)?;
        Ok(Self { cursor: link.cursor()?, metadata: link.manifest.metadata })
    }
}

impl Link {
    /// Locks a version and reads its manifest.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn open(dir: PathBuf, version: Version) -> Result<Self, StoreError> {
        require_dir(&dir)?;
        let lock = lock_dir(&dir)?;
        let (manifest, xxh3_128) = read_manifest(&dir)?;
        let hold = LinkHold { base: Base { version, xxh3_128 }, _lock: lock, dir };
        Ok(Self { manifest, hold: Arc::new(hold), in_ram: false })
    }

    pub(crate) fn version(&self) -> Version {
        self.hold.base.version
    }

    fn dir(&self) -> &Path {
        &self.hold.dir
    }

    /// The bytes of the files with the served rows.
    pub(crate) fn table_bytes(&self) -> u64 {
        let tables = self.manifest.files.iter().filter(|(file, _)| file.starts_with(TABLES));
        tables.map(|(_, entry)| entry.bytes).fold(0, u64::saturating_add)
    }

    /// The path of the manifest, for errors about the base that it names.
    pub(crate) fn manifest_path(&self) -> PathBuf {
        self.dir().join(MANIFEST)
    }

    /// The text of `model.toml`, and the schema.
    ///
    /// # Errors
    /// [`StoreError`] when the file is damaged or not a valid schema, or the manifest lists other files than
    /// those of this schema.
    pub(crate) fn schema(&self) -> Result<(String, Schema), StoreError> {
        let Checked { path, data: text, .. } = self.checked(MODEL, false, None)?;
        let model_toml = String::from_utf8(text.bytes().to_vec())
            .map_err(|e| StoreError::Schema { path: path.clone(), reason: e.to_string() })?;
        let schema = parse_schema(&model_toml).map_err(|reason| StoreError::Schema { path, reason })?;
        self.check_list(&schema)?;
        Ok((model_toml, schema))
    }

    /// Checks that an earlier version of the chain has this version's schema.
    ///
    /// # Errors
    /// [`StoreError::Schema`] with the first difference.
    pub(crate) fn check_same_schema(
        &self,
        schema: &Schema,
        base: Version,
        of_base: &Schema,
    ) -> Result<(), StoreError> {
        let Some(difference) = of_base.first_difference(schema) else { return Ok(()) };
        let reason = format!("not the schema of its base, version {base}: {difference}");
        Err(StoreError::Schema { path: self.dir().join(MODEL), reason })
    }

    /// The dense weights.
    ///
    /// # Errors
    /// [`StoreError`] for a damaged file or a tensor that is not f32.
    pub(crate) fn dense(&self) -> Result<BTreeMap<String, Dense>, StoreError> {
        self.dense_tensors(DENSE)
    }

    /// The optimizer state of the dense weights; empty if the version has none.
    ///
    /// # Errors
    /// As [`Self::dense`], and for a state that is not finite, from which training could not continue.
    pub(crate) fn dense_states(&self) -> Result<BTreeMap<String, Dense>, StoreError> {
        if !self.has(DENSE_STATES) {
            return Ok(BTreeMap::new());
        }
        let states = self.dense_tensors(DENSE_STATES)?;
        match states.iter().find(|(_, state)| !all_finite(state.values())) {
            Some((name, _)) => Err(not_finite(&self.dir().join(DENSE_STATES), name)),
            None => Ok(states),
        }
    }

    /// Checks each file that only training reads: its length, its checksum, and that its numbers are finite.
    ///
    /// # Errors
    /// [`StoreError`] for the first bad file.
    pub(crate) fn check_checkpoint(&self) -> Result<(), StoreError> {
        for file in self.manifest.files.keys().filter(|file| file.starts_with(CHECKPOINT)) {
            if file == CURSOR {
                self.cursor()?;
                continue;
            }
            let (path, data, tensors) = self.tensors(file)?;
            for tensor in tensors.iter().filter(|tensor| tensor.dtype == Dtype::F32) {
                if !all_finite(floats(&path, &data, tensor)?.floats()) {
                    return Err(not_finite(&path, &tensor.name));
                }
            }
        }
        Ok(())
    }

    fn dense_tensors(&self, file: &str) -> Result<BTreeMap<String, Dense>, StoreError> {
        let (path, data, tensors) = self.tensors(file)?;
        let dense = tensors.into_iter().map(|tensor| {
            let shape = tensor.shape.iter().map(|&axis| axis as usize).collect();
            expect_dtype(&path, &tensor, Dtype::F32)?;
            let values = floats(&path, &data, &tensor)?;
            Ok((tensor.name, Dense::new(shape, values)))
        });
        dense.collect()
    }

    /// The position of training, if the version has one.
    ///
    /// # Errors
    /// [`StoreError`] for a damaged file.
    pub(crate) fn cursor(&self) -> Result<Option<String>, StoreError> {
        if !self.has(CURSOR) {
            return Ok(None);
        }
        let Checked { path, data: text, .. } = self.checked(CURSOR, false, None)?;
        let text = String::from_utf8(text.bytes().to_vec());
        text.map(Some).map_err(|e| StoreError::Schema { path, reason: e.to_string() })
    }

    /// The rows of a table. For training they are f32 with optimizer state, if the version has a checkpoint.
    ///
    /// # Errors
    /// [`StoreError`] for a damaged file, for tensors that do not fit the schema, and for a served row that
    /// is not finite.
    pub(crate) fn table(
        &self,
        declared: &schema::TableSchema,
        purpose: Purpose,
    ) -> Result<TableParts, StoreError> {
        let format = RowFormat { element: declared.element, dim: declared.dim };
        let served = self.checked(&table_file(&declared.name), self.in_ram, Some(format))?;
        let (bad, served) = (served.bad, parsed(served)?);
        let mut table = TableReader::new(declared, self.manifest.base.is_some(), served.0.clone());
        table.read(served, TableFile::Served)?;
        if let Some(bad) = bad {
            let source = BadRow { row: table.row_at(bad.row), ..bad };
            return Err(StoreError::Row { path: table.path, source });
        }
        let states = states_file(&declared.name);
        if purpose == Purpose::Train && self.has(&states) {
            table.read(self.tensors(&states)?, TableFile::Checkpoint)?;
        }
        table.finish(purpose)
    }

    /// Checks that the files of the tables are there with their lengths. They are not read.
    ///
    /// # Errors
    /// [`StoreError`] for the first bad file.
    pub(crate) fn check_table_lengths(&self) -> Result<(), StoreError> {
        let mut tables = self.manifest.files.iter().filter(|(file, _)| file.starts_with(TABLES));
        tables.try_for_each(|(file, entry)| open_listed(&self.dir().join(file), entry).map(|_| ()))
    }

    fn has(&self, file: &str) -> bool {
        self.manifest.files.contains_key(file)
    }

    /// Checks the length and the checksum of a file, and reads it into memory or maps it. Also checks the
    /// rows, if their format is given.
    fn checked(&self, file: &str, in_ram: bool, rows: Option<RowFormat>) -> Result<Checked, StoreError> {
        let path = self.dir().join(file);
        let Some(entry) = self.manifest.files.get(file) else {
            return Err(StoreError::MissingFile { path });
        };
        let at = |e| StoreError::at(&path, e);
        let open = open_listed(&path, entry)?;
        let check = |data: &FileBytes| rows.and_then(|rows| RowCheck::of_file(data.bytes(), rows));
        let (data, got, check) = if in_ram {
            let (data, got) = read(&open, entry.bytes as usize, at)?;
            let mut check = check(&data);
            check.iter_mut().for_each(|check| check.feed(data.bytes()));
            (data, got, check)
        } else {
            let data = FileBytes::map(&open).map_err(at)?;
            let mut check = check(&data);
            // The file may be larger than memory, so it is read only once.
            let got = checksum(&open, |piece| check.iter_mut().for_each(|check| check.feed(piece)));
            (data, got.map_err(at)?, check)
        };
        expect_sum(&path, entry, got)?;
        Ok(Checked { path, data, bad: check.and_then(RowCheck::bad) })
    }

    /// Checks that every file in the manifest belongs to the schema.
    fn check_list(&self, schema: &Schema) -> Result<(), StoreError> {
        let mut wanted = BTreeSet::from([MODEL, DENSE, DENSE_STATES, CURSOR].map(str::to_owned));
        for table in &schema.tables {
            check_name("table", &table.name)?;
            wanted.extend([table_file(&table.name), states_file(&table.name)]);
        }
        match self.manifest.files.keys().find(|file| !wanted.contains(*file)) {
            Some(file) => Err(StoreError::UnexpectedFile { path: self.manifest_path(), file: file.clone() }),
            None => Ok(()),
        }
    }

    fn tensors(&self, file: &str) -> Result<TensorFile, StoreError> {
        parsed(self.checked(file, false, None)?)
    }
}

/// Opens a file that a manifest lists, which must have the length that the manifest says.
fn open_listed(path: &Path, entry: &FileEntry) -> Result<File, StoreError> {
    let open = open_file(path)?;
    let got = open.metadata().map_err(|e| StoreError::at(path, e))?.len();
    if got != entry.bytes {
        return Err(StoreError::Size { path: path.to_owned(), expected: entry.bytes, got });
    }
    Ok(open)
}

fn expect_sum(path: &Path, entry: &FileEntry, got: Checksum) -> Result<(), StoreError> {
    if got != entry.xxh3_128 {
        return Err(StoreError::Checksum { path: path.to_owned(), expected: entry.xxh3_128, got });
    }
    Ok(())
}

/// A file whose length and checksum are those of the manifest.
struct Checked {
    path: PathBuf,
    data: FileBytes,
    /// The first row that is not finite, by its position.
    bad: Option<BadRow>,
}

fn parsed(Checked { path, data, .. }: Checked) -> Result<TensorFile, StoreError> {
    match format::parse_header(data.bytes()) {
        Ok(tensors) => Ok((path, data, tensors)),
        Err(source) => Err(StoreError::Format { path, source }),
    }
}

/// Locks a version's directory for reading; `None` on a file system without locks.
fn lock_dir(dir: &Path) -> Result<Option<File>, StoreError> {
    let removing = || StoreError::Removing { path: dir.to_owned() };
    let file = File::open(dir).map_err(|e| StoreError::at(dir, e))?;
    if !lock_shared(&file).map_err(|Held| removing())? {
        return Ok(None);
    }
    // Retention may have removed the directory before the lock was taken.
    if is_at(&file, dir).unwrap_or(false) { Ok(Some(file)) } else { Err(removing()) }
}

/// Another process has a lock, and keeps it.
struct Held;

/// Locks a file for reading. Returns false on a file system without locks.
fn lock_shared(file: &File) -> Result<bool, Held> {
    match lock_until(Instant::now() + LOCK_WAIT, || file.try_lock_shared()) {
        Ok(()) => Ok(true),
        Err(fs::TryLockError::WouldBlock) => Err(Held),
        Err(fs::TryLockError::Error(_)) => Ok(false),
    }
}

fn open_file(path: &Path) -> Result<File, StoreError> {
    open_regular(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => StoreError::MissingFile { path: path.to_owned() },
        _ => StoreError::at(path, e),
    })
}

/// A file of this length in memory, and its checksum. `at` is the error of a failed system call.
fn read(
    mut file: &File,
    bytes: usize,
    at: impl Fn(io::Error) -> StoreError,
) -> Result<(FileBytes, Checksum), StoreError> {
    let mut hash = Xxh3::new();
    let bytes = FileBytes::read(bytes, |piece| {
        file.read_exact(piece).map_err(&at)?;
        hash.update(piece);
        Ok::<_, StoreError>(())
    })?;
    Ok((bytes, Checksum(hash.digest128())))
}

/// The checksum of a whole file, read through a buffer. `take` gets the bytes too.
fn checksum(mut file: &File, mut take: impl FnMut(&[u8])) -> io::Result<Checksum> {
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        pace::rest();
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Checksum(hash.digest128())),
            Ok(bytes) => {
                hash.update(&buffer[..bytes]);
                take(&buffer[..bytes]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Reads the manifest of a version's directory. Also returns the checksum in it.
pub(crate) fn read_manifest(dir: &Path) -> Result<(Manifest, Checksum), StoreError> {
    let path = dir.join(MANIFEST);
    let file = FileBytes::map(&open_file(&path)?).map_err(|e| StoreError::at(&path, e))?;
    Manifest::parse(file.bytes()).map_err(|source| StoreError::Format { path, source })
}
