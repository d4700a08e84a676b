//! The batcher before a real model.

use std::sync::Mutex;
use std::time::Duration;

use super::*;
use crate::metrics::Metrics;
use crate::predict::Description;
use crate::trainer::initialise;
use crate::trainer::optim::{Kind, Optimizer};
use crate::trainer::tests::engines;
use crate::trainer::tests::samples::{generate, schema};

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
    let sgd = Optimizer::new(Kind::Sgd, 0.1);
    initialise(&schema, sgd, 1).unwrap().save(models.path(), "ads").unwrap();
    for engine in engines(models.path(), "ads") {
        let model = Arc::new(Recorded { model: Box::new(engine), calls: Mutex::default() });
        let mut batches = [(2, 2), (3, 4), (4, 6)].map(|(samples, seed)| generate(&schema, samples, seed).0);
        let expected = [0, 2].map(|i: usize| model.predict(&batches[i]).unwrap().probabilities);
        // The second sample of the second request.
        batches[1].dense[3..6].copy_from_slice(&[f32::MAX, f32::MAX, -f32::MAX]);
        model.calls.lock().unwrap().clear();
        // Together they fill a batch, so the batcher does not wait for the delay.
        let config = BatcherConfig {
            max_samples: 9,
            max_delay: Duration::from_secs(60),
            queue_samples: 4096,
            queue_bytes: 16 << 20,
            workers: 1,
        };
        let metrics = Metrics::new().unwrap().model("ads", &schema);
        let batcher = Arc::new(Batcher::start(model.clone(), metrics, &config).unwrap());
        let tickets = batches.map(|batch| batcher.submit(batch, None).unwrap());
        let [first, second, third] = tickets;
        assert_eq!(first.await.unwrap().probabilities, expected[0]);
        let error = second.await.unwrap_err();
        assert!(matches!(error, BatchError::Predict(PredictError::NotFinite { sample: 1 })), "{error}");
        assert!(error.to_string().starts_with("score of sample 1 is not finite"), "{error}");
        assert_eq!(third.await.unwrap().probabilities, expected[1]);
        assert_eq!(*model.calls.lock().unwrap(), [9, 2, 3, 4]);
    }
}
