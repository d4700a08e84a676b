use super::*;
use crate::trainer::pipeline::gpu::GradientSource;
use std::mem::offset_of;

#[test]
fn layouts_are_those_of_the_kernels() {
    assert_eq!((size_of::<RecordRun>(), offset_of!(RecordRun, words)), (32, 24));
    assert_eq!((size_of::<RecordArgs>(), offset_of!(RecordArgs, run_count)), (48, 40));
    assert_eq!((size_of::<UpdateTable>(), offset_of!(UpdateTable, lanes)), (32, 24));
    assert_eq!((size_of::<GradientSource>(), offset_of!(GradientSource, divisor)), (12, 8));
    assert_eq!((size_of::<UpdateArgs>(), offset_of!(UpdateArgs, second_share)), (96, 88));
}

#[test]
fn a_row_has_a_power_of_two_of_threads_up_to_a_warp() {
    assert_eq!([1, 2, 3, 16, 17, 32, 33, 128].map(lanes_of), [1, 2, 4, 16, 32, 32, 32, 32]);
}
