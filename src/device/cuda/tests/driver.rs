//! The `Driver` for NVIDIA devices (`device/cuda/nvidia.rs`), on a stub libcuda and libnvrtc
//! (`stub_driver`): every method, the counts of operations, the release of resources, and every error.
//! Properties that do not need the stub driver are also tested on a real GPU, if there is one.
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use crate::device::cuda::context::usable;
use crate::device::cuda::driver::OperationCounts;
use crate::device::cuda::nvidia::open_with;
use crate::device::cuda::primary::MemoryBytes;
use crate::device::cuda::sources::KernelFile;
use crate::device::cuda::{Address, Driver, DriverError, LaunchShape, Nvidia, Pinned, open};

use crate::skip::skip_part;
use crate::stub_driver::{Machine, is_child, log_so_far};

/// Runs `inside` in a child process on a stub GPU, and `test` on the machine's GPU if there is one.
/// Returns the stub driver's log.
fn on_every_gpu(test: fn(&Nvidia), machine: Machine, inside: impl FnOnce(&Path)) -> Option<String> {
    let output = machine.runs(inside);
    if is_child() {
        return None;
    }
    match usable(0) {
        Ok(_) => test(&open_scale()),
        Err(reason) => skip_part(&format!("no real GPU: {reason}")),
    }
    output.map(|output| output.log)
}

/// Asserts that the driver was dropped and everything was released.
fn assert_nothing_left(log: &str) {
    let end = log.lines().last();
    assert_eq!(end, Some("released with streams 0 events 0 graphs 0 modules 0 device 0 pinned 0"), "{log}");
}

fn bytes_of(memory: Pinned) -> Vec<u8> {
    // SAFETY: tests call this only after an event that follows the last write has fired.
    unsafe { std::slice::from_raw_parts(memory.host.as_ptr(), memory.bytes) }.to_vec()
}

fn fill(memory: Pinned, bytes: &[u8]) {
    assert!(bytes.len() <= memory.bytes);
    // SAFETY: the memory is long enough, and nothing else uses it during the call.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.host.as_ptr(), bytes.len()) };
}

fn free_all(driver: &Nvidia, device: &[Address], pinned: &[Pinned]) {
    for &memory in device {
        // SAFETY: the test has waited for all operations that used it, or a wait has failed.
        unsafe { driver.free(memory) };
    }
    for &memory in pinned {
        // SAFETY: as above.
        unsafe { driver.free_pinned(memory) };
    }
}

fn memory_is_zero_aligned_and_copied_in_order(driver: &Nvidia) {
    const BYTES: usize = 1000;
    let (device, other) = (driver.allocate(BYTES).unwrap(), driver.allocate(BYTES).unwrap());
    let (from, to) = (driver.allocate_pinned(BYTES).unwrap(), driver.allocate_pinned(BYTES).unwrap());
    assert!(device.0.is_multiple_of(256) && other.0.is_multiple_of(256) && device != other);
    assert!((from.host.as_ptr() as usize).is_multiple_of(4096) && from.bytes == BYTES);
    assert!(bytes_of(from).iter().all(|&byte| byte == 0));
    assert_eq!(driver.work(), OperationCounts::default(), "zeroing is not counted");

    let stream = driver.stream().unwrap();
    fill(to, &[7; BYTES]);
    // SAFETY: all ranges are allocated, and nothing else touches them before the event has fired.
    unsafe {
        driver.copy(&stream, device, to.device, BYTES).unwrap();
        driver.finish(&stream).unwrap();
    }
    assert_eq!(bytes_of(to), [0; BYTES], "the device's memory was zero");

    let pattern: Vec<u8> = (0..BYTES).map(|i| i as u8).collect();
    fill(from, &pattern);
    // SAFETY: as above. Copies of one stream are ordered.
    unsafe {
        driver.copy(&stream, from.device, device, BYTES).unwrap();
        driver.copy(&stream, device, other.at(8), BYTES - 8).unwrap();
        driver.copy(&stream, other, to.device, BYTES).unwrap();
        driver.copy(&stream, other, to.device, 0).unwrap();
    }
    let done = driver.record(&stream).unwrap();
    while !driver.fired(&done).unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(&bytes_of(to)[8..], &pattern[..BYTES - 8]);
    assert_eq!(&bytes_of(to)[..8], [0; 8]);
    assert_eq!(driver.work(), OperationCounts { copies: 4, ..OperationCounts::default() });
    free_all(driver, &[device, other], &[from, to]);
}

#[test]
fn memory_is_zeroed_and_aligned_and_copies_are_ordered() {
    let log = on_every_gpu(memory_is_zero_aligned_and_copied_in_order, Machine::whole(), |_| {
        memory_is_zero_aligned_and_copied_in_order(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

fn streams_are_ordered_by_events_alone(driver: &Nvidia) {
    const BYTES: usize = 64;
    let (first, second) = (driver.stream().unwrap(), driver.stream().unwrap());
    let (from, to) = (driver.allocate_pinned(BYTES).unwrap(), driver.allocate_pinned(BYTES).unwrap());
    let between = driver.allocate(BYTES).unwrap();
    fill(from, &[5; BYTES]);
    // SAFETY: an event orders the second stream's read after the first stream's write; there is no other
    // access.
    unsafe {
        driver.copy(&first, from.device, between, BYTES).unwrap();
        driver.follow(&second, &driver.record(&first).unwrap()).unwrap();
        driver.copy(&second, between, to.device, BYTES).unwrap();
    }
    let done = driver.record(&second).unwrap();
    driver.wait(&done).unwrap();
    assert!(driver.fired(&done).unwrap());
    assert_eq!(bytes_of(to), [5; BYTES]);
    free_all(driver, &[between], &[from, to]);
}

#[test]
fn an_event_orders_two_streams() {
    let log = on_every_gpu(streams_are_ordered_by_events_alone, Machine::whole(), |_| {
        streams_are_ordered_by_events_alone(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

/// The parameter of the test kernel.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ScaleArgs {
    from: u64,
    to: u64,
    factor: f32,
    more: f32,
    count: u32,
    unused: u32,
}

/// A kernel for these tests, so that they do not depend on the program's kernels. If the compiler fused its
/// product and sum, the bits would differ from the host's.
const SCALE: KernelFile = KernelFile {
    name: "scale",
    text: r#"
        #include "common.cuh"
        struct ScaleArgs { const float* from; float* to; float factor, more; u32 count, unused; };
        extern "C" __global__ void scale(ScaleArgs args) {
            const u32 step = gridDim.x * blockDim.x;
            for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count; i += step) {
                args.to[i] = args.from[i] * args.factor + args.more;
            }
        }
    "#,
    entries: &["scale"],
};

fn open_scale() -> Nvidia {
    open_with(&[SCALE], 0, None).unwrap()
}

const COUNT: usize = 1000;
const SHAPE: LaunchShape = LaunchShape { blocks: 2, threads: 64, shared_bytes: 16 };

/// The kernel's parameter and memory.
struct Scale {
    args: ScaleArgs,
    from: Pinned,
    to: Pinned,
    expected: Vec<f32>,
}

impl Scale {
    fn new(driver: &Nvidia) -> Self {
        let values: Vec<f32> = (0..COUNT).map(|i| i as f32 * 0.37 - 41.0).collect();
        let (factor, more) = (1.1, 0.3);
        let expected = values.iter().map(|value| value * factor + more).collect();
        let from = driver.allocate_pinned(4 * COUNT).unwrap();
        let to = driver.allocate_pinned(4 * COUNT).unwrap();
        fill(from, bytemuck::cast_slice(&values));
        let (count, unused) = (COUNT as u32, 0);
        let args = ScaleArgs { from: from.device.0, to: to.device.0, factor, more, count, unused };
        Self { args, from, to, expected }
    }

    fn launch(&self, driver: &Nvidia, stream: &<Nvidia as Driver>::Stream) -> Result<(), DriverError> {
        // SAFETY: `ScaleArgs` is the kernel's parameter; both addresses have `COUNT` floats, which live until
        // the test has waited.
        unsafe { driver.launch(stream, "scale", SHAPE, bytemuck::bytes_of(&self.args)) }
    }

    /// Returns the output and clears it, so that the next launch must write it again.
    fn take_out(&self) -> Vec<f32> {
        let out = floats(self.to);
        fill(self.to, &[0; 4 * COUNT]);
        out
    }
}

fn floats(memory: Pinned) -> Vec<f32> {
    bytes_of(memory).chunks_exact(4).map(|four| f32::from_ne_bytes(four.try_into().unwrap())).collect()
}

fn a_kernel_gives_the_hosts_bits(driver: &Nvidia) {
    let (stream, scale) = (driver.stream().unwrap(), Scale::new(driver));
    let before = driver.work();
    scale.launch(driver, &stream).unwrap();
    driver.finish(&stream).unwrap();
    assert_eq!(scale.take_out(), scale.expected);
    assert_eq!(driver.work().launches, before.launches + 1);

    // A thread that has not used the device before can launch too.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            scale.launch(driver, &stream).unwrap();
            driver.finish(&stream).unwrap();
        });
    });
    assert_eq!(scale.take_out(), scale.expected);
    assert!(driver.multiprocessors() > 0);

    let args = bytemuck::bytes_of(&scale.args);
    // SAFETY: both launches are refused before anything runs.
    let (short, unknown) = unsafe {
        (
            driver.launch(&stream, "scale", SHAPE, &args[1..]).unwrap_err(),
            driver.launch(&stream, "mix64", SHAPE, args).unwrap_err(),
        )
    };
    assert_eq!(short.to_string(), "cuda kernels: scale: expected a parameter of 32 bytes, got 31");
    assert!(unknown.to_string().contains("got mix64") && unknown.to_string().contains("one of scale"));
    let none = LaunchShape { blocks: 0, ..SHAPE };
    // SAFETY: a launch of no blocks is refused.
    let none = unsafe { driver.launch(&stream, "scale", none, args) }.unwrap_err();
    assert_eq!(none.to_string(), "cuda cuLaunchKernel: error 1 (CUDA_ERROR_INVALID_VALUE)");
    assert_eq!(driver.work().launches, before.launches + 2, "refused launches are not counted");
    free_all(driver, &[], &[scale.from, scale.to]);
}

#[test]
fn a_kernel_is_launched_with_its_argument_by_value_from_any_thread() {
    let log = on_every_gpu(a_kernel_gives_the_hosts_bits, Machine::whole(), |_| {
        a_kernel_gives_the_hosts_bits(&open_scale());
    });
    if let Some(log) = log {
        assert!(log.contains("launch scale 2 64 16 32"), "{log}");
        assert_nothing_left(&log);
    }
}

fn a_graph_does_what_was_recorded(driver: &Nvidia) {
    let (stream, scale) = (driver.stream().unwrap(), Scale::new(driver));
    let side = driver.stream().unwrap();
    let copy = driver.allocate_pinned(4 * COUNT).unwrap();
    let before = driver.work();
    let graph = driver
        .capture(&stream, &mut || {
            scale.launch(driver, &stream)?;
            // A second stream joins the capture by an event, and an event orders the first stream after it.
            driver.follow(&side, &driver.record(&stream)?)?;
            // SAFETY: both are pinned memory, which nothing else uses until the test has waited.
            unsafe { driver.copy(&side, scale.to.device, copy.device, 4 * COUNT)? };
            driver.follow(&stream, &driver.record(&side)?)
        })
        .unwrap();
    assert_eq!(driver.work(), before, "nothing was executed");
    assert_eq!(scale.take_out(), [0.0; COUNT]);

    for launches in 1..=3 {
        // SAFETY: as for the recorded launch and copy; the previous launch of the graph has ended.
        unsafe { driver.launch_graph(&stream, &graph).unwrap() };
        driver.finish(&stream).unwrap();
        assert_eq!(scale.take_out(), scale.expected);
        assert_eq!(floats(copy), scale.expected);
        assert_eq!(driver.work().graph_nodes, before.graph_nodes + 2 * launches);
    }
    assert_eq!(driver.work().total(), before.total() + 6, "a graph's operations are counted once");
    scale.launch(driver, &stream).unwrap();
    driver.finish(&stream).unwrap();
    assert_eq!(driver.work().launches, before.launches + 1, "launches are counted again after the capture");
    free_all(driver, &[], &[scale.from, scale.to, copy]);
}

#[test]
fn a_graph_is_captured_launched_and_counted_by_its_nodes() {
    let log = on_every_gpu(a_graph_does_what_was_recorded, Machine::whole(), |_| {
        a_graph_does_what_was_recorded(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

fn a_failed_capture_leaves_the_stream_usable(driver: &Nvidia) {
    let (stream, scale) = (driver.stream().unwrap(), Scale::new(driver));
    let own = || DriverError::Kernels { reason: "of the filling".to_owned() };
    let failed = driver.capture(&stream, &mut || {
        scale.launch(driver, &stream)?;
        Err(own())
    });
    assert_eq!(failed.err(), Some(own()));

    let refused = driver.capture(&stream, &mut || driver.capture(&stream, &mut || Ok(())).map(drop));
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("cuStreamBeginCapture_v2") && text.contains("ILLEGAL_STATE"), "{text}");

    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = driver.capture(&stream, &mut || panic!("of the filling"));
    }));
    assert!(panicked.is_err());

    // An event that was recorded in a capture never fires. After it is recorded again, it can be used.
    let mut inside = None;
    let graph = driver
        .capture(&stream, &mut || {
            inside = Some(driver.record(&stream)?);
            Ok(())
        })
        .unwrap();
    let inside = inside.unwrap();
    let refused = driver.fired(&inside).unwrap_err().to_string();
    assert!(refused.contains("cuEventQuery: error 1 (CUDA_ERROR_INVALID_VALUE)"), "{refused}");
    drop((inside, graph));

    scale.launch(driver, &stream).unwrap();
    driver.finish(&stream).unwrap();
    assert_eq!(scale.take_out(), scale.expected);
    assert_eq!(driver.work().launches, 1);
    free_all(driver, &[], &[scale.from, scale.to]);
}

#[test]
fn a_capture_that_fails_or_panics_leaves_the_stream_usable() {
    let log = on_every_gpu(a_failed_capture_leaves_the_stream_usable, Machine::whole(), |_| {
        a_failed_capture_leaves_the_stream_usable(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

fn threads_are_independent(driver: &Nvidia) {
    const BYTES: usize = 256;
    let work = |mark: u8| {
        let (stream, other) = (driver.stream().unwrap(), driver.stream().unwrap());
        let (from, to) = (driver.allocate_pinned(BYTES).unwrap(), driver.allocate_pinned(BYTES).unwrap());
        let between = driver.allocate(BYTES).unwrap();
        for round in 0..50_u8 {
            fill(from, &[mark ^ round; BYTES]);
            // SAFETY: only this thread uses the memory, and each round waits for its operations.
            unsafe { driver.copy(&stream, from.device, between, BYTES).unwrap() };
            driver.follow(&other, &driver.record(&stream).unwrap()).unwrap();
            // SAFETY: as above, and after the first copy.
            let copied = || unsafe { driver.copy(&other, between, to.device, BYTES) };
            if round % 10 == 0 {
                driver.finish(&other).unwrap();
                let graph = driver.capture(&other, &mut || copied()).unwrap();
                // SAFETY: as for its copy.
                unsafe { driver.launch_graph(&other, &graph).unwrap() };
            } else {
                copied().unwrap();
            }
            driver.finish(&other).unwrap();
            assert_eq!(bytes_of(to), [mark ^ round; BYTES]);
        }
        free_all(driver, &[between], &[from, to]);
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || work(thread << 6));
        }
    });
    let (copies, graph_nodes) = (4 * (50 + 45), 4 * 5);
    assert_eq!(driver.work(), OperationCounts { copies, graph_nodes, ..OperationCounts::default() });
}

#[test]
fn threads_work_concurrently_and_every_operation_is_counted_once() {
    let log = on_every_gpu(threads_are_independent, Machine::whole(), |_| {
        threads_are_independent(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

#[test]
fn a_capture_that_allocates_is_refused_and_not_final() {
    let output = Machine::whole().runs(|_| {
        let driver = open_scale();
        let stream = driver.stream().unwrap();
        let refused = driver.capture(&stream, &mut || driver.allocate(64).map(drop)).err().unwrap();
        assert!(refused.to_string().contains("900 (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)"), "{refused}");
        let ignored = driver.capture(&stream, &mut || {
            let _ = driver.allocate(64);
            Ok(())
        });
        assert!(ignored.err().unwrap().to_string().contains("901 (CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)"));
        let unjoined = driver.stream().unwrap();
        let forgotten = driver.capture(&stream, &mut || driver.follow(&unjoined, &driver.record(&stream)?));
        assert!(forgotten.err().unwrap().to_string().contains("904 (CUDA_ERROR_STREAM_CAPTURE_UNJOINED)"));
        // SAFETY: no operation used it.
        unsafe { driver.free(driver.allocate(64).unwrap()) };
    });
    output.inspect(|output| assert_nothing_left(&output.log));
}

#[test]
fn a_graph_that_cannot_be_instantiated_releases_its_capture() {
    let output = Machine::whole().with_setting("INSTANTIATE", "2").runs(|_| {
        let driver = open_scale();
        let refused = driver.capture(&driver.stream().unwrap(), &mut || Ok(())).err().unwrap();
        let expected = "cuda cuGraphInstantiateWithFlags: error 2 (CUDA_ERROR_OUT_OF_MEMORY)";
        assert_eq!(refused.to_string(), expected);
    });
    // The one graph is the executable graph that the stub driver refused, but counts.
    output.inspect(|output| {
        assert!(output.log.contains("released with streams 0 events 0 graphs 1 "), "{}", output.log)
    });
}

#[test]
fn streams_events_and_graphs_keep_the_context_after_the_driver_is_dropped() {
    let output = Machine::whole().runs(|_| {
        let driver = open_scale();
        let stream = driver.stream().unwrap();
        let event = driver.record(&stream).unwrap();
        let graph = driver.capture(&stream, &mut || Ok(())).unwrap();
        drop(driver);
        assert!(!log_so_far().contains("released"));
        drop((graph, event));
        assert!(!log_so_far().contains("released"));
        drop(stream);
        assert_nothing_left(&log_so_far());
        // Opening the device again gives a new context, which works on this thread and on another.
        let again = Arc::new(open(0, None).unwrap());
        std::thread::scope(|scope| {
            let other = again.clone();
            scope.spawn(move || drop(other.stream().unwrap()));
        });
    });
    output.inspect(|output| assert_nothing_left(&output.log));
}

#[test]
fn an_allocation_that_is_too_large_is_refused_with_the_free_bytes() {
    Machine::whole().with_setting("MEMORY", "100000").with_setting("PINNED", "10000").runs(|_| {
        let driver = open_scale();
        let held = driver.allocate(60_000).unwrap();
        let refused = driver.allocate(60_000).unwrap_err();
        let DriverError::OutOfMemory { what: "device memory", bytes: 60_000, total: 100_000, free } = refused
        else {
            panic!("{refused}")
        };
        assert!(free < 40_001);
        assert!(refused.to_string().starts_with("device memory: 60000 bytes refused, "), "{refused}");
        let refused = driver.allocate_pinned(10_000).unwrap_err().to_string();
        assert!(refused.starts_with("pinned memory: 10000 bytes refused, "), "{refused}");
        // The error is not final, so a smaller allocation succeeds.
        let small = driver.allocate_pinned(100).unwrap();
        free_all(&driver, &[held], &[small]);
        // Allocations of 0 bytes succeed.
        let (nothing, no_bytes) = (driver.allocate(0).unwrap(), driver.allocate_pinned(0).unwrap());
        assert!(bytes_of(no_bytes).is_empty());
        free_all(&driver, &[nothing], &[no_bytes]);
    });
}

#[test]
fn memory_is_freed_when_zeroing_or_mapping_fails() {
    let output = Machine::whole().with_setting("MEMSET", "1").with_setting("MAPPED", "801").runs(|_| {
        let driver = open_scale();
        let refused = driver.allocate(64).unwrap_err().to_string();
        assert_eq!(refused, "cuda cuMemsetD8Async: error 1 (CUDA_ERROR_INVALID_VALUE)");
        let refused = driver.allocate_pinned(64).unwrap_err().to_string();
        assert_eq!(refused, "cuda cuMemHostGetDevicePointer_v2: error 801 (CUDA_ERROR_NOT_SUPPORTED)");
    });
    output.inspect(|output| assert_nothing_left(&output.log));
}

#[test]
fn every_call_after_a_final_error_returns_it_without_calling_the_driver() {
    let output = Machine::whole().with_setting("STICKY", "2:700").runs(|_| {
        let driver = open_scale();
        let (stream, scale) = (driver.stream().unwrap(), Scale::new(&driver));
        scale.launch(&driver, &stream).unwrap();
        driver.finish(&stream).unwrap();
        assert_eq!(scale.take_out(), scale.expected);

        scale.launch(&driver, &stream).unwrap();
        let done = driver.record(&stream).unwrap();
        let end = driver.wait(&done).unwrap_err();
        assert_eq!(
            end.to_string(),
            "cuda cuEventSynchronize: error 700 (CUDA_ERROR_ILLEGAL_ADDRESS) is final: the device accepts \
             no more work from this process"
        );
        let anything = Address(4096);
        // SAFETY: none of these calls reaches the driver.
        let answers = unsafe {
            [
                driver.copy(&stream, anything, anything, 8).err(),
                scale.launch(&driver, &stream).err(),
                driver.fired(&done).err(),
                driver.wait(&done).err(),
                driver.follow(&stream, &done).err(),
                driver.record(&stream).err(),
                driver.stream().err(),
                driver.allocate(8).err(),
                driver.allocate_pinned(8).err(),
                driver.capture(&stream, &mut || panic!("`fill` is not called")).err(),
            ]
        };
        for answer in answers {
            assert_eq!(answer.as_ref(), Some(&end));
        }
        assert_eq!(driver.memory(), MemoryBytes::default());
    });
    if let Some(output) = output {
        assert!(!output.log.contains("called after a final error"), "{}", output.log);
        assert!(output.log.lines().last().unwrap().starts_with("released"), "the context is released");
    }
}

/// The error need not be final by its code: after it, operations may be running and nothing shows their end.
#[test]
fn after_a_failed_record_or_wait_nothing_is_enqueued_or_freed() {
    for (setting, call) in [("RECORD", "cuEventRecord"), ("WAIT", "cuEventSynchronize")] {
        let output = Machine::whole().with_setting(setting, "999").runs(|_| {
            let driver = open_scale();
            let (stream, scale) = (driver.stream().unwrap(), Scale::new(&driver));
            let memory = driver.allocate(64).unwrap();
            scale.launch(&driver, &stream).unwrap();
            driver.alive().unwrap();
            let end = driver.finish(&stream).unwrap_err();
            let text = end.to_string();
            println!("{text}");
            assert!(text.ends_with(
                "error 999 (CUDA_ERROR_UNKNOWN) is final: the device accepts no more work from this process"
            ));
            assert_eq!(driver.alive(), Err(end.clone()));
            assert_eq!(scale.launch(&driver, &stream), Err(end.clone()));
            assert_eq!(driver.finish(&stream), Err(end));
            free_all(&driver, &[memory], &[scale.from, scale.to]);
        });
        let Some(output) = output else { return };
        assert!(output.out.contains(&format!("cuda {call}: ")), "{}", output.out);
        let end = output.log.lines().last().unwrap();
        assert!(end.starts_with("released with") && end.ends_with("modules 1 device 1 pinned 2"), "{end}");
    }
}

#[test]
fn a_query_detects_a_final_error_too() {
    Machine::whole().with_setting("STICKY", "1:719").runs(|_| {
        let driver = open_scale();
        let (stream, scale) = (driver.stream().unwrap(), Scale::new(&driver));
        scale.launch(&driver, &stream).unwrap();
        let done = driver.record(&stream).unwrap();
        let end = loop {
            match driver.fired(&done) {
                Ok(fired) => assert!(!fired),
                Err(end) => break end,
            }
        };
        assert!(matches!(end, DriverError::Sticky { code: 719, call: "cuEventQuery", .. }), "{end}");
    });
}
