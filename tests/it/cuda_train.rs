//! The contract of `scratch_contract` on NVIDIA's driver: on a real GPU where there is one; and, with the feature cusim, on
//! the pretended driver, whose kernels the simulator executes (`cusim_kernels`).
#![cfg(target_os = "linux")]

use std::sync::Arc;

use flechette::device::cuda::Nvidia;

use crate::cuda_cache::on_every_gpu;
use crate::scratch_contract::{self as contract, KINDS};

on_every_gpu! {
    records_come_back_as_they_went: |driver: &Arc<Nvidia>| {
        (0..12).for_each(|seed| contract::records_come_back_as_they_went(driver, seed));
    };
    input_rows_are_pooled_as_on_the_host: |driver: &Arc<Nvidia>| {
        (0..12).for_each(|seed| contract::input_rows_are_pooled_as_on_the_host(driver, seed));
    };
    rows_are_updated_as_on_the_host: |driver: &Arc<Nvidia>| {
        for kind in KINDS {
            (0..12).for_each(|seed| contract::rows_are_updated_as_on_the_host(driver, kind, seed));
        }
    };
    what_a_kernel_could_not_do_is_refused_by_name: |driver: &Arc<Nvidia>| {
        contract::what_a_kernel_could_not_do_is_refused_by_name(driver);
    };
}
