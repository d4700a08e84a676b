//! Which layer wins, the defaults, and the printed settings, which name the layer that each comes from.

use super::*;
use crate::config::layers::variable;
use crate::config::settings::{self, Fallback};

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
    assert_eq!(level(&[("FLECHETTE_LOG_LEVEL", " h2=off, debug")], ""), "h2=off,debug");
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

#[test]
fn numbers_that_toml_does_not_have_are_printed_as_strings() {
    let file = layers("[cache]\nfraction = \"00.5\"\n[server]\nmax_samples = \"007\"\nhandshake_seconds = 5");
    let config = file.clone().config().unwrap();
    let printed = file.to_toml(&config);
    assert!(printed.contains("max_samples = \"007\"  # file f:4"), "{printed}");
    assert_eq!(resolve(&Flags::default(), &[], &printed).unwrap(), config);
}
