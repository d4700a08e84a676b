//! Taking over another version while batches run: a newer one, or an older one again.
//!
//! The next version is opened and checked before. A switch adds it to the versions in use, switches the
//! cache, and removes the old version (`versions`). No batch waits for any of this. The switch itself waits
//! for batches of the old version.
//!
//! **The cache** must not return an old row to a batch of the new version. If the rows that changed are not
//! known ([`Changes::Unknown`]), the bytes of every cached row are compared between both versions. Changed
//! rows, the hottest first, get their new bytes, up to `cache.switch_bytes`; the others are dropped. The pool
//! may have no room for old and new bytes at once, so what found no room is filled in after the old rows have
//! left.
//!
//! A device that fails meanwhile is abandoned, and the host takes over.

use std::time::{Duration, Instant};

use super::versions::{LoadedVersion, SharedVersion};
use super::{Engine, LookupTier, WARM_CHUNK, read_weights};
use crate::cache::{CacheError, FlatCache, NewRow, Switched, WarmRow};
use crate::mem::prefetch::prefetch;
use crate::model::WeightsError;
use crate::pace;
use crate::store::{EmbeddingStore, LastDeltaRows, Opened};
use crate::sync::{EvenPoisoned, wait_until};
use crate::types::{RowId, Version};

/// How long a switch waits for the last batch of the old version, so that this thread, and not a batch,
/// releases the old version's memory.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Changed rows that are looked for at a time, so that their memory is prefetched together.
pub(crate) const KNOWN_CHUNK: usize = 256;

/// Which rows may differ between the served version and the next one.
pub(crate) enum Changes {
    /// Any.
    Unknown,
    /// No others than these.
    Rows(Vec<RowId>),
}

/// A version to take over.
pub(crate) struct NextVersion {
    /// What [`Engine::accept`] returned for it.
    pub version: SharedVersion,
    pub changes: Changes,
    /// With [`Changes::Unknown`]: most bytes of changed rows that stay cached (`cache.switch_bytes`).
    pub switch_bytes: u64,
    /// Whether another engine goes on with the old version. Otherwise the switch waits until it is released.
    pub old_stays: bool,
}

/// What a switch has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SwitchReport {
    pub from: Version,
    pub to: Version,
    /// Cached rows that changed and are cached with their new bytes.
    pub carried: u64,
    /// Cached rows that changed and are no longer cached.
    pub dropped: u64,
}

/// Why a version cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SwitchError {
    #[error("version {0}: expected another one than the served version")]
    Current(Version),
    #[error(
        "not the schema of the served version: {0}; a restart, or unloading and loading the model, \
         serves it if stable names it"
    )]
    Schema(String),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("cache: {0}")]
    Cache(#[from] CacheError),
}

impl Engine {
    /// Checks an opened version of the engine's model and prepares it for this engine and for others that
    /// share it.
    ///
    /// # Errors
    /// [`SwitchError`].
    pub(crate) fn accept(&self, opened: Opened) -> Result<SharedVersion, SwitchError> {
        self.check_schema(&opened)?;
        let weights = read_weights(&self.model, &opened)?;
        Ok(LoadedVersion::new(opened, weights).1)
    }

    /// Checks that an opened version has the schema of this engine.
    ///
    /// # Errors
    /// [`SwitchError::Schema`].
    pub(crate) fn check_schema(&self, opened: &Opened) -> Result<(), SwitchError> {
        let difference = self.schema.first_difference(&opened.schema);
        difference.map_or(Ok(()), |difference| Err(SwitchError::Schema(difference)))
    }

    /// The version that later batches use.
    pub(crate) fn served(&self) -> SharedVersion {
        self.versions.current()
    }

    /// Counts a version that was not taken over.
    pub(crate) fn count_refused(&self) {
        self.metrics.switches.refused.increment(1);
    }

    /// Exports how many versions are refused now that are newer than the latest loaded one.
    pub(crate) fn set_refused_now(&self, versions: usize) {
        self.metrics.switches.refused_now.set(versions as f64);
    }

    /// Takes over a version that [`Self::accept`] has accepted: later batches use it. Must not be called
    /// on a request's path.
    ///
    /// # Errors
    /// [`SwitchError`]. Then the served version goes on.
    pub(crate) fn switch(&self, next: NextVersion) -> Result<SwitchReport, SwitchError> {
        let _one_at_a_time = self.switching.lock().even_poisoned();
        let started = Instant::now();
        let NextVersion { version: new, changes, switch_bytes, old_stays } = next;
        let (from, to) = (self.version(), new.version());
        if from == to {
            return Err(SwitchError::Current(to));
        }
        pace::with_locks(|| self.versions.begin(to, new.clone()));
        let old = self.versions.current();
        let (last_delta, offered) = (LastDeltaRows::new(&new.store), Vec::new());
        let mut rows = NextRows { old: &old, new: &new, left: switch_bytes, last_delta, offered };
        let switched = match self.switch_cache(to, &changes, &mut rows) {
            Ok(switched) => switched,
            Err(error) => {
                pace::with_locks(|| self.versions.give_up());
                return Err(error.into());
            }
        };
        let offered = std::mem::take(&mut rows.offered);
        let refilled = pace::with_locks(|| {
            self.versions.end();
            self.refill(switched, offered)
        });
        let carried = switched.carried + refilled;
        let taken = SwitchReport { from, to, carried, dropped: switched.changed.saturating_sub(carried) };
        self.metrics.version.set(to.0 as f64);
        let metrics = &self.metrics.switches;
        metrics.done.increment(1);
        metrics.seconds.record(started.elapsed());
        metrics.carried.increment(taken.carried);
        metrics.dropped.increment(taken.dropped);
        if !old_stays {
            wait_for_last(old);
        }
        Ok(taken)
    }

    fn switch_cache<'r>(
        &self,
        to: Version,
        changes: &Changes,
        rows: &mut NextRows<'r>,
    ) -> Result<Switched, CacheError> {
        match &self.lookup_tier {
            LookupTier::Store => Ok(Switched::default()),
            LookupTier::Host(cache) => switch_host(cache, to, changes, rows),
            LookupTier::Gpu(tier) => tier.switch(to, changes, rows),
        }
    }

    /// Fills the cache with changed rows that found no room while the old rows were still cached. Returns how
    /// many.
    fn refill(&self, switched: Switched, offered: Vec<NewRow<'_>>) -> u64 {
        if switched.carried >= offered.len() as u64 {
            return 0;
        }
        let rows =
            offered.into_iter().filter_map(|NewRow { row, bytes }| Some(WarmRow { row, bytes: bytes? }));
        self.lookup_tier.warm(pace::rested(rows)).stored
    }
}

fn switch_host(
    cache: &FlatCache,
    to: Version,
    changes: &Changes,
    rows: &mut NextRows<'_>,
) -> Result<Switched, CacheError> {
    match changes {
        Changes::Unknown => cache.switch(to, |cached| rows.compared(&cached.rows())),
        Changes::Rows(changed) => {
            let chunks = changed.chunks(KNOWN_CHUNK);
            cache.switch(to, |cached| chunks.flat_map(move |chunk| rows.known(&cached.linked(chunk))))
        }
    }
}

/// The rows of the next version that a cache takes over.
pub(crate) struct NextRows<'r> {
    old: &'r LoadedVersion,
    new: &'r LoadedVersion,
    /// Bytes of changed rows that may still be taken over.
    left: u64,
    last_delta: LastDeltaRows<'r>,
    /// The changed rows that were given to the cache with their bytes, if it lists its rows.
    offered: Vec<NewRow<'r>>,
}

impl<'r> NextRows<'r> {
    /// Those of the cached rows that differ between the versions. `cached` begins with the hottest.
    pub(crate) fn compared(&mut self, cached: &[RowId]) -> Vec<NewRow<'r>> {
        let mut changed = Vec::new();
        for chunk in cached.chunks(WARM_CHUNK) {
            pace::rest();
            self.old.store.fetch(chunk.iter().copied());
            self.new.store.fetch(chunk.iter().copied());
            self.old.store.prefetch(chunk);
            self.new.store.prefetch(chunk);
            for &row in chunk {
                let [old, new] =
                    [self.old, self.new].map(|version| version.store.row(row.table(), row.row()));
                if old != new {
                    changed.push(NewRow { row, bytes: new.filter(|bytes| self.allows(bytes.len())) });
                }
            }
        }
        self.offered = changed.iter().filter(|new| new.bytes.is_some()).copied().collect();
        changed
    }

    /// Rows that are known to have changed. The cache copies only the bytes of those that it holds, as far as
    /// it has room.
    pub(crate) fn known(&mut self, changed: &[RowId]) -> Vec<NewRow<'r>> {
        let mut new: Vec<_> =
            changed.iter().map(|&row| NewRow { row, bytes: self.last_delta.row(row) }).collect();
        new.iter().filter_map(|new| new.bytes).for_each(prefetch);
        // Those of earlier deltas, and those that an older version has in its base.
        let others = new.iter().filter(|new| new.bytes.is_none());
        self.new.store.prefetch(&others.map(|new| new.row).collect::<Vec<_>>());
        for NewRow { row, bytes } in &mut new {
            *bytes = bytes.or_else(|| self.new.store.row(row.table(), row.row()));
        }
        new
    }

    /// Counts a row towards `cache.switch_bytes`. Returns whether it fits.
    fn allows(&mut self, bytes: usize) -> bool {
        let left = self.left.checked_sub(bytes as u64);
        self.left = left.unwrap_or(0);
        left.is_some()
    }

    /// The next version's rows.
    pub(crate) fn store(&self) -> &'r EmbeddingStore {
        &self.new.store
    }
}

/// Waits until no batch uses a version, then releases it. If that takes too long, the batch releases it.
fn wait_for_last(old: SharedVersion) {
    if !wait_until(MAX_WAIT, || SharedVersion::strong_count(&old) == 1) {
        let (version, seconds) = (old.version().0, MAX_WAIT.as_secs());
        tracing::warn!(version, "a batch of the old version has not ended after {seconds} s");
    }
}
