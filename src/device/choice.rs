//! Which device a process computes on: what was wanted, against what there is.

use std::fmt;

use super::cuda::{CudaError, DeviceInfo};
use crate::config::DeviceKind;

/// The device taken, and why. Displays as one line for the log.
#[derive(Clone, Debug)]
pub enum Choice {
    /// The CPU.
    Host {
        /// Why not a GPU.
        why: Why,
    },
}

/// Why the host was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// It was asked for.
    Wanted,
    /// There is no GPU that could be used.
    NoGpu(CudaError),
    /// There is one, which this version does not serve on.
    NotServed(DeviceInfo),
}

impl Choice {
    /// Whether another device was hoped for, so that the log should warn.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        matches!(self, Self::Host { why: Why::NoGpu(_) | Why::NotServed(_) })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Host { why } = self;
        match why {
            Why::Wanted => write!(f, "device host"),
            Why::NoGpu(error) => {
                write!(f, "device host, since device.kind is auto (host looks for no GPU): {error}")
            }
            Why::NotServed(device) => write!(
                f,
                "device host, since device.kind is auto: CUDA {device}: this version does not serve on a GPU yet"
            ),
        }
    }
}

/// Why no device could be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// `cuda` was asked for, and there is no GPU that could be used.
    #[error("device.kind: expected a usable GPU, because it is cuda, got none: {0}")]
    NoGpu(CudaError),
    /// `cuda` was asked for, and there is a GPU, which this version does not serve on.
    #[error("device.kind: expected auto or host, got cuda: this version does not serve on a GPU yet ({0})")]
    NotServed(DeviceInfo),
}

/// Takes a device. `look` finds a GPU, and is asked only where one is wanted.
///
/// # Errors
/// [`DeviceError`] for `cuda`.
pub fn choose(
    wanted: DeviceKind,
    look: impl FnOnce() -> Result<DeviceInfo, CudaError>,
) -> Result<Choice, DeviceError> {
    match wanted {
        DeviceKind::Host => Ok(Choice::Host { why: Why::Wanted }),
        DeviceKind::Auto => Ok(Choice::Host { why: look().map_or_else(Why::NoGpu, Why::NotServed) }),
        DeviceKind::Cuda => Err(look().map_or_else(DeviceError::NoGpu, DeviceError::NotServed)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cuda::Probe;
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
        let choice = choose(DeviceKind::Host, || panic!("nobody asked for a GPU")).unwrap();
        assert!(!choice.is_fallback());
        assert_eq!(choice.to_string(), "device host");
    }

    #[test]
    fn auto_falls_back_to_the_host_aloud() {
        for error in refusals() {
            let choice = choose(DeviceKind::Auto, || Err(error.clone())).unwrap();
            let line = choice.to_string();
            assert!(choice.is_fallback() && line.contains(&error.to_string()), "{line}");
        }
        let choice = choose(DeviceKind::Auto, || Ok(h200())).unwrap();
        let line = choice.to_string();
        assert!(choice.is_fallback() && line.contains("H200") && line.contains("does not serve on a GPU"));
    }

    #[test]
    fn cuda_is_refused_with_the_reason() {
        for error in refusals() {
            let line = choose(DeviceKind::Cuda, || Err(error.clone())).unwrap_err().to_string();
            assert!(line.starts_with("device.kind") && line.contains(&error.to_string()), "{line}");
        }
        let line = choose(DeviceKind::Cuda, || Ok(h200())).unwrap_err().to_string();
        assert!(line.contains("does not serve on a GPU yet") && line.contains("H200"), "{line}");
    }
}
