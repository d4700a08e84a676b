//! More requests than a model can compute: what it computes still reaches its clients in time.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

use crate::serving::{Running, request};

const SAMPLES: usize = 4;

/// How long a client waits. The server does not know it.
const PATIENCE: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_overload_most_of_what_is_computed_is_answered_in_time() {
    let running = Running::start_with(|parts| parts.batchers.common.workers = 1).await;
    running.model.sample_us.store(1000, Ordering::SeqCst);
    let (mut clients, mut ticks) = (JoinSet::new(), interval(Duration::from_millis(4)));
    for tick in 0..750 {
        ticks.tick().await;
        // 12 milliseconds of work.
        for number in 0..3 {
            let mut client = running.client.clone();
            let call = async move { client.predict(request(SAMPLES, 3 * tick + number).0).await };
            clients.spawn(timeout(PATIENCE, call));
        }
    }
    let (mut scored, mut refused) = (0, 0);
    while let Some(answer) = clients.join_next().await {
        match answer.unwrap() {
            Ok(Ok(_)) => scored += SAMPLES,
            Ok(Err(status)) => {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
                refused += SAMPLES;
            }
            Err(_) => {}
        }
    }
    let computed = running.model.computed();
    println!("{scored} of {computed} computed samples in time, {refused} refused");
    assert!(refused > 0 && computed > 300);
    assert!(10 * scored >= 7 * computed, "{scored} of {computed} computed samples in time");
    // The overload is over.
    let last = running.send(request(SAMPLES, 1).0).await.unwrap();
    assert_eq!(last.unwrap(), request(SAMPLES, 1).1);
}
