//! Clients that reset calls: they may do so as often as they like, but only as fast as the server ends calls.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::attacks::http2::{PREFACE, headers, http2_frame};
use crate::fake::LIMIT;
use crate::serving::{Running, request};

const RESET: u8 = 3;

/// The calls of a storm, at least. Most machines need less than a second for them.
const LEAST: u32 = 2_000;

/// Opens calls and resets each at once, as fast as the server reads, until `end` and until there are
/// [`LEAST`]. Returns how many.
fn storm(mut socket: TcpStream, end: Instant) -> u32 {
    // Nobody may wait for room in the buffers of the socket.
    let mut answers = socket.try_clone().unwrap();
    let reader = std::thread::spawn(move || while answers.read(&mut [0; 1 << 16]).is_ok_and(|n| n > 0) {});
    socket.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    socket.write_all(PREFACE).unwrap();
    let goes_on = |calls| Instant::now() < if calls < LEAST { end + LIMIT } else { end };
    let mut calls = 0;
    while goes_on(calls) {
        let ids = (calls..calls + 500).map(|call| 1 + 2 * call);
        let reset = |id| [headers(id), http2_frame(RESET, 0, id, &[0, 0, 0, 8])].concat();
        let mut rest = &ids.flat_map(reset).collect::<Vec<u8>>()[..];
        while !rest.is_empty() && goes_on(calls) {
            match socket.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) => panic!("the server has closed the connection: {error}"),
            }
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
    let (seen, over) = (most.clone(), Arc::new(AtomicBool::new(false)));
    let ends = over.clone();
    let watch = std::thread::spawn(move || {
        while !ends.load(Ordering::Relaxed) {
            seen.fetch_max(tasks.num_alive_tasks(), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    while !storms.iter().all(JoinHandle::is_finished) {
        let asked = Instant::now();
        let (message, scores) = request(1, 3);
        assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
        assert!(asked.elapsed() < Duration::from_secs(60), "{:?}", asked.elapsed());
    }
    over.store(true, Ordering::Relaxed);
    watch.join().unwrap();
    let calls: u32 = storms.into_iter().map(|storm| storm.join().unwrap()).sum();
    assert!(calls >= CONNECTIONS as u32 * LEAST, "{calls}");
    // Those that may be open, and those of one read, which has up to 48 KiB.
    let limit = CONNECTIONS * (100 + (48 << 10) / 70) + 100;
    let most = most.load(Ordering::Relaxed);
    assert!(most < limit, "{most} tasks");
}

/// Sends calls and then a ping. Returns whether the server answers the ping before it closes the connection.
fn send(mut socket: TcpStream, calls: impl Iterator<Item = Vec<u8>>) -> bool {
    const PING: u8 = 6;
    let mut answers = BufReader::new(socket.try_clone().unwrap());
    let reader = std::thread::spawn(move || {
        let mut head = [0; 9];
        while answers.read_exact(&mut head).is_ok() {
            let [_, high, low, kind, flags, ..] = head;
            if (kind, flags) == (PING, 1) {
                return true;
            }
            let mut payload = vec![0; usize::from(high) * 256 + usize::from(low)];
            if answers.read_exact(&mut payload).is_err() {
                break;
            }
        }
        false
    });
    let ping = http2_frame(PING, 0, 0, &[1; 8]);
    let bytes: Vec<u8> = PREFACE.iter().copied().chain(calls.flatten()).chain(ping).collect();
    // Fails if the server closes the connection.
    let _ = socket.write_all(&bytes);
    let goes_on = reader.join().unwrap();
    let _ = socket.shutdown(Shutdown::Both);
    goes_on
}

/// The ids of the first calls of a connection.
fn ids(calls: u32) -> impl Iterator<Item = u32> {
    (0..calls).map(|call| 1 + 2 * call)
}

/// Sends calls on a connection of their own, while another connection is served.
async fn send_beside_others(
    running: &Running,
    calls: impl Iterator<Item = Vec<u8>> + Send + 'static,
) -> bool {
    let socket = TcpStream::connect(running.grpc).unwrap();
    let sending = std::thread::spawn(move || send(socket, calls));
    let mut served = 0;
    while !sending.is_finished() || served < 10 {
        let (message, scores) = request(1, 3);
        assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
        served += 1;
    }
    sending.join().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_of_which_the_server_must_reset_too_many_calls_is_closed_and_others_are_served() {
    const MOST: u32 = 100_000;
    let running = Running::start().await;
    // The method after another header, which HTTP/2 answers with a reset.
    let malformed = |id| http2_frame(1, 5, id, &[0x90, 0x83]);
    for (calls, goes_on) in [(MOST, true), (MOST + 1, false)] {
        let went_on = send_beside_others(&running, ids(calls).map(malformed)).await;
        assert_eq!(went_on, goes_on, "after {calls} calls");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_reset_in_the_fewest_bytes_neither_end_their_connection_nor_hold_up_others() {
    let running = Running::start().await;
    // POST, http and the path `/` take a byte each.
    let reset =
        |id| [http2_frame(1, 4, id, &[0x83, 0x86, 0x84]), http2_frame(RESET, 0, id, &[0, 0, 0, 8])].concat();
    assert!(send_beside_others(&running, ids(50_000).map(reset)).await, "the connection is closed");
}
