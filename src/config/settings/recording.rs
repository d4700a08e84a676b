//! The settings of what is written beside the scores: access traces, learned samples, published versions.

use super::Fallback::{Text, Words};
use super::{Section, setting};

pub(super) const TRACE: Section = Section {
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
};

pub(super) const LEARN: Section = Section {
    name: "learn",
    about: "Labelled samples that clients send ([api.md](api.md#learn)), for training \
            ([training.md](training.md#learned-samples)).",
    settings: &[
        setting("learn.enabled", Text("off"), "`on` or `off`: whether models take Learn calls"),
        setting(
            "learn.max_bytes",
            Text("8GiB"),
            "Most bytes of a model's stored samples; further ones are refused. A file of samples is \
             removed when a version was trained on all of it; the last file always stays. A request \
             may take (`learn.max_bytes` − `learn.segment_bytes`) / 2, and less than 4 GiB",
        ),
        setting(
            "learn.segment_bytes",
            Words("64MiB, or a fourth of `learn.max_bytes` if that is less"),
            "Samples are stored in files of about this size, each of which is removed as a whole; at \
             most a fourth of `learn.max_bytes`",
        ),
    ],
};

pub(super) const VERSIONS: Section = Section {
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
};
