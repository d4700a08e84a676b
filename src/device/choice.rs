//! Which device a process computes on: what was wanted, against what there is.

use std::fmt;

use super::cuda::CudaError;
use crate::config::DeviceKind;

/// The device taken, and why. Displays as one line for the log.
#[derive(Clone, Debug)]
pub enum Choice<D> {
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
pub enum Why {
    /// It was asked for.
    Wanted,
    /// There is no GPU that could be used.
    NoGpu(CudaError),
}

impl<D> Choice<D> {
    /// Whether another device was hoped for, so that the log should warn.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
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
pub struct DeviceError(pub CudaError);

/// Takes a device. `open` opens a GPU, and is asked only where one is wanted.
///
/// # Errors
/// [`DeviceError`] for `cuda`.
pub fn choose<D>(
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
mod tests {
    use super::super::cuda::{DeviceInfo, Probe};
    use super::*;

    fn h200() -> DeviceInfo {
        DeviceInfo { ordinal: 0, name: "H200".into(), compute: (9, 0), memory_bytes: 141 << 30 }
    }

    fn refusals() -> [CudaError; 3] {
        let old = DeviceInfo { name: "GTX 1080".into(), compute: (6, 1), ..h200() };
        [
            CudaError::NoDevice { found: Probe::NoDriver },
            CudaError::NoDevice { found: Probe::DriverTooOld { driver: 12_040, needed: 13_000 } },
            CudaError::DeviceTooOld { device: old },
        ]
    }

    #[test]
    fn host_is_taken_without_a_look() {
        let choice: Choice<DeviceInfo> =
            choose(DeviceKind::Host, || panic!("nobody asked for a GPU")).unwrap();
        assert!(!choice.is_fallback());
        assert_eq!(choice.to_string(), "device host");
    }

    #[test]
    fn a_gpu_that_works_is_taken_by_auto_and_by_cuda() {
        for wanted in [DeviceKind::Auto, DeviceKind::Cuda] {
            let choice = choose(wanted, || Ok(h200())).unwrap();
            assert!(matches!(choice, Choice::Cuda(_)) && !choice.is_fallback());
            assert!(choice.to_string().contains("H200"), "{choice}");
        }
    }

    #[test]
    fn auto_falls_back_to_the_host_aloud() {
        for error in refusals() {
            let choice: Choice<DeviceInfo> = choose(DeviceKind::Auto, || Err(error.clone())).unwrap();
            let line = choice.to_string();
            assert!(choice.is_fallback() && line.contains(&error.to_string()), "{line}");
        }
    }

    #[test]
    fn cuda_is_refused_with_the_reason() {
        for error in refusals() {
            let refused = choose::<DeviceInfo>(DeviceKind::Cuda, || Err(error.clone())).unwrap_err();
            let line = refused.to_string();
            assert!(line.starts_with("device.kind") && line.contains(&error.to_string()), "{line}");
        }
    }
}
