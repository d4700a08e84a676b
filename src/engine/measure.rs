//! The metrics of an engine that are computed when they are requested: counts of the cache, the state of the
//! device, and the age of the version.

use super::{Engine, LookupTier};
use crate::sync::EvenPoisoned;
use crate::types::unix_ms;

impl Engine {
    /// Updates the metrics from the counts of the cache and the state of the device.
    pub(super) fn export_metrics(&self) {
        let current = self.versions.current();
        self.metrics.switches.age_seconds.set(current.loaded.elapsed().as_secs_f64());
        self.metrics.switches.freshness_seconds.set(freshness(current.trained_unix_ms));
        let rows = current.store.row_memory();
        self.metrics.store.ram_bytes.set(rows.ram as f64);
        self.metrics.store.mapped_bytes.set(rows.mapped as f64);
        drop(current);
        if let LookupTier::Gpu(tier) = &self.lookup_tier {
            let bytes = tier.context_bytes();
            self.metrics.device.lost.set(f64::from(tier.is_lost()));
            self.metrics.device.pinned_bytes.set(bytes.pinned as f64);
            self.metrics.device.worker_bytes.set(bytes.device as f64);
        }
        let mut counted = self.counted.lock().even_poisoned();
        let Some(now) = self.cache_stats() else { return };
        let zero = Default::default();
        for (t, table) in self.metrics.tables.iter().enumerate() {
            let (now, before) = (now.tables[t], counted.tables.get(t).copied().unwrap_or(zero));
            table.hits.increment(now.hits - before.hits);
            table.misses.increment(now.misses - before.misses);
            table.evictions.increment(now.evictions - before.evictions);
            table.pointed.increment(now.pointed - before.pointed);
            table.collisions.increment(now.collisions - before.collisions);
        }
        let total = &self.metrics.cache;
        total.inserted.increment(now.inserted - counted.inserted);
        total.not_admitted.increment(now.not_admitted - counted.not_admitted);
        total.rejected.increment(now.rejected_full - counted.rejected_full);
        total.used_bytes.set(now.pool_used_bytes as f64);
        total.capacity_bytes.set(now.total_bytes as f64);
        total.pool_bytes.set(now.pool_bytes as f64);
        total.entries.set(now.entries as f64);
        total.entries_max.set(now.entry_capacity as f64);
        total.pointers.set(now.pointers as f64);
        *counted = now;
    }
}

/// Seconds since a time in milliseconds since 1970; NaN if it is not known. 0 if the clock was set back.
pub(super) fn freshness(then: Option<u64>) -> f64 {
    then.map_or(f64::NAN, |then| unix_ms().saturating_sub(then) as f64 / 1e3)
}
