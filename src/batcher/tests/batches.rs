//! A batcher of a fake model, and batches whose scores are known.

use super::*;
use crate::fake::{Fake, batcher_config, score};
use crate::metrics::Metrics;
use crate::types::{AbsentId, Jagged};

pub(super) fn start(model: &Arc<Fake>, change: impl FnOnce(&mut BatcherConfig)) -> Arc<Batcher> {
    let mut config = batcher_config();
    change(&mut config);
    let metrics = Metrics::new().unwrap().model("ads", &model.schema);
    Arc::new(Batcher::start(model.clone(), metrics, &config).unwrap())
}

pub(super) const ANY: Terms = Terms { deadline: None, priority: Priority::Normal };

pub(super) fn until_then(deadline: Instant) -> Terms {
    Terms { deadline: Some(deadline), ..ANY }
}

/// A batch that depends on `seed`, with its scores and absent ids. With an odd seed, the ids of `tag` are
/// absent.
pub(super) fn batch(samples: usize, seed: u64) -> (Batch, Vec<f32>, Vec<AbsentId>) {
    let mut batch = Batch::empty(3);
    let (mut scores, mut absent) = (Vec::new(), Vec::new());
    for sample in 0..samples as u64 {
        let dense = [seed as f32 + 0.25, sample as f32];
        let tags = vec![49 + seed % 2; (sample % 4) as usize];
        let bags: [&[u64]; 3] = [&[seed % 1000], &tags, &[sample % 10]];
        batch.samples += 1;
        batch.dense.extend(dense);
        for (column, ids) in batch.features.iter_mut().zip(bags) {
            Jagged::push(column, ids);
        }
        scores.push(score(&dense, &bags));
        let absent_tags = if seed % 2 == 1 { tags.len() } else { 0 };
        absent.extend((0..absent_tags).map(|_| AbsentId { sample: sample as u32, feature: 1 }));
    }
    (batch, scores, absent)
}
