//! Parts of a request that were computed with different versions are computed again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::fake::{Fake, batcher_config};
use crate::metrics::Metrics;
use crate::predict::{Description, PredictError};
use crate::types::{Scores, Version};

/// A model whose calls go through a function.
struct Wrapped<F> {
    model: Arc<Fake>,
    predict: F,
}

impl<F> Predict for Wrapped<F>
where
    F: Fn(&Fake, &Batch) -> Result<Scores, PredictError> + Send + Sync,
{
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        (self.predict)(&self.model, batch)
    }

    fn describe(&self) -> Description {
        self.model.describe()
    }

    fn ready(&self) -> bool {
        true
    }
}

/// A batcher whose model's calls go through a function.
fn start_wrapped<F>(model: &Arc<Fake>, config: &BatcherConfig, predict: F) -> Batcher
where
    F: Fn(&Fake, &Batch) -> Result<Scores, PredictError> + Send + Sync + 'static,
{
    let metrics = Metrics::new().unwrap().model("ads", &model.schema);
    Batcher::start(Arc::new(Wrapped { model: model.clone(), predict }), metrics, config).unwrap()
}

/// The answer to a request in three parts, and the number of calls of a model with these versions.
async fn answer_in_parts(versions: impl Iterator<Item = u64>) -> (Result<Scores, BatchError>, usize) {
    let model = Fake::new();
    let mut versions: Vec<u64> = versions.collect();
    versions.reverse();
    let versions = Mutex::new(versions);
    let config = BatcherConfig { max_samples: 10, ..batcher_config() };
    let batcher = start_wrapped(&model, &config, move |model, batch| {
        if let Some(version) = versions.lock().unwrap().pop() {
            model.version.store(version, Ordering::SeqCst);
        }
        model.predict(batch)
    });
    let answer = batcher.submit(batch(30, 1).0, ANY).unwrap().await;
    (answer, model.begun())
}

#[tokio::test]
async fn parts_of_a_version_that_serves_no_more_are_computed_again() {
    for (versions, calls) in [
        (vec![7, 7, 7], 3),
        (vec![7, 7, 8], 5),
        (vec![7, 8, 8, 9], 6),
        // A roll-back.
        (vec![8, 8, 7], 5),
        (vec![8, 7, 7], 4),
        (vec![9, 8, 8, 7], 6),
        (vec![7, 8, 8, 7], 6),
    ] {
        let last = *versions.last().unwrap();
        let (answer, made) = answer_in_parts(versions.into_iter()).await;
        let answer = answer.unwrap();
        assert_eq!((answer.version.0, made), (last, calls));
        assert_eq!((answer.probabilities, answer.absent), (batch(30, 1).1, batch(30, 1).2));
    }
}

#[tokio::test]
async fn a_request_fails_if_the_version_changes_all_the_time() {
    for rising in [true, false] {
        let (answer, calls) = answer_in_parts((1..100).map(|n| if rising { n } else { 100 - n })).await;
        assert!(matches!(answer, Err(BatchError::VersionChanged { times: 4 })));
        assert_eq!(calls, 3 + 3 * 2);
    }
}

#[tokio::test]
async fn a_part_of_the_version_before_that_finishes_last_is_computed_again() {
    for versions in [[7, 8], [8, 7]] {
        let model = Fake::new();
        let config = BatcherConfig { max_samples: 10, workers: 2, ..batcher_config() };
        let calls = AtomicUsize::new(0);
        // The first call has the first version, and ends after the second call, which has the second one.
        let batcher = start_wrapped(&model, &config, move |model, batch| {
            let call = calls.fetch_add(1, Ordering::SeqCst);
            while call == 0 && model.calls.lock().unwrap().is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(Scores { version: Version(versions[call.min(1)]), ..model.predict(batch)? })
        });
        let answer = batcher.submit(batch(20, 1).0, ANY).unwrap().await.unwrap();
        // If both workers have begun at nearly the same time, either may count as the last.
        assert_eq!(answer.version.0, versions[1]);
        assert!((3..=4).contains(&model.begun()), "{}", model.begun());
        assert_eq!(answer.probabilities, batch(20, 1).1);
    }
}

#[tokio::test]
async fn a_request_that_is_cancelled_before_its_parts_are_computed_again_delays_no_later_one() {
    let model = Fake::new();
    let ticket: Arc<Mutex<Option<Ticket>>> = Arc::default();
    let max_delay = Duration::from_secs(3600);
    let config = BatcherConfig { max_samples: 10, workers: 1, max_delay, ..batcher_config() };
    let held = ticket.clone();
    // Another version at each call. During the second one the client cancels.
    let batcher = start_wrapped(&model, &config, move |model, batch| {
        let call = model.begun() as u64;
        while call == 0 && held.lock().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if call == 1 {
            drop(held.lock().unwrap().take());
        }
        Ok(Scores { version: Version(call), ..model.predict(batch)? })
    });
    *ticket.lock().unwrap() = Some(batcher.submit(batch(20, 1).0, ANY).unwrap());
    while model.begun() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // A worker that is idle takes it at once.
    let later = batcher.submit(batch(1, 0).0, ANY).unwrap();
    tokio::time::timeout(Duration::from_secs(60), later).await.unwrap().unwrap();
    assert_eq!(model.begun(), 3);
}
