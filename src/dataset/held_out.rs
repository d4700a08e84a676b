//! Validation data taken out of the training data.
//!
//! A hash of a sample's number decides whether the sample is held out. So it is never trained on, in any
//! epoch, and the choice does not depend on batches or on shuffling, which comes after it.

use serde::{Deserialize, Serialize};

use super::{DatasetError, Reader};
use crate::mem::{mix64, unit};
use crate::types::RawBatch;

/// Samples that are read at a time.
const READ_SAMPLES: usize = 1024;

/// Which samples are held out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeldOut {
    /// The share of samples, above 0 and below 1.
    pub ratio: f64,
    pub seed: u64,
}

impl HeldOut {
    /// Whether this sample, counted from 0 over all files, is held out.
    fn has(self, sample: u64) -> bool {
        unit(mix64(mix64(self.seed) ^ sample)) < self.ratio
    }
}

/// The two parts of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataPart {
    Trained,
    HeldOut,
}

/// Reads one part of the samples of a reader.
pub(crate) struct OnePart {
    inner: Box<dyn Reader + Send>,
    held_out: HeldOut,
    part: DataPart,
    /// The number of the next sample.
    next: u64,
    /// Samples that were read and not yet looked at begin at `at`.
    read: RawBatch,
    at: usize,
}

impl OnePart {
    pub(crate) fn new(inner: Box<dyn Reader + Send>, held_out: HeldOut, part: DataPart) -> Self {
        Self { inner, held_out, part, next: 0, read: RawBatch::default(), at: 0 }
    }

    fn keeps(&self, sample: u64) -> bool {
        self.held_out.has(sample) == (self.part == DataPart::HeldOut)
    }

    /// Makes sure that a sample was read. Returns false at the end.
    fn refill(&mut self) -> Result<bool, DatasetError> {
        if self.at == self.read.samples {
            self.at = 0;
            self.inner.read(READ_SAMPLES, &mut self.read)?;
        }
        Ok(self.at < self.read.samples)
    }
}

impl Reader for OnePart {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        let mut begun = false;
        while self.refill()? {
            if !begun {
                out.clear_like(&self.read);
                begun = true;
            }
            if out.samples == max_samples || out.is_full() {
                break;
            }
            if self.keeps(self.next) {
                out.push_sample(&self.read, self.at);
            }
            self.next += 1;
            self.at += 1;
        }
        Ok(if begun { out.samples } else { 0 })
    }

    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }

    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        let mut left = samples;
        // The samples that were read already.
        while left > 0 && self.at < self.read.samples {
            left -= u64::from(self.keeps(self.next));
            self.next += 1;
            self.at += 1;
        }
        // Numbers up to the last of the skipped samples. The share may be so small that the data ends before,
        // so they are counted and skipped in pieces.
        while left > 0 {
            let first = self.next;
            let (mut end, mut kept) = (first, 0);
            while kept < left && end - first < super::SKIPPED_SAMPLES {
                kept += u64::from(self.keeps(end));
                end += 1;
            }
            let got = self.inner.skip(end - first)?;
            self.next += got;
            left -= (first..first + got).filter(|&sample| self.keeps(sample)).count() as u64;
            if got < end - first {
                break;
            }
        }
        Ok(samples - left)
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }

    fn share(&self) -> Option<f64> {
        self.inner.share()
    }
}
