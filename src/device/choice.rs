//! Which device a process computes on: what was wanted, against what there is.

use std::fmt;

use super::cuda::CudaError;
use crate::config::DeviceKind;

/// The device taken, and why. Displays as one line for the log.
#[derive(Clone, Debug)]
pub(crate) enum Choice<D> {
    /// The CPU.
    Host {
        /// Why not a GPU.
        why: Why,
    },
    /// A GPU, opened.
    Cuda(D),
}

/// Why the host was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It was asked for.
    Wanted,
    /// There is no GPU that could be used.
    NoGpu(CudaError),
}

impl<D> Choice<D> {
    /// Whether another device was hoped for, so that the log should warn.
    #[must_use]
    pub(crate) fn is_fallback(&self) -> bool {
        matches!(self, Self::Host { why: Why::NoGpu(_) })
    }
}

impl<D: fmt::Display> fmt::Display for Choice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { why: Why::Wanted } => write!(f, "device host"),
            Self::Host { why: Why::NoGpu(error) } => {
                write!(f, "device host, since device.kind is auto (host looks for no GPU): {error}")
            }
            Self::Cuda(device) => write!(f, "device {device}"),
        }
    }
}

/// `cuda` was asked for, and there is no GPU that could be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("device.kind: expected a usable GPU, because it is cuda, got none: {0}")]
pub(crate) struct DeviceError(pub CudaError);

/// Takes a device. `open` opens a GPU, and is asked only where one is wanted.
///
/// # Errors
/// [`DeviceError`] for `cuda`.
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
