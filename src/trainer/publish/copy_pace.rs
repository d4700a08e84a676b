//! How long rows are copied between two steps, with rows in memory.

use std::time::{Duration, Instant};

use super::image::RowImage;
use crate::store::Table;

/// Copying this many bytes takes less time than a small step.
const BLOCK_BYTES: usize = 64 << 10;
const STEP_SHARE: u32 = 4;

/// Rows are copied in blocks, for a share of the mean time of a step.
pub(super) struct CopyPace {
    pub block_bytes: usize,
    /// Rows are copied for the mean time of a step divided by this.
    pub step_share: u32,
    /// The running mean of a step's time while no rows are copied.
    mean_step: Duration,
}

impl CopyPace {
    pub(super) fn new() -> Self {
        Self { block_bytes: BLOCK_BYTES, step_share: STEP_SHARE, mean_step: Duration::ZERO }
    }

    /// Counts a step during which no rows were copied.
    pub(super) fn note_step(&mut self, step: Duration) {
        self.mean_step = (self.mean_step * 7 + step) / 8;
    }

    /// Copies blocks of rows, at least one, after a step of this time. `begun` is when the step ended.
    pub(super) fn copy(&self, image: &mut RowImage, tables: &[Table], step: Duration, begun: Instant) {
        // Copying makes steps slower, so they do not count. A step that waited for data makes the mean long,
        // but not the wait of the steps after it.
        let enough = step.min(self.mean_step) / self.step_share;
        loop {
            image.copy_block(tables, self.block_bytes);
            if image.is_complete() || begun.elapsed() >= enough {
                return;
            }
        }
    }
}
