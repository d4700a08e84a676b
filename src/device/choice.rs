//! Which device a process computes on: what was wanted, against what was found.

use std::fmt;

use super::cuda::Probe;
use crate::config::DeviceKind;

/// The device taken, and why. Displays as one line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The CPU.
    Host {
        /// What the look for CUDA devices came to.
        found: Probe,
    },
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { found: found @ Probe::Found(_) } => {
                write!(f, "device host: {found}, which this version does not compute on")
            }
            Self::Host { found } => write!(f, "device host: {found}"),
        }
    }
}

/// Why no device could be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// `cuda` was asked for.
    #[error("device.kind: expected auto or host, got cuda: this version computes on the host only ({found})")]
    CudaNotYet {
        /// What the look for CUDA devices came to.
        found: Probe,
    },
}

/// Takes a device. `found` is kept, so that the log says what else there was.
///
/// # Errors
/// [`DeviceError::CudaNotYet`] for `cuda`: no kernel is launched on a GPU in this version.
pub fn choose(wanted: DeviceKind, found: &Probe) -> Result<Choice, DeviceError> {
    match wanted {
        DeviceKind::Auto | DeviceKind::Host => Ok(Choice::Host { found: found.clone() }),
        DeviceKind::Cuda => Err(DeviceError::CudaNotYet { found: found.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cuda::DeviceInfo;
    use super::*;

    fn h200() -> Probe {
        let device = DeviceInfo { ordinal: 0, name: "H200".into(), compute: (9, 0), memory_bytes: 141 << 30 };
        Probe::Found(vec![device])
    }

    #[test]
    fn auto_takes_the_host_and_says_what_it_passed_by() {
        let line = choose(DeviceKind::Auto, &h200()).unwrap().to_string();
        assert!(
            line.starts_with("device host") && line.contains("H200") && line.contains("does not compute on")
        );
        let line = choose(DeviceKind::Host, &Probe::NoDriver).unwrap().to_string();
        assert_eq!(line, "device host: no CUDA driver (libcuda is not installed)");
    }

    #[test]
    fn cuda_is_refused_with_what_was_found() {
        for found in [h200(), Probe::NoDriver] {
            let line = choose(DeviceKind::Cuda, &found).unwrap_err().to_string();
            assert!(line.contains("host only") && line.contains(&found.to_string()), "{line}");
        }
    }
}
