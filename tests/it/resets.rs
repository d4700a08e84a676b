//! Clients that reset calls: they may do so as often as they like, but only as fast as the server ends calls.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::attacks::{PREFACE, headers, http2_frame};
use crate::serving::{Running, request};

const RESET: u8 = 3;

/// Opens calls and resets each at once, as fast as the server reads, until `until`. Returns how many.
fn storm(mut socket: TcpStream, until: Instant) -> u32 {
    // Nobody may wait for room in the buffers of the socket.
    let mut answers = socket.try_clone().unwrap();
    let reader = std::thread::spawn(move || while answers.read(&mut [0; 1 << 16]).is_ok_and(|n| n > 0) {});
    socket.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    socket.write_all(PREFACE).unwrap();
    let mut calls = 0;
    while Instant::now() < until {
        let ids = (calls..calls + 500).map(|call| 1 + 2 * call);
        let reset = |id| [headers(id), http2_frame(RESET, 0, id, &[0, 0, 0, 8])].concat();
        let mut rest = &ids.flat_map(reset).collect::<Vec<u8>>()[..];
        while !rest.is_empty() && Instant::now() < until {
            let written = socket.write(rest).unwrap_or(0);
            rest = &rest[written..];
        }
        calls += 500;
    }
    socket.shutdown(Shutdown::Both).unwrap();
    reader.join().unwrap();
    calls
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_reset_faster_than_they_end_take_no_memory_and_no_turn_of_others() {
    const CONNECTIONS: usize = 2;
    let running = Running::start_with(|parts| parts.server.max_streams = 100).await;
    let end = Instant::now() + Duration::from_secs(1);
    let storms: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let socket = TcpStream::connect(running.grpc).unwrap();
            std::thread::spawn(move || storm(socket, end))
        })
        .collect();
    // Not a task, because tasks may starve.
    let (tasks, most) = (Handle::current().metrics(), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let watch = std::thread::spawn(move || {
        while Instant::now() < end {
            seen.fetch_max(tasks.num_alive_tasks(), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    while Instant::now() < end {
        let asked = Instant::now();
        let (message, scores) = request(1, 3);
        assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    }
    watch.join().unwrap();
    let calls: u32 = storms.into_iter().map(|storm| storm.join().unwrap()).sum();
    assert!(calls > 3_000, "{calls}");
    // Those that may be open, and those of one read, which has up to 48 KiB.
    let limit = CONNECTIONS * (100 + (48 << 10) / 70) + 100;
    let most = most.load(Ordering::Relaxed);
    assert!(most < limit, "{most} tasks");
}
