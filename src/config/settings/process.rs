//! The settings of the process: its device, threads, log and spans.

use super::Fallback::{Text, Words};
use super::{Section, setting};

pub(super) const DEVICE: Section = Section {
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
};

pub(super) const THREADS: Section = Section {
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
};

pub(super) const LOG: Section = Section {
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
};

pub(super) const OTEL: Section = Section {
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
};
