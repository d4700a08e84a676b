//! Training on a CUDA device in the simulator: the contracts of `contract` and `pipeline/tests/contract`
//! under many schedules.

use std::sync::Arc;

use crate::device::cusim::SimDriver;
use crate::trainer::ScratchpadSize;
use crate::trainer::optim::OptimizerKind;

use super::contract::{self as contract, KINDS};
use crate::trainer::pipeline::tests::contract::{self as pipeline, case};

/// Seeds 0 to 23, each of which gives another schedule. Seed 0 has no preemption.
const SEEDS: u64 = 24;

fn device(seed: u64) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(seed, 1 << 30).unwrap())
}

#[test]
fn records_come_back_unchanged_under_any_schedule() {
    for seed in 0..SEEDS {
        contract::records_come_back_unchanged(&device(seed), seed);
    }
}

#[test]
fn input_rows_are_pooled_as_on_the_host_under_any_schedule() {
    for seed in 0..SEEDS {
        contract::input_rows_are_pooled_as_on_the_host(&device(seed), seed);
    }
}

#[test]
fn rows_are_updated_as_on_the_host_under_any_schedule() {
    for kind in KINDS {
        for seed in 0..SEEDS {
            contract::rows_are_updated_as_on_the_host(&device(seed), kind, seed);
        }
    }
}

#[test]
fn invalid_arguments_are_refused_with_a_message() {
    contract::invalid_arguments_are_refused_with_a_message(&device(1));
}

#[test]
fn a_step_takes_five_operations_whatever_the_table_count() {
    contract::a_step_takes_five_operations_whatever_the_table_count(&device(1));
}

#[test]
fn a_scratchpad_of_any_size_trains_the_sequential_bytes() {
    for (seed, kind) in (0..).zip(KINDS) {
        pipeline::a_scratchpad_of_any_size_trains_the_sequential_bytes(&device(seed), kind, seed);
    }
}

#[test]
fn a_window_that_does_not_fit_trains_the_sequential_bytes() {
    for (seed, kind) in (10..).zip(KINDS) {
        pipeline::a_window_that_does_not_fit_trains_the_sequential_bytes(&device(seed), kind, seed);
    }
}

#[test]
fn a_batch_that_is_split_trains_the_sequential_bytes() {
    for (seed, kind) in (20..).zip(KINDS) {
        pipeline::a_batch_that_is_split_trains_the_sequential_bytes(&device(seed), kind, seed);
    }
}

#[test]
fn small_staging_and_buffers_train_the_sequential_bytes() {
    for (seed, kind) in (30..).zip(KINDS) {
        pipeline::small_staging_and_buffers_train_the_sequential_bytes(&device(seed), kind, seed);
    }
}

#[test]
fn any_settings_train_the_sequential_bytes() {
    for seed in 0..SEEDS {
        pipeline::any_settings_train_the_sequential_bytes(&device(seed), seed);
    }
}

#[test]
fn a_device_without_the_memory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let driver = Arc::new(SimDriver::new(0, 1000).unwrap());
    let case = case(OptimizerKind::Adam, ScratchpadSize::Fraction(1.0));
    let error = case.start(&driver, dir.path()).err().unwrap().to_string();
    assert!(error.starts_with("device memory: ") && error.contains("1000 bytes are free"), "{error}");
}

#[test]
fn several_replicas_on_a_device_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut case = case(OptimizerKind::Sgd, ScratchpadSize::Fraction(1.0));
    case.settings.replicas = 2;
    let error = case.start(&device(0), dir.path()).err().unwrap();
    assert_eq!(error.to_string(), "replicas: expected 1 to 1, got 2");
}

#[test]
fn training_frees_all_its_memory() {
    let driver = device(5);
    let case = case(OptimizerKind::Sgd, ScratchpadSize::Fraction(0.7));
    case.check_on(&driver);
    assert_eq!(driver.used_bytes(), 0);
}
