//! Every setting: its key, flag, default and meaning, each written once.
//!
//! The configuration takes its defaults from here, and the command line its help texts. A test generates
//! `docs/settings.md`. To add a setting, add it here, and read it in a function of its section (`layers.rs`,
//! `cache.rs`). If it has `reloads`, `cli/serve/reload.rs` must apply its new value.

/// A key that can be configured.
#[derive(Debug)]
pub(crate) struct Setting {
    /// `section.key`.
    pub key: &'static str,
    /// The flag that sets it, or "".
    pub flag: &'static str,
    pub default: Fallback,
    /// One or two sentences in Markdown, without the period at the end.
    pub about: &'static str,
    /// Whether a running server applies a new value at SIGHUP.
    pub reloads: bool,
    /// Whether the file may have a list, or a table, instead of a text with commas.
    pub lists: bool,
}

/// The value of a setting that no layer gives.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fallback {
    /// This text, which is read like text that the user wrote.
    Text(&'static str),
    /// A computed default, or none. These words describe it.
    Words(&'static str),
}

use Fallback::{Text, Words};

/// The settings of one section of the file.
#[derive(Debug)]
pub(crate) struct Section {
    pub name: &'static str,
    #[cfg_attr(not(test), expect(dead_code))] // read only when docs/settings.md is generated
    pub about: &'static str,
    pub settings: &'static [Setting],
}

const fn setting(key: &'static str, default: Fallback, about: &'static str) -> Setting {
    Setting { key, flag: "", default, about, reloads: false, lists: false }
}

impl Setting {
    const fn flag(self, flag: &'static str) -> Self {
        Self { flag, ..self }
    }

    const fn reloads(self) -> Self {
        Self { reloads: true, ..self }
    }

    const fn lists(self) -> Self {
        Self { lists: true, ..self }
    }
}

pub(crate) const SECTIONS: &[Section] = &[
    Section {
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
                "A stream without a new request for this long is ended. A reflection stream is ended after \
                 this time in any case",
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
                "After that, calls in flight have this long to finish",
            ),
        ],
    },
    Section {
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
    },
    Section {
        name: "auth",
        about: "Tokens that clients must send; see [security.md](security.md#tokens). Each setting is a file \
                with a token on each line, which is read again at SIGHUP and when it changes. Calls of a \
                role without a file need no token.",
        settings: &[
            setting(
                "auth.predict",
                Words("none"),
                "Tokens for the calls of both protocols that score, teach and describe models",
            ),
            setting(
                "auth.admin",
                Words("none"),
                "Tokens for loading and unloading models, for setting labels (`server.admin`), and for \
                 reflection (`server.reflection`)",
            ),
            setting("auth.metrics", Words("none"), "Tokens for the pages `/metrics`, `/` and `/status.json`"),
        ],
    },
    Section {
        name: "models",
        about: "New versions and new models, which a running server takes over; see \
                [api.md](api.md#new-versions).",
        settings: &[setting(
            "models.watch_seconds",
            Text("1"),
            "How often the directory of the models is read; 0 means only at start and when a client loads a \
             model",
        )
        .reloads()],
    },
    Section {
        name: "batcher",
        about: "How requests are merged into batches. Each model has its own queue. A model can have its own \
                value of each key, in the table `[models.NAME.batcher]` of the file, or as \
                `FLECHETTE_MODELS_<NAME>_BATCHER_<KEY>` in the environment, with the name as it is: \
                `[models.ads.batcher]` or `FLECHETTE_MODELS_ads_BATCHER_WORKERS`.",
        settings: &[
            setting(
                "batcher.max_samples",
                Text("4096"),
                "Most samples of a batch; a larger request is computed in parts",
            ),
            setting(
                "batcher.max_delay_us",
                Text("500"),
                "How long a batch may wait for more requests while at least half of the model's workers \
                 compute; otherwise it is computed at once",
            )
            .reloads(),
            setting(
                "batcher.queue_samples",
                Words("65536, or 4 × `server.max_samples` if that is more"),
                "Most samples that may wait in the queue; at least `server.max_samples`",
            )
            .reloads(),
            setting(
                "batcher.queue_bytes",
                Words("256MiB, or 12 × `server.max_bytes` if that is more"),
                "Most bytes of samples that may wait in the queue; at least what the largest message may \
                 take, 12 × `server.max_bytes`",
            )
            .reloads(),
            setting(
                "batcher.workers",
                Text("0"),
                "Threads that compute batches of a model; 0 means one for each core",
            ),
            setting(
                "batcher.default_deadline_ms",
                Text("10000"),
                "How long a client is assumed to wait that sends no deadline. While requests come faster \
                 than they are computed, a request is refused at once if it would wait longer than 1/20 of \
                 its time. Without a deadline it waits for its scores for at most six times as long",
            )
            .reloads(),
        ],
    },
    Section {
        name: "store",
        about: "The tables of served versions; [files-in-use.md](files-in-use.md) explains the choice.",
        settings: &[setting(
            "store.memory",
            Text("auto"),
            "Where the tables are. `ram`: the files are read into memory of the process, in huge pages. \
             `mapped`: in mapped files. `auto`: in memory if they take at most half of it and an eighth \
             stays available; otherwise, and with `--train`, mapped",
        )
        .flag("--store-memory")],
    },
    Section {
        name: "cache",
        about: "The embedding cache; [cache.md](cache.md) explains it. With `cache.mode = \"off\"` all \
                other keys are ignored. A key that has no effect because of another key is reported in a \
                warning.",
        settings: &[
            setting(
                "cache.mode",
                Text("auto"),
                "`on`, `off`, or `auto`: on if there is a GPU, or if the tables are mapped and take more \
                 than half of the memory",
            )
            .flag("--cache-mode"),
            setting(
                "cache.bytes",
                Words("none"),
                "Memory of the cache: index, rows, and the state of its policies. Cannot be combined with \
                 `cache.fraction`",
            )
            .flag("--cache-bytes"),
            setting(
                "cache.fraction",
                Words("0.1, unless `cache.bytes` is given"),
                "Size of the cache as a share of the model's rows, above 0 and at most 1",
            )
            .flag("--cache-fraction"),
            setting(
                "cache.admission",
                Text("frequency"),
                "Which missed rows are admitted. `all`: every row. `probability`: each row with the \
                 probability `cache.admission_probability`. `frequency`: every row until the cache is full, \
                 then rows with `cache.admission_misses` recent misses",
            ),
            setting(
                "cache.admission_probability",
                Words("none"),
                "Probability of admission, 0 to 1; required with `probability`",
            ),
            setting(
                "cache.admission_misses",
                Text("2"),
                "Miss count that a row needs, 1 to 15; used with `frequency`",
            ),
            setting(
                "cache.eviction",
                Text("lru"),
                "Which rows are evicted first. `lru`: rows that were not used for the longest time. `lfu`: \
                 rows with the lowest rank in `cache.counts`",
            ),
            setting(
                "cache.counts",
                Words("none"),
                "File that `flechette plan --counts` wrote: how often each row is used. It ranks rows for \
                 `lfu`, and fills the cache at start if no hot rows were saved",
            ),
            setting(
                "cache.key_bits",
                Text("64"),
                "Bits of an index key, 2 to 64. If they do not suffice for all rows, rows with the same key \
                 displace each other, and each cached row takes 8 bytes more",
            ),
            setting(
                "cache.pointers",
                Text("0"),
                "Most pointers into the tables' memory that the index may hold, as a share of the model's \
                 rows, 0 to 1. The number in use follows the measured throughput. Above 0, the tables are \
                 loaded into RAM, or for a GPU into pinned memory, where kernels read rows in place. \
                 Without a GPU a pointer saves nothing over a miss",
            ),
            setting(
                "cache.high_watermark",
                Text("0.95"),
                "Eviction starts when more than this share of the cache is used",
            ),
            setting(
                "cache.low_watermark",
                Words("0.9, or in proportion to another `cache.high_watermark`"),
                "Eviction stops when this share of the cache is used",
            ),
            setting(
                "cache.staging_bytes",
                Words("enough for the misses of the largest batch, at most 64MiB for each worker"),
                "On a GPU: memory for the missed rows of the batches in flight, for all workers together. \
                 Not used on the host, which reads rows in place",
            ),
            setting(
                "cache.switch_bytes",
                Text("256MiB"),
                "When a full version is taken over: most bytes of changed rows that stay cached with their \
                 new values, the hottest first. The other changed rows are removed from the cache. The rows \
                 of a delta all stay",
            )
            .reloads(),
            setting(
                "cache.warm",
                Text("on"),
                "`on` or `off`: whether hot rows are saved and fill the cache at the next start",
            ),
            setting(
                "cache.save_seconds",
                Text("300"),
                "How often hot rows are saved; 0 saves them only at shutdown",
            ),
        ],
    },
    Section {
        name: "trace",
        about: "Access traces: recordings of row accesses for [`flechette plan`](cache.md#access-traces).",
        settings: &[
            setting("trace.rate", Text("0"), "Share of all rows whose accesses are recorded, 0 to 1"),
            setting(
                "trace.max_bytes",
                Text("64MiB"),
                "Most bytes of a model's access traces; the oldest are removed",
            ),
        ],
    },
    Section {
        name: "learn",
        about: "Labelled samples that clients send ([api.md](api.md#learn)), for training \
                ([training.md](training.md#learned-samples)).",
        settings: &[
            setting("learn.enabled", Text("off"), "`on` or `off`: whether models take Learn calls"),
            setting(
                "learn.max_bytes",
                Text("8GiB"),
                "Most bytes of a model's stored samples; further ones are refused. A file of them is removed \
                 when a version was trained on all of it, except the last one. A request \
                 may take (`learn.max_bytes` − `learn.segment_bytes`) / 2, and less than 4 GiB",
            ),
            setting(
                "learn.segment_bytes",
                Words("64MiB, or a fourth of `learn.max_bytes` if that is less"),
                "Samples are stored in files of about this size, each of which is removed as a whole; at \
                 most a fourth of `learn.max_bytes`",
            ),
        ],
    },
    Section {
        name: "versions",
        about: "The versions that a trainer publishes while it trains ([training.md](training.md)).",
        settings: &[
            setting(
                "versions.keep",
                Text("3"),
                "Full versions that stay on disk, with the deltas after the oldest of them. A version that a \
                 server uses, or that a label or the settings of a server name, stays too",
            ),
            setting(
                "versions.compact_at",
                Text("0.25"),
                "A full version is published instead of a delta when the deltas exceed this share of the \
                 bytes of the last full version",
            ),
        ],
    },
    Section {
        name: "device",
        about: "Where scores are computed; see [gpu.md](gpu.md).",
        settings: &[
            setting(
                "device.kind",
                Text("auto"),
                "`host`: no GPU. `cuda`: a GPU, or an error. `auto`: a GPU if one is usable, otherwise the \
                 host, with a warning if there is a driver of a GPU. `train` and `verify` use the host with \
                 `auto`",
            )
            .flag("--device"),
            setting(
                "device.kernel_cache",
                Words("`flechette/kernels` in `$XDG_CACHE_HOME` or `~/.cache`"),
                "Directory for compiled GPU kernels, to which no other user may write; with `off` they are \
                 not saved",
            ),
        ],
    },
    Section {
        name: "threads",
        about: "Thread counts.",
        settings: &[
            setting(
                "threads.compute",
                Text("0"),
                "Threads that compute, for each model; 0 means one for each core",
            )
            .flag("--threads"),
            setting("threads.io", Text("0"), "Threads that serve the network; 0 means one for each core"),
        ],
    },
    Section {
        name: "log",
        about: "What is logged to standard error; see [operations.md](operations.md#logs). Each warning has \
                at most 20 lines a minute.",
        settings: &[
            setting(
                "log.level",
                Text("info"),
                "`error`, `warn`, `info`, `debug` (a line for each request) or `trace`, or directives such \
                 as `warn,flechette::server=debug`. A level alone shows no more than `info` of libraries",
            )
            .reloads(),
            setting(
                "log.format",
                Text("text"),
                "`text` for people; `json` for programs: one object on each line",
            ),
            setting(
                "log.slow_seconds",
                Text("1"),
                "A request that takes this long or longer, from its headers to its answer, is logged as a \
                 warning with the time of each stage; 0 logs none",
            )
            .reloads(),
        ],
    },
    Section {
        name: "otel",
        about: "Spans of requests for a collector of OpenTelemetry; see \
                [operations.md](operations.md#request-traces-opentelemetry). Only programs that were built \
                with the cargo feature `otel` have them.",
        settings: &[
            setting(
                "otel.endpoint",
                Words("none"),
                "Where spans are sent with OTLP over gRPC, such as `http://127.0.0.1:4317`; without it there \
                 are none",
            ),
            setting(
                "otel.sample_ratio",
                Text("0.01"),
                "The share of the requests that are recorded, 0 to 1, if they come without a `traceparent`; \
                 with one, its flag decides",
            ),
            setting("otel.service_name", Text("flechette"), "The name of the server in request traces"),
        ],
    },
];

/// The settings that each model has for itself. Their full keys have the name of a model in the place of
/// `NAME`, so they are not among [`all`].
pub(crate) const MODEL_SECTION: Section = Section {
    name: "models.NAME",
    about: "Which versions of a model are loaded, and how its requests are shared out among them; \
            [traffic.md](traffic.md) explains it. The keys are in a table of the model, or in the \
            environment as `FLECHETTE_MODELS_<NAME>_<KEY>`, with the name as it is: `[models.ads]` or \
            `FLECHETTE_MODELS_ads_VERSIONS`. A model can also have its own values of [batcher](#batcher).",
    settings: &[
        setting(
            "models.NAME.versions",
            Text("latest"),
            "Which versions are loaded besides those that labels name. `latest`: the highest good one. \
             `latest 3`: the three highest. `all`: all good ones, at most 32. `[3, 5]`, or `3, 5` in the \
             environment: these",
        )
        .lists()
        .reloads(),
        setting(
            "models.NAME.labels",
            Words("none; `stable` is then `latest`"),
            "Labels and their versions, a number or `latest` each: `{ stable = 3, canary = \"latest\" }`, or \
             `stable = 3, canary = latest` in the environment. A label that `flechette label` has set wins",
        )
        .lists()
        .reloads(),
        setting(
            "models.NAME.canary_share",
            Text("0"),
            "Share of the requests without version and label that `canary` scores, 0 to 1; the others use \
             `stable`",
        )
        .reloads(),
        setting(
            "models.NAME.sticky",
            Text("request_id"),
            "What keeps a user at one of the two: `request_id`, or `feature:NAME`, the ids of a feature of \
             the first sample. Requests without it are shared out at random",
        )
        .reloads(),
        setting(
            "models.NAME.shadow",
            Words("none"),
            "A number, `latest` or a label: the version that scores requests a second time, for comparison",
        )
        .reloads(),
        setting("models.NAME.shadow_share", Text("0.1"), "Share of the requests that it scores, 0 to 1")
            .reloads(),
    ],
};

/// Every setting.
pub(crate) fn all() -> impl Iterator<Item = &'static Setting> {
    SECTIONS.iter().flat_map(|section| section.settings)
}

/// The setting with this key.
pub(crate) fn find(key: &str) -> Option<&'static Setting> {
    all().find(|setting| setting.key == key)
}

/// The help text of the flag that sets this key: its meaning and default as plain text.
pub(crate) fn help(key: &str) -> String {
    let Some(setting) = find(key) else { return String::new() };
    let text = match setting.default {
        Text(default) => format!("{} [default: {default}]", setting.about),
        Words("none") => setting.about.to_owned(),
        Words(words) => format!("{} [default: {words}]", setting.about),
    };
    text.replace('`', "")
}
