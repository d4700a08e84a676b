use super::*;
use crate::trainer::pipeline::gpu::Source;
use std::mem::offset_of;

#[test]
fn the_layouts_are_the_kernels() {
    assert_eq!((size_of::<RecordRun>(), offset_of!(RecordRun, words)), (32, 24));
    assert_eq!((size_of::<RecordArgs>(), offset_of!(RecordArgs, run_count)), (48, 40));
    assert_eq!((size_of::<UpdateTable>(), offset_of!(UpdateTable, lanes)), (32, 24));
    assert_eq!((size_of::<Source>(), offset_of!(Source, divisor)), (12, 8));
    assert_eq!((size_of::<UpdateArgs>(), offset_of!(UpdateArgs, second_share)), (96, 88));
}

#[test]
fn a_row_has_the_fewest_threads_that_its_elements_fill_and_no_more_than_a_warp() {
    assert_eq!([1, 2, 3, 16, 17, 32, 33, 128].map(lanes_of), [1, 2, 4, 16, 32, 32, 32, 32]);
}
