//! Opens a version of a model with the versions that it builds on (`chain`). Writing is in `write`.
//!
//! Opening checks the manifest, the length and checksum of every file that the [`Purpose`] needs, and the
//! name, type and shape of every tensor, so that later code can rely on them. That costs one read of the
//! files, which also brings them into the page cache. The checksum is computed through a small buffer and not
//! through the mapping, because touched pages of a mapping count as memory of the process. If the tables are
//! read into memory (`table_location`), it is computed from the bytes in memory.
//!
//! A delta is opened with its base, and so on down to a full version. One damaged link makes every version
//! after it unusable. A server that already has a version of the chain opens only the links after it
//! ([`open_beside`]), so that a small delta of a large model is ready soon. An earlier version of its chain
//! needs no link, so that a roll-back is ready soon too.

use std::collections::BTreeMap;
use std::path::Path;

use super::bytes::Bytes;
use super::chain::Chain;
use super::format::{Manifest, TrainingTotals};
use super::version_files::versions;
use super::{EmbeddingStore, Refusal, StoreError};
use crate::config::TableMemory;
use crate::schema::Schema;
use crate::types::Version;

/// What a version is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The rows as they are served, mapped, without optimizer state. `checkpoint/` is not read.
    Serve,
    /// The same rows where this setting says. Versions that are opened after this one follow it too.
    ServeFrom(TableMemory),
    /// The rows as they were trained, f32, with optimizer state, if the version has a checkpoint.
    Train,
}

impl Purpose {
    /// Where the rows are.
    fn memory(self) -> TableMemory {
        match self {
            Self::ServeFrom(memory) => memory,
            Self::Serve | Self::Train => TableMemory::Mapped,
        }
    }
}

/// A version that was checked.
#[derive(Debug)]
pub struct Opened {
    /// The parsed `model.toml`.
    pub schema: Schema,
    /// The text of `model.toml`.
    pub model_toml: String,
    /// Dense tensors by name. The store does not check their names and shapes. The model does, through
    /// `accept` of [`open_highest`]. In format 1 they include the optimizer state.
    pub dense: BTreeMap<String, Dense>,
    /// The optimizer state of the dense tensors, by name. Only for training.
    pub dense_states: BTreeMap<String, Dense>,
    /// The rows, and the number of the version.
    pub store: EmbeddingStore,
    /// How far training had come, if the version was trained by this program.
    pub training: Option<TrainingTotals>,
    /// Figures of training or validation, by name.
    pub quality: BTreeMap<String, f64>,
    /// The position of training in its data, as JSON. Only for training.
    pub cursor: Option<String>,
    /// Notes of the writer, such as the optimizer.
    pub metadata: BTreeMap<String, String>,
}

/// A dense tensor of a version.
#[derive(Debug)]
pub struct Dense {
    shape: Vec<usize>,
    values: Bytes,
}

impl Dense {
    /// `values` are f32.
    pub(crate) fn new(shape: Vec<usize>, values: Bytes) -> Self {
        Self { shape, values }
    }

    /// Elements along each axis, slowest first.
    #[must_use]
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Row-major.
    #[must_use]
    pub(crate) fn values(&self) -> &[f32] {
        self.values.floats()
    }
}

/// The highest good version, and the higher ones that were refused.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct Latest {
    pub opened: Opened,
    /// Highest version first.
    pub refused: Vec<Refusal>,
}

/// Opens a version after checking all of it, and all of the versions that it builds on.
///
/// # Errors
/// [`StoreError`] for the first bad file, in the order manifests, schema, dense, tables.
pub fn open(models: &Path, name: &str, version: Version, purpose: Purpose) -> Result<Opened, StoreError> {
    open_chain(name, Chain::read(models, name, version, &[])?, purpose)
}

/// Opens a version to serve it beside loaded ones. If it builds on one of them, or one of them on it, they
/// share their rows, and only the tables of later versions are read and checked. The rows that are read go
/// where those of the first loaded version were to go; without one, they are mapped.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_beside(
    models: &Path,
    name: &str,
    version: Version,
    loaded: &[&EmbeddingStore],
) -> Result<Opened, StoreError> {
    let memory = loaded.first().map_or(TableMemory::Mapped, |store| store.memory);
    open_chain(name, Chain::read(models, name, version, loaded)?, Purpose::ServeFrom(memory))
}

/// Reads and checks the files of a chain.
fn open_chain(name: &str, mut chain: Chain, purpose: Purpose) -> Result<Opened, StoreError> {
    let location = chain.locate_tables(purpose.memory());
    let newest = &chain.newest;
    let (model_toml, schema) = newest.schema()?;
    let dense = newest.dense()?;
    let trains = purpose == Purpose::Train;
    let dense_states = if trains { newest.dense_states()? } else { BTreeMap::new() };
    chain.check_schemas(&schema)?;
    let tables = chain.tables(&schema, purpose)?;
    let store = chain.store(&schema, tables, purpose.memory());
    let cursor = if trains { newest.cursor()? } else { None };
    location.log(name, newest.version(), chain.shared.is_some());
    let Manifest { training, quality, metadata, .. } = newest.manifest.clone();
    Ok(Opened { schema, model_toml, dense, dense_states, store, training, quality, cursor, metadata })
}

/// Opens the highest good version. Each refused version is logged with its reason.
///
/// # Errors
/// [`StoreError::NoGoodVersion`] with all refusals, or the error of reading the directory.
pub(crate) fn open_latest(models: &Path, name: &str, purpose: Purpose) -> Result<Latest, StoreError> {
    let versions = versions(models, name)?;
    open_highest(Candidates { models, name, versions: &versions }, purpose, |_| Ok(()))
}

/// Opens the highest good version for work whose result hides all others: training that continues from it, or
/// a full version with its contents. A higher version that only could not be read now is not passed over.
///
/// # Errors
/// As [`open_latest`], and that of such a version.
pub(crate) fn open_to_continue(models: &Path, name: &str, purpose: Purpose) -> Result<Opened, StoreError> {
    let Latest { opened, refused } = open_latest(models, name, purpose)?;
    match refused.into_iter().find(|refusal| refusal.reason.may_pass()) {
        Some(Refusal { reason, .. }) => Err(reason),
        None => Ok(opened),
    }
}

/// Versions of a model.
#[derive(Clone, Copy)]
pub(crate) struct Candidates<'c> {
    pub models: &'c Path,
    pub name: &'c str,
    /// Ascending.
    pub versions: &'c [Version],
}

/// As [`open_latest`], of these versions. `accept` can also refuse a version, for reasons that the store
/// cannot check, such as the shapes of dense weights.
///
/// # Errors
/// [`StoreError::NoGoodVersion`] with all refusals.
pub(crate) fn open_highest(
    Candidates { models, name, versions }: Candidates<'_>,
    purpose: Purpose,
    accept: impl Fn(&Opened) -> Result<(), String>,
) -> Result<Latest, StoreError> {
    let mut refused = Vec::new();
    for &version in versions.iter().rev() {
        let accepted = open(models, name, version, purpose).and_then(|opened| match accept(&opened) {
            Ok(()) => Ok(opened),
            Err(reason) => Err(StoreError::NotAccepted { reason }),
        });
        match accepted {
            Ok(opened) => return Ok(Latest { opened, refused }),
            Err(reason) => {
                tracing::warn!(model = name, version = version.0, %reason, "version refused");
                refused.push(Refusal { version, reason });
            }
        }
    }
    Err(StoreError::NoGoodVersion { model: name.to_owned(), refused })
}

/// Parses the text of a `model.toml`.
pub(crate) fn parse_schema(text: &str) -> Result<Schema, String> {
    Schema::parse(text).map_err(|e| e.to_string())
}
