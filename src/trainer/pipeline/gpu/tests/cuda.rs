//! The contracts of `contract` and `pipeline/tests/contract` on NVIDIA's driver: on a real GPU if there is
//! one and, with the feature cusim, on the stub driver (`stub_driver`), whose kernels the simulator executes
//! (`device/cusim/stub.rs`).

use std::sync::Arc;

use crate::device::cuda::Nvidia;

use super::contract::{self as contract, KINDS};
use crate::device::cuda::tests::every_gpu::on_every_gpu;
use crate::trainer::pipeline::tests::contract as pipeline;

on_every_gpu! {
    records_come_back_unchanged: |driver: &Arc<Nvidia>| {
        (0..12).for_each(|seed| contract::records_come_back_unchanged(driver, seed));
    };
    input_rows_are_pooled_as_on_the_host: |driver: &Arc<Nvidia>| {
        (0..12).for_each(|seed| contract::input_rows_are_pooled_as_on_the_host(driver, seed));
    };
    rows_are_updated_as_on_the_host: |driver: &Arc<Nvidia>| {
        for kind in KINDS {
            (0..12).for_each(|seed| contract::rows_are_updated_as_on_the_host(driver, kind, seed));
        }
    };
    invalid_arguments_are_refused_with_a_message: |driver: &Arc<Nvidia>| {
        contract::invalid_arguments_are_refused_with_a_message(driver);
    };
    a_step_takes_five_operations_whatever_the_table_count: |driver: &Arc<Nvidia>| {
        contract::a_step_takes_five_operations_whatever_the_table_count(driver);
    };
    any_settings_train_the_sequential_bytes: |driver: &Arc<Nvidia>| {
        (0..12).for_each(|seed| pipeline::any_settings_train_the_sequential_bytes(driver, seed));
    };
    a_pipeline_trains_the_sequential_bytes: |driver: &Arc<Nvidia>| {
        for (seed, kind) in (0..).zip(KINDS) {
            pipeline::a_scratchpad_of_any_size_trains_the_sequential_bytes(driver, kind, seed);
            pipeline::a_window_that_does_not_fit_trains_the_sequential_bytes(driver, kind, seed);
            pipeline::a_batch_that_is_split_trains_the_sequential_bytes(driver, kind, seed);
            pipeline::small_staging_and_buffers_train_the_sequential_bytes(driver, kind, seed);
        }
    };
}

/// After a device error, no thread waits forever, and training returns the device's error.
#[cfg(feature = "cusim")]
#[test]
fn a_device_error_ends_the_training() {
    use std::sync::atomic::Ordering;

    use crate::trainer::{ScratchpadSize, TrainError};

    use crate::device::cusim::stub::{LAUNCHES_LEFT, execute_kernels};
    use crate::stub_driver::Machine;

    // A process cannot use a device after a final error, so each case has its own child.
    for launches in ["0", "1", "5", "20"] {
        let ran = Machine::whole().with_setting("LAUNCHES", launches).runs(|_| {
            let launches: i64 = std::env::var("PRETEND_LAUNCHES").unwrap().parse().unwrap();
            execute_kernels();
            LAUNCHES_LEFT.store(launches, Ordering::SeqCst);
            let case = pipeline::case(KINDS[0], ScratchpadSize::Fraction(0.6));
            let dir = tempfile::tempdir().unwrap();
            let (mut network, mut pipeline) =
                case.start(&crate::device::cuda::tests::every_gpu::nvidia(), dir.path()).unwrap();
            let failed = case.run(&mut network, &mut pipeline).err().unwrap();
            assert!(matches!(failed, TrainError::Device(_)), "{failed}");
            assert!(failed.to_string().contains("is final"), "{failed}");
        });
        if ran.is_none() {
            return;
        }
    }
}
