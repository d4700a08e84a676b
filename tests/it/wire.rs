//! The wire protocol: HTTP/2 frames written by hand, bytes that are not a message, and messages that are not
//! a valid batch. The server must answer everything with a status and keep running.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::net::SocketAddr;

use flechette::server::proto::{FeatureColumn, LearnRequest, PredictRequest, PredictResponse};
use flechette::trainer;
use flechette::trainer::optim::{Optimizer, OptimizerKind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use prost::Message;
use prost::bytes::Bytes;
use tonic::Code;
use tonic::codegen::http::Request;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fake::{crossed_schema, score, until};
use crate::learn::served::{CONFIG, labelled, learning};
use crate::program::Served;
use crate::serving::{Running, request};

/// A gRPC connection on which a test can send any bytes.
pub struct Raw(h2::client::SendRequest<Bytes>);

/// An answer: the status, its message, and the first message of the body.
pub struct Answer {
    pub code: Code,
    pub message: String,
    pub body: Bytes,
}

impl Raw {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        Self(send)
    }

    /// Sends `frames` as the body of one Predict call.
    async fn call(&self, frames: Bytes, headers: &[(&str, &str)]) -> Answer {
        self.call_method("Predict", frames, headers).await
    }

    async fn call_method(&self, method: &str, frames: Bytes, headers: &[(&str, &str)]) -> Answer {
        self.call_path(&format!("flechette.v1.Ctr/{method}"), frames, headers).await
    }

    /// Sends `frames` as the body of a call of any service.
    pub async fn call_path(&self, path: &str, frames: Bytes, headers: &[(&str, &str)]) -> Answer {
        self.begin(path, headers).await.finish(frames).await
    }

    /// Sends only the headers of a call.
    pub async fn begin(&self, path: &str, headers: &[(&str, &str)]) -> Begun {
        let mut request = Request::builder()
            .method("POST")
            .uri(format!("http://x/{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut send = self.0.clone().ready().await.unwrap();
        let (response, body) = send.send_request(request.body(()).unwrap(), false).unwrap();
        Begun { response, body }
    }
}

/// A call without its body.
pub struct Begun {
    response: h2::client::ResponseFuture,
    body: h2::SendStream<Bytes>,
}

impl Begun {
    /// Sends `frames` as the body.
    pub async fn finish(mut self, frames: Bytes) -> Answer {
        // The server may answer and close the stream before it has read everything, so an error is ignored.
        let _ = self.body.send_data(frames, true);
        let response = self.response.await.unwrap();
        let mut headers = response.headers().clone();
        let mut stream = response.into_body();
        let mut bytes = Vec::new();
        while let Some(data) = stream.data().await {
            let data = data.unwrap();
            stream.flow_control().release_capacity(data.len()).unwrap();
            bytes.extend_from_slice(&data);
        }
        if let Some(trailers) = stream.trailers().await.unwrap() {
            headers.extend(trailers);
        }
        let status = tonic::Status::from_header_map(&headers).expect("every call ends with a status");
        let body = Bytes::from(bytes.get(5..).unwrap_or_default().to_vec());
        Answer { code: status.code(), message: status.message().to_owned(), body }
    }
}

/// The length-prefixed frame of a message.
pub fn frame(message: &[u8]) -> Bytes {
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend_from_slice(message);
    frame.into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_deadline_is_answered_with_its_code_and_not_computed() {
    let running = Running::start().await;
    running.model.hold();
    let (message, scores) = request(1, 0);
    let first = running.send(message);
    until(async || running.model.begun() == 1).await;
    let raw = Raw::connect(running.grpc).await;
    let late = frame(&request(5, 1).0.encode_to_vec());
    // The deadline is long enough to decode the message on a slow machine, because the metric's label needs
    // the model's name from the message.
    let answer = raw.call(late, &[("grpc-timeout", "6S")]).await;
    assert_eq!(answer.code, Code::DeadlineExceeded, "{}", answer.message);
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"DEADLINE_EXCEEDED\"} 1").await;
    running.model.release();
    assert_eq!(first.await.unwrap().unwrap(), scores);
    let (message, scores) = request(1, 2);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
    assert_eq!(running.model.computed(), 2);
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 2").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undecodable_bytes_get_internal_and_are_counted() {
    let running = Running::start().await;
    let raw = Raw::connect(running.grpc).await;
    let answer = raw.call(frame(&[0xff; 9]), &[]).await;
    assert_eq!(answer.code, Code::Internal, "{}", answer.message);
    running.until_metric("flechette_requests_total{model=\"(none)\",code=\"INTERNAL\"} 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_is_refused_by_its_claimed_length() {
    let running = Running::start().await;
    let raw = Raw::connect(running.grpc).await;
    let answer = raw.call(Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff, 1]), &[]).await;
    assert_eq!(answer.code, Code::ResourceExhausted);
    let expected = "message: limit 65536 bytes (server.max_bytes), got 4294967295 bytes";
    assert_eq!(answer.message, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_with_a_second_message_is_refused_and_not_computed() {
    let running = Running::start().await;
    let raw = Raw::connect(running.grpc).await;
    let first = frame(&request(1, 1).0.encode_to_vec());
    for second in [frame(&[]), first.clone(), Bytes::from_static(&[0])] {
        let together = raw.call([&first[..], &second].concat().into(), &[]).await;
        let mut begun = raw.begin("flechette.v1.Ctr/Predict", &[]).await;
        begun.body.send_data(first.clone(), false).unwrap();
        for answer in [together, begun.finish(second).await] {
            let Answer { code, message, .. } = answer;
            let expected = (Code::InvalidArgument, "message: expected one, got another one after it");
            assert_eq!((code, message.as_str()), expected);
        }
    }
    assert_eq!(running.model.begun(), 0);
}

#[test]
fn arbitrary_bytes_always_get_a_status() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(Running::start());
    let raw = runtime.block_on(Raw::connect(running.grpc));
    let valid = request(2, 3).0.encode_to_vec();
    let length = valid.len();
    let spoiled = prop::collection::vec((0..length, any::<u8>()), 1..6).prop_map(move |changes| {
        let mut bytes = valid.clone();
        for (place, byte) in changes {
            bytes[place] = byte;
        }
        frame(&bytes)
    });
    let message = prop::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| frame(&bytes));
    let frames = prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    let strategy = prop_oneof![3 => spoiled, 2 => message, 1 => frames];
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    runner
        .run(&strategy, |bytes| {
            let answer = runtime.block_on(raw.call(bytes, &[]));
            let known = [Code::Ok, Code::InvalidArgument, Code::NotFound, Code::Internal];
            // A changed count may exceed a limit. A changed flag byte means an unknown compression.
            let rare = [Code::ResourceExhausted, Code::Unimplemented];
            prop_assert!(known.contains(&answer.code) || rare.contains(&answer.code), "{}", answer.code);
            prop_assert!(!answer.message.contains("panic"), "{}", answer.message);
            Ok(())
        })
        .unwrap();
    let (good, scores) = request(3, 1);
    let answer = runtime.block_on(raw.call(frame(&good.encode_to_vec()), &[]));
    assert_eq!(PredictResponse::decode(answer.body).unwrap().scores, scores);
}

#[test]
fn arbitrary_bytes_for_learn_get_a_status_and_only_valid_samples_are_stored() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let running = runtime.block_on(learning(dir.path(), CONFIG, &[]));
    let raw = runtime.block_on(Raw::connect(running.grpc));
    let valid = labelled(request(2, 3).0, 0.5).encode_to_vec();
    let length = valid.len();
    let spoiled = prop::collection::vec((0..length, any::<u8>()), 1..6).prop_map(move |changes| {
        let mut bytes = valid.clone();
        for (place, byte) in changes {
            bytes[place] = byte;
        }
        bytes
    });
    let message = prop::collection::vec(any::<u8>(), 0..300);
    let strategy = prop_oneof![3 => spoiled, 1 => message];
    let mut runner = TestRunner::new(Config { cases: 1000, failure_persistence: None, ..Config::default() });
    let stored = std::cell::Cell::new(0);
    runner
        .run(&strategy, |bytes| {
            let answer = runtime.block_on(raw.call_method("Learn", frame(&bytes), &[]));
            if answer.code == Code::Ok {
                // What is stored is a message whose labels are in range.
                let message = LearnRequest::decode(&bytes[..]).unwrap();
                prop_assert_eq!(message.labels.len(), message.samples as usize);
                prop_assert!(message.labels.iter().all(|label| (0.0..=1.0).contains(label)));
                stored.set(stored.get() + message.samples);
            }
            prop_assert!(!answer.message.contains("panic"), "{}", answer.message);
            Ok(())
        })
        .unwrap();
    let line = format!("flechette_learn_samples_total{{model=\"ads\"}} {}", stored.get());
    runtime.block_on(running.until_metric(&line));
}

/// The answer that the protocol requires, computed without the server: scores, or the status code of a
/// refusal.
pub fn expected(request: &PredictRequest) -> Result<Vec<f32>, Code> {
    let samples = request.samples as usize;
    let invalid = Err(Code::InvalidArgument);
    match (request.model.as_str(), request.version, samples) {
        ("ads", 0 | 7, 1..=64) => {}
        ("ads", 0 | 7, 0) => return invalid,
        ("ads", 0 | 7, _) => return Err(Code::ResourceExhausted),
        _ => return Err(Code::NotFound),
    }
    if request.dense.len() != samples * 2 || request.dense.iter().any(|d| !d.is_finite()) {
        return invalid;
    }
    let mut bags: Vec<Vec<Vec<u64>>> = Vec::new();
    let rules = [("user", Some((3, 1000)), 1..=1), ("tag", None, 0..=3), ("strict", Some((4, 10)), 1..=1)];
    for (name, hash, counts) in rules {
        let columns: Vec<_> = request.features.iter().filter(|c| c.name == name).collect();
        let [column] = columns[..] else { return invalid };
        let lengths = if column.lengths.is_empty() { vec![1; samples] } else { column.lengths.clone() };
        let hashed = match hash {
            Some((seed, modulus)) => {
                column.strings.iter().map(|s| xxh3_64_with_seed(s, seed) % modulus).collect()
            }
            None if column.strings.is_empty() => vec![],
            None => return invalid,
        };
        if !column.ids.is_empty() && !hashed.is_empty() {
            return invalid;
        }
        let mut values = column.ids.iter().chain(&hashed).copied();
        let mut bag = Vec::new();
        for &length in &lengths {
            if !counts.contains(&length) {
                return invalid;
            }
            bag.push(values.by_ref().take(length as usize).collect::<Vec<_>>());
        }
        let complete = bag.iter().map(Vec::len).eq(lengths.iter().map(|&l| l as usize));
        if lengths.len() != samples || !complete || values.next().is_some() {
            return invalid;
        }
        if name == "strict" && bag.iter().flatten().any(|&id| id >= 10) {
            return invalid;
        }
        bags.push(bag);
    }
    if request.features.len() != 3 {
        return invalid;
    }
    let scored = request.dense.chunks(2).enumerate().map(|(sample, dense)| {
        let ids: Vec<&[u64]> = bags.iter().map(|bag| bag[sample].as_slice()).collect();
        score(&[dense[0], dense[1].max(0.0).ln_1p()], &ids)
    });
    Ok(scored.collect())
}

/// A change of a request. Many changes keep it valid.
fn change() -> impl Strategy<Value = fn(&mut PredictRequest, u64)> {
    let changes: Vec<fn(&mut PredictRequest, u64)> = vec![
        |r, n| r.samples = n as u32 % 80,
        |r, _| r.samples = u32::MAX,
        |r, n| r.version = n % 9,
        |r, n| r.model.truncate(n as usize % 4),
        |r, n| r.dense.truncate(n as usize % 20),
        |r, n| r.dense.push(n as f32),
        |r, n| {
            let special = [f32::NAN, f32::INFINITY, -0.0, f32::MIN, f32::MAX, 1e-45];
            if let Some(value) = r.dense.first_mut() {
                *value = special[n as usize % special.len()];
            }
        },
        |r, n| {
            let count = r.features.len();
            r.features.rotate_left(n as usize % count.max(1));
        },
        |r, n| drop(r.features.remove(n as usize % r.features.len().max(1))),
        |r, n| r.features.push(r.features[n as usize % r.features.len().max(1)].clone()),
        |r, n| r.features.push(FeatureColumn { name: n.to_string(), ..FeatureColumn::default() }),
        |r, n| column(r, n).lengths.clear(),
        |r, n| column(r, n).lengths.push(n as u32),
        |r, n| column(r, n).lengths.iter_mut().for_each(|l| *l = n as u32 % 5),
        |r, n| column(r, n).lengths.iter_mut().for_each(|l| *l = l.wrapping_sub(1)),
        |r, n| column(r, n).ids.push(n),
        |r, n| column(r, n).ids.iter_mut().for_each(|id| *id = n),
        |r, n| column(r, n).ids.clear(),
        |r, n| column(r, n).strings.push(n.to_string().into()),
        |r, n| {
            let column = column(r, n);
            column.strings = column.ids.drain(..).map(|id| id.to_le_bytes().to_vec().into()).collect();
        },
    ];
    prop::sample::select(changes)
}

fn column(request: &mut PredictRequest, n: u64) -> &mut FeatureColumn {
    if request.features.is_empty() {
        request.features.push(FeatureColumn::default());
    }
    let count = request.features.len();
    &mut request.features[n as usize % count]
}

/// Requests that were valid, with 0 to 3 changes.
pub fn requests() -> impl Strategy<Value = PredictRequest> {
    let changes = prop::collection::vec((change(), any::<u64>()), 0..4);
    (1usize..6, any::<u64>(), changes).prop_map(|(samples, seed, changes)| {
        let (mut request, _) = request(samples, seed);
        for (change, n) in changes {
            if request.features.is_empty() {
                break;
            }
            change(&mut request, n);
        }
        request
    })
}

#[test]
fn arbitrary_requests_get_the_answer_that_the_rules_require() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(Running::start());
    let raw = runtime.block_on(Raw::connect(running.grpc));
    let mut runner = TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() });
    let (mut good, mut refused) = (0, 0);
    let counts = std::cell::RefCell::new((&mut good, &mut refused));
    runner
        .run(&requests(), |request| {
            let answer = runtime.block_on(raw.call(frame(&request.encode_to_vec()), &[]));
            match expected(&request) {
                Ok(scores) => {
                    prop_assert_eq!(answer.code, Code::Ok, "{}", answer.message);
                    prop_assert_eq!(PredictResponse::decode(answer.body).unwrap().scores, scores);
                    *counts.borrow_mut().0 += 1;
                }
                Err(code) => {
                    prop_assert_eq!(answer.code, code, "{}", answer.message);
                    prop_assert!(!answer.message.is_empty());
                    *counts.borrow_mut().1 += 1;
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(good > 300 && refused > 300, "both kinds were tried: {good} good, {refused} refused");
}

/// Servers of a small model: without a cache, with one for all rows, and with a small one.
async fn real_servers() -> Vec<(Served, Raw)> {
    let models = tempfile::tempdir().unwrap();
    let sgd = Optimizer::new(OptimizerKind::Sgd, 0.1);
    trainer::initialise(&crossed_schema(), sgd, 1).unwrap().save(models.path(), "ads").unwrap();
    // `expected` assumes version 7.
    let ads = models.path().join("ads");
    std::fs::rename(ads.join("1"), ads.join("7")).unwrap();
    let mut servers = Vec::new();
    // The limits of `serving::server_config` and `batcher_config`.
    let config = models.path().join("serve.toml");
    let limits = "[server]\nmax_samples = 64\nmax_bytes = 65536\n[batcher]\nmax_delay_us = 0\nworkers = 1\n";
    std::fs::write(&config, limits).unwrap();
    for cache in ["off", "on --cache-fraction 1", "on --cache-fraction 0.05"] {
        let flags = format!("--config {} --cache-mode {cache}", config.display());
        let served = Served::start(models.path().to_str().unwrap(), &flags);
        let raw = Raw::connect(served.grpc).await;
        servers.push((served, raw));
    }
    servers
}

#[test]
fn arbitrary_requests_get_the_same_answer_of_a_real_model_with_any_cache() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let servers = runtime.block_on(real_servers());
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    let counts = std::cell::Cell::new((0, 0, 0));
    runner
        .run(&requests(), |request| {
            let message = frame(&request.encode_to_vec());
            let ask = |(_, raw): &(Served, Raw)| runtime.block_on(raw.call(message.clone(), &[]));
            let answers: Vec<Answer> = servers.iter().map(ask).collect();
            let (answer, others) = answers.split_first().unwrap();
            for other in others {
                prop_assert_eq!((other.code, &other.message), (answer.code, &answer.message));
                prop_assert_eq!(&other.body, &answer.body);
            }
            let (good, overflowed, refused) = counts.get();
            match (expected(&request), answer.code) {
                (Ok(_), Code::Ok) => {
                    let scores = PredictResponse::decode(answer.body.clone()).unwrap().scores;
                    prop_assert_eq!(scores.len(), request.samples as usize);
                    prop_assert!(scores.iter().all(|score| (0.0..=1.0).contains(score)), "{:?}", scores);
                    counts.set((good + 1, overflowed, refused));
                }
                (Ok(_), code) => {
                    prop_assert_eq!(code, Code::InvalidArgument, "{}", answer.message);
                    prop_assert!(answer.message.starts_with("score of sample 0 is not finite"));
                    prop_assert!(request.dense[0].abs() == f32::MAX, "{:?}", request.dense);
                    counts.set((good, overflowed + 1, refused));
                }
                (Err(code), got) => {
                    prop_assert_eq!(got, code, "{}", answer.message);
                    prop_assert!(!answer.message.is_empty());
                    counts.set((good, overflowed, refused + 1));
                }
            }
            Ok(())
        })
        .unwrap();
    let (good, overflowed, refused) = counts.get();
    assert!(good > 200 && refused > 200 && overflowed > 0, "{good}, {overflowed}, {refused}");
}
