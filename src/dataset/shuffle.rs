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
}

impl Shuffled {
    /// `epoch` counts from 1.
    pub(crate) fn new(inner: Box<dyn Reader + Send>, shuffle: Shuffle, epoch: u32) -> Self {
        Self { inner, shuffle, epoch, next_block: 0, chunks: Vec::new(), order: Vec::new() }
    }

    /// Reads and shuffles the next block. Returns false after the last one.
    fn load(&mut self) -> Result<bool, DatasetError> {
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

    fn share(&self) -> Option<f64> {
        self.inner.share()
    }
}
