//! The limits that HTTP/2 itself keeps.

use hyper::service::service_fn;
use tokio::io::AsyncWriteExt;

use super::*;
use crate::config::{Config, Flags};

/// Calls that are opened and cancelled in one piece of memory, so HTTP/2 sees all of them before it accepts
/// the first. A [`ConnectionState`] lets nothing like this through.
fn reset(calls: usize) -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for id in (1u32..).step_by(2).take(calls) {
        // POST, http and `/` of the static table.
        bytes.extend([&[0, 0, 3, 1, 4][..], &id.to_be_bytes(), &[0x83, 0x86, 0x84]].concat());
        bytes.extend([&[0, 0, 4, 3, 0][..], &id.to_be_bytes(), &[0, 0, 0, 8]].concat());
    }
    bytes
}

#[tokio::test]
async fn a_connection_ends_if_more_calls_are_cancelled_before_they_are_accepted_than_the_limit() {
    let config = Config::resolve(&Flags::default(), [], Some("server.models = \"m\"")).unwrap().server;
    for (calls, ends) in [(RESETS_AT_ONCE, false), (RESETS_AT_ONCE + 1, true)] {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        client.write_all(&reset(calls)).await.unwrap();
        client.shutdown().await.unwrap();
        let answer = service_fn(async |_| Ok::<_, Infallible>(Response::new(Body::empty())));
        let ended = http2(Http2::new(&config)).serve_connection(TokioIo::new(server), answer).await;
        let error = format!("{ended:?}");
        assert_eq!(error.contains("ENHANCE_YOUR_CALM"), ends, "{calls} calls: {error}");
    }
}
