//! A port in use is one error, a signal starts the shutdown, and a drain finishes the calls in flight.

use flechette::server::{Server, ServerError};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::fake::{Fake, until};
use crate::serving::{self, Running, channel, http_get, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_finishes_calls_in_flight_and_reports_it() {
    let running = Running::start().await;
    running.model.hold();
    let send = |seed| {
        let (message, scores) = request(2, seed);
        (running.send(message), scores)
    };
    let mut sent = vec![send(0)];
    until(async || running.model.begun() == 1).await;
    sent.extend((1..10).map(send));
    running.until_metric("flechette_queue_samples{model=\"ads\"} 18").await;
    let mut health = HealthClient::new(channel(running.grpc).await);
    let mut watch = health.watch(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status, 1);

    let (model, grpc, http) = (running.model.clone(), running.grpc, running.http);
    let ended = running.stop();
    assert_eq!(watch.message().await.unwrap().unwrap().status, 2);
    assert_eq!(http_get(http, "/readyz").await, (503, "draining\n".to_owned()));
    assert_eq!(http_get(http, "/healthz").await.0, 200);
    until(async || tokio::net::TcpStream::connect(grpc).await.is_err()).await;
    model.release();
    for (answer, scores) in sent {
        assert_eq!(answer.await.unwrap().unwrap(), scores);
    }
    assert_eq!(ended.await.unwrap().unwrap().unfinished, 0);
    assert_eq!(model.computed(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_when_its_time_is_over() {
    let running =
        Running::start_with(|parts| parts.server.drain = std::time::Duration::from_millis(50)).await;
    running.model.hold();
    let stuck = running.send(request(1, 0).0);
    until(async || running.model.begun() == 1).await;
    let queued = running.send(request(1, 1).0);
    running.until_metric("flechette_queue_samples{model=\"ads\"} 1").await;
    let model = running.model.clone();
    let ended = running.stop().await.unwrap().unwrap();
    assert_eq!(ended.unfinished, 2);
    let status = queued.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    model.release();
    assert!(stuck.await.unwrap().is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_one_clear_error() {
    let running = Running::start().await;
    for key in ["server.grpc", "server.http"] {
        let mut parts = serving::parts(&Fake::new());
        match key {
            "server.grpc" => parts.server.grpc = running.grpc,
            _ => parts.server.http = running.grpc,
        }
        let error = Server::bind(parts).await.err().unwrap().to_string();
        let expected = format!("{key}: cannot listen on {}", running.grpc);
        assert!(error.starts_with(&expected) && error.contains("in use") && !error.contains('\n'), "{error}");
    }
    let mut parts = serving::parts(&Fake::new());
    parts.models.push(Fake::new());
    let error = Server::bind(parts).await.err().unwrap();
    assert!(matches!(error, ServerError::DuplicateModel(name) if name == "ads"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_starts_the_shutdown() {
    let terminated = flechette::server::terminated().unwrap();
    let pid = std::process::id().to_string();
    let killed = std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(killed.success());
    terminated.await;
}
