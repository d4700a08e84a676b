//! Loads compiled kernels into the device's context and finds them by name.
//!
//! Images compiled [`ahead`] of time are tried first. If there are none, or the driver refuses them, NVRTC
//! compiles the sources.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

use aligned_vec::{AVec, ConstAlign};

use super::ahead;
use super::api::Handle;
use super::compile::{Built, CompileFor, Compiler, Image, build};
use super::context::Compute;
use super::driver::DriverError;
use super::errors::{CudaError, SUCCESS, failed, is_unfit_image, one_line, version_text};
use super::kernel_cache::KernelCache;
use super::primary::Primary;
use super::sources::KernelFile;

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const LOG_OPTIONS: [c_int; 2] = [5, 6];
const LOG_BYTES: usize = 4096;

/// The driver reads images as structs of words, but images embedded in the program are not aligned.
type Aligned = AVec<u8, ConstAlign<64>>;

/// A kernel, ready to be launched.
pub(crate) struct Function {
    name: &'static str,
    pub(crate) handle: Handle,
    /// Size of its only parameter.
    pub(crate) parameter_bytes: usize,
}

/// All kernels of a context.
pub(crate) struct Modules {
    primary: Arc<Primary>,
    handles: Vec<Handle>,
    functions: Vec<Function>,
    /// The compiler and the target, for messages.
    pub(crate) origin: String,
}

impl Modules {
    /// Loads the kernels of these files.
    pub(crate) fn open(
        primary: &Arc<Primary>,
        kernels: &[KernelFile],
        compute: Compute,
        cache: Option<&Path>,
    ) -> Result<Self, CudaError> {
        let ahead = match ahead::images(kernels, compute) {
            Ok(images) => match Self::load(primary, &images) {
                Err(CudaError::Image { code, .. }) if is_unfit_image(code) => {
                    format!("the driver refuses the program's own kernels ({code})")
                }
                loaded => return loaded,
            },
            Err(reason) => reason,
        };
        let compiler = match Compiler::find() {
            Ok(compiler) => compiler,
            Err(found) => return Err(CudaError::NoCompiler { found, ahead }),
        };
        let device = CompileFor { compute, driver: primary.driver_version()? };
        let Built { images, from_cache, troubles } =
            build(&compiler, kernels, device, cache.map(KernelCache::new).as_ref())?;
        for trouble in troubles {
            tracing::warn!("{trouble}");
        }
        let kernels = images.len();
        tracing::info!(compiler = ?compiler, kernels, from_cache, %ahead, "cuda kernels compiled");
        Self::load(primary, &images)
    }

    fn load(primary: &Arc<Primary>, images: &[Image]) -> Result<Self, CudaError> {
        let origin = images.first().map_or_else(String::new, |image| image.origin.clone());
        let mut modules =
            Self { primary: primary.clone(), handles: Vec::new(), functions: Vec::new(), origin };
        for image in images {
            let module = load_image(primary, image)?;
            // Stored before the next error can occur, so that `drop` unloads it.
            modules.handles.push(module);
            for entry in image.kernel.entries {
                modules.functions.push(function(primary, module, entry)?);
            }
        }
        Ok(modules)
    }

    /// The kernel of this name.
    pub(crate) fn function(&self, name: &str) -> Result<&Function, DriverError> {
        self.functions.iter().find(|function| function.name == name).ok_or_else(|| {
            let known: Vec<_> = self.functions.iter().map(|function| function.name).collect();
            DriverError::Kernels { reason: format!("expected one of {}, got {name}", known.join(", ")) }
        })
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        for &module in &self.handles {
            // SAFETY: the module is loaded, and none of its kernels runs: streams and graphs hold an `Arc` of
            // `self`, and a dropped stream waits for its operations before it drops the `Arc`. If that wait
            // fails, the error is final, and `release` does not call the driver.
            self.primary.release(|api| unsafe { (api.unload_module)(module) });
        }
    }
}

fn load_image(primary: &Primary, image: &Image) -> Result<Handle, CudaError> {
    let bytes = Aligned::from_slice(0, &image.bytes);
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options = LOG_OPTIONS;
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
    let mut module = 0;
    // SAFETY: the image is complete: an NVIDIA compiler made it, or its checksum in the cache is correct. The
    // two options have two values, the log's address and its size. All outlive the call.
    let code = primary.code_of(|api| unsafe {
        (api.load_module)(
            &raw mut module,
            bytes.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    })?;
    if code == SUCCESS {
        return Ok(module);
    }
    if let error @ DriverError::Sticky { .. } = failed("cuModuleLoadDataEx", code) {
        return Err(error.into());
    }
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    Err(CudaError::Image {
        kernel: image.kernel.name,
        origin: image.origin.clone(),
        driver: version_text(primary.driver_version()?),
        code,
        log: one_line(&String::from_utf8_lossy(&log[..end])),
    })
}

/// Finds a kernel and checks that it has exactly one parameter, as every launch assumes.
fn function(primary: &Primary, module: Handle, name: &'static str) -> Result<Function, CudaError> {
    let text = CString::new(name).unwrap_or_default();
    let mut handle = 0;
    // SAFETY: the module is alive, the name ends in a zero, and one handle is written.
    primary.call("cuModuleGetFunction", |api| unsafe {
        (api.function)(&raw mut handle, module, text.as_ptr())
    })?;
    // Load now: by default the driver loads a kernel at its first launch, which would delay a request.
    // SAFETY: the function is alive.
    primary.call("cuFuncLoad", |api| unsafe { (api.load_function)(handle) })?;
    let parameter = |index: usize| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function is alive, and two sizes are written.
        let code = primary
            .code_of(|api| unsafe { (api.parameter)(handle, index, &raw mut offset, &raw mut bytes) })?;
        Ok::<_, DriverError>((code == SUCCESS).then_some(bytes))
    };
    match (parameter(0)?, parameter(1)?) {
        (Some(parameter_bytes), None) => Ok(Function { name, handle, parameter_bytes }),
        (None, _) => Err(CudaError::Parameter { kernel: name, got: "none".to_owned() }),
        (_, Some(_)) => Err(CudaError::Parameter { kernel: name, got: "several".to_owned() }),
    }
}
