//! `PredictStream`: answers in order, errors that leave the stream open, and clients that read nothing, send
//! nothing, send rubbish or are too late.

use std::time::{Duration, Instant};

use flechette::server::ServerParts;
use flechette::server::inference::ModelInferRequest;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::predict_stream_response::Result as Answer;
use flechette::server::proto::{
    GetModelRequest, PredictError, PredictRequest, PredictResponse, PredictStreamResponse, Priority,
};
use h2::RecvStream;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::attacks::http2::{connect, frame, head_of};
use crate::fake::{FAIL, logit, until};
use crate::kserve::messages::typed;
use crate::serving::{Running, channel, request};
use crate::wire::Raw;

/// An open stream.
struct Open {
    sender: mpsc::Sender<PredictRequest>,
    answers: Streaming<PredictStreamResponse>,
}

impl Open {
    async fn new(running: &Running) -> Self {
        let (sender, receiver) = mpsc::channel(1);
        let answers = running.client.clone().predict_stream(ReceiverStream::new(receiver)).await;
        Self { sender, answers: answers.unwrap().into_inner() }
    }

    async fn send(&self, request: PredictRequest) {
        self.sender.send(request).await.unwrap();
    }

    /// The next answer, which is not the end of the stream.
    async fn answer(&mut self) -> Result<PredictResponse, PredictError> {
        result(self.answers.message().await.unwrap().unwrap())
    }
}

fn result(answer: PredictStreamResponse) -> Result<PredictResponse, PredictError> {
    match answer.result.unwrap() {
        Answer::Response(response) => Ok(response),
        Answer::Error(error) => Err(error),
    }
}

/// Reads a stream to its end. It must have the scores of requests with so many samples and each seed in turn.
pub async fn expect_answers(mut answers: RecvStream, samples: usize, requests: u64) {
    let mut bytes = Vec::new();
    while let Some(piece) = answers.data().await {
        let piece = piece.expect("the connection stays open");
        answers.flow_control().release_capacity(piece.len()).unwrap();
        bytes.extend_from_slice(&piece);
    }
    let mut rest = &bytes[..];
    for seed in 0..requests {
        let length = u32::from_be_bytes(rest[1..5].try_into().unwrap()) as usize;
        let answer = PredictStreamResponse::decode(&rest[5..5 + length]).unwrap();
        assert_eq!(result(answer).unwrap().scores, request(samples, seed).1);
        rest = &rest[5 + length..];
    }
    assert!(rest.is_empty());
}

/// The answers to some messages of one stream, as far as they come.
async fn all(
    mut client: CtrClient<Channel>,
    messages: Vec<PredictRequest>,
) -> (Vec<Result<PredictResponse, PredictError>>, Result<(), Status>) {
    let mut stream = client.predict_stream(tokio_stream::iter(messages)).await.unwrap().into_inner();
    let mut answers = Vec::new();
    loop {
        match stream.message().await {
            Ok(Some(answer)) => answers.push(result(answer)),
            Ok(None) => return (answers, Ok(())),
            Err(status) => return (answers, Err(status)),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_streams_are_answered_in_order_and_go_on_after_errors() {
    // All messages together take more memory than the limit, but not those without an answer.
    let running = Running::start_with(|parts| parts.server.max_inflight_bytes = 512 << 10).await;
    let streams = (0..4_u64).map(|stream| {
        let numbers = stream * 1000..stream * 1000 + 300;
        let client = running.client.clone();
        tokio::spawn(async move {
            let expected: Vec<_> = numbers.map(|n| request(1 + n as usize % 3, n)).collect();
            let message = |(n, (message, _)): (usize, &(PredictRequest, Vec<f32>))| {
                let mut message = PredictRequest { logits: n % 2 == 0, ..message.clone() };
                match n % 10 {
                    3 => message.dense[0] = FAIL,
                    7 => message.features.clear(),
                    _ => {}
                }
                message
            };
            let (answers, end) = all(client, expected.iter().enumerate().map(message).collect()).await;
            end.unwrap();
            assert_eq!(answers.len(), expected.len());
            for (n, (answer, (_, scores))) in answers.into_iter().zip(expected).enumerate() {
                match (n % 10, answer) {
                    (3, Err(error)) => assert_eq!(error.code, Code::Unavailable as i32, "{error:?}"),
                    (7, Err(error)) => {
                        let message = "features: \"user\" is missing".to_owned();
                        let code = Code::InvalidArgument as i32;
                        assert_eq!(error, PredictError { code, message, retry_ms: 0 });
                    }
                    (_, answer) => {
                        let answer = answer.unwrap();
                        let logits: Vec<f32> = scores.iter().map(|score| logit(*score)).collect();
                        assert_eq!((answer.scores, answer.version), (scores, 7));
                        assert_eq!(answer.logits, if n % 2 == 0 { logits } else { Vec::new() });
                    }
                }
            }
        })
    });
    for stream in streams.collect::<Vec<_>>() {
        stream.await.unwrap();
    }
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"OK\"} 960").await;
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"INVALID_ARGUMENT\"} 120").await;
    running.until_metric("flechette_requests_total{model=\"(none)\",code=\"OK\"} 0").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_own_time_is_over_is_answered_at_once_and_not_computed() {
    let deadline = Duration::from_secs(600);
    let mut running = Running::start_with(|parts| parts.batchers.common.default_deadline = deadline).await;
    running.model.hold();
    let (first, scores) = request(2, 1);
    let held = running.send(first);
    until(async || running.model.begun() == 1).await;
    let started = Instant::now();
    let late = PredictRequest { timeout_ms: 50, ..request(1, 2).0 };
    let status = running.client.predict(late.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(status.message(), "deadline passed before the answer: 50ms (timeout_ms)");
    let mut open = Open::new(&running).await;
    open.send(late).await;
    open.send(PredictRequest { timeout_ms: 600_000, ..request(1, 3).0 }).await;
    let error = open.answer().await.unwrap_err();
    assert_eq!((error.code, error.retry_ms), (Code::DeadlineExceeded as i32, 0));
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    // The earlier one of both limits counts.
    let own = frame(&PredictRequest { timeout_ms: 60_000, ..request(1, 4).0 }.encode_to_vec());
    // Without tonic, whose client has a timer too, which may cancel the call first.
    let raw = Raw::connect(running.grpc).await;
    let answer = raw.call_path("flechette.v1.Ctr/Predict", own, &[("grpc-timeout", "6S")]).await;
    assert_eq!(answer.code, Code::DeadlineExceeded, "{}", answer.message);
    running.until_metric("flechette_requests_total{model=\"ads\",code=\"DEADLINE_EXCEEDED\"} 3").await;
    running.model.release();
    assert_eq!(held.await.unwrap().unwrap(), scores);
    assert_eq!(open.answer().await.unwrap().scores, request(1, 3).1);
    assert_eq!(running.model.computed(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_because_of_overload_says_when_to_send_again() {
    let running = Running::start_with(|parts| parts.batchers.common.queue_samples = 3).await;
    running.model.hold();
    let held = running.send(request(1, 1).0);
    until(async || running.model.begun() == 1).await;
    let mut open = Open::new(&running).await;
    for seed in 2..4 {
        open.send(request(2, seed).0).await;
    }
    // The third one fits again. Requests are read in order, so the second one is refused when it is queued.
    open.send(request(1, 5).0).await;
    running.until_metric("flechette_queue_samples{model=\"ads\"} 3").await;
    running.model.release();
    assert_eq!(open.answer().await.unwrap().scores, request(2, 2).1);
    let error = open.answer().await.unwrap_err();
    assert_eq!((error.code, error.retry_ms), (Code::ResourceExhausted as i32, 100), "{error:?}");
    assert_eq!(open.answer().await.unwrap().scores, request(1, 5).1);
    open.send(request(2, 4).0).await;
    assert_eq!(open.answer().await.unwrap().scores, request(2, 4).1);
    held.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_its_answers_is_not_read_from() {
    const REQUESTS: u64 = 2000;
    let running = Running::start_with(|parts| parts.server.max_inflight_bytes = 100_000).await;
    // Room for about 20 answers.
    let raw = connect(running.grpc, 2000);
    let (answer, mut body) =
        raw.await.send_request(head_of("flechette.v1.Ctr/PredictStream"), false).unwrap();
    for seed in 0..REQUESTS {
        body.send_data(frame(&request(20, seed).0.encode_to_vec()), seed + 1 == REQUESTS).unwrap();
    }
    let answers = answer.await.unwrap().into_body();
    let mut read = 0;
    // The answers in the window, those that wait for it, and those of the stream. tonic gathers up to 32 KiB,
    // about 330 answers, if they are ready at once.
    while read == 0 || read < running.model.computed() / 20 {
        read = running.model.computed() / 20;
        // The server has time for other calls, so it is not just slow.
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(15)).await;
            let ask = GetModelRequest { model: "ads".to_owned() };
            running.client.clone().get_model(ask).await.unwrap();
        }
        running.until_metric("flechette_queue_samples{model=\"ads\"} 0").await;
    }
    assert!((20..REQUESTS as usize / 2).contains(&read), "{read} requests were read");
    let other = running.send(request(2, 1).0).await.unwrap();
    assert_eq!(other.unwrap(), request(2, 1).1);
    expect_answers(answers, 20, REQUESTS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_answers_of_a_stream_may_take_counts_towards_the_memory_in_flight() {
    const SAMPLES: usize = 64;
    /// Of one request: 1, 3 and 1 in each sample.
    const IDS: usize = 5 * SAMPLES;
    let running = Running::start().await;
    let in_flight = async || running.value("flechette_in_flight_bytes").await as usize;
    let raw = connect(running.grpc, 0);
    let (answer, mut body) =
        raw.await.send_request(head_of("flechette.v1.Ctr/PredictStream"), false).unwrap();
    running.model.hold();
    for seed in 0..40 {
        let mut message = request(SAMPLES, seed).0;
        message.features[1].ids = vec![1; 3 * SAMPLES];
        message.features[1].lengths = vec![3; SAMPLES];
        body.send_data(frame(&message.encode_to_vec()), false).unwrap();
    }
    let answer = answer.await.unwrap();
    // 16 of them are read. Each of their ids may be absent, and then takes eight bytes of an answer.
    until(async || in_flight().await >= 16 * (8 * IDS + 4 * SAMPLES)).await;
    running.model.release();
    drop((answer, body));
    until(async || in_flight().await == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_cannot_be_decoded_ends_the_stream_after_the_earlier_answers() {
    let running = Running::start().await;
    let mut large = request(1, 1).0;
    large.model = "x".repeat(70_000);
    let wrong = [
        (large.encode_to_vec(), Code::ResourceExhausted, "message: limit 65536 bytes (server.max_bytes)"),
        (vec![0x0a, 0xff], Code::Internal, "message: malformed"),
        (vec![0x0b], Code::Internal, "message: malformed"),
    ];
    for (bytes, code, words) in wrong {
        let raw = connect(running.grpc, 65_535);
        let (answer, mut body) =
            raw.await.send_request(head_of("flechette.v1.Ctr/PredictStream"), false).unwrap();
        body.send_data(frame(&request(1, 5).0.encode_to_vec()), false).unwrap();
        body.send_data(frame(&bytes), false).unwrap();
        let mut answers = answer.await.unwrap().into_body();
        let mut data = Vec::new();
        while let Some(piece) = answers.data().await {
            data.extend_from_slice(&piece.unwrap());
        }
        let first = PredictStreamResponse::decode(&data[5..]).unwrap();
        assert_eq!(result(first).unwrap().scores, request(1, 5).1);
        let trailers = answers.trailers().await.unwrap().unwrap();
        let status = Status::from_header_map(&trailers).unwrap();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().starts_with(words), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_at_the_deadline_of_its_call() {
    let running = Running::start().await;
    let (sender, receiver) = mpsc::channel(1);
    let mut call = tonic::Request::new(ReceiverStream::new(receiver));
    // The first answer must come before.
    call.metadata_mut().insert("grpc-timeout", "6S".parse().unwrap());
    let mut answers = running.client.clone().predict_stream(call).await.unwrap().into_inner();
    sender.send(PredictRequest { timeout_ms: 60_000, ..request(1, 1).0 }).await.unwrap();
    assert!(result(answers.message().await.unwrap().unwrap()).is_ok());
    running.model.hold();
    sender.send(request(1, 2).0).await.unwrap();
    let status = answers.message().await.unwrap_err();
    running.model.release();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    // Only the request without an answer is counted.
    uncounted(&running, "DEADLINE_EXCEEDED").await;
    let one = "flechette_requests_total{model=\"ads\",code=\"DEADLINE_EXCEEDED\"} 1";
    running.until_metric(one).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_stream_ends_and_gives_up_its_place() {
    let limits = |parts: &mut ServerParts| {
        parts.server.stream_idle = Duration::from_secs(6);
        parts.server.max_requests = 1;
    };
    let running = Running::start_with(limits).await;
    let mut open = Open::new(&running).await;
    for seed in 0..7 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        open.send(request(1, seed).0).await;
        assert!(open.answer().await.is_ok());
    }
    let status = running.send(request(1, 1).0).await.unwrap().unwrap_err();
    let full = "calls in flight: limit 2 (twice server.max_requests), got 2, 2 of them of this connection";
    assert!(status.message().starts_with(full), "{status}");
    let status = open.answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "stream: no request for 6 s (server.stream_idle_seconds)");
    until(async || running.send(request(1, 1).0).await.unwrap().is_ok()).await;
    // An alert would take what is counted for a failure of the server.
    uncounted(&running, "UNAVAILABLE").await;
    let running = Running::start_with(|parts| parts.server.stream_idle = Duration::from_secs(1)).await;
    let mut open = Open::new(&running).await;
    assert_eq!(open.answers.message().await.unwrap_err().code(), Code::Unavailable);
    uncounted(&running, "UNAVAILABLE").await;
}

/// Checks that no call without a model is counted with this code when all have ended.
async fn uncounted(running: &Running, code: &str) {
    running.until_metric("flechette_places_taken 0").await;
    let series = format!("flechette_requests_total{{model=\"(none)\",code=\"{code}\"}}");
    assert_eq!(running.value(&series).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_answers_the_requests_that_were_read_and_ends_the_stream() {
    let running = Running::start().await;
    let model = running.model.clone();
    model.hold();
    let mut open = Open::new(&running).await;
    open.send(request(1, 0).0).await;
    until(async || model.begun() == 1).await;
    for seed in 1..3 {
        open.send(request(1, seed).0).await;
    }
    running.until_metric("flechette_queue_samples{model=\"ads\"} 2").await;
    let drained = running.stop();
    tokio::time::sleep(Duration::from_millis(200)).await;
    model.release();
    for seed in 0..3 {
        assert_eq!(open.answer().await.unwrap().scores, request(1, seed).1);
    }
    let status = open.answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "the server is draining: no more requests of the stream are read");
    assert_eq!(drained.await.unwrap().unwrap().unfinished, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_higher_priority_are_computed_first_and_answered_in_order() {
    let running = Running::start_with(|parts| parts.batchers.common.max_samples = 6).await;
    let mut open = Open::new(&running).await;
    open.send(PredictRequest { priority: 3, ..request(1, 1).0 }).await;
    let error = open.answer().await.unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument as i32);
    assert_eq!(error.message, "priority: expected 0 (normal), 1 (high) or 2 (low), got 3");
    running.model.hold();
    open.send(request(1, 1).0).await;
    until(async || running.model.begun() == 1).await;
    let mut queued = 0;
    for (samples, priority) in [(4, Priority::Low), (5, Priority::Normal), (6, Priority::High)] {
        open.send(PredictRequest { priority: priority.into(), ..request(samples, 1).0 }).await;
        queued += samples;
        running.until_metric(&format!("flechette_queue_samples{{model=\"ads\"}} {queued}")).await;
    }
    running.model.release();
    for samples in [1, 4, 5, 6] {
        assert_eq!(open.answer().await.unwrap().scores, request(samples, 1).1);
    }
    // No two of the later ones fit in a batch.
    assert_eq!(*running.model.calls.lock().unwrap(), [1, 6, 5, 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_computed_in_parts_gets_the_logits_of_all_samples() {
    let mut running = Running::start_with(|parts| parts.batchers.common.max_samples = 7).await;
    let (message, scores) = request(60, 1);
    let answer = running.client.predict(PredictRequest { logits: true, ..message }).await.unwrap();
    let logits: Vec<f32> = scores.iter().map(|score| logit(*score)).collect();
    let answer = answer.into_inner();
    assert_eq!((answer.scores, answer.logits), (scores, logits));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_client_sends_no_more_ends_at_its_deadline() {
    let running = Running::start().await;
    running.model.hold();
    let mut raw = connect(running.grpc, 65_535).await;
    let mut head = head_of("flechette.v1.Ctr/PredictStream");
    head.headers_mut().insert("grpc-timeout", "2S".parse().unwrap());
    let (answer, mut body) = raw.send_request(head, false).unwrap();
    body.send_data(frame(&request(1, 3).0.encode_to_vec()), true).unwrap();
    let ended = async {
        let mut answers = answer.await.unwrap().into_body();
        while answers.data().await.is_some() {}
        answers.trailers().await.unwrap().unwrap()
    };
    let trailers = tokio::time::timeout(Duration::from_secs(60), ended).await;
    running.model.release();
    let status = Status::from_header_map(&trailers.expect("an end in time")).unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_above_the_limit_is_refused_and_takes_no_memory_while_its_answer_waits() {
    let running = Running::start().await;
    let message = PredictRequest { request_id: "x".repeat(1025), ..request(1, 1).0 };
    let status = running.send(message.clone()).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "request id: limit 1024 bytes, got 1025");
    let longest = PredictRequest { request_id: "x".repeat(1024), ..request(1, 1).0 };
    assert_eq!(running.send(longest).await.unwrap().unwrap(), request(1, 1).1);
    let mut kserve = GrpcInferenceServiceClient::new(channel(running.grpc).await);
    let id = "x".repeat(1025);
    let infer = ModelInferRequest { id, ..typed(&request(1, 1).0) };
    assert_eq!(kserve.model_infer(infer.clone()).await.unwrap_err().message(), status.message());
    let answers = kserve.model_stream_infer(tokio_stream::once(infer)).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    assert_eq!(answer.error_message, status.message());
    assert_eq!(answer.infer_response.unwrap().id, "", "it is not repeated");
}
