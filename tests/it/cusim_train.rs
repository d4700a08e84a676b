//! A trainer's scratchpad on a CUDA device, its kernels executed by the simulator: the contract of `scratch_contract` under
//! many schedules.

use std::sync::Arc;

use flechette::device::cusim::SimDriver;

use crate::scratch_contract::{self as contract, KINDS};

/// Schedules: none first, in which streams run in turn.
const SEEDS: u64 = 24;

fn device(seed: u64) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(seed, 1 << 30).unwrap())
}

#[test]
fn records_come_back_as_they_went_under_any_schedule() {
    for seed in 0..SEEDS {
        contract::records_come_back_as_they_went(&device(seed), seed);
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
fn what_a_kernel_could_not_do_is_refused_by_name() {
    contract::what_a_kernel_could_not_do_is_refused_by_name(&device(1));
}
