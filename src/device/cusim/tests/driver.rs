//! The simulator as a driver: it keeps the order that CUDA guarantees, and varies the order where CUDA
//! guarantees none.
#![allow(unsafe_code)]

use crate::device::cuda::driver::OperationCounts;
use crate::device::cuda::{Address, Driver, DriverError, LaunchShape, Pinned};
use crate::device::cusim::driver::{SimDriver, SimStream};

const SEEDS: std::ops::Range<u64> = 0..40;

/// A driver and three numbers in pinned memory: 1, 2, 3.
struct Bench {
    driver: SimDriver,
    memory: Pinned,
}

impl Bench {
    fn new(seed: u64) -> Self {
        let driver = SimDriver::new(seed, 1 << 20).unwrap();
        let memory = driver.allocate_pinned(12).unwrap();
        for i in 0..3 {
            // SAFETY: 12 bytes are allocated, aligned to a page, and nothing runs yet.
            unsafe { memory.host.cast::<u32>().add(i).write(1 + i as u32) };
        }
        Self { driver, memory }
    }

    fn values(&self) -> [u32; 3] {
        // SAFETY: as in `new`; the device's thread runs only while this one waits.
        unsafe { self.memory.host.cast::<[u32; 3]>().read() }
    }

    fn at(&self, place: usize) -> Address {
        self.memory.device.at(4 * place)
    }

    fn copy(&self, stream: &SimStream, from: usize, to: usize) {
        // SAFETY: both are among the three numbers, which live until the driver is dropped.
        unsafe { self.driver.copy(stream, self.at(from), self.at(to), 4) }.unwrap();
    }

    fn finish(&self, streams: &[&SimStream]) -> [u32; 3] {
        for stream in streams {
            self.driver.finish(stream).unwrap();
        }
        self.values()
    }
}

#[test]
fn nothing_runs_before_a_wait() {
    for seed in SEEDS {
        let bench = Bench::new(seed);
        let stream = bench.driver.stream().unwrap();
        bench.copy(&stream, 0, 1);
        assert_eq!(bench.values(), [1, 2, 3]);
        assert_eq!(bench.finish(&[&stream]), [1, 1, 3]);
    }
}

#[test]
fn streams_are_ordered_within_themselves_and_among_each_other_only_by_events() {
    let mut seen = Vec::new();
    for seed in SEEDS {
        for ordered in [false, true] {
            let bench = Bench::new(seed);
            let (a, b) = (bench.driver.stream().unwrap(), bench.driver.stream().unwrap());
            bench.copy(&a, 0, 1);
            if ordered {
                bench.driver.follow(&b, &bench.driver.record(&a).unwrap()).unwrap();
            }
            bench.copy(&b, 1, 2);
            bench.copy(&b, 2, 0);
            let values = bench.finish(&[&b, &a]);
            assert_eq!(values[0], values[2], "one stream's order");
            if ordered {
                assert_eq!(values, [1, 1, 1], "seed {seed}");
            } else {
                seen.push(values);
            }
        }
    }
    assert!(seen.contains(&[1, 1, 1]), "the first stream went first");
    assert!(seen.iter().any(|values| values[2] == 2), "the second stream went first");
}

#[test]
fn a_captured_graph_runs_only_when_launched_and_counts_its_nodes_each_time() {
    let bench = Bench::new(3);
    let stream = bench.driver.stream().unwrap();
    let graph = bench.driver.capture(&stream, &mut || {
        bench.copy(&stream, 0, 1);
        bench.copy(&stream, 1, 2);
        Ok(())
    });
    assert_eq!(bench.finish(&[&stream]), [1, 2, 3]);
    assert_eq!(bench.driver.work(), OperationCounts::default());
    for times in 1..3 {
        // SAFETY: the memory of its copies is allocated.
        unsafe { bench.driver.launch_graph(&stream, graph.as_ref().unwrap()) }.unwrap();
        assert_eq!(bench.finish(&[&stream]), [1, 1, 1]);
        assert_eq!(
            bench.driver.work(),
            OperationCounts { graph_nodes: 2 * times, ..OperationCounts::default() }
        );
    }
}

/// Launches a kernel that breaks a rule. `memory` has 64 words, which are not used otherwise.
fn fail(driver: &SimDriver, stream: &SimStream, memory: Address) {
    let shape = LaunchShape { blocks: 1, threads: 64, shared_bytes: 0 };
    // SAFETY: the kernel takes (u32*) and writes one element per thread. The callers do not use the memory.
    unsafe { driver.launch(stream, "ballot_outside_mask", shape, &memory.0.to_ne_bytes()) }.unwrap();
}

#[test]
fn every_wait_after_a_kernel_error_returns_it() {
    let bench = Bench::new(1);
    let stream = bench.driver.stream().unwrap();
    let memory = bench.driver.allocate(4 * 64).unwrap();
    fail(&bench.driver, &stream, memory);
    let event = bench.driver.record(&stream).unwrap();
    for _ in 0..2 {
        let error = bench.driver.wait(&event).unwrap_err();
        assert!(
            matches!(&error, DriverError::Stopped { kernel, .. } if kernel == "ballot_outside_mask"),
            "{error}"
        );
    }
}

#[test]
fn memory_is_not_freed_after_a_wait_that_failed() {
    let bench = Bench::new(1);
    let stream = bench.driver.stream().unwrap();
    let memory = bench.driver.allocate(4 * 64).unwrap();
    fail(&bench.driver, &stream, memory);
    bench.driver.alive().unwrap();
    let error = bench.driver.finish(&stream).unwrap_err();
    assert_eq!(bench.driver.alive(), Err(error));
    let (used, values) = (bench.driver.used_bytes(), bench.values());
    // SAFETY: a wait for the operation that uses the memory has failed.
    unsafe {
        bench.driver.free(memory);
        bench.driver.free_pinned(bench.memory);
    }
    assert_eq!((bench.driver.used_bytes(), bench.values()), (used, values));
}

#[test]
fn a_wait_for_an_event_that_never_fires_ends_with_an_error() {
    let bench = Bench::new(1);
    let (a, b) = (bench.driver.stream().unwrap(), bench.driver.stream().unwrap());
    // The graph that would record the event is never launched.
    let mut event = None;
    let graph = bench.driver.capture(&a, &mut || {
        event = Some(bench.driver.record(&a)?);
        Ok(())
    });
    graph.unwrap();
    bench.driver.follow(&b, &event.unwrap()).unwrap();
    let error = bench.driver.finish(&b).unwrap_err();
    assert!(error.to_string().contains("never fires"), "{error}");
}

#[test]
fn memory_is_limited_zeroed_and_overwritten_when_freed() {
    let driver = SimDriver::new(1, 10_000).unwrap();
    let memory = driver.allocate(8000).unwrap();
    let byte = |at: usize| {
        // SAFETY: freed memory stays allocated until the driver is dropped, and nothing runs.
        unsafe { (memory.0 as *const u8).add(at).read() }
    };
    assert_eq!((byte(0), byte(7999)), (0, 0));
    let error = driver.allocate_pinned(3000).unwrap_err();
    assert_eq!(error.to_string(), "pinned memory: 3000 bytes refused, 2000 of 10000 bytes are free");
    // SAFETY: no operation uses the memory.
    unsafe { driver.free(memory) };
    assert_ne!((byte(0), byte(7999)), (0, 0));
    driver.allocate_pinned(3000).unwrap();
    assert_eq!(driver.used_bytes(), 3000);
}
