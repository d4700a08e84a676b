//! Layers, defaults and refused values; also generates `docs/settings.md` and compares it with the file.

mod fuzz;

use std::fmt::Write;

use super::layers::variable;
use super::settings::{self, Fallback, MODEL_SECTION, SECTIONS};
use super::*;

fn resolve(flags: &Flags, env: &[(&str, &str)], file: &str) -> Result<Config, ConfigError> {
    Config::resolve(flags, env.iter().map(|(k, v)| (k.into(), v.into())), Some(file))
}

fn refusal(env: &[(&str, &str)], file: &str) -> String {
    resolve(&Flags::default(), env, file).unwrap_err().to_string()
}

#[test]
fn flags_win_over_environment_and_environment_over_file() {
    let file = "[server]\ngrpc = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:2\"\nmax_samples = 5\n";
    let env = [("FLECHETTE_SERVER_GRPC", "127.0.0.1:3"), ("FLECHETTE_SERVER_HTTP", "127.0.0.1:4")];
    let flags = Flags { grpc: Some("127.0.0.1:5".to_owned()), ..Flags::default() };
    let config = resolve(&flags, &env, file).unwrap();
    assert_eq!(config.server.grpc.port(), 5);
    assert_eq!(config.server.http.port(), 4);
    assert_eq!(config.server.max_samples, 5);
    assert!(config.warnings.is_empty());
}

#[test]
fn defaults_are_the_documented_limits() {
    let config = resolve(&Flags::default(), &[], "").unwrap();
    assert_eq!(config.server.max_samples, 4096);
    assert_eq!(config.server.max_bytes, 16 << 20);
    assert_eq!(config.server.grpc.to_string(), "127.0.0.1:8001");
    assert_eq!(config.server.http.to_string(), "127.0.0.1:8002");
    assert_eq!(
        config.cache,
        CacheConfig {
            mode: CacheMode::Auto,
            size: None,
            staging_bytes: None,
            switch_bytes: 256 << 20,
            admission: CacheAdmission::Frequency(2),
            eviction: CacheEviction::Lru,
            counts: None,
            key_bits: 64,
            pointers: 0.0,
            high_watermark: 0.95,
            low_watermark: 0.9,
            warm: true,
            save: Some(Duration::from_secs(300)),
        }
    );
}

/// The text that `docs/settings.md` must have.
fn settings_page() -> String {
    let mut page = String::from(
        "<!-- Generated from src/config by `UPDATE_DOCS=1 cargo test --lib config`. -->\n\n\
         # Settings\n\n\
         A setting is given by a flag, by an environment variable, or in a TOML file (`--config FILE`).\n\
         A flag wins over the environment, and the environment over the file. `section.key` is `key` in the\n\
         table `[section]` of the file, and `FLECHETTE_<SECTION>_<KEY>` in the environment:\n\n\
         ```toml\n[cache]\nbytes = \"4GiB\"\n```\n\n\
         ```sh\nFLECHETTE_CACHE_BYTES=4GiB flechette serve --models models\n\
         flechette serve --models models --cache-bytes 4GiB\n```\n\n\
         `serve` uses all settings, `train` those of `device`, `threads`, `versions` and `log`, `verify`\n\
         those of `device`, `threads` and `log`, `plan` those of `threads` and `log`, and other commands\n\
         those of `log`. Bytes are plain (`512`) or have a unit: K, M, G, T (1,000s) \
         or Ki, Mi,\n\
         Gi, Ti (1,024s), with or without a `B`. An unknown key, section or variable is an error, which\n\
         names the nearest known one.\n\n\
         `flechette config check` reads the settings as `serve` does, and prints what is wrong: unknown\n\
         keys, and the first wrong value of each section. With `--files` it also reads the files of\n\
         certificates, keys and tokens, which may be on another machine.\n\
         `flechette config print` prints every setting with its value and where the value comes from: a\n\
         flag, a variable, a line of the file, or the default. Both take the flags of `serve` and open no\n\
         port, device or model.\n\n\
         At SIGHUP a running server reads the file again. A setting with ↻ then takes its new value. The\n\
         others are named in the log and need a restart. If anything is wrong, the log says what, and\n\
         no setting changes. Files of certificates and tokens are read in any case.\n",
    );
    for section in SECTIONS.iter().flat_map(|section| {
        let own = (section.name == "models").then_some(&MODEL_SECTION);
        std::iter::once(section).chain(own)
    }) {
        let _ = write!(
            page,
            "\n## {}\n\n{}\n\n| key | default | meaning |\n|---|---|---|\n",
            section.name, section.about
        );
        for setting in section.settings {
            let flag = if setting.flag.is_empty() { String::new() } else { format!(", `{}`", setting.flag) };
            let default = match setting.default {
                Fallback::Text(text) => format!("`{text}`"),
                Fallback::Words(words) => words.to_owned(),
            };
            let reloads = if setting.reloads { " ↻" } else { "" };
            let _ = writeln!(page, "| `{}`{reloads}{flag} | {default} | {} |", setting.key, setting.about);
        }
    }
    page
}

#[test]
fn the_page_of_settings_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
    let page = settings_page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == page, "docs/settings.md is stale: run UPDATE_DOCS=1 cargo test --lib config");
}

#[test]
fn administration_and_reflection_are_on_but_with_tokens_only_if_they_are_asked_for() {
    let switches = |file: &str| {
        let server = resolve(&Flags::default(), &[], file).unwrap().server;
        (server.admin, server.reflection)
    };
    assert_eq!(switches(""), (true, true));
    assert_eq!(switches("[server]\nadmin = \"off\""), (false, true));
    for role in ["predict", "admin", "metrics"] {
        assert_eq!(switches(&format!("[auth]\n{role} = \"f\"")), (false, false), "{role}");
    }
    assert_eq!(switches("[auth]\nadmin = \"f\"\n[server]\nadmin = \"on\""), (true, false));
}

#[test]
fn every_default_is_a_valid_value() {
    for setting in settings::all() {
        let Fallback::Text(default) = setting.default else { continue };
        let config = resolve(&Flags::default(), &[(&variable(setting.key), default)], "");
        assert_eq!(config.unwrap(), resolve(&Flags::default(), &[], "").unwrap(), "{}", setting.key);
    }
}

#[test]
fn the_log_level_is_a_key_like_any_other() {
    let level = |env: &[_], file| resolve(&Flags::default(), env, file).unwrap().log.level;
    assert_eq!(level(&[], ""), "info");
    assert_eq!(level(&[], "[log]\nlevel = \"warn\""), "warn");
    assert_eq!(level(&[("FLECHETTE_LOG_LEVEL", "debug,h2=off")], "[log]\nlevel = \"warn\""), "debug,h2=off");
}

#[test]
fn a_bad_value_is_reported_with_its_key_and_source() {
    let text = refusal(&[("FLECHETTE_SERVER_MAX_SAMPLES", "many")], "");
    assert_eq!(
        text,
        "server.max_samples (environment FLECHETTE_SERVER_MAX_SAMPLES): \
         expected a whole number from 1 to 1048576, got \"many\""
    );
    assert!(refusal(&[], "[cache]\nmode = \"maybe\"").contains("cache.mode"));
    assert!(refusal(&[], "[cache]\nmode = true").contains("expected a string or a number"));
    assert!(refusal(&[("FLECHETTE_SERVER_GRPC", "nowhere")], "").contains("host:port"));
    assert!(refusal(&[("FLECHETTE_CACHE_FRACTION", "NaN")], "").contains("cache.fraction"));
    assert_eq!(refusal(&[], "x = 1\n[server\n"), "config file : line 2: unclosed table, expected `]`");
}

#[test]
fn every_key_can_be_set_from_the_environment() {
    for setting in settings::all() {
        let text = refusal_or_ok(&variable(setting.key));
        assert!(!text.contains("unknown"), "{}: {text}", setting.key);
    }
}

fn refusal_or_ok(variable: &str) -> String {
    match resolve(&Flags::default(), &[(variable, "1")], "") {
        Ok(config) => config.warnings.join(" "),
        Err(error) => error.to_string(),
    }
}

#[test]
fn unknown_names_are_refused_with_their_place_and_the_nearest_name() {
    for (file, error) in [
        (
            "[server]\ngrpc = \"127.0.0.1:0\"\nmax_sample = 1\n",
            "file :3: unknown key server.max_sample; did you mean server.max_samples?",
        ),
        ("[cahce]\nmode = \"off\"\n", "file :1: unknown section cahce; did you mean cache?"),
        ("\nloose = 1\n", "file :2: unknown key loose"),
        ("[entirely_other]\nx = 1\n", "file :1: unknown section entirely_other"),
    ] {
        assert_eq!(refusal(&[], file), error);
    }
    let error = refusal(&[("FLECHETTE_CACHE_BYTE", "1")], "");
    let expected = "environment: unknown variable FLECHETTE_CACHE_BYTE; did you mean FLECHETTE_CACHE_BYTES?";
    assert_eq!(error, expected);
}

#[test]
fn variables_of_tests_and_of_kubernetes_services_are_not_settings() {
    for name in [
        "FLECHETTE_DATA",
        "FLECHETTE_TEST_KILLS",
        "FLECHETTE_SERVICE_HOST",
        "FLECHETTE_SERVICE_PORT",
        "FLECHETTE_SERVICE_PORT_GRPC",
        "FLECHETTE_PORT",
        "FLECHETTE_PORT_8001_TCP_ADDR",
        "FLECHETTE_HTTP_SERVICE_HOST",
        "PATH",
    ] {
        assert!(resolve(&Flags::default(), &[(name, "tcp://10.0.0.1:8001")], "").is_ok(), "{name}");
    }
    for name in ["FLECHETTE_SERVER_PORTS", "FLECHETTE_HTTP_PORT", "FLECHETTE_PORT"] {
        assert!(refusal(&[(name, "9002")], "").contains("unknown variable"), "{name}");
    }
}

#[test]
fn everything_that_is_wrong_is_found_at_once() {
    let file = "[server]\nhtpp = 1\nmax_samples = 0\n[cache]\nmode = \"maybe\"\n[log]\nlevel = \"inof\"\n";
    let mut layers = Layers::default();
    layers.add_file(Path::new("f"), file);
    layers.add_environment([("FLECHETTE_THREADS_IO".into(), "many".into())]);
    let problems: Vec<String> = layers.problems().iter().map(ToString::to_string).collect();
    let begin = [
        "file f:2: unknown key server.htpp; did you mean server.http?",
        "server.max_samples (file f:3): ",
        "cache.mode (file f:5): ",
        "threads.io (environment FLECHETTE_THREADS_IO): ",
        "log.level (file f:7): expected error, warn",
    ];
    assert_eq!(problems.len(), begin.len(), "{problems:?}");
    assert!(problems.iter().zip(begin).all(|(problem, begin)| problem.starts_with(begin)), "{problems:?}");
}

#[test]
fn the_printed_settings_are_a_file_with_the_same_meaning_and_name_their_sources() {
    let file = "[server]\nmax_samples = 5000\nmodels = \"a \\\"b\\\"\"\n[cache]\nbytes = \"64MiB\"\n";
    let mut layers = Layers::default();
    layers.add_file(Path::new("f"), file);
    layers.add_environment([
        ("FLECHETTE_TRACE_RATE".into(), "0.5".into()),
        ("FLECHETTE_DEVICE_KERNEL_CACHE".into(), "/kernels".into()),
    ]);
    layers.add_flags(&Flags { grpc: Some("127.0.0.1:5".to_owned()), ..Flags::default() });
    let config = layers.clone().config().unwrap();
    let printed = layers.to_toml(&config);
    for line in [
        "max_samples = 5000  # file f:2",
        "grpc = \"127.0.0.1:5\"  # flag --grpc",
        "bytes = \"64MiB\"  # file f:5",
        "rate = 0.5  # environment FLECHETTE_TRACE_RATE",
        "queue_samples = 65536  # default",
        "max_inflight_bytes = 1073741824  # default",
        "# counts: none  # default",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line}: {printed}");
    }
    assert_eq!(settings::all().count(), printed.lines().filter(|line| line.contains("  # ")).count());
    assert_eq!(resolve(&Flags::default(), &[], &printed).unwrap(), config);
}

fn layers(file: &str) -> Layers {
    let mut layers = Layers::default();
    layers.add_file(Path::new("f"), file);
    layers
}

#[test]
fn a_reload_takes_what_can_change_and_names_what_needs_a_restart() {
    let running =
        layers("[server]\nmax_requests = 5\n[batcher]\nmax_delay_us = 7\n[log]\nlevel = \"warn\"\n");
    let new = layers("[server]\nmax_requests = 6\n[batcher]\nmax_delay_us = 9\n[cache]\nswitch_bytes = 3\n");
    let reloaded = running.changed_to(&new).unwrap();
    assert_eq!(reloaded.changed, ["batcher.max_delay_us", "cache.switch_bytes", "log.level"]);
    assert_eq!(reloaded.restart, ["server.max_requests"]);
    let config = &reloaded.config;
    assert_eq!((config.server.max_requests, config.cache.switch_bytes), (5, 3));
    assert_eq!((config.batchers.common.max_delay.as_micros(), config.log.level.as_str()), (9, "info"));
    // What needs a restart is named until then.
    let again = reloaded.layers.changed_to(&new).unwrap();
    assert!(again.changed.is_empty() && again.restart == ["server.max_requests"]);
}

#[test]
fn a_model_can_have_settings_for_itself() {
    let file = "[batcher]\nmax_delay_us = 7\nworkers = 3\n[models]\nwatch_seconds = 2\n\
                [models.ads.batcher]\nmax_delay_us = 9\nqueue_samples = 5000\n\
                [models.\"b.c\"]\nbatcher.workers = 2\nversions = [3, 5]\n\
                labels = { stable = 3, canary = 5 }\n";
    let env = [("FLECHETTE_MODELS_ads_BATCHER_QUEUE_SAMPLES", "6000")];
    let config = resolve(&Flags::default(), &env, file).unwrap();
    let of = |model| {
        let BatcherConfig { max_delay, queue_samples, workers, .. } = config.batchers.of(model);
        (max_delay.as_micros(), *queue_samples, *workers)
    };
    assert_eq!(of("ads"), (9, 6000, 3));
    assert_eq!(of("b.c"), (7, 65_536, 2));
    assert_eq!(of("others"), (7, 65_536, 3));
    let mut layers = layers(file);
    layers.add_environment(env.map(|(name, value)| (name.into(), value.into())));
    let printed = layers.to_toml(&config);
    for lines in [
        "[models.\"ads\"]\nbatcher.max_delay_us = 9  # file f:7\n\
         batcher.queue_samples = 6000  # environment FLECHETTE_MODELS_ads_BATCHER_QUEUE_SAMPLES\n",
        "[models.\"b.c\"]\nbatcher.workers = 2  # file f:10\n\
         labels = \"canary = 5, stable = 3\"  # file f:12\n\
         versions = \"3, 5\"  # file f:11\n",
    ] {
        assert!(printed.contains(lines), "{lines}: {printed}");
    }
    assert_eq!(resolve(&Flags::default(), &[], &printed).unwrap(), config);
}

#[test]
fn numbers_that_toml_does_not_have_are_printed_as_strings() {
    let file = layers("[cache]\nfraction = \"00.5\"\n[server]\nmax_samples = \"007\"\nhandshake_seconds = 5");
    let config = file.clone().config().unwrap();
    let printed = file.to_toml(&config);
    assert!(printed.contains("max_samples = \"007\"  # file f:4"), "{printed}");
    assert_eq!(resolve(&Flags::default(), &[], &printed).unwrap(), config);
}

#[test]
fn a_model_whose_name_has_a_control_character_has_no_settings() {
    let variable = ("FLECHETTE_MODELS_a\u{1}_BATCHER_WORKERS", "2");
    assert!(refusal(&[variable], "").starts_with("environment: unknown variable FLECHETTE_MODELS_a\u{1}_"));
    let file = refusal(&[], "[models.\"a\\n\".batcher]\nworkers = 2");
    assert!(file.starts_with("file :2: unknown key models.a\n.batcher.workers"), "{file}");
}

#[test]
fn wrong_settings_of_a_model_are_reported_with_their_full_keys() {
    for (keys, error) in [
        (
            "[models.ads.batcher]\nmax_dely_us = 1",
            "file :2: unknown key models.ads.batcher.max_dely_us; did you mean \
             models.ads.batcher.max_delay_us?",
        ),
        (
            "[models.ads.batchr]\nx = 1",
            "file :1: unknown section models.ads.batchr; did you mean models.ads.batcher?",
        ),
        (
            "[models]\nwatch_second = 1",
            "file :2: unknown key models.watch_second; did you mean models.watch_seconds?",
        ),
        (
            "[models.ads.batcher]\nqueue_samples = 10",
            "models.ads.batcher.queue_samples (file :2): expected a whole number from 4096 to 1073741824, \
             got \"10\"",
        ),
    ] {
        assert_eq!(refusal(&[], keys), error);
    }
    assert_eq!(
        refusal(&[("FLECHETTE_MODELS_ads_BATCHER_WORKER", "1")], ""),
        "environment: unknown variable FLECHETTE_MODELS_ads_BATCHER_WORKER; \
         did you mean FLECHETTE_MODELS_ads_BATCHER_WORKERS?"
    );
}

#[test]
fn a_reload_takes_the_settings_of_models_that_can_change() {
    let running = layers(
        "[models.ads.batcher]\nmax_delay_us = 7\nworkers = 2\nqueue_samples = 5000\n\
         [models.c]\nversions = 3\n",
    );
    let new = layers(
        "[models.ads.batcher]\nmax_delay_us = 9\nworkers = 3\n[models.b.batcher]\nqueue_bytes = \"1GiB\"\n\
         [models.b]\nlabels = \"canary = 2\"\n",
    );
    let reloaded = running.changed_to(&new).unwrap();
    let changed = [
        "models.ads.batcher.max_delay_us",
        "models.ads.batcher.queue_samples",
        "models.b.batcher.queue_bytes",
        "models.b.labels",
        "models.c.versions",
    ];
    assert_eq!(reloaded.changed, changed);
    assert_eq!(reloaded.restart, ["models.ads.batcher.workers"]);
    let ads = reloaded.config.batchers.of("ads");
    assert_eq!((ads.max_delay.as_micros(), ads.workers, ads.queue_samples), (9, 2, 65_536));
    assert_eq!(reloaded.config.batchers.of("b").queue_bytes, 1 << 30);
}

#[test]
fn a_model_keeps_its_value_when_a_reload_changes_the_common_one_and_gives_the_model_its_own() {
    let running = layers("[batcher]\nmax_delay_us = 7\n");
    let new = layers("[batcher]\nmax_delay_us = 9\n[models.ads.batcher]\nmax_delay_us = 7\n");
    let reloaded = running.changed_to(&new).unwrap();
    assert_eq!(reloaded.changed, ["batcher.max_delay_us"]);
    let of = |model| reloaded.config.batchers.of(model).max_delay.as_micros();
    assert_eq!((of("ads"), of("others")), (7, 9));
}

#[test]
fn a_reload_is_refused_if_the_new_settings_are_wrong_alone_or_with_those_that_stay() {
    let running = layers("[server]\nmax_samples = 1000\n");
    let error = running.changed_to(&layers("[server]\nmax_sample = 1\n")).unwrap_err().to_string();
    assert!(error.contains("did you mean server.max_samples?"), "{error}");
    let new = layers("[server]\nmax_samples = 10\n[batcher]\nqueue_samples = 10\n");
    let error = running.changed_to(&new).unwrap_err().to_string();
    assert!(error.contains("batcher.queue_samples (file f:4)") && error.contains("1000"), "{error}");
}

#[test]
fn bytes_and_fraction_exclude_each_other_unless_the_cache_is_off() {
    let env = [("FLECHETTE_CACHE_BYTES", "64Mi"), ("FLECHETTE_CACHE_FRACTION", "0.1")];
    let text = refusal(&env, "");
    assert!(text.contains("cache.bytes") && text.contains("cache.fraction"), "{text}");
    let config = resolve(&Flags::default(), &env, "[cache]\nmode = \"off\"").unwrap();
    assert_eq!(config.cache.size, None);
}

#[test]
fn bytes_take_suffixes() {
    let cases = [("512", 512), ("64K", 64_000), ("1.5Ki", 1536), ("2 GB", 2_000_000_000), ("1GiB", 1 << 30)];
    for (text, bytes) in cases {
        assert_eq!(parse_bytes(text), Some(bytes), "{text}");
    }
    for text in ["", "K", "-1", "-1K", "1X", "inf K", "1e30G"] {
        assert_eq!(parse_bytes(text), None, "{text}");
    }
}

#[test]
fn a_queue_smaller_than_one_request_is_refused() {
    let text = refusal(&[("FLECHETTE_BATCHER_QUEUE_SAMPLES", "100")], "");
    assert!(text.contains("batcher.queue_samples") && text.contains("4096"), "{text}");
}

#[test]
fn limits_that_cannot_hold_the_largest_message_are_refused() {
    let config =
        |keys: &str| resolve(&Flags::default(), &[], &format!("[server]\nmax_bytes = \"64MiB\"\n{keys}"));
    let chosen = config("").unwrap();
    assert_eq!(chosen.batchers.common.queue_bytes, 768 << 20);
    assert_eq!(chosen.server.max_inflight_bytes, 33 * (64 << 20) + 25_311_088);
    for (keys, key, least) in [
        ("[batcher]\nqueue_bytes = \"767MiB\"", "batcher.queue_bytes", chosen.batchers.common.queue_bytes),
        ("max_inflight_bytes = \"2GiB\"", "server.max_inflight_bytes", chosen.server.max_inflight_bytes),
    ] {
        let text = config(keys).unwrap_err().to_string();
        let needed = format!("at least {least}, which a message of server.max_bytes = 67108864 may take");
        assert!(text.starts_with(key) && text.contains(&needed), "{text}");
    }
}

#[test]
fn a_log_of_learned_samples_has_room_for_several_files() {
    let config = |keys: &str| resolve(&Flags::default(), &[], &format!("[learn]\n{keys}"));
    assert_eq!(config("").unwrap().learn.segment_bytes, 64 << 20);
    assert_eq!(config("max_bytes = \"1MiB\"").unwrap().learn.segment_bytes, 256 << 10);
    let text = config("max_bytes = \"1MiB\"\nsegment_bytes = \"257KiB\"").unwrap_err().to_string();
    let needed = "from 65536 to 262144, a fourth of learn.max_bytes = 1048576";
    assert!(text.starts_with("learn.segment_bytes") && text.contains(needed), "{text}");
}

#[test]
fn seconds_reach_their_fields() {
    let file = "[server]\nhandshake_seconds = 1\nbody_seconds = 2\nwrite_seconds = 3\ngrpc_idle_seconds = 0\n\
                stream_idle_seconds = 4\n";
    let server = resolve(&Flags::default(), &[], file).unwrap().server;
    let times = [server.handshake, server.body, server.write, server.stream_idle];
    assert_eq!(times, [1, 2, 3, 4].map(Duration::from_secs));
    assert_eq!(server.grpc_idle, None);
    assert!(refusal(&[], "[server]\nbody_seconds = 0").contains("server.body_seconds"));
}

#[test]
fn accesses_are_recorded_only_with_a_rate() {
    let config = resolve(&Flags::default(), &[], "").unwrap();
    assert_eq!(config.trace, TraceConfig { rate: 0.0, max_bytes: 64 << 20 });
    let config =
        resolve(&Flags::default(), &[("FLECHETTE_TRACE_RATE", "0.01")], "[trace]\nmax_bytes = \"2Mi\"");
    assert_eq!(config.unwrap().trace, TraceConfig { rate: 0.01, max_bytes: 2 << 20 });
    for rate in ["-0.1", "1.5", "NaN", "some"] {
        let text = refusal(&[("FLECHETTE_TRACE_RATE", rate)], "");
        assert!(text.contains("trace.rate") && text.contains("a number from 0 to 1"), "{text}");
    }
    assert!(refusal(&[], "[trace]\nmax_bytes = 1000").contains("trace.max_bytes"));
}

#[test]
fn the_default_kernel_cache_is_in_the_users_cache_directory() {
    let kept = |env: &[_], file| resolve(&Flags::default(), env, file).unwrap().device.kernel_cache;
    let (home, caches) = (("HOME", "/home/user"), ("XDG_CACHE_HOME", "/caches"));
    assert_eq!(kept(&[home], ""), Some("/home/user/.cache/flechette/kernels".into()));
    assert_eq!(kept(&[home, caches], ""), Some("/caches/flechette/kernels".into()));
    assert_eq!(kept(&[home, ("XDG_CACHE_HOME", "caches")], ""), kept(&[home], ""));
    assert_eq!(kept(&[], ""), None);
    let file = "[device]\nkernel_cache = \"/kernels\"";
    assert_eq!(kept(&[home, caches], file), Some("/kernels".into()));
    assert_eq!(kept(&[home, ("FLECHETTE_DEVICE_KERNEL_CACHE", "off")], file), None);
}

fn cache(keys: &str) -> CacheConfig {
    let config = resolve(&Flags::default(), &[], &format!("[cache]\n{keys}")).unwrap();
    assert_eq!(config.warnings, Vec::<String>::new(), "{keys}");
    config.cache
}

#[test]
fn cache_keys_reach_their_fields() {
    let default = || resolve(&Flags::default(), &[], "").unwrap().cache;
    for (keys, expected) in [
        ("admission = \"all\"", CacheConfig { admission: CacheAdmission::All, ..default() }),
        ("admission_misses = 3", CacheConfig { admission: CacheAdmission::Frequency(3), ..default() }),
        (
            "admission = \"probability\"\nadmission_probability = 0.25",
            CacheConfig { admission: CacheAdmission::Probability(0.25), ..default() },
        ),
        ("admission = \"frequency\"", default()),
        (
            "admission = \"frequency\"\nadmission_misses = 15",
            CacheConfig { admission: CacheAdmission::Frequency(15), ..default() },
        ),
        (
            "eviction = \"lfu\"\ncounts = \"ids\"",
            CacheConfig { eviction: CacheEviction::Lfu, counts: Some("ids".into()), ..default() },
        ),
        ("key_bits = 12\npointers = 0.5", CacheConfig { key_bits: 12, pointers: 0.5, ..default() }),
        (
            "high_watermark = 0.8\nlow_watermark = 0.6",
            CacheConfig { high_watermark: 0.8, low_watermark: 0.6, ..default() },
        ),
        ("save_seconds = 0", CacheConfig { save: None, ..default() }),
        ("save_seconds = 7", CacheConfig { save: Some(Duration::from_secs(7)), ..default() }),
        ("warm = \"off\"", CacheConfig { warm: false, ..default() }),
        ("mode = \"off\"\nkey_bits = 1", CacheConfig { mode: CacheMode::Off, ..default() }),
    ] {
        assert_eq!(cache(keys), expected, "{keys}");
    }
    let lowered = cache("high_watermark = 0.5");
    assert!(lowered.low_watermark < 0.5 && lowered.low_watermark > 0.45, "{lowered:?}");
}

#[test]
fn a_cache_value_out_of_range_is_reported_with_key_source_and_limits() {
    for (keys, words) in [
        ("admission = \"some\"", ["cache.admission (file", "all, probability, frequency"]),
        (
            "admission_probability = 1.5",
            ["cache.admission_probability (file", "a number from 0 to 1, got \"1.5\""],
        ),
        ("admission_misses = 16", ["cache.admission_misses (file", "from 1 to 15, got \"16\""]),
        ("key_bits = 65", ["cache.key_bits (file", "from 2 to 64"]),
        ("pointers = -0.1", ["cache.pointers (file", "from 0 to 1"]),
        ("high_watermark = 0", ["cache.high_watermark (file", "above 0 and at most 1"]),
        ("low_watermark = 0.99", ["cache.low_watermark (file", "at most 0.95"]),
        ("save_seconds = -1", ["cache.save_seconds (file", "from 0 to 86400"]),
        ("warm = \"hot\"", ["cache.warm (file", "on, off"]),
        ("eviction = \"lfu\"", ["cache.counts: missing", "cache.eviction = lfu (file"]),
        (
            "admission = \"probability\"",
            ["cache.admission_probability: missing", "cache.admission = probability (file"],
        ),
    ] {
        let text = refusal(&[], &format!("[cache]\n{keys}"));
        assert!(words.iter().all(|word| text.contains(word)), "{keys}: {text}");
    }
}

#[test]
fn cache_keys_without_effect_are_reported_in_warnings() {
    for (keys, words) in [
        (
            "admission = \"all\"\nadmission_misses = 3",
            "cache.admission_misses (file :3) has no effect: cache.admission is not frequency",
        ),
        ("admission_probability = 0.5", "cache.admission_probability (file :2) has no effect"),
        ("warm = \"off\"\nsave_seconds = 5", "cache.save_seconds (file :3) has no effect: cache.warm is off"),
        ("warm = \"off\"\ncounts = \"ids\"", "cache.counts (file :3) has no effect"),
    ] {
        let warnings = resolve(&Flags::default(), &[], &format!("[cache]\n{keys}")).unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].starts_with(words), "{keys}: {warnings:?}");
    }
}

#[test]
fn a_server_whose_models_everyone_can_change_has_a_warning() {
    let warning = |text: &str| resolve(&Flags::default(), &[], text).unwrap().open_administration();
    let open = "[server]\ngrpc = \"0.0.0.0:8001\"\n";
    let text = warning(open).unwrap();
    assert!(text.starts_with("server.admin: everyone who reaches 0.0.0.0:8001 (server.grpc) can"), "{text}");
    for closed in [
        "",
        "[server]\ngrpc = \"127.0.0.1:8001\"\n",
        &format!("{open}admin = \"off\"\n"),
        &format!("{open}[auth]\nadmin = \"tokens\"\n"),
        &format!("{open}[auth]\npredict = \"tokens\"\n"),
        &format!("{open}[tls]\ncertificate = \"c\"\nkey = \"k\"\nclient_ca = \"a\"\n"),
    ] {
        assert_eq!(warning(closed), None, "{closed}");
    }
}
