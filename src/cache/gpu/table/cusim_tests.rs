//! Jobs and their staging buffer, on the simulator.

use super::*;
use crate::device::cuda::LaunchShape;
use crate::device::cusim::SimDriver;

#[test]
fn launches_that_copy_nothing_from_the_staging_buffer_leave_it_no_events() {
    let driver = Arc::new(SimDriver::new(1, 1 << 20).unwrap());
    let shape = GpuTableShape { buckets: 1, slab_bytes: 1 << 10, slabs: 1 };
    let table = Arc::new(GpuTable::new(driver.clone(), shape).unwrap());
    let rows = Arc::new(PinnedMemory::new(&driver, 64).unwrap());
    let first = table.register(rows).unwrap();
    let (mut jobs, mut staging) = (Jobs::new(&table, 4).unwrap(), Staging::new(&driver, 4).unwrap());
    let mut launch = |row: JobRow| {
        let job = IndexJob { key: 64, location: 0, row, tag: 0, words: 1, kind: JobKind::Swap, older: 0 };
        assert!(jobs.push(job, &staging));
        jobs.launch(1, MayReplace::Nothing, Some(&mut staging)).unwrap();
        jobs.finish().unwrap();
        staging.reader_count()
    };
    for _ in 0..3 {
        assert_eq!(launch(JobRow::Host(first)), 0);
    }
    assert_eq!(launch(JobRow::Staged(0)), 1);
}

#[test]
fn jobs_and_their_staging_buffer_are_not_used_again_after_a_failed_wait() {
    let driver = Arc::new(SimDriver::new(1, 1 << 20).unwrap());
    let shape = GpuTableShape { buckets: 1, slab_bytes: 1 << 10, slabs: 1 };
    let table = Arc::new(GpuTable::new(driver.clone(), shape).unwrap());
    let rows = Arc::new(PinnedMemory::new(&driver, 64).unwrap());
    table.register(rows.clone()).unwrap();
    let (mut jobs, mut staging) = (Jobs::new(&table, 4).unwrap(), Staging::new(&driver, 4).unwrap());
    let row = JobRow::Staged(0);
    assert!(jobs.push(
        IndexJob { key: 64, location: 0, row, tag: 0, words: 1, kind: JobKind::Keep, older: 0 },
        &staging
    ));
    let words = DeviceMemory::new(&driver, 4 * 64).unwrap();
    let (shape, args) =
        (LaunchShape { blocks: 1, threads: 64, shared_bytes: 0 }, words.address().to_ne_bytes());
    // SAFETY: the kernel takes (u32*), writes one element per thread, and breaks a rule. Nothing else uses
    // the memory, which is dropped after the wait has failed.
    unsafe { driver.launch(table.stream(), "ballot_outside_mask", shape, &args) }.unwrap();
    jobs.launch(1, MayReplace::Nothing, Some(&mut staging)).unwrap();
    for _ in 0..2 {
        assert!(staging.words_mut().is_err());
        assert!(jobs.finish().is_err());
    }
    let used = driver.used_bytes();
    drop((jobs, staging, words, table));
    assert_eq!(driver.used_bytes(), used, "the device may still use the memory");
    assert!(Arc::strong_count(&rows) > 1, "the registered memory stays shared");
}
