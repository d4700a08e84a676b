//! A device's primary context: current on whatever thread calls, and ended by the first final error.
//!
//! CUDA binds a context to a thread. [`Primary::call`] binds ours to the calling thread, remembers for
//! each thread that it did, and so asks the driver once a thread and context.
//!
//! After a final error (`errors::is_final`) every call on the context fails, with an error that says
//! nothing about the cause any more. So the first one is kept, and every later call returns it at once,
//! without asking the driver.
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

/// Contexts are numbered, because a handle may come again after its context is gone.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The retained primary context of one device.
pub(crate) struct Primary {
    pub(crate) api: Api,
    device: c_int,
    context: Handle,
    number: u64,
    end: OnceLock<DriverError>,
    /// Events that nobody holds, to be recorded again.
    pub(crate) spare_events: Mutex<Vec<Handle>>,
    /// Captures in progress, of any stream.
    pub(crate) captures: AtomicUsize,
}

impl Primary {
    /// Retains the context and makes it current.
    pub(crate) fn retain(info: &DeviceInfo) -> Result<Arc<Self>, CudaError> {
        // SAFETY: `info` came from a look for devices, which opened the library.
        let api = unsafe { Api::load() }
            .map_err(|symbol| CudaError::NoDevice { found: Probe::DriverIncomplete { symbol } })?;
        let (mut device, mut context) = (0, 0);
        // SAFETY: the look has initialised the driver, and one int is written.
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

    /// Calls the driver with the context current.
    pub(crate) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&Api) -> c_int,
    ) -> Result<(), DriverError> {
        let code = self.code_of(call)?;
        self.verdict(name, code)
    }

    /// Calls the driver with the context current, for a code that may be an answer.
    pub(crate) fn code_of(&self, call: impl FnOnce(&Api) -> c_int) -> Result<c_int, DriverError> {
        self.enter()?;
        Ok(call(&self.api))
    }

    /// A code as a result; a final one is kept.
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

    /// Gives something back to the driver, which has no use for the caller's opinion if it fails. After
    /// a final error everything is gone already.
    pub(crate) fn give_back(&self, call: impl FnOnce(&Api) -> c_int) {
        if let Err(error) = self.call("giving back", call) {
            tracing::debug!("{error}");
        }
    }

    fn enter(&self) -> Result<(), DriverError> {
        if let Some(error) = self.end.get() {
            return Err(error.clone());
        }
        // A thread that is ending has no memory of its own left, and asks each time.
        if CURRENT.try_with(Cell::get) == Ok(self.number) {
            return Ok(());
        }
        // SAFETY: the context is retained until `self` is dropped.
        self.verdict("cuCtxSetCurrent", unsafe { (self.api.set_current)(self.context) })?;
        let _ = CURRENT.try_with(|current| current.set(self.number));
        Ok(())
    }

    /// A number that the driver gives of the device (`CUdevice_attribute`).
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

    /// Free and total bytes of the device's memory; zeros when the driver does not tell.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two sizes are written.
        let told =
            self.call("cuMemGetInfo_v2", |api| unsafe { (api.memory_info)(&raw mut free, &raw mut total) });
        if told.is_ok() { (free as u64, total as u64) } else { (0, 0) }
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        let spare = self.spare_events.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in std::mem::take(spare) {
            // SAFETY: nobody holds the event: it is in the list of those.
            self.give_back(|api| unsafe { (api.destroy_event)(event) });
        }
        // SAFETY: no context is current on this thread after this, which is a good state. The release is
        // the one that `retain` owes; whatever used the context held an `Arc` of `self`, so nothing does.
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
