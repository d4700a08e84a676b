//! Lists the versions of a model, and opens one of them with the versions that it builds on. (Writing is in
//! `write`.)
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
use std::fs;
use std::io;
use std::path::Path;

use rayon::prelude::*;

use super::bytes::Bytes;
use super::format::{Base, Training};
use super::link::Link;
use super::overlay::DeltaRows;
use super::table::Table;
use super::table_location::TableLocation;
use super::table_reader::TableParts;
use super::{EmbeddingStore, Refusal, StoreError, check_name};
use crate::config::TableMemory;
use crate::schema::{self, Schema};
use crate::types::{TableId, Version};

pub(crate) const MANIFEST: &str = "MANIFEST.json";
pub(crate) const MODEL: &str = "model.toml";
pub(crate) const DENSE: &str = "dense.safetensors";
pub(crate) const TABLES: &str = "tables";
pub(crate) const CHECKPOINT: &str = "checkpoint";
pub(crate) const DENSE_STATES: &str = "checkpoint/dense.safetensors";
pub(crate) const CURSOR: &str = "checkpoint/cursor.json";
pub(crate) const WEIGHT: &str = "weight";
/// The tensor of the changed rows of a delta.
pub(crate) const KEYS: &str = "keys";

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
    pub training: Option<Training>,
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

/// The directory that `mkfs.ext4` makes at the root of a volume, which only root can read.
const LOST_AND_FOUND: &str = "lost+found";

/// The names of the models in a directory, sorted: each subdirectory that has a version, good or not, or that
/// cannot be read.
///
/// # Errors
/// [`StoreError`] when `dir` is missing, is not a directory, or cannot be read.
pub(crate) fn models(dir: &Path) -> Result<Vec<String>, StoreError> {
    let is_model = |name: &String| {
        let named = check_name("model", name).is_ok() && name != LOST_AND_FOUND;
        named
            && match versions(dir, name) {
                Ok(versions) => !versions.is_empty(),
                // A file, or a directory that was removed just now.
                Err(StoreError::NotADirectory { .. } | StoreError::MissingDirectory { .. }) => false,
                // Whoever opens it gets the reason, and the other models are not affected.
                Err(_) => true,
            }
    };
    let mut names: Vec<String> = entry_names(dir)?.into_iter().filter(is_model).collect();
    names.sort();
    Ok(names)
}

/// The version numbers of a model, ascending, good or not.
///
/// # Errors
/// [`StoreError`] when the directory of the model is missing or cannot be read.
pub(crate) fn versions(models: &Path, name: &str) -> Result<Vec<Version>, StoreError> {
    check_name("model", name)?;
    let names = entry_names(&models.join(name))?;
    let mut versions: Vec<Version> = names.iter().filter_map(|name| version_number(name)).collect();
    versions.sort();
    Ok(versions)
}

/// Opens a version after checking all of it, and all of the versions that it builds on.
///
/// # Errors
/// [`StoreError`] for the first bad file, in the order manifests, schema, dense, tables.
pub fn open(models: &Path, name: &str, version: Version, purpose: Purpose) -> Result<Opened, StoreError> {
    open_chain(models, name, version, purpose, &[])
}

/// Opens a version to serve it beside loaded ones. If it builds on one of them, or one of them on it, they
/// share their rows, and only the tables of later versions are read and checked.
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
    open_chain(models, name, version, Purpose::ServeFrom(memory), loaded)
}

fn open_chain(
    models: &Path,
    name: &str,
    version: Version,
    purpose: Purpose,
    loaded: &[&EmbeddingStore],
) -> Result<Opened, StoreError> {
    check_name("model", name)?;
    let mut chain = Chain::read(&models.join(name), version, loaded)?;
    let memory = match purpose {
        Purpose::ServeFrom(memory) => memory,
        Purpose::Serve | Purpose::Train => TableMemory::Mapped,
    };
    let location = TableLocation::choose(memory, chain.unread().iter().map(Link::table_bytes).sum());
    chain.links.iter_mut().for_each(|link| link.in_ram = location.in_ram);
    let (unread, shared) = (chain.unread(), chain.shared.as_ref());
    let Some(newest) = chain.links.last() else {
        // `read` returns the version itself at least.
        return Err(StoreError::MissingDirectory { path: models.join(name) });
    };
    let (model_toml, schema) = newest.schema()?;
    let dense = newest.dense()?;
    let trains = purpose == Purpose::Train;
    let dense_states = if trains { newest.dense_states()? } else { BTreeMap::new() };
    if let Some((base, of_base)) = shared.and_then(|store| Some((store.version, store.schema.as_ref()?))) {
        newest.check_same_schema(&schema, base, of_base)?;
    }
    for link in &chain.links[..chain.links.len() - 1] {
        newest.check_same_schema(&schema, link.version, &link.schema()?.1)?;
    }
    // Tables are checked in parallel. The error returned is that of the first bad table in schema order.
    let table = |(t, declared): (usize, &schema::Table)| {
        let shared = shared.and_then(|store| store.table(TableId(t as u32)));
        read_table(declared, shared, unread, purpose)
    };
    let tables: Vec<_> = schema.tables.par_iter().enumerate().map(table).collect();
    let tables = tables.into_iter().collect::<Result<_, _>>()?;
    let holds = shared.map_or(&[][..], |store| &store.links);
    let holds = holds.iter().cloned().chain(unread.iter().map(|link| link.hold.clone())).collect();
    let mut store = EmbeddingStore::new(version, tables);
    (store.links, store.merged) = (holds, shared.map_or(1, |store| store.merged));
    (store.on_disk, store.memory) = (shared.is_some_and(|store| store.on_disk), memory);
    store.schema = Some(schema.clone().into());
    let cursor = if trains { newest.cursor()? } else { None };
    location.log(name, version, shared.is_some());
    let newest = newest.manifest.clone();
    let (training, quality, metadata) = (newest.training, newest.quality, newest.metadata);
    Ok(Opened { schema, model_toml, dense, dense_states, store, training, quality, cursor, metadata })
}

/// The versions that a version builds on.
struct Chain {
    /// The rows of the oldest versions, if a loaded version has them. Without it, the first link is full.
    shared: Option<EmbeddingStore>,
    /// The versions after those, oldest first. The last is the version itself, also if `shared` has its rows.
    links: Vec<Link>,
}

impl Chain {
    fn read(model: &Path, version: Version, loaded: &[&EmbeddingStore]) -> Result<Self, StoreError> {
        let shared = |base: Base| {
            let mut shared = loaded.iter().map(|store| store.up_to(base));
            shared.find_map(Result::transpose).transpose()
        };
        let itself = Link::open(model.join(version.to_string()), version)?;
        let mut first = shared(itself.hold.base)?;
        let mut links = vec![itself];
        while first.is_none()
            && let Some(link) = links.last()
            && let Some(base) = link.manifest.base
        {
            let path = link.manifest_path();
            if base.version.checked_add(1) != Some(link.version.0) {
                return Err(StoreError::BaseNumber { path, version: link.version, got: base.version });
            }
            first = shared(base)?;
            if first.is_some() {
                break;
            }
            let number = Version(base.version);
            let next = Link::open(model.join(number.to_string()), number);
            let next = next.map_err(|source| {
                let (path, source) = (path.clone(), Box::new(source));
                StoreError::Base { path, base: number, source }
            })?;
            let Base { xxh3_128: got, .. } = next.hold.base;
            if got != base.xxh3_128 {
                return Err(StoreError::BaseDiffers { path, base: number, expected: base.xxh3_128, got });
            }
            links.push(next);
        }
        links.reverse();
        Ok(Self { shared: first, links })
    }

    /// The links whose rows are not shared.
    fn unread(&self) -> &[Link] {
        match (&self.shared, self.links.last()) {
            (Some(shared), Some(newest)) if shared.base() == Some(newest.hold.base) => &[],
            _ => &self.links,
        }
    }
}

/// The rows of a table: those of the first link or of the `shared` table, and then those of the deltas.
fn read_table(
    declared: &schema::Table,
    shared: Option<&Table>,
    links: &[Link],
    purpose: Purpose,
) -> Result<Table, StoreError> {
    let read = |purpose| -> Result<Vec<(Version, TableParts)>, StoreError> {
        let parts = links.iter().map(|link| Ok((link.version, link.table(declared, purpose)?)));
        let parts = parts.collect::<Result<Vec<_>, StoreError>>()?;
        // A delta that changed no row of the table says nothing about its states.
        Ok(parts.into_iter().filter(|(_, parts)| parts.rows() != Some(0)).collect())
    };
    let mut parts = read(purpose)?;
    // If some link has no checkpoint, training has only the served rows of the others.
    if parts.windows(2).any(|pair| kind(&pair[0].1) != kind(&pair[1].1)) {
        parts = read(Purpose::Serve)?;
    }
    let mut parts = parts.into_iter();
    let mut table = match shared {
        Some(shared) => shared.clone(),
        None => {
            let full = parts.next().and_then(|(_, TableParts { element, weight, states, .. })| {
                Table::from_parts(declared, element, weight, states)
            });
            // The reader has checked every shape.
            full.ok_or_else(|| StoreError::Tables { expected: 1, got: 0 })?
        }
    };
    let deltas = parts.filter_map(|(version, TableParts { keys, weight, states, .. })| {
        Some(DeltaRows { version, keys: keys?, weight, states })
    });
    table.add_deltas(deltas)?;
    Ok(table)
}

/// What the rows of all links of a chain have in common if they can be used together.
fn kind(parts: &TableParts) -> (crate::types::Element, Vec<(&str, usize)>) {
    (parts.element, parts.states.iter().map(|state| (state.name(), state.width())).collect())
}

/// Opens the highest good version. Each refused version is logged with its reason. `accept` can also refuse a
/// version, for reasons that the store cannot check, such as the shapes of dense weights.
///
/// # Errors
/// [`StoreError::NoGoodVersion`] with all refusals, or the error of reading the directory.
pub(crate) fn open_latest(
    models: &Path,
    name: &str,
    purpose: Purpose,
    accept: impl Fn(&Opened) -> Result<(), String>,
) -> Result<Latest, StoreError> {
    open_highest(models, name, &versions(models, name)?, purpose, accept)
}

/// Opens the highest good version for work whose result hides all others: training that continues from it, or
/// a full version with its contents. A higher version that only could not be read now is not passed over.
///
/// # Errors
/// As [`open_latest`], and that of such a version.
pub(crate) fn open_to_continue(models: &Path, name: &str, purpose: Purpose) -> Result<Opened, StoreError> {
    let Latest { opened, refused } = open_latest(models, name, purpose, |_| Ok(()))?;
    match refused.into_iter().find(|refusal| refusal.reason.may_pass()) {
        Some(Refusal { reason, .. }) => Err(reason),
        None => Ok(opened),
    }
}

/// As [`open_latest`], of these versions, ascending.
///
/// # Errors
/// [`StoreError::NoGoodVersion`] with all refusals.
pub(crate) fn open_highest(
    models: &Path,
    name: &str,
    versions: &[Version],
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

/// The path of a table's served file in its version.
pub(crate) fn table_file(table: &str) -> String {
    format!("{TABLES}/{table}.safetensors")
}

/// The path of a table's file in the checkpoint.
pub(crate) fn states_file(table: &str) -> String {
    format!("{CHECKPOINT}/{TABLES}/{table}.safetensors")
}

/// Parses the name of a version directory. Signs and leading zeros are refused, so each number has one name.
fn version_number(name: &str) -> Option<Version> {
    name.parse().ok().filter(|number: &u64| *number > 0 && number.to_string() == name).map(Version)
}

/// The names in a directory. Names that are not UTF-8 are left out, because models and versions have none.
fn entry_names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let at = |e| match require_dir(dir) {
        Ok(()) => StoreError::at(dir, e),
        Err(better) => better,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(at)? {
        names.extend(entry.map_err(at)?.file_name().into_string());
    }
    Ok(names)
}

pub(crate) fn require_dir(path: &Path) -> Result<(), StoreError> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(StoreError::NotADirectory { path: path.to_owned() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(StoreError::MissingDirectory { path: path.to_owned() })
        }
        Err(e) => Err(StoreError::at(path, e)),
    }
}
