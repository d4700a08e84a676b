//! The frames and calls that the tests of attacks send on connections of their own, and what they read from
//! them.

use std::net::SocketAddr;

use h2::client::{ResponseFuture, SendRequest};
use prost::Message;
use prost::bytes::Bytes;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tonic::Code;
use tonic::codegen::http::{HeaderMap, Request};
use tonic_types::StatusExt;

use crate::fake::LIMIT;
use crate::serving::request;

/// The first bytes of an HTTP/2 client: the fixed text and an empty SETTINGS frame.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// A connection whose stream windows have `window` bytes.
pub async fn connect(address: SocketAddr, window: u32) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (send, connection) = h2::client::Builder::new()
        .initial_window_size(window)
        .initial_max_send_streams(1000)
        .handshake(stream)
        .await
        .unwrap();
    tokio::spawn(connection);
    send.ready().await.unwrap()
}

pub(super) fn head() -> Request<()> {
    head_of("flechette.v1.Ctr/Predict")
}

pub fn head_of(path: &str) -> Request<()> {
    let request = Request::builder().method("POST").uri(format!("http://x/{path}"));
    request.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

/// The length-prefixed frame of a message.
pub fn frame(message: &[u8]) -> Bytes {
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend_from_slice(message);
    frame.into()
}

/// The code and message of an answer without a body.
pub(super) async fn status(answer: ResponseFuture) -> (Code, String) {
    let answer = tokio::time::timeout(LIMIT, answer).await.expect("an answer in time").unwrap();
    let status = |headers: &HeaderMap| tonic::Status::from_header_map(headers);
    let status = status(answer.headers()).expect("a status in the headers");
    (status.code(), status.message().to_owned())
}

/// Whether the server closes the connection.
pub(super) async fn closed(stream: &mut TcpStream) -> bool {
    let mut bytes = Vec::new();
    tokio::time::timeout(LIMIT, stream.read_to_end(&mut bytes)).await.is_ok()
}

/// Waits until the server has read what was sent on a connection: a later call has its answer.
pub(super) async fn has_arrived(raw: &mut SendRequest<Bytes>) {
    let (answer, mut body) = raw.send_request(head(), false).unwrap();
    body.send_data(frame(&request(1, 3).0.encode_to_vec()), true).unwrap();
    tokio::time::timeout(LIMIT, answer).await.expect("an answer in time").unwrap();
}

/// Reads to a frame whose first bytes are these: its length, its type and its flags.
pub(super) async fn read_to(stream: &mut TcpStream, head: [u8; 5]) {
    let mut bytes = Vec::new();
    let read = async {
        while !bytes.windows(5).any(|found: &[u8]| found == head) {
            let mut more = [0; 1024];
            let count = stream.read(&mut more).await.unwrap();
            assert!(count > 0, "closed without this frame");
            bytes.extend(&more[..count]);
        }
    };
    tokio::time::timeout(LIMIT, read).await.expect("a frame in time");
}

/// Whether the call may be sent again after a time that the status gives.
pub(super) fn has_retry(status: &tonic::Status) -> bool {
    status.get_details_retry_info().is_some_and(|info| info.retry_delay.is_some())
}

/// A request for the scores of one sample, and a message that names its model but does not end.
pub(super) fn whole_and_cut() -> (Bytes, Bytes) {
    let whole = frame(&request(1, 3).0.encode_to_vec());
    let cut = whole.slice(..whole.len() - 1);
    (whole, cut)
}

/// A HEADERS frame of a Predict call, with `END_HEADERS`.
pub fn headers(stream: u32) -> Vec<u8> {
    headers_of(stream, "/flechette.v1.Ctr/Predict")
}

/// A HEADERS frame of a call, with `END_HEADERS`.
pub fn headers_of(stream: u32, path: &str) -> Vec<u8> {
    // Literals without indexing, and POST and http from the static table.
    let mut block = vec![0x83, 0x86];
    for (name, value) in [(vec![0x04], path), (vec![0x0f, 0x10], "application/grpc")] {
        block.extend(name);
        block.push(value.len() as u8);
        block.extend(value.as_bytes());
    }
    http2_frame(1, 4, stream, &block)
}

pub fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}
