//! Ctrl-C, SIGTERM and SIGHUP (a terminal that was closed) while `train` runs. The first one ends training
//! after a whole batch, and the model is saved. A second Ctrl-C or SIGTERM ends the process at once.

use std::fmt;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use signal_hook::low_level::unregister;

use crate::dataset::Stop;

/// The exit code of a run that a signal ended: that of a shell for SIGINT.
pub(crate) const EXIT_CODE: u8 = 130;

/// Sets a flag at a signal, until it is dropped.
pub(crate) struct OnSignal(Vec<SigId>);

impl OnSignal {
    /// Sets the flag of interrupts at SIGINT and SIGTERM.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub(crate) fn set(stop: &Stop) -> anyhow::Result<Self> {
        Self::set_flag(&stop.interrupt_flag())
    }

    /// Sets this flag at SIGINT and SIGTERM. A signal that finds it set ends the process.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub(crate) fn set_flag(flag: &Arc<AtomicBool>) -> anyhow::Result<Self> {
        let mut handlers = Self(Vec::new());
        for signal in [SIGINT, SIGTERM] {
            // Actions run in this order, so the first signal does not end the process.
            let second = register_conditional_shutdown(signal, EXIT_CODE.into(), flag.clone());
            handlers.0.push(second.context("signals")?);
            handlers.0.push(register(signal, flag.clone()).context("signals")?);
        }
        Ok(handlers)
    }

    /// Also sets the flag of interrupts at SIGHUP, unless the process was started to ignore it (`nohup`). A
    /// second one does not end the process, because a closed terminal and its shell both send it.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub(crate) fn and_hangup(mut self, stop: &Stop) -> anyhow::Result<Self> {
        if !hangup_is_ignored() {
            self.0.push(register(SIGHUP, stop.interrupt_flag()).context("signals")?);
        }
        Ok(self)
    }
}

/// Whether SIGHUP does nothing. Where the system does not say so, it is left as it is.
fn hangup_is_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}

impl Drop for OnSignal {
    fn drop(&mut self) {
        for id in self.0.drain(..) {
            unregister(id);
        }
    }
}

/// A signal ended the training. The text says what was written and how to continue.
#[derive(Debug)]
pub(crate) struct Interrupted(pub String);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by a signal: {}", self.0)
    }
}

impl std::error::Error for Interrupted {}
