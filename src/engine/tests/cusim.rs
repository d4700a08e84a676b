//! The tests of `engine/tests.rs` with a cache on a device in the simulator, and a device that fails.

use super::*;
use crate::device::cusim::SimDriver;
use crate::engine::gpu::GpuTierOptions;

/// A tier whose device has `memory` bytes.
fn device(world: &World, fraction: f64, memory: u64) -> (Arc<SimDriver>, LookupTier) {
    let driver = Arc::new(SimDriver::new(3, memory).unwrap());
    let tier = GpuTierOptions {
        schema: &world.schema,
        cache_shape: &world.shape(fraction),
        cache_options: &options(),
        contexts: 2,
        max_samples: 64,
        staging_bytes: None,
    };
    let tier = GpuLookupTier::new(driver.clone(), &tier).unwrap();
    (driver, LookupTier::Gpu(tier))
}

fn gpu(engine: &Engine) -> &GpuLookupTier {
    match &engine.lookup_tier {
        LookupTier::Gpu(tier) => tier,
        _ => panic!("the engine has a device"),
    }
}

#[test]
fn every_answer_is_its_versions_with_a_cache_on_a_device() {
    for (fraction, writer) in
        [(0.05, Writer::Everything), (1.0, Writer::Everything), (0.3, Writer::FivePercent)]
    {
        every_answer_is_its_versions(writer, false, |world| device(world, fraction, 1 << 30).1);
    }
    every_answer_is_its_versions(Writer::FivePercent, true, |world| device(world, 1.0, 1 << 30).1);
}

#[test]
fn batches_during_switches_use_one_version_with_a_cache_on_a_device() {
    batches_during_switches_use_one_version(|world| device(world, 0.3, 1 << 30).1);
}

#[test]
fn a_device_that_fails_during_a_switch_is_abandoned_and_the_new_version_serves() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    let needed = device(&world, 0.3, 1 << 30).0.used_bytes();
    // There is no room for the overlay.
    let (_, tier) = device(&world, 0.3, needed + 64);
    let engine = world.engine(1, tier);
    world.check_all(&engine, 1, 0..6);
    assert!(!gpu(&engine).is_lost());
    world.publish();
    world.switch(&engine, 2, Changes::Unknown);
    assert!(gpu(&engine).is_lost());
    world.check_all(&engine, 2, 0..6);
}
