//! A reader that ends at an error of its data, so that training ends after the last whole batch as at a
//! signal. Its state can then be written.

use crate::dataset::{DatasetError, Reader};
use crate::types::RawBatch;

pub(super) struct WholeBatches {
    inner: Box<dyn Reader + Send>,
    /// The error that has ended it.
    pub failed: Option<DatasetError>,
}

impl WholeBatches {
    pub(super) fn new(inner: Box<dyn Reader + Send>) -> Self {
        Self { inner, failed: None }
    }
}

impl Reader for WholeBatches {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        if self.failed.is_some() {
            return Ok(0);
        }
        Ok(self.inner.read(max_samples, out).unwrap_or_else(|error| {
            self.failed = Some(error);
            0
        }))
    }

    fn inner(&self) -> Option<&dyn Reader> {
        Some(&*self.inner)
    }
}
