//! A device's primary context: made current on each calling thread, and closed by the first final error.
//!
//! CUDA calls use the context that is current on the calling thread. [`Primary::call`] makes this context
//! current first, and remembers that, so later calls on the same thread skip the step.
//!
//! After a final error (`errors::is_final`) every call on the context fails, with an error that does not show
//! the cause. So the first final error is stored, and every later call returns it without calling the driver.
//! If the host cannot learn whether operations have ended ([`Primary::call_or_end`]), the error is final
//! whatever its code. As the driver is not called any more, nothing is freed that such an operation may use.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::api::{Api, Handle, driver_is_present};
use super::context::{DeviceInfo, Probe};
use super::driver::DriverError;
use super::errors::{CudaError, OUT_OF_MEMORY, SUCCESS, failed};
use crate::sync::EvenPoisoned;

thread_local! {
    /// The number of the [`Primary`] that is current on this thread; 0 is none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// How many contexts were retained. They are numbered because the driver may reuse a handle after its context
/// is destroyed.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The retained primary context of one device.
pub(crate) struct Primary {
    pub(crate) api: Api,
    device: c_int,
    context: Handle,
    number: u64,
    /// The first final error.
    end: OnceLock<DriverError>,
    /// Unused events, to be recorded again.
    pub(crate) spare_events: Mutex<Vec<Handle>>,
    /// Captures in progress, of any stream.
    pub(crate) captures: AtomicUsize,
}

/// Bytes of a memory; zeros when the driver or the system does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryBytes {
    pub free: u64,
    pub total: u64,
}

impl Primary {
    /// Retains the device's primary context and makes it current.
    pub(crate) fn retain(info: &DeviceInfo) -> Result<Arc<Self>, CudaError> {
        if !driver_is_present() {
            return Err(CudaError::NoDevice { found: Probe::NoDriver });
        }
        // SAFETY: the library is present.
        let api = unsafe { Api::load() }
            .map_err(|symbol| CudaError::NoDevice { found: Probe::DriverIncomplete { symbol } })?;
        let (mut device, mut context) = (0, 0);
        // SAFETY: one int is written. The probe that found the device has initialised the driver; otherwise
        // the call would return an error.
        let code = unsafe { (api.device)(&raw mut device, info.ordinal as c_int) };
        if code != SUCCESS {
            return Err(failed("cuDeviceGet", code).into());
        }
        // SAFETY: `device` is a device; one handle is written.
        match unsafe { (api.retain)(&raw mut context, device) } {
            SUCCESS => {}
            OUT_OF_MEMORY => return Err(CudaError::NoRoom { device: info.clone() }),
            code => return Err(failed("cuDevicePrimaryCtxRetain", code).into()),
        }
        let primary = Self {
            api,
            device,
            context,
            number: OPENED.fetch_add(1, Ordering::Relaxed) + 1,
            end: OnceLock::new(),
            spare_events: Mutex::default(),
            captures: AtomicUsize::new(0),
        };
        primary.enter()?;
        Ok(Arc::new(primary))
    }

    /// Calls the driver with the context current. `name` is the called function, for the error.
    pub(crate) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&Api) -> c_int,
    ) -> Result<(), DriverError> {
        let code = self.code_of(call)?;
        self.verdict(name, code)
    }

    /// Calls the driver with the context current, and returns its code. For calls that answer by their code.
    pub(crate) fn code_of(&self, call: impl FnOnce(&Api) -> c_int) -> Result<c_int, DriverError> {
        self.enter()?;
        Ok(call(&self.api))
    }

    /// Converts a code to a result. The first final error is stored.
    pub(crate) fn verdict(&self, name: &'static str, code: c_int) -> Result<(), DriverError> {
        if code == SUCCESS {
            return Ok(());
        }
        match failed(name, code) {
            error @ DriverError::Sticky { .. } => Err(self.end_with(error)),
            error => Err(error),
        }
    }

    /// As [`Self::call`], but any error is final. For the calls by which the host learns that operations have
    /// ended: after an error, they may be running and nothing would show when they end.
    pub(crate) fn call_or_end(
        &self,
        name: &'static str,
        call: impl FnOnce(&Api) -> c_int,
    ) -> Result<(), DriverError> {
        self.call(name, call).map_err(|error| match error {
            DriverError::Failed { call, code, name } => {
                self.end_with(DriverError::Sticky { call, code, name })
            }
            error => error,
        })
    }

    /// Stores a final error if it is the first. Returns the first one.
    fn end_with(&self, error: DriverError) -> DriverError {
        tracing::error!("{error}");
        self.end.get_or_init(|| error).clone()
    }

    /// # Errors
    /// The first final error.
    pub(crate) fn alive(&self) -> Result<(), DriverError> {
        self.end.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Makes a call that releases something. An error is only logged, since the caller cannot do anything
    /// about it. After a final error nothing is called: what is left is released with the context.
    pub(crate) fn release(&self, call: impl FnOnce(&Api) -> c_int) {
        if let Err(error) = self.call("release", call) {
            tracing::debug!("{error}");
        }
    }

    fn enter(&self) -> Result<(), DriverError> {
        self.alive()?;
        // On a thread that is ending, `CURRENT` may be destroyed. Then every call sets the context.
        if CURRENT.try_with(Cell::get) == Ok(self.number) {
            return Ok(());
        }
        // SAFETY: the context is retained until `self` is dropped.
        self.verdict("cuCtxSetCurrent", unsafe { (self.api.set_current)(self.context) })?;
        let _ = CURRENT.try_with(|current| current.set(self.number));
        Ok(())
    }

    /// A device attribute (`CUdevice_attribute`).
    pub(crate) fn attribute(&self, which: c_int) -> Result<c_int, DriverError> {
        let mut value = 0;
        // SAFETY: one int is written.
        self.call("cuDeviceGetAttribute", |api| unsafe {
            (api.attribute)(&raw mut value, which, self.device)
        })?;
        Ok(value)
    }

    /// The driver's CUDA version.
    pub(crate) fn driver_version(&self) -> Result<c_int, DriverError> {
        let mut version = 0;
        // SAFETY: one int is written.
        self.call("cuDriverGetVersion", |api| unsafe { (api.version)(&raw mut version) })?;
        Ok(version)
    }

    /// Free and total bytes of device memory; zeros when the driver does not report them.
    pub(crate) fn memory(&self) -> MemoryBytes {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two sizes are written.
        let read =
            self.call("cuMemGetInfo_v2", |api| unsafe { (api.memory_info)(&raw mut free, &raw mut total) });
        if read.is_err() {
            return MemoryBytes::default();
        }
        MemoryBytes { free: free as u64, total: total as u64 }
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        let spare = self.spare_events.get_mut().even_poisoned();
        for event in std::mem::take(spare) {
            // SAFETY: events in this list are unused.
            self.release(|api| unsafe { (api.destroy_event)(event) });
        }
        // SAFETY: a thread may have no current context. The release matches the retain in `retain`. Users of
        // the context hold an `Arc` of `self`, so none is left. Operations that may be running after a failed
        // wait end with the context.
        let code = unsafe {
            (self.api.set_current)(0);
            (self.api.release)(self.device)
        };
        let _ = CURRENT.try_with(|current| current.set(0));
        if code != SUCCESS {
            tracing::debug!(code, "the context could not be released");
        }
    }
}
