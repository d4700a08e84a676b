//! Shuffling in bounded memory: within consecutive blocks of samples.
//!
//! The order of a block depends only on the seed, the epoch and the number of the block. So to continue in
//! the middle of an epoch, whole blocks are skipped, and only one block is read again.

use serde::{Deserialize, Serialize};

use super::{DatasetError, Reader};
use crate::mem::{SplitMix64, mix64};
use crate::types::RawBatch;

/// How samples are shuffled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shuffle {
    /// Samples of a block.
    pub samples: u32,
    pub seed: u64,
}

/// Where a sample of a block is: a chunk of the block, and its index in the chunk.
type At = (u32, u32);

/// Shuffles the samples of a reader.
pub(crate) struct Shuffled {
    inner: Box<dyn Reader + Send>,
    shuffle: Shuffle,
    epoch: u32,
    /// The number of the next block.
    next_block: u64,
    /// The samples of the block, in the batches in which they were read.
    chunks: Vec<RawBatch>,
    /// The shuffled order of the samples of the block that were not handed out; the next one is the last.
    order: Vec<At>,
    /// Samples that the block had.
    block_samples: usize,
    /// The share of the input that was read before the block.
    share_before: Option<f64>,
}

impl Shuffled {
    /// `epoch` counts from 1.
    pub(crate) fn new(inner: Box<dyn Reader + Send>, shuffle: Shuffle, epoch: u32) -> Self {
        let (chunks, order, share_before) = (Vec::new(), Vec::new(), inner.share());
        Self { inner, shuffle, epoch, next_block: 0, chunks, order, block_samples: 0, share_before }
    }

    /// Reads and shuffles the next block. Returns false after the last one.
    fn load(&mut self) -> Result<bool, DatasetError> {
        self.share_before = self.inner.share();
        let (mut chunk, mut left) = (0, self.shuffle.samples as usize);
        while left > 0 {
            if chunk == self.chunks.len() {
                self.chunks.push(RawBatch::default());
            }
            let got = self.inner.read(left, &mut self.chunks[chunk])?;
            if got == 0 {
                break;
            }
            self.order.extend((0..got).map(|s| (chunk as u32, s as u32)));
            left -= got;
            chunk += 1;
        }
        let seed = mix64(mix64(self.shuffle.seed) ^ u64::from(self.epoch));
        let mut draws = SplitMix64::new(mix64(seed ^ self.next_block));
        self.next_block += 1;
        self.block_samples = self.order.len();
        for last in (1..self.order.len()).rev() {
            self.order.swap(last, (draws.next_u64() % (last as u64 + 1)) as usize);
        }
        Ok(!self.order.is_empty())
    }
}

impl Reader for Shuffled {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        if self.order.is_empty() && !self.load()? {
            return Ok(0);
        }
        out.clear_like(&self.chunks[0]);
        while out.samples < max_samples && !out.is_full() {
            if self.order.is_empty() && !self.load()? {
                break;
            }
            let Some((chunk, s)) = self.order.pop() else { break };
            out.push_sample(&self.chunks[chunk as usize], s as usize);
        }
        Ok(out.samples)
    }

    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }

    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        let block = u64::from(self.shuffle.samples);
        let mut left = samples;
        loop {
            let of_block = left.min(self.order.len() as u64);
            self.order.truncate(self.order.len() - of_block as usize);
            left -= of_block;
            if left == 0 {
                return Ok(samples);
            }
            if left >= block {
                let got = self.inner.skip(block)?;
                self.next_block += 1;
                left -= got;
                if got < block {
                    return Ok(samples - left);
                }
            } else if !self.load()? {
                return Ok(samples - left);
            }
        }
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }

    /// The whole block is read before its first sample is handed out.
    fn share(&self) -> Option<f64> {
        let (before, now) = (self.share_before?, self.inner.share()?);
        let left = self.order.len() as f64 / self.block_samples.max(1) as f64;
        Some(before + (now - before) * (1.0 - left))
    }
}
