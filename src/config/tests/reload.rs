//! A reload takes the settings that can change, names those that need a restart, and refuses wrong ones.

use super::*;

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
    let end = "the file is valid after a restart, which also applies the new values of server.max_samples";
    assert!(error.ends_with(end), "{error}");
}
