//! Compiles kernels with NVRTC at start, for the device of the machine.
//!
//! [`Compiler`] wraps libnvrtc, opened at run time. [`build`] returns an [`Image`] of each kernel, from the
//! disk cache if it has one. If NVRTC knows the device's capability, an image is machine code for it.
//! Otherwise it is PTX for the newest older capability that NVRTC knows, and the driver compiles the PTX.
//!
//! A multiplication and an addition are never fused ([`OPTIONS`]). The results must have the bits of the
//! host's gather-pool and optimizers, which round each operation.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::fmt;

use super::api::{Handle, Nvrtc, compiler_is_present};
use super::context::Compute;
use super::errors::{CudaError, SUCCESS, one_line};
use super::kernel_cache::{Entry, KernelCache};
use super::sources::{HEADERS, KernelFile};

/// Options of every compilation, without the architecture. `build.rs` and `.ci/nvrtc.py` repeat them.
const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

/// What an image is compiled for. Displays as the value of the compiler's option `--gpu-architecture`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Machine code for this capability, 10 x major + minor.
    Binary(i32),
    /// PTX, which the driver compiles for any device of this capability or a newer one.
    Text(i32),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Binary(sm) => write!(f, "sm_{sm}"),
            Self::Text(compute) => write!(f, "compute_{compute}"),
        }
    }
}

impl Target {
    /// The best target for a device among the capabilities that the compiler knows. `None` when the device is
    /// older than all of them.
    #[must_use]
    pub(crate) fn best(compute: Compute, known: &[i32]) -> Option<Self> {
        let device = compute.number();
        if known.contains(&device) {
            return Some(Self::Binary(device));
        }
        known.iter().copied().filter(|&it| it < device).max().map(Self::Text)
    }
}

/// A kernel file, compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// Its source.
    pub kernel: KernelFile,
    /// Machine code, PTX with its closing zero, or a bundle of both.
    pub bytes: std::borrow::Cow<'static, [u8]>,
    /// The compiler and the target, for messages.
    pub origin: String,
}

/// The result of [`build`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Built {
    /// One image per kernel file.
    pub images: Vec<Image>,
    /// How many images came from the disk cache.
    pub from_cache: usize,
    /// Errors of the disk cache, one sentence each, to be logged as warnings.
    pub troubles: Vec<String>,
}

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompileFor {
    pub compute: Compute,
    /// The driver's CUDA version.
    pub driver: i32,
}

/// Compiles kernels for a device, or reads them from the cache.
///
/// # Errors
/// [`CudaError::CompilerTooNew`] when the device is older than every capability that NVRTC knows;
/// [`CudaError::Compile`] when NVRTC refuses a kernel.
pub(crate) fn build(
    compiler: &Compiler,
    kernels: &[KernelFile],
    CompileFor { compute, driver }: CompileFor,
    cache: Option<&KernelCache>,
) -> Result<Built, CudaError> {
    let target = compiler.target(compute)?;
    let nvrtc = compiler.release();
    let mut built = Built::default();
    for kernel in kernels {
        let entry = Entry { kernel, target, options: OPTIONS, nvrtc, driver };
        let cached = cache.and_then(|cache| {
            cache.get(&entry).unwrap_or_else(|trouble| {
                built.troubles.push(trouble);
                None
            })
        });
        built.from_cache += usize::from(cached.is_some());
        let bytes = match cached {
            Some(bytes) => bytes,
            None => {
                let bytes = compiler.compile(kernel, target)?;
                if let Some(Err(trouble)) = cache.map(|cache| cache.put(&entry, &bytes)) {
                    built.troubles.push(trouble);
                }
                bytes
            }
        };
        let origin = format!("NVRTC {nvrtc} for {target}");
        built.images.push(Image { kernel: *kernel, bytes: bytes.into(), origin });
    }
    Ok(built)
}

/// The release of NVRTC, and so of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct NvrtcRelease {
    pub major: i32,
    pub minor: i32,
}

impl fmt::Display for NvrtcRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The opened libnvrtc.
pub(crate) struct Compiler {
    nvrtc: Nvrtc,
    release: NvrtcRelease,
    architectures: Vec<i32>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {}", self.release)
    }
}

impl Compiler {
    /// Opens libnvrtc, found by the dynamic loader.
    ///
    /// # Errors
    /// What is missing, as the first clause of a sentence.
    pub(crate) fn find() -> Result<Self, String> {
        if !compiler_is_present() {
            return Err("libnvrtc is not on the library path".to_owned());
        }
        // SAFETY: the library is present.
        let nvrtc =
            unsafe { Nvrtc::load() }.map_err(|symbol| format!("the installed libnvrtc lacks {symbol}"))?;
        let refused = |call: &str, code: c_int| format!("libnvrtc's {call} fails with code {code}");
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: writes one int through each pointer.
        let code = unsafe { (nvrtc.version)(&raw mut major, &raw mut minor) };
        if code != SUCCESS {
            return Err(refused("nvrtcVersion", code));
        }
        // SAFETY: writes one int through the pointer.
        let code = unsafe { (nvrtc.architecture_count)(&raw mut count) };
        let mut architectures = vec![0; usize::try_from(count).unwrap_or(0)];
        if code != SUCCESS || architectures.is_empty() {
            return Err(refused("nvrtcGetNumSupportedArchs", code));
        }
        // SAFETY: writes `count` ints, and the vector has that length.
        let code = unsafe { (nvrtc.architectures)(architectures.as_mut_ptr()) };
        if code != SUCCESS {
            return Err(refused("nvrtcGetSupportedArchs", code));
        }
        Ok(Self { nvrtc, release: NvrtcRelease { major, minor }, architectures })
    }

    #[must_use]
    pub(crate) fn release(&self) -> NvrtcRelease {
        self.release
    }

    /// The target for a device.
    ///
    /// # Errors
    /// [`CudaError::CompilerTooNew`].
    pub(crate) fn target(&self, compute: Compute) -> Result<Target, CudaError> {
        Target::best(compute, &self.architectures).ok_or_else(|| {
            let least = self.architectures.iter().copied().min().unwrap_or(0);
            CudaError::CompilerTooNew { nvrtc: self.release, least: Compute::from_number(least), compute }
        })
    }

    /// Compiles one kernel.
    ///
    /// # Errors
    /// [`CudaError::Compile`], with the compiler's log.
    pub(crate) fn compile(&self, kernel: &KernelFile, target: Target) -> Result<Vec<u8>, CudaError> {
        let refused = |log: String| CudaError::Compile { kernel: kernel.name, nvrtc: self.release, log };
        let program = Program::new(&self.nvrtc, kernel).map_err(refused)?;
        let compiled = program.compile(target).and_then(|()| match target {
            Target::Binary(_) => program.read(self.nvrtc.cubin_bytes, self.nvrtc.cubin),
            Target::Text(_) => program.read(self.nvrtc.ptx_bytes, self.nvrtc.ptx),
        });
        compiled.map_err(refused)
    }
}

type SizeOf = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type ContentsOf = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;

/// An NVRTC program, destroyed when dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

/// The text as a C string. It would end at a zero byte, but our texts contain none.
fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().take_while(|&byte| byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

/// An array of C strings. The pointers are valid as long as the array lives.
struct TextArray {
    pointers: Vec<*const c_char>,
    _texts: Vec<CString>,
}

impl TextArray {
    fn new<'t>(texts: impl IntoIterator<Item = &'t str>) -> Self {
        let texts: Vec<CString> = texts.into_iter().map(c_text).collect();
        Self { pointers: texts.iter().map(|text| text.as_ptr()).collect(), _texts: texts }
    }
}

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, kernel: &KernelFile) -> Result<Self, String> {
        let (text, name) = (c_text(kernel.text), c_text(&format!("{}.cu", kernel.name)));
        let headers = TextArray::new(HEADERS.iter().map(|header| header.text));
        let names = TextArray::new(HEADERS.iter().map(|header| header.name));
        let mut handle = 0;
        // SAFETY: all texts end in a zero, and both arrays have `HEADERS.len()` of them. All outlive the
        // call, which copies them. One handle is written.
        let code = unsafe {
            (nvrtc.create)(
                &raw mut handle,
                text.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                headers.pointers.as_ptr(),
                names.pointers.as_ptr(),
            )
        };
        if code == SUCCESS { Ok(Self { nvrtc, handle }) } else { Err(format!("code {code} at creation")) }
    }

    fn compile(&self, target: Target) -> Result<(), String> {
        let architecture = format!("--gpu-architecture={target}");
        let options = TextArray::new(OPTIONS.iter().copied().chain([architecture.as_str()]));
        // SAFETY: `handle` is a program. The array has the given length and outlives the call.
        let code = unsafe {
            (self.nvrtc.compile)(self.handle, options.pointers.len() as c_int, options.pointers.as_ptr())
        };
        if code == SUCCESS {
            return Ok(());
        }
        let log = self.read(self.nvrtc.log_bytes, self.nvrtc.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        Err(format!("code {code}: {}", one_line(log.trim_end_matches('\0'))))
    }

    /// Reads one output of the program: the log, the machine code or the PTX.
    fn read(&self, size_of: SizeOf, contents_of: ContentsOf) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: `handle` is a program, and one size is written.
        let code = unsafe { size_of(self.handle, &raw mut bytes) };
        if code != SUCCESS {
            return Err(format!("code {code} for the size of its output"));
        }
        let mut contents = vec![0_u8; bytes];
        // SAFETY: the library writes as many bytes as the call above returned, and `contents` has room for
        // them.
        let code = unsafe { contents_of(self.handle, contents.as_mut_ptr().cast()) };
        if code == SUCCESS { Ok(contents) } else { Err(format!("code {code} for its output")) }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: `handle` is a program of this NVRTC, and is not used after this.
        unsafe { (self.nvrtc.destroy)(&raw mut self.handle) };
    }
}

#[cfg(test)]
mod tests;
