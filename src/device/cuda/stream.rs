//! Streams, events and graphs of libcuda. Dropping one releases it.
//!
//! A dropped stream waits for its operations and keeps the kernels' code loaded until then; if the wait
//! fails, for ever. (Waiting for the whole context instead would invalidate captures in progress on other
//! threads.)
//!
//! An event is created once and recorded many times: a dropped event goes to the context's list of unused
//! events. This is sound even while a stream waits for the event, because the wait refers to the last record
//! before the wait was enqueued.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::api::Handle;
use super::driver::DriverError;
use super::errors::SUCCESS;
use super::modules::Modules;
use super::primary::Primary;
use crate::sync::EvenPoisoned;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the default stream, which is not used.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: events without time stamps are cheaper.
const DISABLE_TIMING: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads may allocate meanwhile.
const THREAD_LOCAL: c_int = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NO_CAPTURE: c_int = 0;

/// A queue of operations, executed in order.
pub struct Stream {
    primary: Arc<Primary>,
    modules: Arc<Modules>,
    pub(crate) handle: Handle,
}

/// A point in a stream.
pub struct Event {
    primary: Arc<Primary>,
    pub(crate) handle: Handle,
}

/// Operations that are recorded once and launched together.
pub struct Graph {
    primary: Arc<Primary>,
    pub(crate) handle: Handle,
    /// Number of operations.
    pub(crate) nodes: u64,
    /// Keeps the kernels' code loaded.
    _modules: Arc<Modules>,
}

impl Stream {
    pub(crate) fn new(primary: &Arc<Primary>, modules: &Arc<Modules>) -> Result<Self, DriverError> {
        let mut handle = 0;
        primary.call("cuStreamCreate", |api| {
            // SAFETY: one handle is written.
            unsafe { (api.create_stream)(&raw mut handle, NON_BLOCKING) }
        })?;
        Ok(Self { primary: primary.clone(), modules: modules.clone(), handle })
    }

    /// Whether enqueued operations are captured instead of executed. A stream also joins the capture of
    /// another stream when it follows an event of that stream.
    pub(crate) fn is_captured(&self) -> bool {
        if self.primary.captures.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut status = NO_CAPTURE;
        // SAFETY: the stream is alive, and one int is written.
        let queried = self
            .primary
            .call("cuStreamIsCapturing", |api| unsafe { (api.is_capturing)(self.handle, &raw mut status) });
        queried.is_ok() && status != NO_CAPTURE
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is alive.
        let waited =
            self.primary.call_or_end("cuStreamSynchronize", |api| unsafe { (api.finish)(self.handle) });
        if let Err(error) = waited {
            tracing::debug!(%error, "a stream and the code of its kernels are kept");
        }
        // SAFETY: the stream is alive until here. After a failed wait, `release` does not call the driver.
        self.primary.release(|api| unsafe { (api.destroy_stream)(self.handle) });
    }
}

impl Event {
    /// Records an event behind all operations that were enqueued on the stream before. An error is final.
    pub(crate) fn record(stream: &Stream) -> Result<Self, DriverError> {
        let primary = &stream.primary;
        let spare = primary.spare_events.lock().even_poisoned().pop();
        let handle = match spare {
            Some(handle) => handle,
            None => {
                let mut handle = 0;
                // SAFETY: one handle is written.
                primary.call_or_end("cuEventCreate", |api| unsafe {
                    (api.create_event)(&raw mut handle, DISABLE_TIMING)
                })?;
                handle
            }
        };
        let event = Self { primary: primary.clone(), handle };
        // SAFETY: stream and event are alive, and of one context.
        primary.call_or_end("cuEventRecord", |api| unsafe { (api.record)(event.handle, stream.handle) })?;
        Ok(event)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut spare = self.primary.spare_events.lock().even_poisoned();
        spare.push(self.handle);
    }
}

impl Graph {
    /// Records the operations that `fill` enqueues.
    pub(crate) fn capture(
        stream: &Stream,
        fill: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<Self, DriverError> {
        let primary = &stream.primary;
        let capture = Capture::begin(stream)?;
        let filled = fill();
        let captured = capture.end();
        // The error of `fill` comes first: an invalid capture is only its consequence.
        filled?;
        let captured = captured?;
        let mut nodes = 0;
        // SAFETY: the captured graph is alive. Without an array for nodes, only their number is written.
        primary.call("cuGraphGetNodes", |api| unsafe {
            (api.graph_nodes)(captured.handle, ptr::null_mut(), &raw mut nodes)
        })?;
        let mut handle = 0;
        // SAFETY: the captured graph is alive, and one handle is written.
        primary.call("cuGraphInstantiateWithFlags", |api| unsafe {
            (api.instantiate)(&raw mut handle, captured.handle, 0)
        })?;
        Ok(Self { primary: primary.clone(), handle, nodes: nodes as u64, _modules: stream.modules.clone() })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is alive until here. The driver frees a running graph when it has finished.
        self.primary.release(|api| unsafe { (api.destroy_executable)(self.handle) });
    }
}

/// A capture in progress. It ends even if `fill` panics.
struct Capture<'a> {
    stream: &'a Stream,
    ended: bool,
}

/// A captured graph before it is instantiated.
struct Captured<'a> {
    primary: &'a Primary,
    handle: Handle,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, DriverError> {
        // SAFETY: the stream is alive.
        stream.primary.call("cuStreamBeginCapture_v2", |api| unsafe {
            (api.begin_capture)(stream.handle, THREAD_LOCAL)
        })?;
        stream.primary.captures.fetch_add(1, Ordering::AcqRel);
        Ok(Self { stream, ended: false })
    }

    fn end(mut self) -> Result<Captured<'a>, DriverError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Captured<'a>, DriverError> {
        self.ended = true;
        let primary = &self.stream.primary;
        let mut handle = 0;
        // SAFETY: the stream is alive, and one handle is written. It is 0 if the capture became invalid.
        let code = primary.code_of(|api| unsafe { (api.end_capture)(self.stream.handle, &raw mut handle) });
        primary.captures.fetch_sub(1, Ordering::AcqRel);
        let captured = Captured { primary, handle };
        code.and_then(|code| primary.verdict("cuStreamEndCapture", code)).map(|()| captured)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // Reached only while a panic unwinds.
            drop(self.finish());
        }
    }
}

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: the captured graph is alive until here. An instantiated graph is a copy.
            self.primary.release(|api| unsafe { (api.destroy_graph)(self.handle) });
        }
    }
}

/// Whether the event has fired.
pub(crate) fn fired(event: &Event) -> Result<bool, DriverError> {
    // SAFETY: the event is alive.
    let code = event.primary.code_of(|api| unsafe { (api.query)(event.handle) })?;
    match code {
        SUCCESS => Ok(true),
        super::errors::NOT_READY => Ok(false),
        code => event.primary.verdict("cuEventQuery", code).map(|()| true),
    }
}
