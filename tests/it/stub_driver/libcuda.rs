//! A stub libcuda in plain memory, with the functions that flechette uses. Tests compile it with rustc
//! and put it on the library path.
//!
//! It is as strict as the real driver. A call without a current context fails. The operations of a stream
//! are executed late, one per query, and only in the stream's order. During a capture, calls fail that the
//! real driver refuses. After a final error, every call returns it. The library executes one kernel itself,
//! `scale` of the tests. Other kernels go to the function that was registered with `stub_executes`, or
//! are ignored if none was registered.
//!
//! Environment variables inject errors (`setting`). Loaded modules, launches, calls after a final error and
//! the release of the context are written to the file `PRETEND_LOG`, one per line. SAFETY, for the whole
//! file: the functions are unsafe, and callers must follow cuda.h.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{c_char, c_void, CStr};
use std::io::Write;
use std::mem::size_of;
use std::sync::Mutex;

const CONTEXT: usize = 77;
const DEVICE: i32 = 40;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Executes a kernel, given its name, blocks, threads, bytes of shared memory and argument.
type Execute = unsafe extern "C" fn(*const u8, usize, *const u32, *const u8, usize) -> i32;
/// Size of a kernel's argument.
type ArgumentBytes = unsafe extern "C" fn(*const u8, usize) -> usize;

static EXECUTOR: Mutex<Option<(Execute, ArgumentBytes)>> = Mutex::new(None);

static WORLD: Mutex<World> = Mutex::new(World::new());

/// An operation of a stream.
#[derive(Clone)]
enum Work {
    Copy { from: u64, to: u64, bytes: usize },
    Set { to: u64, byte: u8, bytes: usize },
    Kernel { name: String, shape: [u32; 3], args: Vec<u8> },
    /// Record number n of an event.
    Record(usize, u64),
    /// Waits for record number n of an event. The last field is the stream of that record, because the event
    /// may be recorded in another stream later.
    Wait(usize, u64, usize),
    Graph(Vec<Work>),
}

#[derive(Default)]
struct Stream {
    work: VecDeque<Work>,
    capture: Option<usize>,
}

#[derive(Clone, Default)]
struct Event {
    records: u64,
    fired: BTreeSet<u64>,
    stream: usize,
    capture: Option<usize>,
}

struct Capture {
    origin: usize,
    thread: std::thread::ThreadId,
    work: Vec<Work>,
    unjoined: BTreeSet<usize>,
    invalid: bool,
}

struct World {
    next: usize,
    retained: usize,
    sticky: i32,
    launches: u64,
    device: BTreeMap<u64, Vec<u128>>,
    pinned: BTreeMap<u64, Vec<u64>>,
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<usize, Event>,
    captures: BTreeMap<usize, Capture>,
    drawings: BTreeMap<usize, Vec<Work>>,
    graphs: BTreeMap<usize, Vec<Work>>,
    modules: BTreeMap<usize, Vec<usize>>,
    functions: BTreeMap<usize, String>,
}

impl World {
    const fn new() -> Self {
        Self {
            next: 1000,
            retained: 0,
            sticky: 0,
            launches: 0,
            device: BTreeMap::new(),
            pinned: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            drawings: BTreeMap::new(),
            graphs: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
        }
    }

    fn handle(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    /// Adds an operation to a stream's queue, or to the capture that the stream is part of.
    fn push(&mut self, stream: usize, work: Work) -> i32 {
        let Some(found) = self.streams.get_mut(&stream) else { return 400 };
        match found.capture {
            None => found.work.push_back(work),
            Some(capture) => match self.captures.get_mut(&capture) {
                Some(capture) => capture.work.push(work),
                None => return 901,
            },
        }
        0
    }

    /// Executes the first operation of a stream. If that must wait for another stream, executes an operation
    /// of the other stream instead. Returns false if there is nothing to execute.
    unsafe fn step(&mut self, stream: usize) -> bool {
        let first = self.streams.get(&stream).and_then(|stream| stream.work.front().cloned());
        let Some(work) = first else { return false };
        if let Work::Wait(event, record, recorder) = work {
            if !self.has_fired(event, record) {
                // The other stream must reach the record first.
                return self.step(recorder);
            }
        }
        self.streams.get_mut(&stream).unwrap().work.pop_front();
        self.carry_out(&work);
        true
    }

    unsafe fn carry_out(&mut self, work: &Work) {
        if self.sticky != 0 {
            return;
        }
        match work {
            Work::Copy { from, to, bytes } => std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes),
            Work::Set { to, byte, bytes } => std::ptr::write_bytes(*to as *mut u8, *byte, *bytes),
            Work::Kernel { name, shape, args } => {
                self.launches += 1;
                if let Some((at, code)) = setting("STICKY").and_then(|s| {
                    let (at, code) = s.split_once(':')?;
                    Some((at.parse::<u64>().ok()?, code.parse::<i32>().ok()?))
                }) {
                    if self.launches == at {
                        self.sticky = code;
                        return;
                    }
                }
                if name == "scale" {
                    scale(args);
                } else if let Some((execute, _)) = *EXECUTOR.lock().unwrap() {
                    let (name, shape) = ((name.as_ptr(), name.len()), shape.as_ptr());
                    self.sticky = execute(name.0, name.1, shape, args.as_ptr(), args.len());
                }
            }
            Work::Record(event, record) => {
                if let Some(event) = self.events.get_mut(event) {
                    event.fired.insert(*record);
                }
            }
            Work::Wait(..) => {}
            Work::Graph(works) => works.iter().for_each(|work| self.carry_out(work)),
        }
    }

    /// Whether the record has fired. A destroyed event counts as fired.
    fn has_fired(&self, event: usize, record: u64) -> bool {
        self.events.get(&event).is_none_or(|event| event.fired.contains(&record))
    }

    unsafe fn drain(&mut self, stream: usize) {
        while self.step(stream) {}
    }

    /// The counts of all resources that still exist, for the log at the context's release.
    fn remains(&self) -> String {
        format!(
            "streams {} events {} graphs {} modules {} device {} pinned {}",
            self.streams.len(),
            self.events.len(),
            self.drawings.len() + self.graphs.len(),
            self.modules.len(),
            self.device.len(),
            self.pinned.len()
        )
    }
}

fn setting(name: &str) -> Option<String> {
    std::env::var(format!("PRETEND_{name}")).ok()
}

fn number(name: &str, otherwise: i64) -> i64 {
    setting(name).and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn log(line: &str) {
    if let Some(path) = setting("LOG") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        writeln!(file.unwrap(), "{line}").unwrap();
    }
}

/// Runs `then` if there is a current context and no final error. Otherwise returns the error's code.
unsafe fn call(then: impl FnOnce(&mut World) -> i32) -> i32 {
    if CURRENT.with(Cell::get) != CONTEXT {
        return 201;
    }
    let mut world = WORLD.lock().unwrap();
    if world.sticky != 0 {
        log("called after a final error");
        return world.sticky;
    }
    then(&mut world)
}

/// The same as `ScaleArgs` in `device/cuda/tests/driver.rs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ScaleArgs {
    from: *const f32,
    to: *mut f32,
    factor: f32,
    more: f32,
    count: u32,
    unused: u32,
}

unsafe fn scale(args: &[u8]) {
    let args = args.as_ptr().cast::<ScaleArgs>().read_unaligned();
    for i in 0..args.count as usize {
        *args.to.add(i) = *args.from.add(i) * args.factor + args.more;
    }
}

#[no_mangle]
unsafe extern "C" fn cuInit(_: u32) -> i32 {
    number("INIT", 0) as i32
}

#[no_mangle]
unsafe extern "C" fn cuDriverGetVersion(to: *mut i32) -> i32 {
    *to = number("DRIVER", 13_000) as i32;
    0
}

#[no_mangle]
unsafe extern "C" fn cuDeviceGetCount(to: *mut i32) -> i32 {
    *to = number("DEVICES", 1) as i32;
    0
}

#[no_mangle]
unsafe extern "C" fn cuDeviceGet(to: *mut i32, ordinal: i32) -> i32 {
    *to = DEVICE + ordinal;
    0
}

#[no_mangle]
unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, bytes: i32, device: i32) -> i32 {
    let name: &[u8] = if device == DEVICE { b"Pretend GPU\0" } else { b"Other GPU\0" };
    assert!(name.len() <= bytes as usize);
    to.copy_from(name.as_ptr().cast(), name.len());
    0
}

#[no_mangle]
unsafe extern "C" fn cuDeviceGetAttribute(to: *mut i32, which: i32, device: i32) -> i32 {
    let compute = if device == DEVICE { number("COMPUTE", 90) as i32 } else { 86 };
    *to = match which {
        75 => compute / 10,
        76 => compute % 10,
        16 => 132,
        _ => return 1,
    };
    0
}

#[no_mangle]
unsafe extern "C" fn cuDeviceTotalMem_v2(to: *mut usize, _: i32) -> i32 {
    *to = number("MEMORY", 1 << 30) as usize;
    0
}

#[no_mangle]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut usize, _: i32) -> i32 {
    let code = number("RETAIN", 0) as i32;
    if code == 0 {
        WORLD.lock().unwrap().retained += 1;
        *to = CONTEXT;
    }
    code
}

#[no_mangle]
unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_: i32) -> i32 {
    let mut world = WORLD.lock().unwrap();
    if world.retained == 0 {
        return 201;
    }
    world.retained -= 1;
    log(&format!("released with {}", world.remains()));
    0
}

#[no_mangle]
unsafe extern "C" fn cuCtxSetCurrent(context: usize) -> i32 {
    if context != 0 && (context != CONTEXT || WORLD.lock().unwrap().retained == 0) {
        return 201;
    }
    CURRENT.with(|current| current.set(context));
    0
}

fn used(world: &World) -> usize {
    world.device.values().map(|memory| memory.len() * 16).sum()
}

#[no_mangle]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    call(|world| {
        *total = number("MEMORY", 1 << 30) as usize;
        *free = *total - used(world);
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> i32 {
    call(|world| {
        let thread = std::thread::current().id();
        if let Some(capture) = world.captures.values_mut().find(|capture| capture.thread == thread) {
            capture.invalid = true;
            return 900;
        }
        if bytes == 0 {
            return 1;
        }
        if used(world).saturating_add(bytes) > number("MEMORY", 1 << 30) as usize {
            return 2;
        }
        // Device memory is not zeroed, and is aligned to 256 bytes.
        let memory = vec![u128::MAX; bytes.div_ceil(16) + 16];
        let at = (memory.as_ptr() as u64).next_multiple_of(256);
        world.device.insert(at, memory);
        *to = at;
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuMemFree_v2(memory: u64) -> i32 {
    call(|world| if world.device.remove(&memory).is_some() { 0 } else { 1 })
}

#[no_mangle]
unsafe extern "C" fn cuMemHostAlloc(to: *mut usize, bytes: usize, flags: u32) -> i32 {
    call(|world| {
        assert_eq!(flags, 3, "portable and mapped");
        if bytes as i64 > number("PINNED", 1 << 30) {
            return 2;
        }
        // The memory does not begin on a page, as with small blocks of the real driver.
        let memory = vec![u64::MAX; bytes.div_ceil(8) + 1024];
        let at = (memory.as_ptr() as u64).next_multiple_of(4096) + 512;
        world.pinned.insert(at, memory);
        *to = at as usize;
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuMemFreeHost(memory: usize) -> i32 {
    call(|world| if world.pinned.remove(&(memory as u64)).is_some() { 0 } else { 1 })
}

#[no_mangle]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(to: *mut u64, memory: usize, _: u32) -> i32 {
    call(|world| {
        *to = memory as u64;
        if world.pinned.contains_key(&(memory as u64)) { number("MAPPED", 0) as i32 } else { 1 }
    })
}

#[no_mangle]
unsafe extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) -> i32 {
    call(|world| world.push(stream, Work::Copy { from, to, bytes }))
}

#[no_mangle]
unsafe extern "C" fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: usize) -> i32 {
    call(|world| match number("MEMSET", 0) as i32 {
        0 => world.push(stream, Work::Set { to, byte, bytes }),
        code => code,
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamCreate(to: *mut usize, flags: u32) -> i32 {
    call(|world| {
        assert_eq!(flags, 1, "non-blocking");
        *to = world.handle();
        world.streams.insert(*to, Stream::default());
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamDestroy_v2(stream: usize) -> i32 {
    call(|world| {
        world.drain(stream);
        if world.streams.remove(&stream).is_some() { 0 } else { 400 }
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamSynchronize(stream: usize) -> i32 {
    call(|world| {
        world.drain(stream);
        world.sticky
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _: u32) -> i32 {
    call(|world| {
        let Some(found) = world.events.get(&event).cloned() else { return 400 };
        let own = world.streams.get(&stream).and_then(|stream| stream.capture);
        match (own, found.capture) {
            (None, None) => world.push(stream, Work::Wait(event, found.records, found.stream)),
            // A capture must not depend on operations outside it.
            (Some(_), None) => 905,
            (Some(own), Some(capture)) if own != capture => 902,
            (own, Some(capture)) => {
                let Some(capturing) = world.captures.get_mut(&capture) else { return 901 };
                if own.is_none() {
                    capturing.unjoined.insert(stream);
                } else if stream == capturing.origin {
                    capturing.unjoined.remove(&found.stream);
                }
                world.streams.get_mut(&stream).unwrap().capture = Some(capture);
                0
            }
        }
    })
}

#[no_mangle]
unsafe extern "C" fn cuEventCreate(to: *mut usize, flags: u32) -> i32 {
    call(|world| {
        assert_eq!(flags, 2, "without timing");
        *to = world.handle();
        world.events.insert(*to, Event::default());
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuEventDestroy_v2(event: usize) -> i32 {
    call(|world| if world.events.remove(&event).is_some() { 0 } else { 400 })
}

#[no_mangle]
unsafe extern "C" fn cuEventRecord(event: usize, stream: usize) -> i32 {
    call(|world| {
        let refusal = number("RECORD", 0) as i32;
        if refusal != 0 {
            return refusal;
        }
        let Some(capture) = world.streams.get(&stream).map(|stream| stream.capture) else { return 400 };
        let Some(found) = world.events.get_mut(&event) else { return 400 };
        found.capture = capture;
        found.stream = stream;
        if capture.is_some() {
            return 0;
        }
        found.records += 1;
        let record = found.records;
        world.push(stream, Work::Record(event, record))
    })
}

#[no_mangle]
unsafe extern "C" fn cuEventQuery(event: usize) -> i32 {
    call(|world| {
        let Some(found) = world.events.get(&event).cloned() else { return 400 };
        if found.capture.is_some() {
            return 1; // as driver 580, after the capture has ended
        }
        if found.fired.contains(&found.records) {
            return 0;
        }
        world.step(found.stream);
        if world.sticky != 0 { world.sticky } else { 600 }
    })
}

#[no_mangle]
unsafe extern "C" fn cuEventSynchronize(event: usize) -> i32 {
    call(|world| {
        let refusal = number("WAIT", 0) as i32;
        if refusal != 0 {
            return refusal;
        }
        let Some(found) = world.events.get(&event).cloned() else { return 400 };
        if found.capture.is_some() {
            return 1; // as driver 580, after the capture has ended
        }
        while !world.has_fired(event, found.records) && world.sticky == 0 {
            assert!(world.step(found.stream), "a wait that never ends");
        }
        world.sticky
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: i32) -> i32 {
    call(|world| {
        assert_eq!(mode, 1, "of this thread alone");
        let capture = world.handle();
        match world.streams.get_mut(&stream) {
            None => return 400,
            Some(stream) if stream.capture.is_some() => return 401,
            Some(stream) => stream.capture = Some(capture),
        }
        let (thread, unjoined) = (std::thread::current().id(), BTreeSet::new());
        let begun = Capture { origin: stream, thread, work: Vec::new(), unjoined, invalid: false };
        world.captures.insert(capture, begun);
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamEndCapture(stream: usize, to: *mut usize) -> i32 {
    call(|world| {
        *to = 0;
        let Some(capture) = world.streams.get(&stream).and_then(|stream| stream.capture) else { return 401 };
        let Some(ended) = world.captures.remove(&capture) else { return 401 };
        for stream in world.streams.values_mut().filter(|stream| stream.capture == Some(capture)) {
            stream.capture = None;
        }
        if ended.invalid {
            return 901;
        }
        if !ended.unjoined.is_empty() {
            return 904;
        }
        *to = world.handle();
        world.drawings.insert(*to, ended.work);
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuStreamIsCapturing(stream: usize, to: *mut i32) -> i32 {
    call(|world| match world.streams.get(&stream) {
        None => 400,
        Some(stream) => {
            *to = i32::from(stream.capture.is_some());
            0
        }
    })
}

#[no_mangle]
unsafe extern "C" fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) -> i32 {
    call(|world| {
        assert!(nodes.is_null());
        match world.drawings.get(&graph) {
            None => 400,
            Some(work) => {
                *count = work.len();
                0
            }
        }
    })
}

#[no_mangle]
unsafe extern "C" fn cuGraphInstantiateWithFlags(to: *mut usize, graph: usize, flags: u64) -> i32 {
    call(|world| {
        assert_eq!(flags, 0);
        let Some(work) = world.drawings.get(&graph).cloned() else { return 400 };
        *to = world.handle();
        world.graphs.insert(*to, work);
        number("INSTANTIATE", 0) as i32
    })
}

#[no_mangle]
unsafe extern "C" fn cuGraphDestroy(graph: usize) -> i32 {
    call(|world| if world.drawings.remove(&graph).is_some() { 0 } else { 400 })
}

#[no_mangle]
unsafe extern "C" fn cuGraphExecDestroy(graph: usize) -> i32 {
    call(|world| if world.graphs.remove(&graph).is_some() { 0 } else { 400 })
}

#[no_mangle]
unsafe extern "C" fn cuGraphLaunch(graph: usize, stream: usize) -> i32 {
    call(|world| match world.graphs.get(&graph).cloned() {
        None => 400,
        Some(work) => world.push(stream, Work::Graph(work)),
    })
}

#[no_mangle]
unsafe extern "C" fn cuModuleLoadDataEx(
    to: *mut usize,
    image: *const c_void,
    options: u32,
    names: *mut i32,
    values: *mut *mut c_void,
) -> i32 {
    call(|world| {
        assert_eq!(image as usize % 16, 0, "aligned");
        let begin: [u8; 4] = image.cast::<[u8; 4]>().read_unaligned();
        let kind = match &begin {
            b"\x50\xed\x55\xba" => "bundle",
            b"\x7fELF" => "machine code",
            [b'/', b'/', ..] => "ptx",
            _ => "text",
        };
        let whole = if kind == "text" { CStr::from_ptr(image.cast()).to_str().unwrap() } else { "" };
        log(&format!("module {kind} {whole}"));
        let refusal = if kind == "bundle" { number("BUNDLE", 209) } else { number("IMAGE", 0) } as i32;
        if refusal != 0 {
            assert_eq!((options, *names, *names.add(1)), (2, 5, 6), "options for the error log");
            let message = b"ptxas fatal:\n  unsupported version\0";
            assert!(*values.add(1) as usize >= message.len());
            (*values).cast::<u8>().copy_from(message.as_ptr(), message.len());
            return refusal;
        }
        *to = world.handle();
        world.modules.insert(*to, Vec::new());
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuModuleUnload(module: usize) -> i32 {
    call(|world| {
        let Some(functions) = world.modules.remove(&module) else { return 400 };
        functions.iter().for_each(|function| drop(world.functions.remove(function)));
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuModuleGetFunction(to: *mut usize, module: usize, name: *const c_char) -> i32 {
    call(|world| {
        let code = number("FUNCTION", 0) as i32;
        if code != 0 {
            return code;
        }
        *to = world.handle();
        world.functions.insert(*to, CStr::from_ptr(name).to_str().unwrap().to_owned());
        world.modules.get_mut(&module).unwrap().push(*to);
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuFuncLoad(function: usize) -> i32 {
    call(|world| if world.functions.contains_key(&function) { 0 } else { 400 })
}

/// Size of a kernel's only parameter.
fn parameter_bytes(name: &str) -> usize {
    match *EXECUTOR.lock().unwrap() {
        _ if name == "scale" => size_of::<ScaleArgs>(),
        // SAFETY: the registered function takes the address and the length of a name.
        Some((_, argument_bytes)) => unsafe { argument_bytes(name.as_ptr(), name.len()) },
        None => 8,
    }
}

/// Registers a function that executes all kernels except `scale`. A result other than 0 is a final error.
#[no_mangle]
unsafe extern "C" fn stub_executes(execute: Execute, argument_bytes: ArgumentBytes) {
    *EXECUTOR.lock().unwrap() = Some((execute, argument_bytes));
}

#[no_mangle]
unsafe extern "C" fn cuFuncGetParamInfo(
    function: usize,
    index: usize,
    offset: *mut usize,
    bytes: *mut usize,
) -> i32 {
    call(|world| {
        if index >= number("PARAMETERS", 1) as usize {
            return 1;
        }
        *offset = 8 * index;
        *bytes = parameter_bytes(&world.functions[&function]);
        0
    })
}

#[no_mangle]
unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    blocks: u32,
    blocks_y: u32,
    blocks_z: u32,
    threads: u32,
    threads_y: u32,
    threads_z: u32,
    shared_bytes: u32,
    stream: usize,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> i32 {
    call(|world| {
        assert_eq!((blocks_y, blocks_z, threads_y, threads_z, extra.is_null()), (1, 1, 1, 1, true));
        let Some(name) = world.functions.get(&function).cloned() else { return 400 };
        if blocks == 0 || threads == 0 || threads > 1024 || shared_bytes > 48 << 10 {
            return 1;
        }
        let bytes = parameter_bytes(&name);
        let args = std::slice::from_raw_parts((*parameters).cast::<u8>(), bytes).to_vec();
        log(&format!("launch {name} {blocks} {threads} {shared_bytes} {bytes}"));
        world.push(stream, Work::Kernel { name, shape: [blocks, threads, shared_bytes], args })
    })
}
