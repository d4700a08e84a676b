//! Section `cache`: its values, and which keys exclude or need each other.

use std::path::PathBuf;
use std::time::Duration;

use super::ConfigError;
use super::layers::Layers;
use super::security::SWITCH;

/// The default low watermark, as a share of the high watermark.
const LOW_OF_HIGH: f64 = 0.9 / 0.95;

/// Section `cache`. With mode `off` all other values are the defaults.
#[allow(missing_docs)] // settings/ has the meaning of each key
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CacheConfig {
    pub mode: CacheMode,
    /// `cache.bytes` or `cache.fraction`, if one is given.
    pub size: Option<CacheSize>,
    /// `None`: room for the misses of the largest batch, at most 64 MiB for each worker.
    pub staging_bytes: Option<u64>,
    pub admission: CacheAdmission,
    pub eviction: CacheEviction,
    /// A file that `flechette plan --counts` wrote.
    pub counts: Option<PathBuf>,
    /// Bits of an index key, 2 to 64.
    pub key_bits: u32,
    /// Most pointers, as a share of the model's rows, 0 to 1.
    pub pointers: f64,
    /// Eviction starts above this share of the cache.
    pub high_watermark: f64,
    /// Eviction stops at this share of the cache.
    pub low_watermark: f64,
    /// Most bytes of changed rows that stay cached when a version is taken over.
    pub switch_bytes: u64,
    /// Whether hot rows are saved, and fill the cache at start.
    pub warm: bool,
    /// Interval between two saves of hot rows; `None`: they are saved only at shutdown.
    pub save: Option<Duration>,
}

/// Whether there is a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum CacheMode {
    /// On with a GPU, or if the tables take more than half of the memory.
    Auto,
    On,
    Off,
}

/// How large the cache is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CacheSize {
    /// Bytes of index, rows and policy state together.
    Bytes(u64),
    /// Room for this share of the model's rows, above 0 and at most 1.
    Fraction(f64),
}

/// Which missed rows are admitted to the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub(crate) enum CacheAdmission {
    All,
    /// Each missed row with this probability, 0 to 1.
    Probability(f64),
    /// Every missed row until the cache is full, then rows with this number of recent misses, 1 to 15.
    Frequency(u32),
}

/// Which rows are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum CacheEviction {
    /// Rows that were not used for the longest time.
    Lru,
    /// Rows with the lowest rank in `cache.counts`.
    Lfu,
}

impl Layers {
    pub(crate) fn cache(&mut self) -> Result<CacheConfig, ConfigError> {
        let modes = &[("auto", CacheMode::Auto), ("on", CacheMode::On), ("off", CacheMode::Off)];
        match self.choice("cache.mode", modes)? {
            // The other keys are ignored, even if they are wrong.
            CacheMode::Off => Self::default().cache_in_mode(CacheMode::Off),
            mode => self.cache_in_mode(mode),
        }
    }

    fn cache_in_mode(&mut self, mode: CacheMode) -> Result<CacheConfig, ConfigError> {
        let admission = self.admission()?;
        let evictions = &[("lru", CacheEviction::Lru), ("lfu", CacheEviction::Lfu)];
        let eviction = self.choice("cache.eviction", evictions)?;
        if eviction == CacheEviction::Lfu {
            self.require("cache.eviction", "cache.counts")?;
        }
        let high = self.share("cache.high_watermark", 1.0)?;
        let low = self.optional("cache.low_watermark", |key| self.share(key, high.min(0.999)))?;
        let warm = self.choice("cache.warm", SWITCH)?;
        if !warm {
            self.warn_of_no_effect("cache.save_seconds", "cache.warm is off");
        }
        if !warm && eviction == CacheEviction::Lru {
            self.warn_of_no_effect("cache.counts", "cache.warm is off and cache.eviction is lru");
        }
        let save_seconds = self.whole("cache.save_seconds", 0, 86_400)?;
        Ok(CacheConfig {
            mode,
            size: self.cache_size()?,
            staging_bytes: self.optional("cache.staging_bytes", |key| self.bytes(key, 1, u64::MAX))?,
            admission,
            eviction,
            counts: self.path("cache.counts")?,
            key_bits: self.whole("cache.key_bits", 2, 64)? as u32,
            pointers: self.fraction("cache.pointers")?,
            high_watermark: high,
            low_watermark: low.unwrap_or(LOW_OF_HIGH * high),
            switch_bytes: self.bytes("cache.switch_bytes", 0, u64::MAX)?,
            warm,
            save: (save_seconds > 0).then(|| Duration::from_secs(save_seconds)),
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
        let bytes = self.optional("cache.bytes", |key| self.bytes(key, 1, u64::MAX))?;
        let fraction = self.optional("cache.fraction", |key| self.share(key, 1.0))?;
        Ok(bytes.map(CacheSize::Bytes).or(fraction.map(CacheSize::Fraction)))
    }

    fn admission(&mut self) -> Result<CacheAdmission, ConfigError> {
        let misses = self.whole("cache.admission_misses", 1, 15)? as u32;
        let probability = self.optional("cache.admission_probability", |key| self.fraction(key))?;
        let choices = &[
            ("all", CacheAdmission::All),
            ("probability", CacheAdmission::Probability(probability.unwrap_or(0.0))),
            ("frequency", CacheAdmission::Frequency(misses)),
        ];
        let admission = self.choice("cache.admission", choices)?;
        match admission {
            CacheAdmission::Probability(_) => {
                self.require("cache.admission", "cache.admission_probability")?;
            }
            _ => self.warn_of_no_effect("cache.admission_probability", "cache.admission is not probability"),
        }
        if !matches!(admission, CacheAdmission::Frequency(_)) {
            self.warn_of_no_effect("cache.admission_misses", "cache.admission is not frequency");
        }
        Ok(admission)
    }

    /// Refuses the value of `key` if the key `needed` is not given.
    pub(super) fn require(&self, key: &'static str, needed: &'static str) -> Result<(), ConfigError> {
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

    pub(super) fn warn_of_no_effect(&mut self, key: &'static str, reason: &str) {
        if let Some(source) = self.source(key) {
            let warning = format!("{key} ({source}) has no effect: {reason}");
            self.warnings.push(warning);
        }
    }
}
