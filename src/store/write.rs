//! Writes a version so that a crash at any instant leaves the old versions, or the old versions and the whole
//! new one.
//!
//! ```text
//! 1. make .<number>.<pid>.<n>.tmp beside the versions, and lock it
//! 2. write and sync every file, the manifest last; sync both directories
//! 3. rename it to the next free number
//! 4. sync the model's directory: now the version is acknowledged
//! ```
//!
//! A name that starts with a dot is not a version. So readers see nothing before step 3 and the whole version
//! after it, because everything is synced before. Concurrent writers conflict only in step 3: the later
//! rename fails because the number is taken, and that writer tries the next number.
//!
//! A lock on the staging directory (`flock`, released when its process ends) distinguishes a live writer from
//! a dead one. The next write removes the staging directories of dead writers. A process id cannot
//! distinguish them, because ids are reused and containers that share a disk number processes separately.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::contents::{Contents, DenseTensor, Numbering};
use super::disk::{Disk, SystemDisk, is_at, lock_if_free};
use super::format::{self, Base, Checksum, Dtype, Manifest};
use super::new_file::NewFile;
use super::new_tensor::{NewTensor, TensorData, checkpoint_tensors, served_tensors};
use super::retention::check_base;
use super::version_files::{
    CHECKPOINT, CURSOR, DENSE, DENSE_STATES, MANIFEST, MODEL, TABLES, states_file, table_file, version_dir,
    versions,
};
use super::{StoreError, check_name, highest_version};
use crate::schema::Schema;
use crate::types::Version;

/// A version that was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    /// What a delta names as its base.
    pub(crate) base: Base,
    /// Just before its directory got its number: no reader found it earlier.
    pub(crate) appeared: Instant,
    /// The bytes of its files.
    pub(crate) bytes: u64,
}

/// Writes a version of model `name` in the directory `models`, which is made if needed. Returns its number:
/// 1 above the highest number that a version has had, good or not, or what [`Contents::numbering`] says.
/// After success, the version survives a crash. A failure leaves existing versions unchanged.
///
/// # Errors
/// [`StoreError`] for contents that do not match their schema, before anything is written; for the first row
/// that its element type cannot hold; and for errors of the file system.
pub fn write(models: &Path, name: &str, contents: &Contents) -> Result<Version, StoreError> {
    publish(&SystemDisk, models, name, contents).map(|written| written.base.version)
}

/// As [`write()`], on any disk. A delta gets the number after its base.
///
/// # Errors
/// As [`write()`]; and for a delta whose base is not the highest version [`StoreError::BaseOvertaken`], or
/// [`StoreError::Base`] if the base is gone.
pub(crate) fn publish(
    disk: &dyn Disk,
    models: &Path,
    name: &str,
    contents: &Contents,
) -> Result<Written, StoreError> {
    check_name("model", name)?;
    let schema = contents.checked()?;
    let model = models.join(name);
    make_dirs(disk, &model)?;
    // Another writer, dead or alive, may have made the model's directory without syncing its entry.
    disk.sync_dir(models).map_err(|e| StoreError::at(models, e))?;
    sweep(&model);
    let mut staging = Staging::begin(disk, models, name)?;
    staging.fill(contents, &schema)?;
    let bytes = staging.manifest.bytes();
    let xxh3_128 = staging.seal(contents)?;
    let (version, appeared) = staging.publish(models, name, contents)?;
    Ok(Written { base: Base { version, xxh3_128 }, appeared, bytes })
}

/// Makes a directory and its missing parents, and syncs the directory entry of each.
pub(crate) fn make_dirs(disk: &dyn Disk, path: &Path) -> Result<(), StoreError> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    make_dirs(disk, parent)?;
    match disk.create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !path.is_dir() => {
            return Err(StoreError::NotADirectory { path: path.to_owned() });
        }
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(StoreError::at(path, e)),
        _ => {}
    }
    disk.sync_dir(parent).map_err(|e| StoreError::at(parent, e))
}

/// Removes the staging directories of dead writers, and what is left of removed versions. A directory that
/// cannot be locked or removed stays until the next write or removal.
pub(super) fn sweep(model: &Path) {
    let Ok(entries) = fs::read_dir(model) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(is_staging) && entry.path().is_dir();
        let Some(lock) = ours.then(|| File::open(entry.path()).ok()).flatten() else { continue };
        if lock.try_lock().is_err() {
            continue;
        }
        let path = entry.path();
        match fs::remove_dir_all(&path) {
            Ok(()) => {
                tracing::info!(path = %path.display(), "removed the files of an interrupted write or removal")
            }
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "the files of an interrupted write stay")
            }
        }
    }
}

/// Where a version is moved before its files are removed: a name that no reader opens, and that [`sweep`]
/// recognises.
pub(crate) fn removal_path(model: &Path, version: Version) -> PathBuf {
    model.join(format!(".{version}.{}.0.tmp", std::process::id()))
}

/// Whether a name is of the form `.<number>.<pid>.<n>.tmp`.
fn is_staging(name: &str) -> bool {
    let numbers = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".tmp"));
    let parsed =
        numbers.map(|numbers| numbers.split('.').map(str::parse::<u64>).collect::<Result<Vec<_>, _>>());
    matches!(parsed, Some(Ok(numbers)) if numbers.len() == 3)
}

/// A version that is being written. If it is dropped before it is published, its files are removed.
struct Staging<'a> {
    disk: &'a dyn Disk,
    path: PathBuf,
    manifest: Manifest,
    /// Keeps other writers from removing the directory. `None` when it is renamed: then it is a version that
    /// readers lock, and `path` may belong to another writer.
    lock: Option<File>,
}

impl<'a> Staging<'a> {
    fn begin(disk: &'a dyn Disk, models: &Path, name: &str) -> Result<Self, StoreError> {
        let next = next_after(&models.join(name), versions(models, name)?.pop())?;
        for attempt in 0_u64.. {
            let path = models.join(name).join(format!(".{next}.{}.{attempt}.tmp", std::process::id()));
            match disk.create_dir(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(StoreError::at(&path, e)),
                Ok(()) => {}
            }
            if let Some(lock) = lock(&path).map_err(|e| StoreError::at(&path, e))? {
                return Ok(Self { disk, path, manifest: Manifest::default(), lock: Some(lock) });
            }
        }
        Err(StoreError::NumbersExhausted { path: models.join(name) })
    }

    /// Writes every file but the manifest.
    fn fill(&mut self, contents: &Contents, schema: &Schema) -> Result<(), StoreError> {
        self.file(MODEL, |file| file.append(contents.model_toml.as_bytes()))?;
        self.dense(DENSE, &contents.dense)?;
        self.dir(TABLES, |staging| {
            for (declared, rows) in schema.tables.iter().zip(&contents.tables) {
                staging.tensors(&table_file(&declared.name), &served_tensors(declared, *rows)?)?;
            }
            Ok(())
        })?;
        if let Some(checkpoint) = &contents.checkpoint {
            self.dir(CHECKPOINT, |staging| {
                if !checkpoint.dense_states.is_empty() {
                    staging.dense(DENSE_STATES, &checkpoint.dense_states)?;
                }
                if let Some(cursor) = checkpoint.cursor {
                    staging.file(CURSOR, |file| file.append(cursor.as_bytes()))?;
                }
                staging.dir(&format!("{CHECKPOINT}/{TABLES}"), |staging| staging.states(contents, schema))
            })?;
        }
        Ok(())
    }

    /// Writes the manifest. Returns the checksum in it.
    fn seal(&mut self, contents: &Contents) -> Result<Checksum, StoreError> {
        self.manifest.base = contents.numbering.base();
        self.manifest.training = contents.training;
        let finite = contents.quality.iter().filter(|(_, figure)| figure.is_finite());
        self.manifest.quality = finite.map(|(name, figure)| (name.clone(), *figure)).collect();
        self.manifest.metadata = contents.metadata.clone();
        let path = self.path.join(MANIFEST);
        let encoded = self.manifest.encode().map_err(|source| StoreError::Format { path, source })?;
        let (manifest, checksum) = encoded;
        self.file(MANIFEST, |file| file.append(&manifest))?;
        self.disk.sync_dir(&self.path).map_err(|e| StoreError::at(&self.path, e))?;
        Ok(checksum)
    }

    /// Writes the optimizer state of the rows.
    fn states(&mut self, contents: &Contents, schema: &Schema) -> Result<(), StoreError> {
        for (declared, rows) in schema.tables.iter().zip(&contents.tables) {
            let tensors = checkpoint_tensors(declared, *rows)?;
            if !tensors.is_empty() {
                self.tensors(&states_file(&declared.name), &tensors)?;
            }
        }
        Ok(())
    }

    /// Makes a directory, fills it and syncs it.
    fn dir(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut Self) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let path = self.path.join(name);
        self.disk.create_dir(&path).map_err(|e| StoreError::at(&path, e))?;
        fill(self)?;
        self.disk.sync_dir(&path).map_err(|e| StoreError::at(&path, e))
    }

    /// Writes dense tensors in the order of their names, so that equal tensors give equal bytes.
    fn dense(&mut self, name: &str, tensors: &[DenseTensor]) -> Result<(), StoreError> {
        let mut sorted: Vec<&DenseTensor> = tensors.iter().collect();
        sorted.sort_by(|one, other| one.name.cmp(&other.name));
        let tensors = sorted.into_iter().map(|tensor| NewTensor {
            name: &tensor.name,
            dtype: Dtype::F32,
            shape: tensor.shape.iter().map(|&axis| axis as u64).collect(),
            data: TensorData::Bytes(bytemuck::cast_slice(tensor.values)),
        });
        self.tensors(name, &tensors.collect::<Vec<_>>())
    }

    /// Writes a safetensors file.
    fn tensors(&mut self, name: &str, tensors: &[NewTensor]) -> Result<(), StoreError> {
        let shapes: Vec<_> = tensors.iter().map(|t| (t.name, t.dtype, t.shape.as_slice())).collect();
        let header = format::encode_header(&shapes)
            .map_err(|source| StoreError::Format { path: self.path.join(name), source })?;
        self.file(name, |file| {
            file.append(&header)?;
            tensors.iter().try_for_each(|tensor| match &tensor.data {
                TensorData::Bytes(bytes) => file.append(bytes),
                TensorData::Encoded(table, element) => file.append_rows(table, *element),
                TensorData::State(table, state) => file.append_states(table, *state),
                TensorData::Streamed(columns) => file.append_columns(columns),
            })
        })
    }

    /// Writes a file, syncs it and adds it to the manifest.
    fn file(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut NewFile) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let path = self.path.join(name);
        let mut file = NewFile::create(self.disk, &path, name)?;
        write(&mut file)?;
        self.manifest.files.insert(name.to_owned(), file.finish()?);
        Ok(())
    }

    /// Renames the version to the next free number, which for a delta must be that after its base. Returns
    /// the number and when it was about to be given.
    fn publish(
        mut self,
        models: &Path,
        name: &str,
        contents: &Contents,
    ) -> Result<(Version, Instant), StoreError> {
        let model = models.join(name);
        loop {
            let highest = highest(models, name)?;
            let version = match contents.numbering {
                Numbering::Next => next_after(&model, highest)?,
                Numbering::Above(above) => next_after(&model, highest.max(Some(above)))?,
                Numbering::OnlyAfter(after) => {
                    // The highest one may have been deleted by hand. Then it is not hidden.
                    check_highest(&model, after, versions(models, name)?.pop())?;
                    next_after(&model, highest)?
                }
                Numbering::DeltaOf(base) => {
                    check_highest(&model, base.version, highest)?;
                    check_base(models, name, base)?;
                    next_after(&model, highest)?
                }
            };
            let path = version_dir(&model, version);
            let appeared = Instant::now();
            // A rename replaces an empty directory without an error. But a version's directory is never
            // empty, because it gets its number only when it is complete.
            match self.disk.rename(&self.path, &path) {
                // Another writer took the number. (If our directory is gone too, a network file system has
                // renamed it and lost the answer, which is an error.)
                Err(_) if path.symlink_metadata().is_ok() && self.path.is_dir() => continue,
                Err(e) => return Err(StoreError::at(&path, e)),
                Ok(()) => self.lock = None,
            }
            self.disk.sync_dir(&model).map_err(|e| StoreError::at(&model, e))?;
            highest_version::raise(&model, version);
            return Ok((version, appeared));
        }
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // If this fails, the sweep of the next write removes the files.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Checks that [`write()`] can make a version of model `name` in the directory `models`, by making and
/// removing a staging directory. Also removes the model's directory if it did not exist before.
///
/// # Errors
/// [`StoreError`].
pub(crate) fn check_writable(models: &Path, name: &str) -> Result<(), StoreError> {
    check_name("model", name)?;
    let model = models.join(name);
    let existed = model.is_dir();
    make_dirs(&SystemDisk, &model)?;
    let staged = Staging::begin(&SystemDisk, models, name).map(drop);
    if !existed {
        // Fails if another writer uses the directory by now.
        let _ = fs::remove_dir(&model);
    }
    staged
}

/// The highest number that a version of the model has, or has had; `None` if it has had none.
///
/// # Errors
/// [`StoreError`] when the directory of the model cannot be read.
pub(crate) fn highest(models: &Path, name: &str) -> Result<Option<Version>, StoreError> {
    Ok(versions(models, name)?.pop().max(highest_version::read(&models.join(name))))
}

/// Checks that the base of a delta is the highest version of its model.
fn check_highest(model: &Path, base: Version, highest: Option<Version>) -> Result<(), StoreError> {
    let path = model.to_owned();
    match highest {
        Some(highest) if highest == base => Ok(()),
        Some(highest) if highest > base => Err(StoreError::BaseOvertaken { path, base, highest }),
        _ => {
            let source = Box::new(StoreError::MissingDirectory { path: version_dir(model, base) });
            Err(StoreError::Base { path, base, source })
        }
    }
}

/// The number after a version; 1 if there is none.
fn next_after(model: &Path, highest: Option<Version>) -> Result<Version, StoreError> {
    let next = highest.map_or(0, |version| version.0).checked_add(1).map(Version);
    next.ok_or_else(|| StoreError::NumbersExhausted { path: model.to_owned() })
}

/// Locks a directory that was just made; `None` when the sweep of another writer has locked or removed it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    // On a file system without locks, sweeps cannot lock the directory either, and so do not remove it.
    let ours = lock_if_free(&file) && is_at(&file, path)?;
    Ok(ours.then_some(file))
}
