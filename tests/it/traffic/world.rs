//! A model with several versions whose scores differ, and the settings of a server of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use flechette::schema::preset::ArchKind;
use flechette::server::proto::PredictRequest;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::client::Client;
use crate::program::{Served, Workshop};
use crate::switching::{bits, expected, publish, requests};

pub(super) const MODEL: &str = "dlrm";

/// A model with the versions 1 to `versions`, which have different scores, and some requests for it.
pub(super) struct World {
    pub(super) workshop: Workshop,
    pub(super) requests: Vec<PredictRequest>,
    /// The scores of each version when it is served alone, by request.
    pub(super) scores: BTreeMap<u64, Vec<Vec<u32>>>,
}

impl World {
    pub(super) fn new(versions: u64) -> Self {
        Self::publish(versions, |workshop, version| publish_other(&workshop.models, version))
    }

    pub(super) fn publish(versions: u64, publish: impl Fn(&Workshop, u64)) -> Self {
        let workshop = Workshop::new(300, 400);
        workshop.train(ArchKind::Dlrm);
        (2..=versions).for_each(|version| publish(&workshop, version));
        let (requests, batches): (Vec<_>, Vec<_>) = requests(&workshop).into_iter().unzip();
        let alone = |version| (version, expected(&workshop.models, version, &batches));
        let scores: BTreeMap<_, _> = (1..=versions).map(alone).collect();
        for request in 0..requests.len() {
            let different: BTreeSet<_> = scores.values().map(|alone| &alone[request]).collect();
            assert_eq!(different.len() as u64, versions, "all versions have different scores");
        }
        Self { workshop, requests, scores }
    }

    /// Starts a server with a table of the model.
    pub(super) fn serve(&self, table: &str, flags: &str) -> Client {
        self.serve_in("true", table, flags)
    }

    /// As [`Self::serve`], in a shell that runs `setup` before.
    pub(super) fn serve_in(&self, setup: &str, table: &str, flags: &str) -> Client {
        let flags = format!("--config {} {flags}", self.configure(table));
        Client::of(Served::start_in(setup, &self.workshop.models, &flags))
    }

    pub(super) fn configure(&self, table: &str) -> String {
        let config = self.workshop.path("traffic.toml");
        fs::write(&config, format!("[models.{MODEL}]\n{table}\n")).unwrap();
        config
    }

    /// Which version has these scores for this request.
    pub(super) fn version_of(&self, request: usize, scores: &[f32]) -> u64 {
        let scores = bits(scores);
        let found = self.scores.iter().find(|(_, alone)| alone[request] == scores);
        *found.expect("the scores of a version that is served alone").0
    }
}

/// Publishes a version whose numbers are all a little different from those of version 1.
pub(super) fn publish_other(models: &str, version: u64) {
    publish(models, version, |file, i, value| {
        let random = xxh3_64_with_seed(&(i as u64).to_le_bytes(), version ^ file.len() as u64) % 1024;
        value * 0.9 + (random as f32 - 512.0) / 16384.0
    });
}
