use super::*;
use std::mem::offset_of;

#[test]
fn argument_layouts_match_the_kernels() {
    assert_eq!((size_of::<ProbeColumn>(), offset_of!(ProbeColumn, row_words)), (32, 28));
    assert_eq!((size_of::<NarrowColumn>(), offset_of!(NarrowColumn, tagged)), (16, 12));
    assert_eq!((size_of::<Changed>(), offset_of!(Changed, location)), (16, 8));
    assert_eq!((size_of::<ProbeArgs>(), offset_of!(ProbeArgs, scratch_mask)), (144, 136));
    assert_eq!((size_of::<CopyArgs>(), offset_of!(CopyArgs, capacity)), (72, 68));
    assert_eq!((size_of::<ReplaceJob>(), offset_of!(ReplaceJob, older)), (48, 40));
    assert_eq!((size_of::<Outcome>(), offset_of!(Outcome, link)), (24, 16));
    assert_eq!((size_of::<ReplaceArgs>(), offset_of!(ReplaceArgs, may_replace)), (56, 52));
    assert_eq!((size_of::<Listed>(), offset_of!(Listed, age)), (32, 24));
    assert_eq!((size_of::<ListArgs>(), offset_of!(ListArgs, drawn)), (64, 60));
    assert_eq!((size_of::<SampleArgs>(), offset_of!(SampleArgs, pointers)), (48, 44));
    assert_eq!((size_of::<Evicted>(), offset_of!(Evicted, moved)), (24, 16));
    assert_eq!((size_of::<Pointable>(), offset_of!(Pointable, words)), (32, 24));
    assert_eq!((size_of::<SweepArgs>(), offset_of!(SweepArgs, pointers)), (120, 112));
}
