//! The section `[cache]`: its values, their ranges, and keys that exclude others or have no effect.

use super::*;

#[test]
fn bytes_and_fraction_exclude_each_other_unless_the_cache_is_off() {
    let env = [("FLECHETTE_CACHE_BYTES", "64Mi"), ("FLECHETTE_CACHE_FRACTION", "0.1")];
    let text = refusal(&env, "");
    assert!(text.contains("cache.bytes") && text.contains("cache.fraction"), "{text}");
    let config = resolve(&Flags::default(), &env, "[cache]\nmode = \"off\"").unwrap();
    assert_eq!(config.cache.size, None);
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
