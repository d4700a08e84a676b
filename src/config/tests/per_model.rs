//! The settings of single models, in `[models.NAME]`.

use super::*;

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
