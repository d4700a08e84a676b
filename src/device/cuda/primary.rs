//! A device's primary context: made current on each calling thread, and closed by the first final error.
//!
//! CUDA calls use the context that is current on the calling thread. [`Primary::call`] makes this context
//! current first, and remembers that, so later calls on the same thread skip the step.
//!
//! After a final error (`errors::is_final`) every call on the context fails, with an error that does not show
//! the cause. So the first final error is stored, and every later call returns it without calling the driver.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::api::{Api, Handle};
use super::context::{DeviceInfo, Probe};
use super::driver::DriverError;
use super::errors::{CudaError, OUT_OF_MEMORY, SUCCESS, failed};

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

impl Primary {
    /// Retains the device's primary context and makes it current.
    pub(crate) fn retain(info: &DeviceInfo) -> Result<Arc<Self>, CudaError> {
        // SAFETY: `info` came from a probe, which opened the library.
        let api = unsafe { Api::load() }
            .map_err(|symbol| CudaError::NoDevice { found: Probe::DriverIncomplete { symbol } })?;
        let (mut device, mut context) = (0, 0);
        // SAFETY: the probe has initialised the driver, and one int is written.
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
        let error = failed(name, code);
        if matches!(error, DriverError::Sticky { .. }) {
            tracing::error!("{error}");
            return Err(self.end.get_or_init(|| error).clone());
        }
        Err(error)
    }

    /// Makes a call that releases something. An error is only logged: the caller cannot do anything about it,
    /// and after a final error the driver has released everything already.
    pub(crate) fn release(&self, call: impl FnOnce(&Api) -> c_int) {
        if let Err(error) = self.call("release", call) {
            tracing::debug!("{error}");
        }
    }

    fn enter(&self) -> Result<(), DriverError> {
        if let Some(error) = self.end.get() {
            return Err(error.clone());
        }
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
    pub(crate) fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two sizes are written.
        let read =
            self.call("cuMemGetInfo_v2", |api| unsafe { (api.memory_info)(&raw mut free, &raw mut total) });
        if read.is_ok() { (free as u64, total as u64) } else { (0, 0) }
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        let spare = self.spare_events.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in std::mem::take(spare) {
            // SAFETY: events in this list are unused.
            self.release(|api| unsafe { (api.destroy_event)(event) });
        }
        // SAFETY: a thread may have no current context. The release matches the retain in `retain`. Users of
        // the context hold an `Arc` of `self`, so none is left.
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
