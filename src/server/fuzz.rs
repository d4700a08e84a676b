//! Bytes of connections to both ports of a running server.

use std::sync::Once;

use prost::Message;
use prost::bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tonic::codegen::http::{HeaderMap, HeaderName, HeaderValue, Request};

use super::meter::tests::fuzz::{infer_request_of, predict_requests};
use super::*;
use crate::config::{Config, Flags};
use crate::fake::Fake;
use crate::fuzz::bytes::{Input, mutated};
use crate::fuzz::run;

/// The name of the threads of a server.
const THREAD: &str = "fuzzed-server";

/// A server that says nothing for so long has answered, or waits.
const PAUSE: Duration = Duration::from_millis(5);

/// Panics in threads of that name. The runtime catches them.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// A server of the model `ads` with these settings.
pub(crate) fn parts_of(file: &str) -> ServerParts {
    let config = Config::resolve(&Flags::default(), [], Some(file)).unwrap();
    ServerParts {
        models: vec![Fake::new()],
        metrics: Arc::new(Metrics::new().unwrap()),
        server: config.server,
        tls: None,
        auth: config.auth,
        batchers: config.batchers,
        learning: None,
        slow: None,
        otel: None,
    }
}

/// A server whose clients must say everything within seconds.
struct Running {
    runtime: Runtime,
    grpc: SocketAddr,
    http: SocketAddr,
}

impl Running {
    fn start() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                if std::thread::current().name() == Some(THREAD) {
                    PANICS.fetch_add(1, Ordering::Relaxed);
                }
                before(panic);
            }));
        });
        let file = "[server]\ngrpc = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\nmax_bytes = \"64KiB\"\n\
                    handshake_seconds = 5\nbody_seconds = 5\nwrite_seconds = 5\n";
        let parts = parts_of(file);
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).thread_name(THREAD).enable_all().build().unwrap();
        let server = runtime.block_on(Server::bind(parts)).unwrap();
        let (grpc, http) = (server.grpc_addr(), server.http_addr());
        runtime.spawn(server.run(std::future::pending()));
        Self { runtime, grpc, http }
    }

    /// Sends bytes, waits for a pause in the answer, and ends the connection's sending half. Returns what the
    /// server answers until it closes the connection, which it must do soon.
    fn send(&self, to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
        let answer = async {
            let mut stream = TcpStream::connect(to).await.unwrap();
            // The server may close the connection before it has read everything.
            let _ = stream.write_all(bytes).await;
            let mut answer = Vec::new();
            let next = async |stream: &mut TcpStream, answer: &mut Vec<u8>| stream.read_buf(answer).await;
            while let Ok(Ok(1..)) = tokio::time::timeout(PAUSE, next(&mut stream, &mut answer)).await {}
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut answer).await;
            answer
        };
        let limit = Duration::from_secs(20);
        let answer = self.runtime.block_on(async { tokio::time::timeout(limit, answer).await });
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "the server panicked");
        answer.expect("the server closes the connection")
    }
}

#[test]
fn the_http_port() {
    let server = Running::start();
    let seeds = [
        "GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /readyz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "GET /readyz?x=%20 HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
    ];
    let words = &[
        "\r\n",
        "\r\n\r\n",
        "HTTP/1.1",
        "GET ",
        ": ",
        "%",
        "Upgrade: h2c\r\n",
        "Connection: close\r\n",
        "\0",
    ];
    run(mutated(seeds, words), |Input(bytes)| {
        let answer = server.send(server.http, &bytes);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1."),
            "{:?}",
            answer.escape_ascii().to_string()
        );
        answer.starts_with(b"HTTP/1.1 200 ")
    });
}

/// What an HTTP/2 client sends for calls of these methods, each with a message.
fn client_bytes(runtime: &Runtime, calls: &[(&str, Vec<u8>)]) -> Vec<u8> {
    runtime.block_on(async {
        let (client, mut server) = tokio::io::duplex(1 << 20);
        let (mut send, connection) = h2::client::handshake(client).await.unwrap();
        let connection = tokio::spawn(connection);
        let mut begun = Vec::new();
        for (path, message) in calls {
            let request =
                Request::post(format!("http://x/{path}")).header("content-type", "application/grpc");
            let request = request.header("te", "trailers").header("grpc-timeout", "1S").body(()).unwrap();
            let (answer, mut body) = send.send_request(request, false).unwrap();
            let frame = [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat();
            body.send_data(Bytes::from(frame), true).unwrap();
            // Without them the client would reset the call.
            begun.push((answer, body));
        }
        let mut bytes = vec![0; 1 << 16];
        let mut got = 0;
        // The client sends everything at once, and then waits for the server.
        while let Ok(read) =
            tokio::time::timeout(Duration::from_millis(200), server.read(&mut bytes[got..])).await
        {
            got += read.unwrap();
        }
        connection.abort();
        bytes.truncate(got);
        bytes
    })
}

#[test]
fn the_grpc_port() {
    let server = Running::start();
    let predict = proto::PredictRequest { version: 0, timeout_ms: 5000, ..predict_requests()[0].clone() };
    let predict = predict.encode_to_vec();
    let model = proto::GetModelRequest { model: "ads".to_owned() }.encode_to_vec();
    let infer = inference::ModelInferRequest {
        model_version: String::new(),
        parameters: Default::default(),
        ..infer_request_of(3, false)
    };
    let infer = infer.encode_to_vec();
    let seeds = [
        vec![("flechette.v1.Ctr/GetModel", model.clone())],
        vec![("flechette.v1.Ctr/Predict", predict.clone()), ("flechette.v1.Ctr/Learn", predict.clone())],
        vec![("flechette.v1.Ctr/PredictStream", predict)],
        vec![("inference.GRPCInferenceService/ModelInfer", infer.clone())],
        vec![("inference.GRPCInferenceService/ModelStreamInfer", infer)],
        vec![("inference.GRPCInferenceService/RepositoryIndex", vec![])],
        vec![
            ("grpc.health.v1.Health/Check", vec![]),
            ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", model),
        ],
    ];
    let seeds = seeds.map(|calls| client_bytes(&server.runtime, &calls));
    // Frames: an empty SETTINGS, a PING, WINDOW_UPDATE, RST_STREAM, GOAWAY.
    let frames = &[
        "\0\0\0\x04\0\0\0\0\0",
        "\0\0\x08\x06\0\0\0\0\0abcdefgh",
        "\0\0\x04\x08\0\0\0\0\x01\x7f\x7f\x7f\x7f",
        "\0\0\x04\x03\0\0\0\0\x01\0\0\0\x08",
        "\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    run(mutated(seeds, frames), |Input(bytes)| {
        let answer = server.send(server.grpc, &bytes);
        answers_a_call(&answer)
    });
}

/// Whether a server's bytes have the headers of an answer.
fn answers_a_call(mut bytes: &[u8]) -> bool {
    const HEADERS: u8 = 1;
    while let Some((&[a, b, c, kind, ..], rest)) = bytes.split_first_chunk::<9>() {
        if kind == HEADERS {
            return true;
        }
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        bytes = rest.get(length..).unwrap_or_default();
    }
    false
}

#[test]
fn the_timeout_of_a_call() {
    run(mutated(["20m", "99999999H", "1n", "7u", "60S", "3M"], &["0", "9", "S", "+"]), |Input(text)| {
        let Ok(value) = HeaderValue::from_bytes(&text) else { return false };
        let headers = HeaderMap::from_iter([(HeaderName::from_static("grpc-timeout"), value)]);
        let timeout = gate::timeout(&headers);
        // gRPC's form: 1 to 8 digits, and a unit.
        let form = text.split_last().is_some_and(|(unit, digits)| {
            b"HMSmun".contains(unit)
                && (1..=8).contains(&digits.len())
                && digits.iter().all(u8::is_ascii_digit)
        });
        assert_eq!(timeout.is_some(), form);
        form
    });
}
