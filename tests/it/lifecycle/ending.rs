//! Signals end a server, however early they come, and no client that follows its readiness loses a call.

use std::fs;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;
use flechette::server::proto::PredictRequest;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::types::Batch;
use rustix::process::{Pid, Signal, kill_process};

use crate::fake::LIMIT;
use crate::program::{Served, Workshop, flechette};
use crate::serving::channel;
use crate::switching::{requests, wait};

/// Whether a process catches SIGTERM.
fn catches_sigterm(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (Signal::TERM.as_raw() - 1) & 1 == 1
}

#[test]
fn a_signal_ends_a_server_however_early_it_comes() {
    let workshop = Workshop::new(300, 50);
    fs::create_dir(&workshop.models).unwrap();
    let line = format!("serve --models {} --grpc 127.0.0.1:0 --http 127.0.0.1:0", workshop.models);
    for _ in 0..10 {
        let mut child = flechette().args(line.split(' ')).stderr(Stdio::null()).spawn().unwrap();
        while !catches_sigterm(child.id()) {
            assert!(child.try_wait().unwrap().is_none(), "it has ended");
        }
        // A new process for this would come too late.
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let ended = (0..6000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            child.try_wait().unwrap()
        });
        let _ = child.kill();
        assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    }
}

#[test]
fn clients_that_follow_readyz_lose_no_call_when_another_server_takes_over() {
    let workshop = Workshop::new(300, 400);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    let settings = "[server]\ndrain_delay_seconds = 10\n[batcher]\ndefault_deadline_ms = 3600000\n";
    fs::write(&config, settings).unwrap();
    let [old, new] = [(); 2].map(|()| Served::start(&workshop.models, &format!("--config {config}")));
    let (grpc, moved, stop) = ([old.grpc, new.grpc], AtomicBool::new(false), AtomicBool::new(false));
    let call = |requests: Vec<(PredictRequest, Batch)>| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut clients = Vec::new();
            for address in grpc {
                clients.push(CtrClient::new(channel(address).await));
            }
            for (calls, (request, _)) in requests.iter().cycle().enumerate() {
                if stop.load(Ordering::SeqCst) {
                    return calls;
                }
                let server = usize::from(moved.load(Ordering::SeqCst));
                let answer = tokio::time::timeout(LIMIT, clients[server].predict(request.clone())).await;
                answer
                    .expect("an answer in time")
                    .unwrap_or_else(|status| panic!("call {calls} of server {server}: {status}"));
            }
            unreachable!("calls do not end")
        })
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3).map(|_| scope.spawn(|| call(requests(&workshop)))).collect();
        std::thread::sleep(Duration::from_millis(300));
        old.terminate();
        while old.get("/readyz").0 == 200 {
            std::thread::sleep(Duration::from_millis(100));
        }
        moved.store(true, Ordering::SeqCst);
        let (status, log) = old.ended();
        assert!(status.success(), "{log}");
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, Ordering::SeqCst);
        let calls: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        println!("{calls} calls");
    });
    assert!(new.sum("flechette_requests_total", "dlrm") > 0.0);
}

#[test]
fn a_server_that_will_drain_serves_on_for_the_delay_but_is_not_ready() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[server]\ndrain_delay_seconds = 15\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    let begun = Instant::now();
    served.terminate();
    wait("it is not ready", || served.get("/readyz") == (503, "draining\n".to_owned()));
    // On a new connection.
    served.score("dlrm", &workshop.valid, "");
    let (status, log) = served.ended();
    assert!(status.success() && log.contains("unfinished=0"), "{log}");
    assert!(begun.elapsed() >= Duration::from_secs(15), "{log}");
}

#[test]
fn a_second_signal_ends_a_server_at_once() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[server]\ndrain_delay_seconds = 600\n").unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    served.terminate();
    wait("it is not ready", || served.get("/readyz").0 == 503);
    std::thread::sleep(Duration::from_millis(500));
    served.terminate();
    assert_eq!(served.ended().0.code(), Some(130));
}

#[test]
fn a_signal_to_a_server_and_at_once_to_its_group_is_one_request_to_end() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let pid = Pid::from_raw(served.id() as i32).unwrap();
    // Two equal signals could become one, and a new process for the second one could come too late.
    for signal in [Signal::TERM, Signal::INT] {
        kill_process(pid, signal).unwrap();
    }
    let (status, log) = served.ended();
    assert!(status.success() && log.contains("unfinished=0"), "{status}: {log}");
}
