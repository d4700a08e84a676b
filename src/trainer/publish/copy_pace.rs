//! How many rows are copied between two steps, with rows in memory.

use std::time::{Duration, Instant};

use super::image::RowImage;
use crate::store::Table;

/// The least that a thread copies at a time. It takes less time than a small step.
const LEAST_BYTES: usize = 32 << 10;
const STEP_SHARE: u32 = 4;
/// How fast a thread copies rows, until this is measured.
const BYTES_PER_S: f64 = 1e9;

/// Rows are copied for a share of the mean time of a step: as many at once as that takes, because threads
/// that begin and end a block together wait for each other.
pub(super) struct CopyPace {
    pub least_bytes: usize,
    /// Rows are copied for the mean time of a step divided by this.
    pub step_share: u32,
    /// The running mean of a step's time while no rows are copied.
    mean_step: Duration,
    /// How fast a thread copies rows: a running mean.
    bytes_per_s: f64,
}

impl CopyPace {
    pub(super) fn new() -> Self {
        let (least_bytes, step_share, mean_step) = (LEAST_BYTES, STEP_SHARE, Duration::ZERO);
        Self { least_bytes, step_share, mean_step, bytes_per_s: BYTES_PER_S }
    }

    /// Counts a step during which no rows were copied.
    pub(super) fn note_step(&mut self, step: Duration) {
        self.mean_step = (self.mean_step * 7 + step) / 8;
    }

    /// Copies a block of rows after a step of this time.
    pub(super) fn copy(&mut self, image: &mut RowImage, tables: &[Table], step: Duration) {
        // Copying makes steps slower, so they do not count. A step that waited for data makes the mean long,
        // but not the wait of the steps after it.
        let enough = (step.min(self.mean_step) / self.step_share).as_secs_f64();
        let bytes = ((enough * self.bytes_per_s) as usize).max(self.least_bytes);
        let begun = Instant::now();
        let whole = image.copy_block(tables, bytes);
        let took = begun.elapsed().as_secs_f64();
        if whole && took > 0.0 {
            self.bytes_per_s = (self.bytes_per_s * 7.0 + bytes as f64 / took) / 8.0;
        }
    }
}
