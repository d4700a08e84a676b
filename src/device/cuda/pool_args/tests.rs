use super::*;
use std::mem::offset_of;

#[test]
fn sizes_and_offsets_are_those_of_the_kernels() {
    assert_eq!((size_of::<BatchHeader>(), offset_of!(BatchHeader, samples)), (32, 28));
    assert_eq!((size_of::<BatchState>(), offset_of!(BatchState, copied)), (24, 16));
    assert_eq!((size_of::<PoolArgs>(), offset_of!(PoolArgs, lookup_count)), (120, 104));
    assert_eq!(offset_of!(PoolArgs, staged), 116);
}
