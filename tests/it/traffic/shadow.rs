//! A shadow scores requests too: the difference is recorded, and the answers are not affected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use flechette::server::proto::PredictRequest;

use super::client::score_until;
use super::world::World;
use crate::switching::wait;

#[test]
fn a_shadow_records_the_difference_and_leaves_the_answers_alone() {
    let world = World::new(2);
    let client = world.serve("labels = { stable = 1 }\nshadow = \"latest\"\nshadow_share = 1", "");
    let (mut sum, mut largest, mut samples) = (0.0, 0.0f64, 0);
    for (number, request) in world.requests.iter().enumerate() {
        let (version, scores) = client.predict(request.clone()).unwrap();
        assert_eq!(version, 1);
        let other = world.scores[&2][number].iter().map(|bits| f32::from_bits(*bits));
        for difference in scores.iter().zip(other).map(|(own, other)| f64::from((own - other).abs())) {
            (sum, largest, samples) = (sum + difference, largest.max(difference), samples + 1);
        }
        // So that no request is dropped.
        let count = || client.metric("shadow_difference_count", "");
        wait("the shadow has scored", || count() == f64::from(samples));
    }
    assert!((client.metric("shadow_difference_sum", "") - sum).abs() < 1e-4 && largest > 0.0);
    assert!((client.metric("shadow_difference_max", "") - largest).abs() < 1e-6);
    assert_eq!(client.metric("shadow_dropped_total", "") + client.metric("shadow_failed_total", ""), 0.0);
    assert_eq!(
        client.metric("batch_samples_sum", ""),
        f64::from(samples),
        "the shadow's batches are not counted"
    );
    let request = PredictRequest { version: 2, ..world.requests[0].clone() };
    assert_eq!(client.predict(request).unwrap().0, 2);
    sleep(Duration::from_millis(300));
    assert_eq!(
        client.metric("shadow_difference_count", ""),
        f64::from(samples),
        "it is not compared with itself"
    );
    client.ends_well();
}

#[test]
fn a_shadow_that_cannot_keep_up_drops_requests_and_no_request_fails() {
    let world = Arc::new(World::new(2));
    let client = world.serve("labels = { stable = 1, old = 2 }\nshadow = 2\nshadow_share = 1", "");
    let stop = Arc::new(AtomicBool::new(false));
    // Eight clients take all processors, so the shadow, which needs a free one, falls behind.
    let mut clients = score_until(&world, client.served.grpc, &client.runtime, &stop);
    clients.extend(score_until(&world, client.served.grpc, &client.runtime, &stop));
    let done = |name| client.metric(name, "");
    wait("requests are dropped", || done("shadow_dropped_total") > 0.0);
    stop.store(true, Ordering::Release);
    for seen in clients {
        assert!(client.runtime.block_on(seen).unwrap().values().sum::<usize>() > 0);
    }
    wait("the shadow scores again", || done("shadow_difference_count") > 0.0);
    assert_eq!(done("shadow_failed_total"), 0.0);
    client.ends_well();
}
