//! Requests that wait: the limits of the queue, what leaves it without a score, and the end of a batcher.

use std::time::Duration;

use super::*;
use crate::fake::{Fake, batcher_config, until};

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
