//! How a reader is told to hand out no more samples.
//!
//! There are three reasons. An interrupt (Ctrl-C, SIGTERM) is final. A pause ends one run of the trainer, for
//! example to publish a version; afterwards the same reader continues with the next sample. Either way
//! training ends after a whole batch, because readers look at the flag between batches. A failure of training
//! ends the wait of a reader, so that the error is reported at once. It is not an interrupt, because after an
//! interrupt a second signal ends the process.
//!
//! Readers also say here whether they wait for data. So who stops them can tell a step that takes long from
//! one that cannot begin.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that readers share with the thread that stops them. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    interrupted: Arc<AtomicBool>,
    failed: Arc<AtomicBool>,
    paused: Arc<AtomicBool>,
    waiting: Arc<AtomicBool>,
}

/// As long as this lives, the reader waits for data.
pub(crate) struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Stop {
    /// Whether readers must hand out no more samples.
    #[must_use]
    pub(crate) fn requested(&self) -> bool {
        self.interrupted() || self.failed.load(Ordering::SeqCst) || self.paused.load(Ordering::SeqCst)
    }

    /// Ends the waits of readers, because training has failed.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// Whether the reason is final.
    #[must_use]
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// Whether readers are paused, and not stopped for good.
    #[must_use]
    pub(crate) fn paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst) && !self.interrupted()
    }

    /// Stops readers for good.
    pub(crate) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::SeqCst);
    }

    /// Pauses readers until [`Self::resume`].
    pub(crate) fn pause(&self) {
        self.paused.store(true, Ordering::SeqCst);
    }

    /// Ends a pause. An interrupt remains.
    pub(crate) fn resume(&self) {
        self.paused.store(false, Ordering::SeqCst);
    }

    /// A reader begins to wait for data.
    #[must_use]
    pub(crate) fn begin_wait(&self) -> Waiting {
        self.waiting.store(true, Ordering::Relaxed);
        Waiting(self.waiting.clone())
    }

    /// Whether a reader waits for data.
    #[must_use]
    pub(crate) fn waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// The flag of interrupts, for a signal handler to set.
    #[must_use]
    pub(crate) fn interrupt_flag(&self) -> Arc<AtomicBool> {
        self.interrupted.clone()
    }

    /// A flag with the same interrupts and failures, and without pauses, for readers that cannot continue
    /// after a pause.
    #[must_use]
    pub(crate) fn only_interrupts(&self) -> Self {
        let (interrupted, failed) = (self.interrupted.clone(), self.failed.clone());
        Self { interrupted, failed, paused: Arc::default(), waiting: Arc::default() }
    }
}
