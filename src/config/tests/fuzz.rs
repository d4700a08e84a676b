//! The file and the environment.

use super::*;
use crate::fuzz::bytes::{Input, mutated};
use crate::fuzz::run;

const WORDS: &[&str] = &[
    "[server]\n",
    "[cache]\n",
    "[models.ads.batcher]\n",
    "[models]\n",
    "max_samples = 7\n",
    "workers = 2\n",
    "[",
    "]",
    "\"",
    "'''",
    "{",
    "\n",
    "#",
    " = ",
    "KiB",
    "GiB",
    "8EiB",
    "on",
    "off",
    "auto",
    "none",
    "127.0.0.1:1",
    "[::1]:1",
    "-",
    "FLECHETTE_",
    "_BATCHER_",
    "\u{e9}",
    "\u{feff}",
];

/// Some settings with values that are not their defaults.
const FILE: &str = r#"
[server]
grpc = "127.0.0.1:1"
max_samples = 100
max_bytes = "1MiB"
handshake_seconds = 2.5
[cache]
mode = "on"
bytes = "64MiB"
[trace]
rate = 0.5
[models.ads.batcher]
max_delay_us = 9
workers = 2
[log]
level = "info,flechette::server=debug"
"#;

const ENVIRONMENT: &str = "FLECHETTE_SERVER_HTTP=127.0.0.1:2\n\
    FLECHETTE_MODELS_ads_BATCHER_QUEUE_SAMPLES=6000\n\
    FLECHETTE_CACHE_FRACTION=0.5\nFLECHETTE_DEVICE_KIND=host\nHOME=/root\nXDG_CACHE_HOME=/x\n\
    FLECHETTE_PORT_8001_TCP_ADDR=10.0.0.1\nFLECHETTE_THREADS_COMPUTE=3\n";

fn layers_of(file: &str, environment: &str) -> Layers {
    let pairs = environment.lines().filter_map(|line| line.split_once('='));
    Layers::read(&Flags::default(), pairs.map(|(name, value)| (name.into(), value.into())), Some(file))
}

#[test]
fn file_and_environment() {
    let all = Layers::read(&Flags::default(), [], None);
    let all = all.to_toml(&all.clone().config().unwrap());
    let file = mutated([FILE, FILE, &all, ""], WORDS);
    run((file, mutated(["", ENVIRONMENT], WORDS)), |(Input(file), Input(environment))| {
        let Ok(file) = String::from_utf8(file) else { return false };
        let layers = layers_of(&file, &String::from_utf8_lossy(&environment));
        let problems = layers.clone().problems();
        let config = match layers.clone().config() {
            Ok(config) => config,
            Err(error) => {
                let first = problems.first().map(ToString::to_string);
                assert_eq!(first, Some(error.to_string()));
                return false;
            }
        };
        assert!(problems.is_empty(), "{problems:?}");
        let printed = layers.to_toml(&config);
        let again = resolve(&Flags::default(), &[], &printed);
        let again = again.unwrap_or_else(|error| panic!("{error}\n{printed}"));
        // Warnings name the source of a value.
        let warnings = config.warnings.clone();
        assert_eq!(Config { warnings, ..again }, config);
        true
    });
}
