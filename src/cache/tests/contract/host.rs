//! Runs the cache contract on the cache of the host.

use crate::cache::{FlatCache, HostRows, Miss, NewRow, Query, Source};
use crate::types::Version;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

pub(crate) struct HostSubject {
    cache: Arc<FlatCache>,
    query: Query,
    /// For each table: how many [`InRam`] exist.
    in_ram: Arc<Vec<AtomicU64>>,
}

/// Allows pointers to the rows of a table while it exists.
struct InRam {
    right: Option<HostRows>,
    table: usize,
    in_ram: Arc<Vec<AtomicU64>>,
}

impl Drop for InRam {
    fn drop(&mut self) {
        drop(self.right.take());
        self.in_ram[self.table].fetch_sub(1, Ordering::AcqRel);
    }
}

impl Subject for HostSubject {
    fn embed(&mut self, world: &World, batch: &Batch, meanwhile: impl FnOnce()) -> Seen {
        let (pin, query) = (self.cache.pin(), &mut self.query);
        let version = pin.version().0;
        query.clear();
        let mut at = Vec::new();
        for lookup in &world.lookups {
            let rows = world.tables[lookup.table.index()].rows;
            let ids = batch.features[lookup.feature].ids.iter().copied();
            at.push(query.push(lookup.table, ids.filter(|&id| id < rows)).start);
        }
        let found = pin.lookup(query).unwrap();
        if !found.misses().is_empty() {
            meanwhile();
        }
        let fetched = found.misses().iter().map(Miss::row).collect();
        for row in found.misses().iter().chain(found.pointed()) {
            pin.insert(row, &world.row(row.table, row.id, version).unwrap()).unwrap();
        }
        // The row that the cache returns for each table and id.
        let mut rows = std::collections::HashMap::new();
        for (lookup, at) in world.lookups.iter().zip(at) {
            let shape = world.tables[lookup.table.index()];
            let ids = batch.features[lookup.feature].ids.iter().filter(|id| **id < shape.rows);
            for (i, &id) in ids.enumerate() {
                let stored = || world.row(lookup.table, id, version).unwrap();
                let row = match found.source(found.uniques()[at + i]) {
                    Source::Row(row) => row.to_vec(),
                    Source::Pointer(_) => {
                        let held = self.in_ram[lookup.table.index()].load(Ordering::Acquire);
                        assert!(held > 0, "a pointer was read after its table was withdrawn");
                        stored()
                    }
                    Source::Miss(_) => stored(),
                };
                rows.insert((lookup.table, id), row);
            }
        }
        let matrix = world.pooled(batch, |lookup, id| rows.get(&(lookup.table, id)).cloned());
        Seen { matrix, fetched, version }
    }

    fn another(&self, _: &World) -> Self {
        Self { cache: self.cache.clone(), query: Query::default(), in_ram: self.in_ram.clone() }
    }

    fn version(&self) -> u64 {
        self.cache.version().0
    }

    fn switch(&self, version: u64, changed: &[(TableId, u64, &[u8])]) -> Result<Switched, String> {
        self.cache
            .switch(Version(version), |_| changed.iter().copied().map(NewRow::of))
            .map_err(|error| error.to_string())
    }

    fn host_rows(&self, _: &World, table: TableId) -> Box<dyn Send> {
        self.in_ram[table.index()].fetch_add(1, Ordering::AcqRel);
        let right = Some(self.cache.host_rows(table).unwrap());
        Box::new(InRam { right, table: table.index(), in_ram: self.in_ram.clone() })
    }

    fn set_pointers(&self, capacity: u64) {
        self.cache.set_pointers(capacity);
    }

    fn observe(&self, ids: u64, elapsed: Duration) {
        self.cache.observe(ids, elapsed);
    }

    fn evict_step(&self) -> EvictStep {
        self.cache.evict_step()
    }

    fn settle(&self) {}

    fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    fn warm(&mut self, rows: &mut Rows) -> Result<Warmed, CacheError> {
        self.cache.warm(rows)
    }

    fn hot_rows(&mut self) -> Vec<RowId> {
        self.cache.hot_rows()
    }
}

fn on_host(world: &World) -> HostSubject {
    let cache = Arc::new(FlatCache::new(&world.shape(), &world.options).unwrap());
    let in_ram = world.tables.iter().map(|_| AtomicU64::new(0)).collect();
    HostSubject { cache, query: Query::default(), in_ram: Arc::new(in_ram) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn on_the_host_a_hit_is_the_row_inserted(
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 0usize..6000,
        draw in any::<u64>(),
    ) {
        let world = World::new(120, &dims, room).with_a_shared_feature();
        a_hit_is_the_row_inserted(on_host, &world, 40, draw);
    }

    #[test]
    fn on_the_host_a_hit_is_the_row_inserted_however_narrow_the_keys_are(
        bits in 4u32..12,
        dims in prop::collection::vec(1usize..40, 1..6),
        room in 0usize..6000,
        draw in any::<u64>(),
    ) {
        let world = World::new(120, &dims, room).with_a_shared_feature();
        a_hit_is_the_row_inserted(on_host, &narrow::keys(world, bits), 40, draw);
    }

    #[test]
    fn on_the_host_a_key_has_the_row_last_used(bits in 3u32..9, draw in any::<u64>()) {
        narrow::a_key_has_the_row_last_used(on_host, bits, draw);
    }

    #[test]
    fn on_the_host_whatever_happens_a_row_is_its_batchs_versions(
        world in any_world(),
        steps in any_steps(),
        draw in any::<u64>(),
    ) {
        whatever_happens_a_row_is_its_batchs_versions(on_host, &world, &steps, draw);
    }
}

macro_rules! on_the_host {
    ($($name:ident: $property:ident;)*) => {
        $(#[test]
        fn $name() {
            $property(on_host);
        })*
    };
}

#[test]
fn on_the_host_eviction_goes_to_the_low_watermark_and_takes_the_oldest() {
    for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![])] {
        eviction_goes_to_the_low_watermark_and_takes_the_oldest(on_host, eviction);
    }
}

on_the_host! {
    on_the_host_all_miss_all_hit_and_a_mixture: all_miss_all_hit_and_a_mixture;
    on_the_host_memory_passes_from_one_row_size_to_another: memory_passes_from_one_row_size_to_another;
    on_the_host_a_switch_carries_over_what_was_cached_and_keeps_the_rest_out:
        a_switch_carries_over_what_was_cached_and_keeps_the_rest_out;
    on_the_host_a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new:
        a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new;
    on_the_host_the_current_version_and_a_wrong_row_change_nothing:
        the_current_version_and_a_wrong_row_change_nothing;
    on_the_host_a_row_that_comes_twice_has_its_last_bytes: a_row_that_comes_twice_has_its_last_bytes;
    on_the_host_cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss:
        cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss;
    on_the_host_a_row_behind_a_pointer_is_admitted_again: a_row_behind_a_pointer_is_admitted_again;
    on_the_host_memory_is_given_up_after_the_batches_that_were_pointed_there:
        host_memory_is_released_after_the_batches_that_point_into_it;
    on_the_host_pointers_to_rows_that_changed_end_with_their_version:
        pointers_to_rows_that_changed_end_with_their_version;
    on_the_host_the_tuner_sets_how_many_pointers_there_are_by_what_batches_report:
        the_tuner_sets_how_many_pointers_there_are_by_what_batches_report;
}

#[test]
fn on_the_host_rows_that_share_a_key_in_a_batch_stay_separate() {
    narrow::rows_that_share_a_key_in_a_batch_stay_separate(on_host);
}

#[test]
fn on_the_host_rows_of_low_rank_leave_first() {
    warm::rows_of_low_rank_leave_first(on_host);
}

#[test]
fn on_the_host_a_row_is_as_old_as_its_last_use_but_for_a_few_batches() {
    warm::a_row_is_as_old_as_its_last_use_but_for_a_few_batches(on_host);
}

#[test]
fn on_the_host_hot_rows_are_those_in_the_cache_the_last_used_first() {
    warm::hot_rows_are_those_in_the_cache_the_last_used_first(on_host);
}

#[test]
fn on_the_host_warm_rows_are_found_whatever_the_admission_and_keep_their_order() {
    warm::warm_rows_are_found_whatever_the_admission_and_keep_their_order(on_host);
}

#[test]
fn on_the_host_warming_stops_at_the_high_watermark_and_keeps_the_hottest() {
    warm::warming_stops_at_the_high_watermark_and_keeps_the_hottest(on_host);
}

#[test]
fn on_the_host_the_coldest_of_the_warm_rows_leave_first() {
    warm::the_coldest_of_the_warm_rows_leave_first(on_host);
}

#[test]
fn on_the_host_a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused() {
    warm::a_row_that_is_there_keeps_its_place_and_a_wrong_one_is_refused(on_host);
}
