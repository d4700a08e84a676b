//! Jobs and their staging buffer, on the simulator.

use super::*;
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
        let job = Job { key: 64, location: 0, row, tag: 0, words: 1, kind: JobKind::Swap, older: 0 };
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
