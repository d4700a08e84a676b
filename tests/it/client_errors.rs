//! What commands say that get no answer of a server: its address, the cause, and a hint.

use std::net::SocketAddr;

use flechette::schema::preset::ArchKind;

use crate::certificates::{Authority, Files};
use crate::program::{Served, Workshop, run_failing};
use crate::serving::Running;
use crate::switching::wait;

const GRPC_PORT: &str = "is this the gRPC port (8001 by default)";

/// What `score`, `load` and `label` say to this server.
fn errors(addr: &str, flags: &str) -> Vec<String> {
    let data = format!("--addr {addr} {flags} --model ads --format criteo-tsv /nowhere.tsv");
    let lines = [
        format!("score {data}"),
        format!("load {data} --rate 1 --seconds 1"),
        format!("label --addr {addr} {flags} ads"),
    ];
    lines.iter().map(|line| run_failing(1, line)).collect()
}

async fn encrypted(files: &Files, authority: &Authority, mutual: bool) -> Running {
    let mut tls = files.certificate(&authority.sign(2090));
    tls.client_ca = mutual.then(|| files.write("clients.pem", &authority.pem()));
    Running::start_with(|parts| parts.tls = Some(tls)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_the_wrong_port_or_without_tls_is_told_the_address_and_what_to_check() {
    let (files, authority) = (Files::new(), Authority::new());
    let plain = Running::start().await;
    let (tls, mutual) =
        (encrypted(&files, &authority, false).await, encrypted(&files, &authority, true).await);
    let ca =
        |name: &str, authority: &Authority| format!("--ca {}", files.write(name, &authority.pem()).display());
    let (own, other) = (ca("own.pem", &authority), ca("other.pem", &Authority::new()));
    let (http, https) =
        (|port: SocketAddr| format!("http://{port}"), |port: SocketAddr| format!("https://{port}"));
    for (addr, flags, hint) in [
        (http(plain.http), "", GRPC_PORT),
        (http(tls.grpc), "", "does it need https:// and --ca?"),
        (https(mutual.grpc), &own, "--certificate and --key"),
        (https(plain.grpc), &own, "is this port encrypted? Otherwise it needs http://"),
        (https(tls.grpc), &other, "does --ca name the authority of the server's certificate?"),
    ] {
        for error in errors(&addr, flags) {
            assert!(error.starts_with(&format!("error: {addr}: ")) && error.contains(hint), "{error}");
            assert!(!error.contains("transport error") && error.len() < 300, "{error}");
        }
    }
}

#[test]
fn a_server_that_is_killed_during_a_run_is_named_with_the_cause() {
    let workshop = Workshop::new(300, 300);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let addr = served.url();
    let line = format!(
        "load --addr {addr} --model dlrm --format criteo-tsv {} --batch 8 --concurrency 2 --seconds 15",
        workshop.valid
    );
    let killing = std::thread::spawn(move || {
        wait("requests are answered", || served.sum("flechette_requests_total", "dlrm") >= 50.0);
        served.signal("-KILL");
    });
    let error = run_failing(1, &line);
    killing.join().unwrap();
    assert!(error.starts_with(&format!("error: {addr}: ")), "{error}");
    assert!(error.contains("UNAVAILABLE: the connection failed: "), "{error}");
    assert!(!error.contains("transport error") && !error.contains(GRPC_PORT), "{error}");
}
