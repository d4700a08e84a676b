//! Section `cache`: its keys, and which of them make sense together.

use std::path::PathBuf;
use std::time::Duration;

use super::ConfigError;
use super::layers::Layers;

/// Section `cache`.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheConfig {
    /// `cache.mode`. With `off` all other keys are ignored.
    pub mode: CacheMode,
    /// `cache.bytes` or `cache.fraction`; neither is given when the mode is `off`.
    pub size: Option<CacheSize>,
    /// `cache.staging_bytes`; room for one maximum batch when absent.
    pub staging_bytes: Option<u64>,
    /// `cache.admission`, with `cache.admission_probability` or `cache.admission_misses`.
    pub admission: CacheAdmission,
    /// `cache.eviction`.
    pub eviction: CacheEviction,
    /// `cache.counts`: how often each row is asked for, as `flechette plan --counts` writes it.
    pub counts: Option<PathBuf>,
    /// `cache.key_bits`: bits of the index's keys, 2 to 64.
    pub key_bits: u32,
    /// `cache.pointers`: the share of the model's rows that the unified index may point at, 0 to 1.
    pub pointers: f64,
    /// `cache.high_watermark`: eviction begins past this share of the cache.
    pub high_watermark: f64,
    /// `cache.low_watermark`: and ends at this one.
    pub low_watermark: f64,
    /// `cache.warm`: whether the hot rows are saved, and the cache is filled with them at the start.
    pub warm: bool,
    /// `cache.save_seconds`: how often the hot rows are saved besides at the drain; `None` where 0 was
    /// given.
    pub save: Option<Duration>,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            mode: CacheMode::Auto,
            size: None,
            staging_bytes: None,
            admission: CacheAdmission::Frequency(ADMISSION_MISSES),
            eviction: CacheEviction::Lru,
            counts: None,
            key_bits: 64,
            pointers: 0.0,
            high_watermark: 0.95,
            low_watermark: 0.9,
            warm: true,
            save: Some(Duration::from_secs(300)),
        }
    }
}

/// Whether there is a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// Off where the tables fit in RAM on the host device, on elsewhere.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How large the cache is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CacheSize {
    /// Bytes of index and pool together.
    Bytes(u64),
    /// Room for this share of the model's rows, above 0 and at most 1.
    Fraction(f64),
}

/// Which missed rows are let into the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CacheAdmission {
    /// `all`.
    All,
    /// `probability`: each with `cache.admission_probability`, 0 to 1.
    Probability(f64),
    /// `frequency`: once the cache is full, those missed `cache.admission_misses` times of late, 1 to 15.
    Frequency(u32),
}

/// Which rows leave the cache first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEviction {
    /// `lru`: those longest unused.
    Lru,
    /// `lfu`: those of the lowest rank in `cache.counts`.
    Lfu,
}

/// The values of `cache.admission`, before its numbers are known.
#[derive(Clone, Copy, PartialEq)]
enum Admission {
    All,
    Probability,
    Frequency,
}

/// Misses after which `frequency` lets a row in, unless told otherwise.
const ADMISSION_MISSES: u32 = 2;

impl Layers {
    pub(crate) fn cache(&mut self) -> Result<CacheConfig, ConfigError> {
        let modes = &[("auto", CacheMode::Auto), ("on", CacheMode::On), ("off", CacheMode::Off)];
        let mode = self.choice("cache.mode", modes)?.unwrap_or(CacheMode::Auto);
        let default = CacheConfig { mode, ..CacheConfig::default() };
        if mode == CacheMode::Off {
            return Ok(default);
        }
        let admission = self.admission()?;
        let evictions = &[("lru", CacheEviction::Lru), ("lfu", CacheEviction::Lfu)];
        let eviction = self.choice("cache.eviction", evictions)?.unwrap_or(default.eviction);
        if eviction == CacheEviction::Lfu {
            self.require("cache.eviction", "cache.counts")?;
        }
        let high = self.within("cache.high_watermark", 0.0, 1.0)?.unwrap_or(default.high_watermark);
        let low = self.within("cache.low_watermark", 0.0, high)?;
        let warm = self.choice("cache.warm", &[("on", true), ("off", false)])?.unwrap_or(default.warm);
        if !warm {
            self.warn_of_no_effect("cache.save_seconds", "cache.warm is off");
        }
        if !warm && eviction == CacheEviction::Lru {
            self.warn_of_no_effect("cache.counts", "cache.warm is off and cache.eviction is lru");
        }
        let save_seconds = self.whole("cache.save_seconds", 0, 86_400)?;
        Ok(CacheConfig {
            size: self.cache_size()?,
            staging_bytes: self.bytes("cache.staging_bytes", 1, u64::MAX)?,
            admission,
            eviction,
            counts: self.text("cache.counts").map(PathBuf::from),
            key_bits: self.whole("cache.key_bits", 2, 64)?.map_or(default.key_bits, |bits| bits as u32),
            pointers: self.fraction("cache.pointers")?.unwrap_or(default.pointers),
            high_watermark: high,
            // Where only the high one was given, the low one keeps its distance.
            low_watermark: low.unwrap_or(default.low_watermark / default.high_watermark * high),
            warm,
            save: match save_seconds {
                None => default.save,
                Some(0) => None,
                Some(seconds) => Some(Duration::from_secs(seconds)),
            },
            ..default
        })
    }

    fn cache_size(&self) -> Result<Option<CacheSize>, ConfigError> {
        if let (Some(bytes), Some(fraction)) = (self.source("cache.bytes"), self.source("cache.fraction")) {
            return Err(ConfigError::Both {
                first: "cache.bytes",
                first_source: bytes.clone(),
                second: "cache.fraction",
                second_source: fraction.clone(),
            });
        }
        let bytes = self.bytes("cache.bytes", 1, u64::MAX)?.map(CacheSize::Bytes);
        Ok(bytes.or(self.within("cache.fraction", 0.0, 1.0)?.map(CacheSize::Fraction)))
    }

    fn admission(&mut self) -> Result<CacheAdmission, ConfigError> {
        let choices = &[
            ("all", Admission::All),
            ("probability", Admission::Probability),
            ("frequency", Admission::Frequency),
        ];
        let admission = self.choice("cache.admission", choices)?.unwrap_or(Admission::Frequency);
        let probability = self.fraction("cache.admission_probability")?;
        let misses = self.whole("cache.admission_misses", 1, 15)?;
        if admission != Admission::Probability {
            self.warn_of_no_effect("cache.admission_probability", "cache.admission is not probability");
        }
        if admission != Admission::Frequency {
            self.warn_of_no_effect("cache.admission_misses", "cache.admission is not frequency");
        }
        Ok(match (admission, probability) {
            (Admission::All, _) => CacheAdmission::All,
            (Admission::Frequency, _) => {
                CacheAdmission::Frequency(misses.map_or(ADMISSION_MISSES, |misses| misses as u32))
            }
            (Admission::Probability, Some(p)) => CacheAdmission::Probability(p),
            (Admission::Probability, None) => {
                self.require("cache.admission", "cache.admission_probability")?;
                CacheAdmission::All
            }
        })
    }

    /// Refuses a key's value for want of another key.
    fn require(&self, key: &'static str, needed: &'static str) -> Result<(), ConfigError> {
        match (self.source(key), self.text(key)) {
            (Some(source), Some(got)) if self.text(needed).is_none() => Err(ConfigError::Missing {
                key: needed,
                wanted_by: key,
                got: got.to_owned(),
                source_of: source.clone(),
            }),
            _ => Ok(()),
        }
    }

    fn warn_of_no_effect(&mut self, key: &'static str, reason: &str) {
        if let Some(source) = self.source(key) {
            let warning = format!("{key} ({source}) has no effect: {reason}");
            self.warnings.push(warning);
        }
    }
}
