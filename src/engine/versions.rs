//! The versions that batches use: the current one and, during a switch, the next one.
//!
//! A batch takes everything that belongs to a version (dense weights, rows) as one [`LoadedVersion`], and
//! keeps it until it ends. With a cache, the version of the batch's pin decides which one it takes: the rows
//! that the batch finds in the cache are of that version. Without a cache it takes the current one.
//!
//! **Why the version of a pin is always here.** A switch adds the next version before the cache makes it
//! current. It removes the old one after the cache has waited for all batches with a pin of the old version.
//!
//! A version's memory and its files are released with the last reference to it. Several engines may share it.

use std::fs::File;
use std::time::Instant;

use crate::model::Weights;
use crate::schema::Schema;
use crate::store::{EmbeddingStore, Opened};
use crate::sync::{Arc, EvenPoisoned, RwLock};
use crate::types::Version;

/// A version, ready to score.
pub(crate) struct LoadedVersion {
    pub weights: Weights<f32>,
    pub store: EmbeddingStore,
    /// When its last batch was trained, in milliseconds since 1970, if it says so.
    pub trained_unix_ms: Option<u64>,
    /// When it was loaded.
    pub loaded: Instant,
    /// Shows `flechette versions` that the version is served.
    _mark: Option<File>,
}

/// A loaded version, which the engines that use it share.
pub(crate) type SharedVersion = Arc<LoadedVersion>;

impl LoadedVersion {
    /// An opened version with its weights, laid out for the model. Also returns its schema.
    pub(crate) fn new(opened: Opened, weights: Weights<f32>) -> (Schema, SharedVersion) {
        let Opened { schema, store, training, .. } = opened;
        let trained_unix_ms = training.map(|training| training.last_batch_unix_ms);
        let (loaded, mark) = (Instant::now(), store.mark_served());
        (schema, Arc::new(Self { weights, store, trained_unix_ms, loaded, _mark: mark }))
    }

    /// The number of the version.
    pub(crate) fn version(&self) -> Version {
        self.store.version()
    }
}

/// The versions that are in use. `T` is [`LoadedVersion`], or what a model checker puts in its place.
pub(crate) struct Versions<T>(RwLock<InUse<T>>);

struct InUse<T> {
    current: Numbered<T>,
    /// Only during a switch.
    next: Option<Numbered<T>>,
}

/// A version with its number.
struct Numbered<T> {
    version: Version,
    parts: Arc<T>,
}

impl<T> Versions<T> {
    pub(crate) fn new(version: Version, parts: Arc<T>) -> Self {
        let current = Numbered { version, parts };
        Self(RwLock::new(InUse { current, next: None }))
    }

    /// The number of the current version.
    pub(crate) fn version(&self) -> Version {
        self.read(|in_use| in_use.current.version)
    }

    /// The current version.
    pub(crate) fn current(&self) -> Arc<T> {
        self.read(|in_use| in_use.current.parts.clone())
    }

    /// The version with this number; `None` if it is not in use. The caller has a pin of this version.
    pub(crate) fn of(&self, version: Version) -> Option<Arc<T>> {
        self.read(|in_use| {
            let mut both = std::iter::once(&in_use.current).chain(&in_use.next);
            both.find(|numbered| numbered.version == version).map(|numbered| numbered.parts.clone())
        })
    }

    /// Begins a switch: batches may use the next version.
    pub(crate) fn begin(&self, version: Version, parts: Arc<T>) {
        self.write(|in_use| in_use.next = Some(Numbered { version, parts }));
    }

    /// Ends a switch: the next version is the current one. Returns the previous version, which only batches
    /// that have it already still use. `None` if no switch has begun.
    pub(crate) fn end(&self) -> Option<Arc<T>> {
        self.write(|in_use| {
            let next = in_use.next.take()?;
            Some(std::mem::replace(&mut in_use.current, next).parts)
        })
    }

    /// Ends a switch that has failed: the current version stays.
    pub(crate) fn give_up(&self) {
        self.write(|in_use| in_use.next = None);
    }

    fn read<R>(&self, read: impl FnOnce(&InUse<T>) -> R) -> R {
        read(&self.0.read().even_poisoned())
    }

    fn write<R>(&self, write: impl FnOnce(&mut InUse<T>) -> R) -> R {
        write(&mut self.0.write().even_poisoned())
    }
}

#[cfg(test)]
#[cfg(flechette_loom)]
mod models;
