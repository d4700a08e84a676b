//! Limits on the memory that clients can make a server use: bytes of calls in flight, columns, connections
//! and answers that are not read. The largest message is within them.

use std::net::SocketAddr;
use std::time::Duration;

use flechette::schema::Schema;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, GetModelRequest, PredictRequest, PredictResponse};
use flechette::trainer;
use flechette::trainer::optim::{Optimizer, OptimizerKind};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Channel;

use crate::attacks::http2::{connect, frame, head_of};
use crate::fake::until;
use crate::program::{Served, bytes_of};
use crate::serving::{Running, channel, request};

/// A request with so many ids of one byte, which take many times as much memory when they are converted.
fn multiplied(ids: usize) -> PredictRequest {
    let (mut message, _) = request(2, 1);
    message.features[0].ids = vec![1; ids];
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_on_bytes_in_flight_counts_what_a_message_takes_when_it_is_converted() {
    let mut running = Running::start_with(|parts| parts.server.max_inflight_bytes = 200_000).await;
    // 20,000 bytes on the wire, at least 160,000 in memory, and as much while the vector grows.
    let status = running.client.predict(multiplied(20_000)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    for needle in ["limit 200000 (server.max_inflight_bytes)", "of this call so far"] {
        assert!(status.message().contains(needle), "{needle:?} in {status}");
    }
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"RESOURCE_EXHAUSTED\"} 1").await;
    // The bytes of refused calls are released.
    let status = running.client.predict(multiplied(1000)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    for seed in 0..200 {
        let (message, scores) = request(60, seed);
        assert_eq!(running.client.predict(message).await.unwrap().into_inner().scores, scores);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_calls_hold_their_bytes_until_they_are_answered() {
    let running = Running::start_with(|parts| parts.server.max_inflight_bytes = 64 << 10).await;
    running.model.hold();
    let (first, first_scores) = request(64, 0);
    let mut held = vec![(running.send(first), first_scores)];
    until(async || running.model.begun() == 1).await;
    let refused = loop {
        assert!(held.len() < 1000, "64 KiB hold more than 1,000 calls of 64 samples");
        let (message, scores) = request(64, held.len() as u64);
        let mut sent = running.send(message);
        let queued = format!("flechette_queue_samples{{model=\"ads\"}} {}", 64 * held.len());
        tokio::select! {
            answer = &mut sent => break answer.unwrap().unwrap_err(),
            () = running.until_metric(&queued) => held.push((sent, scores)),
        }
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("limit 65536 (server.max_inflight_bytes)"), "{refused}");
    assert!(held.len() > 1);
    running.model.release();
    for (sent, scores) in held {
        assert_eq!(sent.await.unwrap().unwrap(), scores);
    }
    let (message, scores) = request(64, 5);
    assert_eq!(running.send(message).await.unwrap().unwrap(), scores);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn columns_without_content_take_no_memory_and_are_refused() {
    let mut running = Running::start_with(|parts| parts.server.max_bytes = 1 << 20).await;
    let (mut message, _) = request(2, 1);
    message.features = vec![FeatureColumn::default(); 400_000];
    let status = running.client.predict(message).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "features: unknown feature \"\"");
    let (message, scores) = request(2, 1);
    assert_eq!(running.client.predict(message).await.unwrap().into_inner().scores, scores);
}

async fn served(client: &mut CtrClient<Channel>) -> Result<(), tonic::Status> {
    client.predict(request(1, 1).0).await.map(drop)
}

/// Whether the server closes a new connection without an answer in this time.
async fn closed_within(time: Duration, address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let closed = tokio::time::timeout(time, stream.read(&mut [0; 64])).await;
    matches!(closed, Ok(Ok(0) | Err(_)))
}

/// The same, for tests that ask again and again.
async fn closed_at_once(address: SocketAddr) -> bool {
    closed_within(Duration::from_millis(200), address).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_past_the_limit_are_closed_and_closing_one_makes_room() {
    let mut running = Running::start_with(|parts| parts.server.max_connections = 2).await;
    served(&mut running.client).await.unwrap();
    let mut second = CtrClient::new(channel(running.grpc).await);
    served(&mut second).await.unwrap();
    assert!(closed_within(Duration::from_secs(5), running.grpc).await);
    served(&mut running.client).await.unwrap();
    drop(second);
    until(async || !closed_at_once(running.grpc).await).await;
    until(async || {
        let third = Channel::from_shared(format!("http://{}", running.grpc)).unwrap().connect().await;
        match third {
            Ok(third) => served(&mut CtrClient::new(third)).await.is_ok(),
            Err(_) => false,
        }
    })
    .await;

    let held =
        (TcpStream::connect(running.http).await.unwrap(), TcpStream::connect(running.http).await.unwrap());
    until(async || closed_at_once(running.http).await).await;
    drop(held);
    until(async || !closed_at_once(running.http).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http_request_that_never_ends_is_disconnected() {
    let running = Running::start_with(|parts| parts.server.http_idle = Duration::from_secs(6)).await;
    let mut slow = TcpStream::connect(running.http).await.unwrap();
    // Sends a header byte by byte without end, so only the server can end the connection.
    until(async || running.get("/healthz").await.0 == 200).await;
    slow.write_all(b"GET /healthz HTTP/1.1\r\nX: ").await.unwrap();
    let (mut read, mut write) = slow.split();
    let dripping = async {
        while write.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut answer = Vec::new();
    let ended = async {
        tokio::select! {
            () = dripping => {}
            ended = read.read_to_end(&mut answer) => drop(ended),
        }
    };
    timeout(LATE, ended).await.expect("closed in time");
    assert!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(running.get("/healthz").await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_clients_with_half_a_request_or_that_read_no_answer_are_closed_while_others_are_served() {
    let running = Running::start_with(|parts| {
        // One more than are open: a place becomes free just after its client sees the end.
        parts.server.max_connections = 5;
        parts.server.http_idle = Duration::from_secs(6);
    })
    .await;
    let open = async |sent: &[u8]| {
        let mut stream = TcpStream::connect(running.http).await.unwrap();
        stream.write_all(sent).await.unwrap();
        stream
    };
    let head = open(b"GET /metrics HTTP/1.1\r\nHost: x\r\n").await;
    let body = open(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf of it").await;
    let unread = open(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    for path in ["/healthz", "/metrics", "/status.json"] {
        assert_eq!(running.get(path).await.0, 200, "{path}");
    }
    let ended = async |mut stream: TcpStream| {
        // What is read is an answer, or that the client's bytes were not read.
        let _ = timeout(LATE, stream.read_to_end(&mut Vec::new())).await.expect("closed in time");
    };
    // Asks for more until the answers fill all buffers, and then until it is closed.
    let asking = async {
        let page = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100);
        let mut unread = unread;
        while unread.write_all(&page).await.is_ok() {}
    };
    let asked = timeout(LATE, asking);
    let (_, _, asked) = tokio::join!(ended(head), ended(body), asked);
    asked.expect("closed in time");
    // The one that asks.
    running.until_metric("flechette_connections{port=\"http\"} 1").await;
}

/// A running program with the model `ads` of this schema and these settings.
fn serve(schema: &str, settings: &str) -> (tempfile::TempDir, Served) {
    let models = tempfile::tempdir().unwrap();
    let schema = Schema::parse(schema).unwrap();
    let trained = trainer::initialise(&schema, Optimizer::new(OptimizerKind::Sgd, 0.1), 1).unwrap();
    trained.save(models.path(), "ads").unwrap();
    let config = models.path().join("serve.toml");
    std::fs::write(&config, settings).unwrap();
    let flags = format!("--cache-mode off --config {}", config.display());
    let served = Served::start(models.path().to_str().unwrap(), &flags);
    (models, served)
}

/// Far above what a call takes.
const LATE: Duration = Duration::from_secs(120);

#[test]
fn answers_that_no_client_reads_take_no_more_memory_than_the_limit() {
    const MIB: u64 = 1 << 20;
    /// The calls. Without a limit, their answers would take as many MiB.
    const ALL: usize = 400;
    // The description of the model has more than a megabyte.
    let dense: String = (0..8000).map(|i| format!("[[dense]]\nname = \"{i:0128}\"\n")).collect();
    let schema = "[architecture]\nkind = \"dlrm\"\nbottom = [8]\ntop = [8]\n".to_owned()
        + &dense
        + "[[features]]\nname = \"user\"\ntable = \"users\"\n\
           [[tables]]\nname = \"users\"\nrows = 10\ndim = 8\n";
    let settings = "[server]\nmax_requests = 64\nmax_inflight_bytes = \"64MiB\"\nmax_bytes = \"1MiB\"\n\
                    write_seconds = 600\n";
    let (_models, served) = serve(&schema, settings);
    let memory = || bytes_of(served.id(), "RssAnon").unwrap();
    Runtime::new().unwrap().block_on(async {
        let describe = GetModelRequest { model: "ads".to_owned() };
        let ask = async || {
            let mut reads = CtrClient::new(channel(served.grpc).await);
            timeout(LATE, reads.get_model(describe.clone())).await.expect("an answer in time")
        };
        let answer = ask().await.unwrap().into_inner();
        assert!(answer.encoded_len() as u64 > MIB, "{} bytes", answer.encoded_len());
        let (before, message) = (memory(), frame(&describe.encode_to_vec()));
        let (mut open, mut unread, mut refused) = (Vec::new(), Vec::new(), 0);
        for _ in 0..8 {
            let mut connection = connect(served.grpc, 0).await;
            for _ in 0..ALL / 8 {
                let head = head_of("flechette.v1.Ctr/GetModel");
                let (answer, mut body) = connection.send_request(head, false).unwrap();
                body.send_data(message.clone(), true).unwrap();
                let answer = timeout(LATE, answer).await.expect("an answer in time").unwrap();
                if answer.headers().contains_key("grpc-status") {
                    refused += 1;
                } else {
                    unread.push(answer);
                }
                connection = connection.ready().await.unwrap();
            }
            open.push(connection);
        }
        let grown = memory().saturating_sub(before) / MIB;
        println!("{} answers are not read, {refused} calls are refused, {grown} MiB", unread.len());
        assert!(unread.len() >= 20 && refused > 0, "{} and {refused}", unread.len());
        // The limit, and as much for memory that is not returned to the system.
        assert!(grown < 128, "{grown} MiB of {ALL}");
        // Others are served when they are gone.
        drop((unread, open));
        until(async || ask().await.is_ok()).await;
    });
}

#[test]
fn streams_that_have_sent_a_large_message_take_no_more_memory_than_the_limit() {
    const MIB: u64 = 1 << 20;
    /// The streams. Without a limit, their buffers would take as many MiB.
    const ALL: usize = 256;
    let schema = "[architecture]\nkind = \"dlrm\"\nbottom = [8]\ntop = [8]\n[[dense]]\nname = \"price\"\n\
                  [[features]]\nname = \"user\"\ntable = \"users\"\n\
                  [[tables]]\nname = \"users\"\nrows = 10\ndim = 8\n";
    let settings = "[server]\nmax_requests = 1000\nmax_inflight_bytes = \"64MiB\"\nmax_bytes = \"1MiB\"\n";
    let (_models, served) = serve(schema, settings);
    let memory = || bytes_of(served.id(), "RssAnon").unwrap();
    // Refused for its unknown feature, whose text is nearly a megabyte.
    let strings = vec![vec![b'x'; 1000].into(); 1000];
    let column = FeatureColumn { name: "unknown".to_owned(), strings, ..FeatureColumn::default() };
    let large =
        PredictRequest { model: "ads".to_owned(), samples: 1, features: vec![column], ..Default::default() };
    Runtime::new().unwrap().block_on(async {
        let (mut open, mut refused, before) = (Vec::new(), 0, memory());
        for _ in 0..ALL / 16 {
            let mut client = CtrClient::new(channel(served.grpc).await);
            for _ in 0..16 {
                let (sender, receiver) = mpsc::channel(1);
                sender.send(large.clone()).await.unwrap();
                let answers = client.predict_stream(ReceiverStream::new(receiver)).await;
                let mut answers = answers.unwrap().into_inner();
                match timeout(LATE, answers.message()).await.expect("an answer in time") {
                    Ok(_) => open.push((sender, answers)),
                    Err(status) => {
                        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                        refused += 1;
                    }
                }
            }
        }
        let grown = memory().saturating_sub(before) / MIB;
        println!("{} streams are open, {refused} are refused, {grown} MiB", open.len());
        assert!(open.len() >= 16 && refused > 0, "{} and {refused}", open.len());
        // The limit, and as much for memory that is not returned to the system.
        assert!(grown < 128, "{grown} MiB of {ALL}");
        // A stream may send as much again. Others are served when it has ended.
        let (sender, answers) = &mut open[0];
        sender.send(large.clone()).await.unwrap();
        timeout(LATE, answers.message()).await.expect("an answer in time").unwrap();
        drop(open);
        let client = CtrClient::new(channel(served.grpc).await);
        until(async || {
            client.clone().predict(large.clone()).await.unwrap_err().code() == Code::InvalidArgument
        })
        .await;
    });
}

#[test]
fn a_message_of_38_mib_is_scored_where_the_limits_have_room_for_one_of_the_largest() {
    // Each id is a byte of the message, and eight bytes of the batch.
    const SAMPLES: usize = 608;
    const IDS: usize = 65_536;
    let schema = format!(
        "[architecture]\nkind = \"dlrm\"\nbottom = [8]\ntop = [8]\n[[dense]]\nname = \"price\"\n\
         [[features]]\nname = \"seen\"\ntable = \"seen\"\narity = {{ multi_hot = {{ max = {IDS} }} }}\n\
         [[tables]]\nname = \"seen\"\nrows = 100\ndim = 2\n"
    );
    // The least values that are accepted with such messages.
    let settings = "[server]\nmax_bytes = \"64MiB\"\nmax_inflight_bytes = \"2239903600\"\n\
                    body_seconds = 100\n[batcher]\nqueue_bytes = \"768MiB\"\n";
    let (_models, served) = serve(&schema, settings);
    // All samples are equal.
    let message = |samples: usize| PredictRequest {
        model: "ads".to_owned(),
        samples: samples as u32,
        dense: vec![0.5; samples],
        features: vec![FeatureColumn {
            name: "seen".to_owned(),
            lengths: vec![IDS as u32; samples],
            ids: (0..IDS as u64).map(|i| i * 7 % 100).collect::<Vec<_>>().repeat(samples),
            ..FeatureColumn::default()
        }],
        logits: true,
        ..PredictRequest::default()
    };
    let (one, all): (PredictResponse, PredictResponse) = Runtime::new().unwrap().block_on(async {
        let mut client = CtrClient::new(channel(served.grpc).await);
        let mut score = async |message: PredictRequest| {
            timeout(LATE, client.predict(message)).await.expect("an answer in time").unwrap().into_inner()
        };
        let large = message(SAMPLES);
        assert_eq!(large.encoded_len() >> 20, 38);
        (score(message(1)).await, score(large).await)
    });
    assert!(one.scores[0].is_finite());
    assert_eq!((all.scores, all.logits), (one.scores.repeat(SAMPLES), one.logits.repeat(SAMPLES)));
}
