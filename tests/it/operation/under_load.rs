//! No request is lost: not of many clients, and not in a drain under load.

use std::error::Error as _;
use std::path::PathBuf;
use std::time::Duration;

use flechette::cli::client;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::preset::{self, ArchKind};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::types::RawBatch;
use tonic::Code;

use crate::program::{PATIENT, Served, Workshop, run};
use crate::serving::channel;

/// Whether the client library failed a call that the server never accepted. Either the call was not sent
/// before the connection closed, or its stream id is above the last that the draining server accepts (RFC
/// 9113, section 6.8). Such a status has a source; a status from the server has none.
fn not_taken_by_the_server(status: &tonic::Status) -> bool {
    let sources = std::iter::successors(status.source(), |&error| error.source());
    let past_the_last = |error: &h2::Error| {
        error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR)
    };
    let unsent = status.code() == Code::Cancelled && status.source().is_some();
    unsent || sources.filter_map(|error| error.downcast_ref()).any(past_the_last)
}

#[test]
fn a_drain_under_load_loses_no_request_and_exits_with_0() {
    let workshop = Workshop::new(500, 64);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start_in(PATIENT, &workshop.models, "");
    let schema = preset::criteo(ArchKind::Dlrm, 8, 1000);
    let mut raw = RawBatch::default();
    let valid = [PathBuf::from(&workshop.valid)];
    let mut reader = dataset::open(Format::CriteoTsv, &valid, &schema, ReadOptions::default()).unwrap();
    reader.read(64, &mut raw).unwrap();
    let request = client::request("dlrm", &schema, &raw);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let scored: usize = runtime.block_on(async {
        let mut clients = Vec::new();
        for _ in 0..16 {
            let (mut ctr, request) = (CtrClient::new(channel(served.grpc).await), request.clone());
            clients.push(tokio::spawn(async move {
                for scored in 0.. {
                    match ctr.predict(request.clone()).await {
                        Ok(answer) => assert_eq!(answer.into_inner().scores.len(), 64),
                        Err(status) => {
                            let unsent = not_taken_by_the_server(&status);
                            assert!(unsent || status.code() == Code::Unavailable, "{status:?}");
                            assert!(!status.message().is_empty());
                            return scored;
                        }
                    }
                }
                unreachable!("the server never ended")
            }));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        served.terminate();
        let mut scored = 0;
        for client in clients {
            scored += client.await.unwrap();
        }
        scored
    });
    let (status, log) = served.ended();
    assert!(status.success(), "{status}: {log}");
    assert!(scored > 0);
    assert!(log.contains("stopped") && log.contains("unfinished=0"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn no_request_of_500_clients_is_lost() {
    let workshop = Workshop::new(500, 200);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "");
    let (url, valid) = (served.url(), &workshop.valid);
    let output = run(&format!(
        "load --addr {url} --model dlrm --format criteo-tsv {valid} --batch 2 --concurrency 500 \
         --connections 500 --seconds 3 --timeout 60 --json"
    ));
    let reported: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |key: &str| reported[key].as_u64().unwrap_or_else(|| panic!("{key}: {reported}"));
    assert_eq!(number("sent"), number("ok") + number("failed"));
    assert!(number("ok") >= 500, "{reported}");
    // The time limit of a request is a minute.
    assert_eq!(reported["goodput_per_s"], reported["requests_per_s"], "{reported}");
    assert_eq!(number("rows"), 2 * number("ok"));
    assert_eq!(output.status.code(), Some(i32::from(number("failed") > 0)), "{reported}");
    let errors = reported["errors"].as_object().unwrap();
    assert!(errors.keys().all(|code| code == "RESOURCE_EXHAUSTED"), "{reported}");
    // The server also counts the GetModel call.
    let counted = served.metric("flechette_requests_total", &["model=\"dlrm\"", "code=\"OK\""]);
    assert_eq!(counted as u64, number("ok") + 1);
}
