//! The machine's own CUDA driver (`device/cuda/nvidia.rs`), on a libcuda and libnvrtc that pretend (see
//! `pretend`): every method, every count, what is given back, and every error. Where a GPU is, what needs
//! no pretence runs on it too.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use flechette::device::cuda::sources::{KERNELS, KernelFile};
use flechette::device::cuda::{
    Address, CudaError, Driver, DriverError, LaunchShape, Nvidia, Pinned, Work, ahead, open, open_with,
    usable,
};

use crate::pretend::{LIBCUDA, Machine, log_so_far};
use crate::program::flechette;

/// Runs it on a pretended GPU, and on the machine's own where there is one.
fn on_every_gpu(test: fn(&Nvidia), machine: Machine, inside: impl FnOnce(&Path)) -> Option<String> {
    let said = machine.runs(inside)?;
    match usable(0) {
        Ok(_) => test(&open_scale()),
        Err(reason) => eprintln!("skipped on a real GPU: {reason}"),
    }
    Some(said.log)
}

/// The driver was dropped with nothing left behind.
fn assert_nothing_left(log: &str) {
    let end = log.lines().last();
    assert_eq!(end, Some("released with streams 0 events 0 graphs 0 modules 0 device 0 pinned 0"), "{log}");
}

fn bytes_of(memory: Pinned) -> Vec<u8> {
    // SAFETY: the tests read when an event after the last writer has fired.
    unsafe { std::slice::from_raw_parts(memory.host.as_ptr(), memory.bytes) }.to_vec()
}

fn fill(memory: Pinned, bytes: &[u8]) {
    assert!(bytes.len() <= memory.bytes);
    // SAFETY: it is long enough, and the tests write when nobody else uses it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.host.as_ptr(), bytes.len()) };
}

fn give_back(driver: &Nvidia, device: &[Address], pinned: &[Pinned]) {
    for &memory in device {
        // SAFETY: the tests have waited for all that used it.
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
    assert_eq!(driver.work(), Work::default(), "zeroing is nobody's work");

    let stream = driver.stream().unwrap();
    fill(to, &[7; BYTES]);
    // SAFETY: all ranges are allocated, and nobody touches them before the event has fired.
    unsafe {
        driver.copy(&stream, device, to.device, BYTES).unwrap();
        driver.wait(&driver.record(&stream).unwrap()).unwrap();
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
    assert_eq!(driver.work(), Work { copies: 4, ..Work::default() });
    give_back(driver, &[device, other], &[from, to]);
}

#[test]
fn memory_comes_zeroed_and_aligned_and_copies_are_ordered() {
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
    // SAFETY: the second stream reads what the first writes after the event of that; nobody else does.
    unsafe {
        driver.copy(&first, from.device, between, BYTES).unwrap();
        driver.follow(&second, &driver.record(&first).unwrap()).unwrap();
        driver.copy(&second, between, to.device, BYTES).unwrap();
    }
    let done = driver.record(&second).unwrap();
    driver.wait(&done).unwrap();
    assert!(driver.fired(&done).unwrap());
    assert_eq!(bytes_of(to), [5; BYTES]);
    give_back(driver, &[between], &[from, to]);
}

#[test]
fn an_event_orders_two_streams() {
    let log = on_every_gpu(streams_are_ordered_by_events_alone, Machine::whole(), |_| {
        streams_are_ordered_by_events_alone(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

/// The argument of the tests' own kernel.
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

/// A kernel of the tests' own, so that nothing here depends on what the program's kernels do. A product
/// and a sum that are contracted to one rounding would give other bits than the host's.
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

/// The kernel's argument and memory.
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
        // SAFETY: `ScaleArgs` is the kernel's parameter; both addresses are of `COUNT` floats, which live
        // until each test has waited.
        unsafe { driver.launch(stream, "scale", SHAPE, bytemuck::bytes_of(&self.args)) }
    }

    /// Takes the output away, so that the next launch shows.
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
    driver.wait(&driver.record(&stream).unwrap()).unwrap();
    assert_eq!(scale.take_out(), scale.expected);
    assert_eq!(driver.work().launches, before.launches + 1);

    // A thread that has never used the device can.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            scale.launch(driver, &stream).unwrap();
            driver.wait(&driver.record(&stream).unwrap()).unwrap();
        });
    });
    assert_eq!(scale.take_out(), scale.expected);
    assert!(driver.multiprocessors() > 0);

    let args = bytemuck::bytes_of(&scale.args);
    // SAFETY: both are refused before anything runs.
    let (short, unknown) = unsafe {
        (
            driver.launch(&stream, "scale", SHAPE, &args[1..]).unwrap_err(),
            driver.launch(&stream, "scatter", SHAPE, args).unwrap_err(),
        )
    };
    assert_eq!(short.to_string(), "cuda kernels: scale: expected a parameter of 32 bytes, got 31");
    assert!(unknown.to_string().contains("got scatter") && unknown.to_string().contains("one of scale"));
    let none = LaunchShape { blocks: 0, ..SHAPE };
    // SAFETY: a launch of no blocks is refused.
    let none = unsafe { driver.launch(&stream, "scale", none, args) }.unwrap_err();
    assert_eq!(none.to_string(), "cuda cuLaunchKernel: error 1 (CUDA_ERROR_INVALID_VALUE)");
    assert_eq!(driver.work().launches, before.launches + 2, "what was refused is not counted");
    give_back(driver, &[], &[scale.from, scale.to]);
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
            // Another stream is drawn in by an event, and back.
            driver.follow(&side, &driver.record(&stream)?)?;
            // SAFETY: both are pinned memory, used by nobody else until the tests have waited.
            unsafe { driver.copy(&side, scale.to.device, copy.device, 4 * COUNT)? };
            driver.follow(&stream, &driver.record(&side)?)
        })
        .unwrap();
    assert_eq!(driver.work(), before, "nothing was carried out");
    assert_eq!(scale.take_out(), [0.0; COUNT]);

    for launches in 1..=3 {
        // SAFETY: as for the launch and the copy; the one before has ended.
        unsafe { driver.launch_graph(&stream, &graph).unwrap() };
        driver.wait(&driver.record(&stream).unwrap()).unwrap();
        assert_eq!(scale.take_out(), scale.expected);
        assert_eq!(floats(copy), scale.expected);
        assert_eq!(driver.work().graph_nodes, before.graph_nodes + 2 * launches);
    }
    assert_eq!(driver.work().total(), before.total() + 6, "a graph's operations are counted once");
    scale.launch(driver, &stream).unwrap();
    driver.wait(&driver.record(&stream).unwrap()).unwrap();
    assert_eq!(driver.work().launches, before.launches + 1, "and launches again afterwards");
    give_back(driver, &[], &[scale.from, scale.to, copy]);
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

    // An event that was recorded in a capture never fires, and is none when it is recorded again.
    let mut inside = None;
    let graph = driver
        .capture(&stream, &mut || {
            inside = Some(driver.record(&stream)?);
            Ok(())
        })
        .unwrap();
    let inside = inside.unwrap();
    assert!(driver.fired(&inside).unwrap_err().to_string().contains("907 (CUDA_ERROR_CAPTURED_EVENT)"));
    drop((inside, graph));

    scale.launch(driver, &stream).unwrap();
    driver.wait(&driver.record(&stream).unwrap()).unwrap();
    assert_eq!(scale.take_out(), scale.expected);
    assert_eq!(driver.work().launches, 1);
    give_back(driver, &[], &[scale.from, scale.to]);
}

#[test]
fn a_capture_that_fails_or_panics_leaves_the_stream_usable() {
    let log = on_every_gpu(a_failed_capture_leaves_the_stream_usable, Machine::whole(), |_| {
        a_failed_capture_leaves_the_stream_usable(&open_scale());
    });
    log.inspect(|log| assert_nothing_left(log));
}

#[test]
fn a_capture_that_allocates_is_refused_and_not_final() {
    let said = Machine::whole().runs(|_| {
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
        // SAFETY: nobody used it.
        unsafe { driver.free(driver.allocate(64).unwrap()) };
    });
    said.inspect(|said| assert_nothing_left(&said.log));
}

#[test]
fn a_graph_that_is_refused_gives_its_drawing_back() {
    let said = Machine::whole().told("INSTANTIATE", "2").runs(|_| {
        let driver = open_scale();
        let refused = driver.capture(&driver.stream().unwrap(), &mut || Ok(())).err().unwrap();
        let expected = "cuda cuGraphInstantiateWithFlags: error 2 (CUDA_ERROR_OUT_OF_MEMORY)";
        assert_eq!(refused.to_string(), expected);
    });
    // The pretended driver counts the graph that it refused.
    said.inspect(|said| {
        assert!(said.log.contains("released with streams 0 events 0 graphs 1 "), "{}", said.log)
    });
}

#[test]
fn what_outlives_the_driver_keeps_its_context() {
    let said = Machine::whole().runs(|_| {
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
        // Opened again, on this thread and on another, it is a new context.
        let again = Arc::new(open(0, None).unwrap());
        std::thread::scope(|scope| {
            let other = again.clone();
            scope.spawn(move || drop(other.stream().unwrap()));
        });
    });
    said.inspect(|said| assert_nothing_left(&said.log));
}

#[test]
fn memory_that_there_is_not_is_refused_with_what_is_free() {
    Machine::whole().told("MEMORY", "100000").told("PINNED", "10000").runs(|_| {
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
        assert!(refused.starts_with("pinned memory: 14096 bytes refused, "), "{refused}");
        // It is not final.
        let small = driver.allocate_pinned(100).unwrap();
        give_back(&driver, &[held], &[small]);
        // Nothing is something, too.
        let (nothing, no_bytes) = (driver.allocate(0).unwrap(), driver.allocate_pinned(0).unwrap());
        assert!(bytes_of(no_bytes).is_empty());
        give_back(&driver, &[nothing], &[no_bytes]);
    });
}

#[test]
fn memory_that_cannot_be_made_ready_is_given_back() {
    let said = Machine::whole().told("MEMSET", "1").told("MAPPED", "801").runs(|_| {
        let driver = open_scale();
        let refused = driver.allocate(64).unwrap_err().to_string();
        assert_eq!(refused, "cuda cuMemsetD8Async: error 1 (CUDA_ERROR_INVALID_VALUE)");
        let refused = driver.allocate_pinned(64).unwrap_err().to_string();
        assert_eq!(refused, "cuda cuMemHostGetDevicePointer_v2: error 801 (CUDA_ERROR_NOT_SUPPORTED)");
    });
    said.inspect(|said| assert_nothing_left(&said.log));
}

#[test]
fn a_final_error_is_every_later_calls_answer_without_asking_the_driver() {
    let said = Machine::whole().told("STICKY", "2:700").runs(|_| {
        let driver = open_scale();
        let (stream, scale) = (driver.stream().unwrap(), Scale::new(&driver));
        scale.launch(&driver, &stream).unwrap();
        driver.wait(&driver.record(&stream).unwrap()).unwrap();
        assert_eq!(scale.take_out(), scale.expected);

        scale.launch(&driver, &stream).unwrap();
        let done = driver.record(&stream).unwrap();
        let end = driver.wait(&done).unwrap_err();
        assert_eq!(
            end.to_string(),
            "cuda cuEventSynchronize: error 700 (CUDA_ERROR_ILLEGAL_ADDRESS) is final: the device takes no more \
             work from this process"
        );
        let anything = Address(4096);
        // SAFETY: nothing of it reaches the driver.
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
                driver.capture(&stream, &mut || panic!("asked to fill")).err(),
            ]
        };
        for answer in answers {
            assert_eq!(answer.as_ref(), Some(&end));
        }
        assert_eq!(driver.memory(), (0, 0));
    });
    if let Some(said) = said {
        assert!(!said.log.contains("asked after the end"), "{}", said.log);
        assert!(said.log.lines().last().unwrap().starts_with("released"), "the context itself is given back");
    }
}

#[test]
fn a_final_error_is_noticed_by_a_query_too() {
    Machine::whole().told("STICKY", "1:719").runs(|_| {
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

/// Why the device of this machine could not be opened.
fn refusal() -> CudaError {
    let error = open(0, None).map(drop).unwrap_err();
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

#[test]
fn a_driver_that_lacks_a_function_is_refused_with_its_name() {
    let old = LIBCUDA.replace("fn cuGraphLaunch(", "fn cuGraphLaunch_v0(");
    Machine::whole().with("libcuda.so", &old).runs(|_| {
        assert_eq!(
            refusal().to_string(),
            "CUDA driver lacks cuGraphLaunch; install a whole driver, 580 or newer"
        );
    });
}

#[test]
fn an_old_driver_is_refused_with_what_is_needed() {
    Machine::whole().told("DRIVER", "12040").runs(|_| {
        assert_eq!(
            refusal().to_string(),
            "CUDA driver too old: expected at least 13.0, got 12.4; install NVIDIA's driver 580 or newer"
        );
    });
}

#[test]
fn an_old_device_is_refused_with_what_is_needed() {
    Machine::whole().told("COMPUTE", "61").runs(|_| {
        let text = refusal().to_string();
        assert!(text.contains("Pretend GPU, compute 6.1, 1.0 GiB: expected compute 7.0 or newer"), "{text}");
    });
}

#[test]
fn a_device_that_is_not_there_is_refused_with_how_many_are() {
    Machine::whole().told("DEVICES", "2").runs(|_| {
        assert_eq!(open(1, None).unwrap().info().ordinal, 1);
        let text = open(2, None).unwrap_err().to_string();
        assert_eq!(text, "CUDA device 2: expected one below 2, the number of devices");
    });
}

#[test]
fn a_device_without_room_for_a_context_is_refused() {
    Machine::whole().told("RETAIN", "2").runs(|_| {
        let text = refusal().to_string();
        assert!(text.contains("no memory is left for a context") && text.contains("nvidia-smi"), "{text}");
    });
}

#[test]
fn a_context_that_is_refused_is_named_by_its_code() {
    Machine::whole().told("RETAIN", "46").runs(|_| {
        let expected = "cuda cuDevicePrimaryCtxRetain: error 46 (CUDA_ERROR_DEVICE_UNAVAILABLE)";
        assert_eq!(refusal().to_string(), expected);
    });
}

#[test]
fn serve_falls_back_aloud_where_auto_finds_no_usable_gpu_and_refuses_where_cuda_is_wanted() {
    let cases = [
        (Machine::whole().told("DRIVER", "12040"), "CUDA driver too old: expected at least 13.0, got 12.4"),
        (Machine::whole().told("COMPUTE", "61"), "compute 6.1, 1.0 GiB: expected compute 7.0 or newer"),
        (Machine::whole().told("DEVICES", "0"), "CUDA driver found, no device; check nvidia-smi"),
        (Machine::whole(), "this version does not serve on a GPU yet"),
    ];
    // Without models it ends right after the choice.
    let none = tempfile::tempdir().unwrap();
    for (machine, reason) in cases {
        for (wanted, aloud) in [("auto", " WARN "), ("cuda", "error: device.kind: expected ")] {
            let mut serve = flechette();
            serve.args(["serve", "--device", wanted, "--models"]).arg(none.path());
            let ended = machine.equips(&mut serve).output().unwrap();
            let text = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(2), "{text}");
            let line = text.lines().find(|line| line.contains(reason)).unwrap_or_else(|| panic!("{text}"));
            assert!(line.contains(aloud), "{line}");
        }
    }
}

#[test]
fn kernels_of_another_shape_than_ours_are_refused() {
    let (none, several) =
        ("expected one parameter by value, got none", "expected one parameter by value, got several");
    for (count, expected) in [("0", none), ("2", several)] {
        // One test runs itself as two children, which tell the cases apart by what they were told.
        let said = Machine::whole().told("PARAMETERS", count).runs(|_| println!("{}", refusal()));
        let Some(said) = said else { return };
        assert!(said.out.contains(expected), "{}", said.out);
    }
}

#[test]
fn a_kernel_that_is_not_in_its_image_is_refused() {
    let said = Machine::whole().told("FUNCTION", "500").runs(|_| {
        assert_eq!(refusal().to_string(), "cuda cuModuleGetFunction: error 500 (CUDA_ERROR_NOT_FOUND)");
    });
    // What was loaded before is unloaded.
    said.inspect(|said| assert_nothing_left(&said.log));
}

#[test]
fn kernels_are_compiled_for_the_device_kept_and_taken_again() {
    let said = Machine::whole().runs(|folder| {
        let cache = folder.join("kernels");
        for _ in 0..2 {
            let driver = open(0, Some(&cache)).unwrap();
            assert!(driver.to_string().ends_with("kernels by NVRTC 13.0 for sm_90"), "{driver}");
        }
        assert!(std::fs::read_dir(cache).unwrap().count() > 0);
    });
    if let Some(said) = said {
        let log = said.log;
        for kernel in KERNELS {
            let name = format!("{}.cu", kernel.name);
            assert_eq!(log.matches(&format!("compiled {name}")).count(), 1, "{log}");
            assert_eq!(
                log.matches(&format!("module text binary {name} with common.cuh")).count(),
                2,
                "{log}"
            );
        }
        assert!(log.contains("--fmad=false") && log.contains("--gpu-architecture=sm_90"));
    }
}

#[test]
fn a_device_newer_than_the_compiler_gets_ptx_and_one_that_is_older_is_refused() {
    let newer = Machine::whole().told("COMPUTE", "120").runs(|_| {
        if std::env::var("PRETEND_COMPUTE").unwrap() == "120" {
            assert!(open(0, None).unwrap().to_string().ends_with("for compute_90"));
        } else {
            println!("{}", refusal());
        }
    });
    let Some(newer) = newer else { return };
    assert!(newer.log.contains("module text ptx "), "{}", newer.log);
    let older = Machine::whole()
        .told("COMPUTE", "70")
        .runs_test("cuda_driver::a_device_newer_than_the_compiler_gets_ptx_and_one_that_is_older_is_refused");
    let expected = "NVRTC 13.0 knows compute 7.5 and newer, the device has 7.0; install NVRTC 12.9";
    assert!(older.out.contains(expected), "{}", older.out);
}

#[test]
fn a_kernel_that_does_not_compile_is_refused_with_what_the_compiler_says() {
    let said = Machine::whole().told("COMPILE", "6").runs(|_| {
        let text = refusal().to_string();
        let expected = "NVRTC 13.0 says: code 6: it.cu(1): error: | expected a kernel";
        assert_eq!(text, format!("CUDA kernel {}: {expected}", KERNELS[0].name));
    });
    said.inspect(|said| assert_nothing_left(&said.log));
}

#[test]
fn an_image_that_the_driver_refuses_is_named_with_versions_and_its_log() {
    let said = Machine::whole().told("IMAGE", "222").runs(|_| {
        let expected = "(NVRTC 13.0 for sm_90): the driver, of CUDA 13.0, refuses it with 222 \
                        (CUDA_ERROR_UNSUPPORTED_PTX_VERSION): ptxas fatal: | unsupported version";
        assert_eq!(refusal().to_string(), format!("CUDA kernel {} {expected}", KERNELS[0].name));
    });
    said.inspect(|said| assert_nothing_left(&said.log));
}

#[test]
fn without_a_compiler_the_refusal_says_what_to_install() {
    let said = Machine::bare().with("libcuda.so", LIBCUDA).runs(|_| match open(0, None) {
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("libnvrtc is not on the library path, and "), "{text}");
            assert!(text.contains("install NVRTC of CUDA 13.0"), "{text}");
        }
        // Where NVRTC is installed for all programs it is found.
        Ok(driver) => println!("found a compiler: {driver}"),
    });
    said.inspect(|said| eprintln!("{}", said.log));
}

#[test]
fn kernels_that_the_program_carries_need_no_compiler() {
    if let Err(reason) = ahead::images(KERNELS, (9, 0)) {
        eprintln!("skipped: {reason}");
        return;
    }
    let said = Machine::bare().with("libcuda.so", LIBCUDA).told("BUNDLE", "0").runs(|_| {
        let driver = open(0, None).unwrap();
        assert!(driver.to_string().contains("kernels by nvcc"), "{driver}");
    });
    if let Some(said) = said {
        assert!(said.log.contains("module bundle"), "{}", said.log);
        assert_nothing_left(&said.log);
    }
}
