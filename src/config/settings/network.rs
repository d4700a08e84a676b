//! The settings of the ports: their limits, certificates and tokens.

use super::Fallback::{Text, Words};
use super::{Section, setting};

pub(super) const SERVER: Section = Section {
    name: "server",
    about: "The ports, the models, and the limits of requests and connections.",
    settings: &[
        setting(
            "server.grpc",
            Text("127.0.0.1:8001"),
            "Address of the gRPC port. With port 0 the system chooses a free port",
        )
        .flag("--grpc"),
        setting(
            "server.http",
            Text("127.0.0.1:8002"),
            "Address of the HTTP port (metrics, health, status page). With port 0 the system chooses a \
             free port",
        )
        .flag("--http"),
        setting(
            "server.metrics",
            Text("on"),
            "`on` or `off`: whether metrics are kept. Without them there is no `/metrics` and no status \
             page",
        ),
        setting("server.models", Words("none"), "Directory of the models").flag("--models"),
        setting("server.max_samples", Text("4096"), "Most samples in a request"),
        setting("server.max_bytes", Text("16MiB"), "Most bytes of a request message"),
        setting(
            "server.max_requests",
            Text("8192"),
            "Most calls being computed plus open streams, over all connections. Twice as many calls may \
             be in flight, which includes calls whose message arrives or whose answer leaves. Once half \
             of those are taken, each connection gets a small part of the rest",
        ),
        setting(
            "server.max_inflight_bytes",
            Words("1GiB, or the least value if that is more"),
            "Most memory for the messages of all calls in flight, encoded and decoded, and for answers \
             that have not left, or wait behind another one of their stream; at least what the largest \
             message may take, 33 × `server.max_bytes` and 26MB. Bytes that are not read yet do not \
             count: all calls of a gRPC connection have an HTTP/2 window for them, of this value / \
             `server.max_connections`, within 64 KiB to 1 MiB, and at least 512 bytes × \
             `server.max_streams` (so 512 KiB with the defaults)",
        ),
        setting(
            "server.max_connections",
            Text("4096"),
            "Most connections of each port; further connections are closed at once",
        ),
        setting(
            "server.handshake_seconds",
            Text("10"),
            "A new connection has this long for the TLS handshake and the HTTP/2 preface, or on the HTTP \
             port for the TLS handshake and its first request",
        ),
        setting(
            "server.body_seconds",
            Text("10"),
            "The message of a call must arrive within this long after its headers, and one of a stream \
             within this long after its first byte",
        ),
        setting(
            "server.write_seconds",
            Text("30"),
            "An answer must leave within this long, or its gRPC connection is closed, because its client \
             does not read",
        ),
        setting(
            "server.http_idle_seconds",
            Text("75"),
            "An HTTP connection of which no whole answer has left for this long is closed",
        ),
        setting(
            "server.grpc_idle_seconds",
            Text("3600"),
            "A gRPC connection without a call for this long is closed with GOAWAY, after which clients \
             connect again; 0 keeps it open. Health watches and reflection do not count",
        ),
        setting(
            "server.stream_idle_seconds",
            Text("300"),
            "A stream is ended if all of its requests are answered, and for this long no request has come \
             and no answer was sent. A reflection stream is ended after this time in any case",
        ),
        setting("server.max_streams", Text("1024"), "Most concurrent calls of one gRPC connection"),
        setting(
            "server.reflection",
            Words("on, or off if a file of `auth` is given"),
            "`on` or `off`: whether gRPC reflection is served",
        ),
        setting(
            "server.admin",
            Words("on, or off if a file of `auth` is given"),
            "`on` or `off`: whether clients can load and unload models, and set labels",
        ),
        setting(
            "server.drain_delay_seconds",
            Text("0"),
            "After SIGTERM, `/readyz` answers 503 for this long before connections and calls are \
             refused, so that clients can choose another server. 5 suits Kubernetes",
        ),
        setting(
            "server.drain_seconds",
            Text("30"),
            "After `server.drain_delay_seconds`, calls in flight have this long to finish",
        ),
    ],
};

pub(super) const TLS: Section = Section {
    name: "tls",
    about: "Encryption of the ports; [security.md](security.md) has commands. All files are in PEM form, \
            and are read again at SIGHUP and when they change.",
    settings: &[
        setting(
            "tls.certificate",
            Words("none"),
            "File of the server's certificate, followed by those that lead to its authority. The gRPC \
             port then accepts only TLS 1.2 and 1.3",
        ),
        setting("tls.key", Words("none"), "File of the certificate's private key, not encrypted"),
        setting(
            "tls.client_ca",
            Words("none"),
            "File of certificates of authorities. A client of the gRPC port must then show a certificate \
             that one of them has signed",
        ),
        setting(
            "tls.http",
            Text("off"),
            "`on` or `off`: whether the HTTP port uses TLS too, with the same certificate. It never asks \
             for a certificate of the client",
        ),
    ],
};

pub(super) const AUTH: Section = Section {
    name: "auth",
    about: "Tokens that clients must send; see [security.md](security.md#tokens). Each setting is a file \
            with a token on each line, which is read again at SIGHUP and when it changes. Calls of a \
            role without a file need no token.",
    settings: &[
        setting(
            "auth.predict",
            Words("none"),
            "Tokens for the calls of both protocols that score, describe models, and send samples (`Learn`)",
        ),
        setting(
            "auth.admin",
            Words("none"),
            "Tokens for loading and unloading models, for setting labels (`server.admin`), and for \
             reflection (`server.reflection`)",
        ),
        setting("auth.metrics", Words("none"), "Tokens for the pages `/metrics`, `/` and `/status.json`"),
    ],
};
