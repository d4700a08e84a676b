//! Chooses the device that a process computes on, from the configured `device.kind` and the usable GPU, if
//! there is one.

use std::fmt;

use super::cuda::CudaError;
use super::cuda::context::Probe;
use crate::config::DeviceKind;

/// The chosen device. Displays as one line for the log.
#[derive(Clone, Debug)]
pub(crate) enum Choice<D> {
    /// The CPU.
    Host { why: Why },
    /// An opened GPU.
    Cuda(D),
}

/// Why the host was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The configuration wants it.
    Wanted,
    /// `device.kind` is `auto`, and no GPU is usable.
    NoGpu(CudaError),
}

impl<D> Choice<D> {
    /// Whether the host replaces a GPU that `auto` would have preferred, and that seems to be there. The
    /// caller then logs a warning. Without a driver, no GPU is expected.
    #[must_use]
    pub(crate) fn is_fallback(&self) -> bool {
        let Self::Host { why: Why::NoGpu(error) } = self else { return false };
        !matches!(error, CudaError::NoDevice { found: Probe::NoDriver })
    }
}

impl<D: fmt::Display> fmt::Display for Choice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { why: Why::Wanted } => write!(f, "device host"),
            Self::Host { why: Why::NoGpu(CudaError::NoDevice { found: Probe::NoDriver }) } => {
                write!(f, "device host: this machine has no GPU with an NVIDIA driver")
            }
            Self::Host { why: Why::NoGpu(error) } => {
                write!(f, "device host, because device.kind is auto and no GPU is usable: {error}")
            }
            Self::Cuda(device) => write!(f, "device {device}"),
        }
    }
}

/// The configuration wants `cuda`, and no GPU is usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("device.kind is cuda: expected a usable GPU, found none: {0}")]
pub(crate) struct DeviceError(pub CudaError);

/// Chooses a device. `open` opens a GPU; it is not called for `host`.
///
/// # Errors
/// [`DeviceError`] for `cuda` when `open` fails.
pub(crate) fn choose<D>(
    wanted: DeviceKind,
    open: impl FnOnce() -> Result<D, CudaError>,
) -> Result<Choice<D>, DeviceError> {
    match wanted {
        DeviceKind::Host => Ok(Choice::Host { why: Why::Wanted }),
        DeviceKind::Auto => {
            Ok(open().map_or_else(|error| Choice::Host { why: Why::NoGpu(error) }, Choice::Cuda))
        }
        DeviceKind::Cuda => open().map(Choice::Cuda).map_err(DeviceError),
    }
}

#[cfg(test)]
mod tests;
