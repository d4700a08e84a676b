//! The settings of the models that are served: their versions, batches, tables and cache.

use super::Fallback::{Text, Words};
use super::{Section, setting};

pub(super) const MODELS: Section = Section {
    name: "models",
    about: "New versions and new models, which a running server takes over; see \
            [api.md](api.md#new-versions).",
    settings: &[setting(
        "models.watch_seconds",
        Text("1"),
        "How often the directory of the models is read; 0 means only at start, and of one model when a \
         client loads it or sets a label",
    )
    .reloads()],
};

pub(super) const BATCHER: Section = Section {
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
            "The assumed deadline of a request that has none. While requests come faster than they are \
             computed, a request is refused at once if it would wait longer than 1/20 of the time until \
             its deadline. A request without a deadline waits for its scores for at most six times this \
             value",
        )
        .reloads(),
    ],
};

pub(super) const STORE: Section = Section {
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
};

pub(super) const CACHE: Section = Section {
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
            "Memory of each model's cache: index, rows, and the state of its policies. Cannot be combined \
             with `cache.fraction`",
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
             loaded into RAM, or for a GPU into pinned memory, where kernels read rows in place. If they \
             take more than half of the memory, no pointers are used and a warning is logged. Without a \
             GPU a pointer saves nothing over a miss",
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
};

/// The settings that each model has for itself. Their full keys have the name of a model in the place of
/// `NAME`, so they are not among [`super::all`].
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
            "What keeps a user at either `stable` or `canary`: `request_id`, or `feature:NAME`, the ids of \
             a feature of the first sample. Requests without it are shared out at random",
        )
        .reloads(),
        setting(
            "models.NAME.shadow",
            Words("none"),
            "A number, `latest` or a label: the version that scores requests a second time, for comparison",
        )
        .reloads(),
        setting(
            "models.NAME.shadow_share",
            Text("0.1"),
            "Share of the requests that the shadow scores, 0 to 1",
        )
        .reloads(),
    ],
};
