//! Models that fail, panic, give no finite score or do not answer: which requests fail with them.

use std::time::Duration;

use super::*;
use crate::fake::{FAIL, Fake, batcher_config, until};
use crate::metrics::Metrics;
use crate::predict::{Description, PredictError};
use crate::trainer::initialise;
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::tests::engines;
use crate::trainer::tests::samples::{generate, schema};
use crate::types::{Scores, Times};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_part_that_fails_ends_its_request() {
    let model = Fake::new();
    let batcher = start(&model, |config| config.max_samples = 4);
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let mut broken = batch(20, 2).0;
    broken.dense[0] = FAIL;
    let failed = batcher.submit(broken, ANY).unwrap();
    let expired = batcher.submit(batch(20, 2).0, until_then(Instant::now())).unwrap();
    let dropped = batcher.submit(batch(20, 4).0, ANY).unwrap();
    let last = batcher.submit(batch(3, 4).0, ANY).unwrap();
    drop(dropped);
    model.release();
    first.await.unwrap();
    assert!(matches!(failed.await, Err(BatchError::Predict(PredictError::Store(_)))));
    assert!(matches!(expired.await, Err(BatchError::Expired { .. })));
    assert_eq!(last.await.unwrap().probabilities, batch(3, 4).1);
    assert_eq!(*model.calls.lock().unwrap(), [1, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_while_requests_are_merged_fails_them_and_the_worker_goes_on() {
    let model = Fake::new();
    let metrics = Metrics::new().unwrap();
    let series = metrics.model("ads", &model.schema);
    let batcher = Batcher::start(model.clone(), series, &batcher_config()).unwrap();
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let mut broken = batch(1, 2).0;
    broken.features[0].ids.clear();
    let merged = [batch(2, 1).0, broken, batch(3, 3).0];
    let tickets = merged.map(|batch| batcher.submit(batch, ANY).unwrap());
    model.release();
    first.await.unwrap();
    for ticket in tickets {
        assert!(matches!(ticket.await, Err(BatchError::Failed(text)) if text.contains("panic")));
    }
    let (next, scores, _) = batch(4, 5);
    assert_eq!(batcher.submit(next, ANY).unwrap().await.unwrap().probabilities, scores);
    assert!(metrics.render().contains("flechette_batch_panics_total{model=\"ads\"} 1"));
}

/// A model that says that lookups took the longest time, so that adding those of two parts panics.
struct LongLookups(Arc<Fake>);

impl Predict for LongLookups {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        let scores = self.0.predict(batch)?;
        Ok(Scores { times: Times { lookup: Duration::MAX, ..scores.times }, ..scores })
    }

    fn describe(&self) -> Description {
        self.0.describe()
    }

    fn ready(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_while_scores_are_split_fails_the_requests_of_its_batch_and_the_worker_goes_on() {
    let model = Fake::new();
    let metrics = Metrics::new().unwrap();
    let series = metrics.model("ads", &model.schema);
    let config = BatcherConfig { max_samples: 10, ..batcher_config() };
    let batcher = Batcher::start(Arc::new(LongLookups(model.clone())), series, &config).unwrap();
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    // The second of the two parts is computed with the request after it, and then the parts are joined.
    let tickets = [12, 3].map(|samples| batcher.submit(batch(samples, 2).0, ANY).unwrap());
    let (after, scores, _) = batch(4, 5);
    let after = batcher.submit(after, ANY).unwrap();
    model.release();
    assert_eq!(first.await.unwrap().probabilities, batch(1, 0).1);
    for ticket in tickets {
        assert!(matches!(ticket.await, Err(BatchError::Failed(text)) if text.contains("panic")));
    }
    assert_eq!(after.await.unwrap().probabilities, scores);
    assert_eq!(*model.calls.lock().unwrap(), [1, 6, 9, 4]);
    assert!(metrics.render().contains("flechette_batch_panics_total{model=\"ads\"} 1"));
}

/// A model that records the number of samples of each call.
struct Recorded {
    model: Box<dyn Predict>,
    calls: Mutex<Vec<usize>>,
}

impl Predict for Recorded {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        self.calls.lock().unwrap().push(batch.samples);
        self.model.predict(batch)
    }

    fn describe(&self) -> Description {
        self.model.describe()
    }

    fn ready(&self) -> bool {
        self.model.ready()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_score_that_is_not_finite_fails_only_its_request() {
    let models = tempfile::tempdir().unwrap();
    let schema = schema("kind = \"dcn\"\ncross_layers = 3\ndeep = [8]");
    let sgd = Optimizer::new(OptimizerKind::Sgd, 0.1);
    initialise(&schema, sgd, 1).unwrap().save(models.path(), "ads").unwrap();
    for engine in engines(models.path(), "ads") {
        let model = Arc::new(Recorded { model: Box::new(engine), calls: Mutex::default() });
        let mut batches = [(2, 2), (3, 4), (4, 6)].map(|(samples, seed)| generate(&schema, samples, seed).0);
        let expected = [0, 2].map(|i: usize| model.predict(&batches[i]).unwrap().probabilities);
        // Makes the score of the second sample of the second request overflow.
        batches[1].dense[3..6].copy_from_slice(&[f32::MAX, f32::MAX, -f32::MAX]);
        model.calls.lock().unwrap().clear();
        // Together the three fill a batch, so the batcher does not wait for the delay.
        let config = BatcherConfig {
            max_samples: 9,
            max_delay: Duration::from_secs(60),
            queue_samples: 4096,
            queue_bytes: 16 << 20,
            workers: 1,
            default_deadline: Duration::from_secs(10),
        };
        let metrics = Metrics::new().unwrap().model("ads", &schema);
        let batcher = Arc::new(Batcher::start(model.clone(), metrics, &config).unwrap());
        let calls = model.calls.lock().unwrap();
        let before = batcher.submit(generate(&schema, 1, 8).0, ANY).unwrap();
        while batcher.state.lock_queue().jobs.held().samples > 0 {
            std::thread::yield_now();
        }
        // The model waits for the lock of its list, so these three are merged.
        let [first, second, third] = batches.map(|batch| batcher.submit(batch, ANY).unwrap());
        drop(calls);
        before.await.unwrap();
        assert_eq!(first.await.unwrap().probabilities, expected[0]);
        let error = second.await.unwrap_err();
        assert!(matches!(error, BatchError::Predict(PredictError::NotFinite { sample: 1 })), "{error}");
        assert!(error.to_string().starts_with("score of sample 1 is not finite"), "{error}");
        assert_eq!(third.await.unwrap().probabilities, expected[1]);
        assert_eq!(*model.calls.lock().unwrap(), [1, 9]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_stuck_while_each_of_its_workers_is_in_a_call_that_does_not_end() {
    let model = Fake::new();
    let batcher = start(&model, |config| {
        config.workers = 2;
        config.max_samples = 1;
        config.default_deadline = Duration::from_millis(20);
    });
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    tokio::time::sleep(2 * batcher.patience()).await;
    assert!(!batcher.is_stuck(), "another worker is free");
    let second = batcher.submit(batch(1, 2).0, ANY).unwrap();
    until(async || batcher.is_stuck()).await;
    model.release();
    first.await.unwrap();
    second.await.unwrap();
    until(async || !batcher.is_stuck()).await;
}
