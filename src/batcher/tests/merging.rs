//! Which requests are merged into one batch, computed in parts, and shared among workers.

use std::time::Duration;

use super::*;
use crate::fake::{Fake, batcher_config, until};
use crate::metrics::Metrics;

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
