//! A reader that hands out no more batches once it is told to stop.

use super::{DatasetError, Reader, Stop};
use crate::types::RawBatch;

/// A reader and its flag.
pub(crate) struct Stoppable {
    inner: Box<dyn Reader + Send>,
    stop: Stop,
}

impl Stoppable {
    pub(crate) fn new(inner: Box<dyn Reader + Send>, stop: Stop) -> Self {
        Self { inner, stop }
    }
}

impl Reader for Stoppable {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        if self.stop.requested() {
            return Ok(0);
        }
        let read = self.inner.read(max_samples, out)?;
        // An interrupt may have cut the batch short. It is final, so the batch is not missed.
        Ok(if self.stop.interrupted() { 0 } else { read })
    }

    fn inner(&self) -> Option<&dyn Reader> {
        Some(&*self.inner)
    }

    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        self.inner.skip(samples)
    }

    fn stop(&self) -> Option<Stop> {
        Some(self.stop.clone())
    }
}
