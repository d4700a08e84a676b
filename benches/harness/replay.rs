//! Synthetic batches, made before anything is measured, and a reader that goes round them.

use std::path::PathBuf;
use std::sync::Arc;

use flechette::dataset::{self, DatasetError, Format, ReadOptions, Reader};
use flechette::schema::Schema;
use flechette::types::RawBatch;

/// So many batches of `samples`, with exactly `lookups` ids a feature of each sample. They are drawn by a schema whose
/// features are one-hot, and joined: the reader draws how many ids a multi-hot feature has.
pub fn draw(
    one_hot: &Schema,
    skew: &str,
    (samples, lookups): (usize, usize),
    batches: usize,
) -> anyhow::Result<Vec<RawBatch>> {
    let drawn = samples * lookups;
    let source = PathBuf::from(format!("rows={},seed=1,skew={skew}", drawn * batches));
    let mut reader = dataset::open(Format::Synthetic, &[source], one_hot, ReadOptions::default())?;
    let draw = |_| {
        let mut raw = RawBatch::default();
        reader.read(drawn, &mut raw)?;
        Ok(joined(raw, lookups))
    };
    (0..batches).map(draw).collect()
}

/// Makes one sample of each `lookups` in a row: with all of their ids, and what else the first ones have.
fn joined(mut raw: RawBatch, lookups: usize) -> RawBatch {
    let width = raw.dense.len() / raw.samples;
    raw.samples /= lookups;
    raw.dense.truncate(raw.samples * width);
    if let Some(labels) = &mut raw.labels {
        labels.truncate(raw.samples);
    }
    for feature in &mut raw.features {
        feature.offsets = feature.offsets.iter().copied().step_by(lookups).collect();
    }
    raw
}

/// Gives the batches of a pool, round and round.
pub struct Replay {
    batches: Arc<Vec<RawBatch>>,
    next: usize,
    left: usize,
}

impl Replay {
    /// Without end, until it is told otherwise.
    pub fn of(batches: &Arc<Vec<RawBatch>>) -> Self {
        Self { batches: batches.clone(), next: 0, left: usize::MAX }
    }

    /// Ends after so many batches from now on.
    pub fn end_after(&mut self, batches: usize) {
        self.left = batches;
    }
}

impl Reader for Replay {
    fn read(&mut self, _: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        if self.left == 0 {
            return Ok(0);
        }
        self.left -= 1;
        out.clone_from(&self.batches[self.next % self.batches.len()]);
        self.next += 1;
        Ok(out.samples)
    }

    fn skipped(&self) -> u64 {
        0
    }
}
