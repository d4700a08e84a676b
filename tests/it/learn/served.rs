//! A server whose models take samples, the messages that it takes, and the labels in the log that it writes.

use std::fs;
use std::path::{Path, PathBuf};

use flechette::config::LearnConfig;
use flechette::server::Learning;
use flechette::server::proto::{LearnRequest, PredictRequest};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::serving::Running;

/// A server whose models take samples, or only those in `only`.
pub async fn learning(models: &Path, config: LearnConfig, only: &[&str]) -> Running {
    let only = only.iter().map(|&name| name.to_owned()).collect();
    let learning = Learning { models: models.to_owned(), config, only };
    Running::start_with(|parts| parts.learning = Some(learning)).await
}

pub const CONFIG: LearnConfig = LearnConfig { enabled: true, max_bytes: 1 << 20, segment_bytes: 4096 };

/// The samples of a Predict request, with labels.
pub fn labelled(request: PredictRequest, label: f32) -> LearnRequest {
    let PredictRequest { model, samples, dense, features, .. } = request;
    LearnRequest { model, samples, dense, features, labels: vec![label; samples as usize], dense_order: 0 }
}

pub(super) fn log_of(models: &Path, name: &str) -> PathBuf {
    models.join(name).join("state/learn")
}

/// The labels of all samples of a log, from the documented format.
pub(super) fn labels(log: &Path) -> Vec<f32> {
    let mut files: Vec<PathBuf> = fs::read_dir(log).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "fllearn"));
    files.sort();
    let mut labels = Vec::new();
    for file in files {
        let bytes = fs::read(&file).unwrap();
        assert_eq!(&bytes[..8], b"FLLEARNS");
        let mut at = 36;
        while at < bytes.len() {
            let number = |from: usize| u32::from_le_bytes(bytes[at + from..][..4].try_into().unwrap());
            let (length, samples) = (number(0) as usize, number(4) as usize);
            let sum = u64::from_le_bytes(bytes[at + 16..][..8].try_into().unwrap());
            let summed = [&bytes[at..at + 16], &bytes[at + 24..][..length]].concat();
            assert_eq!(xxh3_64_with_seed(&summed, at as u64), sum, "{} at {at}", file.display());
            labels.extend((0..samples).map(|s| f32::from_bits(number(24 + 4 * s))));
            at += 24 + length;
        }
    }
    labels
}
