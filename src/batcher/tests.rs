//! The batcher through its public interface: which requests are merged, dropped and answered.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::fake::{FAIL, Fake, batcher_config, score, until};
use crate::metrics::Metrics;
use crate::predict::{Description, PredictError};
use crate::trainer::initialise;
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::tests::engines;
use crate::trainer::tests::samples::{generate, schema};
use crate::types::{AbsentId, Jagged, Scores, Times, Version};

fn start(model: &Arc<Fake>, change: impl FnOnce(&mut BatcherConfig)) -> Arc<Batcher> {
    let mut config = batcher_config();
    change(&mut config);
    let metrics = Metrics::new().unwrap().model("ads", &model.schema);
    Arc::new(Batcher::start(model.clone(), metrics, &config).unwrap())
}

const ANY: Terms = Terms { deadline: None, priority: Priority::Normal };

fn until_then(deadline: Instant) -> Terms {
    Terms { deadline: Some(deadline), ..ANY }
}

/// A batch that depends on `seed`, with its scores and absent ids. With an odd seed, the ids of `tag` are
/// absent.
fn batch(samples: usize, seed: u64) -> (Batch, Vec<f32>, Vec<AbsentId>) {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_requests_are_one_batch_and_each_gets_its_own_answer() {
    let model = Fake::new();
    let batcher = start(&model, |_| {});
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let waiting: Vec<_> = [(2, 1), (5, 2), (3, 3), (1, 4), (4, 5)]
        .into_iter()
        .map(|(samples, seed)| {
            let (batch, scores, absent) = batch(samples, seed);
            (batcher.submit(batch, ANY).unwrap(), scores, absent)
        })
        .collect();
    model.release();
    assert_eq!(first.await.unwrap().probabilities, batch(1, 0).1);
    for (ticket, scores, absent) in waiting {
        let answer = ticket.await.unwrap();
        assert_eq!(answer.probabilities, scores);
        assert_eq!(answer.absent, absent);
        assert_eq!(answer.version.0, 7);
    }
    assert_eq!(*model.calls.lock().unwrap(), [1, 15]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_keeps_its_limit_and_a_larger_request_is_computed_in_parts() {
    let model = Fake::new();
    let batcher = start(&model, |config| config.max_samples = 6);
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let waiting = [3, 3, 4, 20, 1].map(|samples| {
        let (batch, scores, absent) = batch(samples, 3);
        (batcher.submit(batch, ANY).unwrap(), scores, absent)
    });
    model.release();
    first.await.unwrap();
    for (ticket, scores, absent) in waiting {
        let answer = ticket.await.unwrap();
        assert_eq!((answer.probabilities, answer.absent), (scores, absent));
    }
    // The parts of 20 have 5 samples each.
    assert_eq!(*model.calls.lock().unwrap(), [1, 6, 4, 5, 5, 5, 6]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_workers_compute_the_parts_of_a_request() {
    let model = Fake::new();
    let batcher = start(&model, |config| (config.workers, config.max_samples) = (3, 10));
    model.hold();
    let (large, scores, absent) = batch(30, 1);
    let ticket = batcher.submit(large, ANY).unwrap();
    until(async || model.begun() == 3).await;
    model.release();
    let answer = ticket.await.unwrap();
    assert_eq!((answer.probabilities, answer.absent), (scores, absent));
}

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

/// A model whose version changes from call to call as listed.
struct Changing {
    model: Arc<Fake>,
    versions: Mutex<Vec<u64>>,
}

impl Predict for Changing {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        if let Some(version) = self.versions.lock().unwrap().pop() {
            self.model.version.store(version, Ordering::SeqCst);
        }
        self.model.predict(batch)
    }

    fn describe(&self) -> Description {
        self.model.describe()
    }

    fn ready(&self) -> bool {
        true
    }
}

/// The answer to a request in three parts, and the number of calls of a model with these versions.
async fn answer_in_parts(versions: impl Iterator<Item = u64>) -> (Result<Scores, BatchError>, usize) {
    let model = Fake::new();
    let mut versions: Vec<u64> = versions.collect();
    versions.reverse();
    let changing = Arc::new(Changing { model: model.clone(), versions: Mutex::new(versions) });
    let config = BatcherConfig { max_samples: 10, ..batcher_config() };
    let metrics = Metrics::new().unwrap().model("ads", &model.schema);
    let batcher = Batcher::start(changing, metrics, &config).unwrap();
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

/// A model whose first call has the first version, and ends after the second call, which has the second one.
struct Overtaken {
    model: Arc<Fake>,
    versions: [u64; 2],
    calls: AtomicUsize,
}

impl Predict for Overtaken {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        while call == 0 && self.model.calls.lock().unwrap().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let version = Version(self.versions[call.min(1)]);
        Ok(Scores { version, ..self.model.predict(batch)? })
    }

    fn describe(&self) -> Description {
        self.model.describe()
    }

    fn ready(&self) -> bool {
        true
    }
}

#[tokio::test]
async fn a_part_of_the_version_before_that_finishes_last_is_computed_again() {
    for versions in [[7, 8], [8, 7]] {
        let model = Fake::new();
        let overtaken = Arc::new(Overtaken { model: model.clone(), versions, calls: AtomicUsize::new(0) });
        let config = BatcherConfig { max_samples: 10, workers: 2, ..batcher_config() };
        let metrics = Metrics::new().unwrap().model("ads", &model.schema);
        let batcher = Batcher::start(overtaken, metrics, &config).unwrap();
        let answer = batcher.submit(batch(20, 1).0, ANY).unwrap().await.unwrap();
        // If both workers have begun at nearly the same time, either may count as the last.
        assert_eq!(answer.version.0, versions[1]);
        assert!((3..=4).contains(&model.begun()), "{}", model.begun());
        assert_eq!(answer.probabilities, batch(20, 1).1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_worker_joins_in_when_the_delay_is_over() {
    let model = Fake::new();
    let batcher = start(&model, |config| {
        config.workers = 2;
        config.max_delay = Duration::from_millis(5);
    });
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let second = batcher.submit(batch(2, 0).0, ANY).unwrap();
    until(async || model.begun() == 2).await;
    model.release();
    first.await.unwrap();
    second.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_looked_up_while_another_one_is_in_its_dense_layers_only_by_a_second_worker() {
    for workers in [1, 2] {
        let model = Fake::new();
        let batcher = start(&model, |config| (config.workers, config.max_samples) = (workers, 1));
        // A batch that has begun is looked up. It is held as if in its dense layers.
        model.hold();
        let tickets = [0, 2, 4].map(|seed| batcher.submit(batch(1, seed).0, ANY).unwrap());
        until(async || model.begun() == workers).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(model.begun(), workers);
        model.release();
        for ticket in tickets {
            ticket.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_and_dropped_requests_are_not_computed() {
    let model = Fake::new();
    let batcher = start(&model, |_| {});
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let expired = batcher.submit(batch(2, 0).0, until_then(Instant::now())).unwrap();
    drop(batcher.submit(batch(4, 0).0, ANY).unwrap());
    let alive_until = until_then(Instant::now() + Duration::from_secs(3600));
    let alive = batcher.submit(batch(8, 0).0, alive_until).unwrap();
    model.release();
    assert!(first.await.is_ok());
    assert!(alive.await.is_ok());
    assert!(matches!(expired.await, Err(BatchError::Expired { .. })));
    assert_eq!(*model.calls.lock().unwrap(), [1, 8]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_and_displaced_requests_leave_the_queue_at_once() {
    let model = Fake::new();
    let batcher = start(&model, |config| config.queue_samples = 10);
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let low = batcher.submit(batch(3, 2).0, Terms { priority: Priority::Low, ..ANY }).unwrap();
    let before = batcher.submit(batch(1, 4).0, ANY).unwrap();
    let dropped = batcher.submit(batch(5, 6).0, ANY).unwrap();
    assert!(batcher.submit(batch(7, 8).0, ANY).is_err());
    drop(dropped);
    let last = batcher.submit(batch(8, 8).0, Terms { priority: Priority::High, ..ANY }).unwrap();
    assert!(matches!(low.await, Err(BatchError::Displaced)));
    model.release();
    first.await.unwrap();
    assert_eq!(last.await.unwrap().probabilities, batch(8, 8).1);
    assert_eq!(before.await.unwrap().probabilities, batch(1, 4).1);
    assert_eq!(*model.calls.lock().unwrap(), [1, 9]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queue_is_bounded_in_samples_and_in_bytes() {
    let model = Fake::new();
    let batcher = start(&model, |config| {
        config.queue_samples = 10;
        config.queue_bytes = 1000;
    });
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let queued = batcher.submit(batch(4, 0).0, ANY).unwrap();
    let refusal = batcher.submit(batch(7, 0).0, ANY).err().unwrap();
    assert!(matches!(refusal, BatchError::QueueSamples { limit: 10, queued: 4, size: 7 }), "{refusal}");
    let mut long = batch(1, 0).0;
    long.features[1].ids = vec![1; 200];
    long.features[1].offsets = vec![0, 200];
    let refusal = batcher.submit(long, ANY).err().unwrap();
    assert!(matches!(refusal, BatchError::QueueBytes { limit: 1000, .. }), "{refusal}");
    model.release();
    first.await.unwrap();
    queued.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_a_worker_has_is_not_waited_for() {
    let model = Fake::new();
    let batcher = start(&model, |_| {});
    let state = batcher.state.lock_queue();
    assert!(batcher.try_submit(batch(1, 0).0, ANY).is_none());
    drop(state);
    // The worker may look at the queue just then.
    let ticket = loop {
        if let Some(ticket) = batcher.try_submit(batch(1, 0).0, ANY) {
            break ticket;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(ticket.await.unwrap().probabilities, batch(1, 0).1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_limits_apply_to_later_requests_and_a_new_delay_to_those_that_wait() {
    let model = Fake::new();
    let long = |config: &mut BatcherConfig| {
        (config.workers, config.max_delay, config.queue_samples) = (2, Duration::from_secs(1000), 10);
    };
    let batcher = start(&model, long);
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let waiting = batcher.submit(batch(10, 2).0, ANY).unwrap();
    assert!(batcher.submit(batch(1, 2).0, ANY).is_err());
    batcher.set_queue(&BatcherConfig { max_delay: Duration::ZERO, queue_samples: 5, ..batcher_config() });
    // The other worker takes it, although the first batch is not finished.
    until(async || model.begun() == 2).await;
    let refusal = batcher.submit(batch(6, 2).0, ANY).err().unwrap();
    assert!(matches!(refusal, BatchError::QueueSamples { limit: 5, queued: 0, size: 6 }), "{refusal}");
    model.release();
    assert_eq!(first.await.unwrap().probabilities.len(), 1);
    assert_eq!(waiting.await.unwrap().probabilities.len(), 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_batcher_answers_queued_requests_and_refuses_new_ones() {
    let model = Fake::new();
    let batcher = start(&model, |config| config.workers = 3);
    model.hold();
    let tickets: Vec<_> = (0..50).map(|seed| batcher.submit(batch(2, seed).0, ANY).unwrap()).collect();
    batcher.close();
    assert!(matches!(batcher.submit(batch(1, 0).0, ANY), Err(BatchError::Closed)));
    let joined = tokio::task::spawn_blocking({
        let batcher = batcher.clone();
        move || batcher.join()
    });
    model.release();
    for (seed, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap().probabilities, batch(2, seed as u64).1);
    }
    joined.await.unwrap();
    assert_eq!(model.computed(), 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_batcher_answers_every_queued_request() {
    let model = Fake::new();
    let batcher = start(&model, |_| {});
    model.hold();
    let first = batcher.submit(batch(1, 0).0, ANY).unwrap();
    until(async || model.begun() == 1).await;
    let waiting: Vec<_> = (0..5).map(|seed| batcher.submit(batch(1, seed).0, ANY).unwrap()).collect();
    assert_eq!(batcher.abandon(), 5);
    for ticket in waiting {
        assert!(matches!(ticket.await, Err(BatchError::Closed)));
    }
    model.release();
    assert!(first.await.is_ok());
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
async fn the_network_waits_for_a_batch_but_not_for_one_on_a_free_processor() {
    for on_free_processors in [false, true] {
        let cores: &'static Cores = Box::leak(Box::new(Cores::new(1, Duration::from_secs(3600))));
        let model = Fake::new();
        let metrics = Metrics::new().unwrap().model("ads", &model.schema);
        let own = (!on_free_processors).then_some(cores);
        let batcher = Batcher::start_on(own, model.clone(), metrics, &batcher_config()).unwrap();
        model.hold();
        let ticket = batcher.submit(batch(1, 0).0, ANY).unwrap();
        until(async || model.begun() == 1).await;
        assert_eq!(cores.wait_for_one(), on_free_processors, "whether a core is free");
        model.release();
        ticket.await.unwrap();
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
