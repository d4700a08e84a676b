//! Ctrl-C, SIGTERM and SIGHUP (a terminal that was closed) while `train` runs. The first one ends training
//! after a whole batch, and the model is saved. A second Ctrl-C or SIGTERM ends the process at once.

use std::fmt;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::unregister;

use crate::dataset::Stop;

/// The exit code of a run that a signal ended: that of a shell for SIGINT.
pub(crate) const EXIT_CODE: u8 = 130;

/// A signal that comes so soon after the first one is the same request: `timeout` and some init programs
/// signal a process and then its group.
const SAME_REQUEST: Duration = Duration::from_millis(250);

/// Sets a flag at a signal, until it is dropped.
pub(crate) struct OnSignal {
    actions: Vec<SigId>,
    /// Ends the thread that waits for the first signal.
    first: Handle,
}

impl OnSignal {
    /// Sets the flag of interrupts at SIGINT and SIGTERM.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub(crate) fn set(stop: &Stop) -> anyhow::Result<Self> {
        Self::set_flag(&stop.interrupt_flag())
    }

    /// Sets this flag at SIGINT and SIGTERM. A further signal ends the process, unless it comes at once.
    ///
    /// # Errors
    /// When the system refuses the handlers or a thread.
    pub(crate) fn set_flag(flag: &Arc<AtomicBool>) -> anyhow::Result<Self> {
        // Before anything else that catches a signal, so that none is lost.
        let flags = [SIGINT, SIGTERM].map(|signal| register(signal, flag.clone()).context("signals"));
        let actions = flags.into_iter().collect::<Result<_, _>>()?;
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals")?;
        let (first, ends) = (signals.handle(), Arc::new(AtomicBool::new(false)));
        let mut on_signal = Self { actions, first };
        for signal in [SIGINT, SIGTERM] {
            let further = register_conditional_shutdown(signal, EXIT_CODE.into(), ends.clone());
            on_signal.actions.push(further.context("signals")?);
        }
        let wait = move || {
            if signals.forever().next().is_some() {
                thread::sleep(SAME_REQUEST);
                ends.store(true, Ordering::SeqCst);
            }
        };
        thread::Builder::new().name("first-signal".to_owned()).spawn(wait).context("signals")?;
        Ok(on_signal)
    }

    /// Also sets the flag of interrupts at SIGHUP, unless the process was started to ignore it (`nohup`). A
    /// second one does not end the process, because a closed terminal and its shell both send it.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub(crate) fn and_hangup(mut self, stop: &Stop) -> anyhow::Result<Self> {
        if !hangup_is_ignored() {
            self.actions.push(register(SIGHUP, stop.interrupt_flag()).context("signals")?);
        }
        Ok(self)
    }
}

/// Whether SIGHUP does nothing. Where the system does not say so, it is left as it is.
pub(crate) fn hangup_is_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}

impl Drop for OnSignal {
    fn drop(&mut self) {
        self.first.close();
        for id in self.actions.drain(..) {
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
