//! The contract of a cache on NVIDIA's driver: on a real GPU if there is one and, with the feature
//! cusim, on the stub driver (`stub_driver`), whose kernels the simulator executes.

use std::sync::Arc;

use crate::cache::EvictionOption;
use crate::device::cuda::Nvidia;
use crate::device::cuda::tests::every_gpu::on_every_gpu;
use crate::mem::mix64;

use super::subject as device;
use crate::cache::tests::contract::{self, World, narrow, warm};

/// A closure that checks a property of the contract with a subject on the driver.
macro_rules! held {
    ($property:path) => {
        |driver: &Arc<Nvidia>| $property(|world: &World| device::on(driver, world))
    };
}

on_every_gpu! {
    all_miss_all_hit_and_a_mixture: held!(contract::all_miss_all_hit_and_a_mixture);
    memory_passes_from_one_row_size_to_another: held!(contract::memory_passes_from_one_row_size_to_another);
    a_switch_carries_over_what_was_cached_and_keeps_the_rest_out:
        held!(contract::a_switch_carries_over_what_was_cached_and_keeps_the_rest_out);
    a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new:
        held!(contract::a_batch_of_the_old_version_reads_old_rows_beside_one_of_the_new);
    the_current_version_and_a_wrong_row_change_nothing:
        held!(contract::the_current_version_and_a_wrong_row_change_nothing);
    a_row_that_comes_twice_has_its_last_bytes: held!(contract::a_row_that_comes_twice_has_its_last_bytes);
    cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss:
        held!(contract::cold_rows_become_pointers_up_to_the_capacity_and_no_longer_miss);
    a_row_behind_a_pointer_is_admitted_again: held!(contract::a_row_behind_a_pointer_is_admitted_again);
    host_memory_is_released_after_the_batches_that_point_into_it:
        held!(contract::host_memory_is_released_after_the_batches_that_point_into_it);
    pointers_to_rows_that_changed_end_with_their_version:
        held!(contract::pointers_to_rows_that_changed_end_with_their_version);
    rows_that_share_a_key_in_a_batch_stay_separate:
        held!(narrow::rows_that_share_a_key_in_a_batch_stay_separate);
    rows_of_low_rank_leave_first: held!(warm::rows_of_low_rank_leave_first);
    hot_rows_are_those_in_the_cache_the_last_used_first:
        held!(warm::hot_rows_are_those_in_the_cache_the_last_used_first);
    warm_rows_are_found_whatever_the_admission_and_keep_their_order:
        held!(warm::warm_rows_are_found_whatever_the_admission_and_keep_their_order);
    warming_stops_at_the_high_watermark_and_keeps_the_hottest:
        held!(warm::warming_stops_at_the_high_watermark_and_keeps_the_hottest);
    a_batch_of_hits_takes_three_operations_whatever_the_table_count:
        held!(device::a_batch_of_hits_takes_three_operations_whatever_the_table_count);
    a_batch_takes_one_copy: held!(device::a_batch_takes_one_copy);
    eviction_goes_to_the_low_watermark_and_takes_the_oldest: |driver: &Arc<Nvidia>| {
        for eviction in [EvictionOption::Lru, EvictionOption::Lfu(vec![])] {
            let new = |world: &World| device::on(driver, world);
            contract::eviction_goes_to_the_low_watermark_and_takes_the_oldest(new, eviction);
        }
    };
    a_hit_is_the_row_inserted: |driver: &Arc<Nvidia>| {
        for (draw, bits) in (0..24).zip([64, 9, 64, 5].into_iter().cycle()) {
            let dim = |t| 1 + (mix64(draw << 8 | t) % 39) as usize;
            let dims: Vec<usize> = (0..1 + draw % 5).map(dim).collect();
            let world = World::new(120, &dims, (mix64(draw) % 6000) as usize).with_a_shared_feature();
            let world = narrow::keys(world, bits);
            contract::a_hit_is_the_row_inserted(|world| device::on(driver, world), &world, 16, mix64(draw));
        }
    };
    whatever_happens_a_row_is_its_batchs_versions: |driver: &Arc<Nvidia>| {
        for (draw, bits) in (100..124).zip([64, 9, 64, 5].into_iter().cycle()) {
            let world = World::new(120, &[7, 3], 3000).with_a_shared_feature().with_pointers(draw);
            let world = narrow::keys(world, bits);
            let steps: Vec<u8> = (0..40).map(|i| (mix64(draw << 8 | i) % 20) as u8).collect();
            let new = |world: &World| device::on(driver, world);
            contract::whatever_happens_a_row_is_its_batchs_versions(new, &world, &steps, mix64(draw));
        }
    };
}
