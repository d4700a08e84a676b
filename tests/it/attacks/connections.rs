//! Connections that are silent or idle, or whose request has no end. They are counted and closed, and make
//! room for others.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::http2::{PREFACE, closed, http2_frame, read_to};
use super::served::is_served;
use crate::fake::LIMIT;
use crate::serving::Running;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_without_a_preface_are_closed_and_make_room() {
    let running = Running::start_with(|parts| {
        parts.server.max_connections = 3;
        parts.server.handshake = Duration::from_secs(5);
    })
    .await;
    // The client of `running` is the third.
    assert!(is_served(&running).await);
    let (mut silent, mut slow) =
        (TcpStream::connect(running.grpc).await.unwrap(), TcpStream::connect(running.grpc).await.unwrap());
    slow.write_all(&PREFACE[..10]).await.unwrap();
    assert!(closed(&mut silent).await && closed(&mut slow).await);
    running.until_metric("flechette_connections_overdue_total{port=\"grpc\"} 2").await;
    running.until_metric("flechette_connections{port=\"grpc\"} 1").await;
    let mut late = TcpStream::connect(running.grpc).await.unwrap();
    late.write_all(PREFACE).await.unwrap();
    let mut later = TcpStream::connect(running.grpc).await.unwrap();
    assert!(closed(&mut later).await);
    // A connection with a preface stays open: it answers a PING.
    late.write_all(&http2_frame(6, 0, 0, &[0; 8])).await.unwrap();
    read_to(&mut late, [0, 0, 8, 6, 1]).await;
    running.until_metric("flechette_connections{port=\"grpc\"} 2").await;
    assert!(is_served(&running).await);
    let mut silent = TcpStream::connect(running.http).await.unwrap();
    assert!(closed(&mut silent).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_and_refused_connections_are_counted_by_port() {
    let running = Running::start_with(|parts| parts.server.max_connections = 3).await;
    assert!(is_served(&running).await);
    running.until_metric("flechette_connections_max{port=\"grpc\"} 3").await;
    // The client of `running` is the third.
    let taken = [(); 2].map(|()| std::net::TcpStream::connect(running.grpc).unwrap());
    running.until_metric("flechette_connections{port=\"grpc\"} 3").await;
    running.until_metric("flechette_connections_refused_total{port=\"grpc\"} 0").await;
    let mut refused = TcpStream::connect(running.grpc).await.unwrap();
    assert!(closed(&mut refused).await);
    running.until_metric("flechette_connections_refused_total{port=\"grpc\"} 1").await;
    drop(taken);
    running.until_metric("flechette_connections{port=\"grpc\"} 1").await;
    // The one that asks.
    running.until_metric("flechette_connections{port=\"http\"} 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_is_closed_and_its_client_connects_again() {
    let running = Running::start_with(|parts| parts.server.grpc_idle = Some(Duration::from_secs(2))).await;
    assert!(is_served(&running).await);
    let mut raw = TcpStream::connect(running.grpc).await.unwrap();
    raw.write_all(PREFACE).await.unwrap();
    // GOAWAY.
    read_to(&mut raw, [0, 0, 8, 7, 0]).await;
    drop(raw);
    running.until_metric("flechette_connections{port=\"grpc\"} 0").await;
    assert!(is_served(&running).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_head_of_an_http_request_has_a_limit() {
    let running = Running::start().await;
    let mut raw = TcpStream::connect(running.http).await.unwrap();
    // More than the limit of 16 KiB, and no end. What the server has not read when it closes is lost.
    raw.write_all(format!("GET /healthz HTTP/1.1\r\nname: {}", "x".repeat(20 << 10)).as_bytes())
        .await
        .unwrap();
    let mut answer = vec![0; 1000];
    let length =
        tokio::time::timeout(LIMIT, raw.read(&mut answer)).await.expect("an answer in time").unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
}
