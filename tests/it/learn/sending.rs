//! A model that is trained on what is sent: its workshop, a client that sends a file, and the versions that
//! come of it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use flechette::cli::client;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::types::RawBatch;
use tonic::Code;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::served::labelled;
use crate::program::{Served, Workshop, run_json};
use crate::serving::channel;
use crate::switching::wait;

/// A workshop with the same model under two names, and the settings of a server that takes samples.
pub(super) fn workshop(rows: u64) -> (Workshop, Schema, String) {
    let workshop = Workshop::new(rows, 200);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let Workshop { models, valid, .. } = &workshop;
    run_json(&format!(
        "train --model-config {config} --format criteo-tsv --data {valid} --models {models} --name file \
         --json"
    ));
    let copied = Command::new("cp").args(["-r", "file", "log"]).current_dir(models).status().unwrap();
    assert!(copied.success());
    let settings = workshop.path("settings.toml");
    fs::write(&settings, "[learn]\nenabled = \"on\"\nsegment_bytes = \"64Ki\"\n").unwrap();
    (workshop, preset::criteo(ArchKind::Dlrm, 4, 300), format!("--config {settings}"))
}

/// Sends the samples of a file one request after the other, from 1 to 50 samples each. A request that a full
/// log refuses is sent again until the log has room.
pub(super) async fn send_file(served: &Served, schema: &Schema, file: &str) -> usize {
    let options = ReadOptions::default();
    let mut reader = dataset::open(Format::CriteoTsv, &[file.into()], schema, options).unwrap();
    let mut ctr = CtrClient::new(channel(served.grpc).await);
    let (mut raw, mut sent) = (RawBatch::default(), 0);
    while reader.read(1 + sent % 50, &mut raw).unwrap() > 0 {
        let mut message = labelled(client::request("log", schema, &raw), 0.0);
        message.labels = raw.labels.clone().unwrap();
        // Ids and strings take turns.
        if sent.is_multiple_of(2) {
            for (column, feature) in message.features.iter_mut().zip(&schema.features) {
                let strings = std::mem::take(&mut column.strings);
                let hash = feature.hash.unwrap();
                column.ids = strings.iter().map(|s| xxh3_64_with_seed(s, hash.seed) % hash.modulus).collect();
            }
        }
        let began = Instant::now();
        let stored = loop {
            match ctr.learn(message.clone()).await {
                Err(status) if status.code() == Code::ResourceExhausted => {
                    assert!(began.elapsed() < LIMIT, "{sent} samples were sent: {status}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                stored => break stored.unwrap().into_inner().samples,
            }
        };
        assert_eq!(stored as usize, raw.samples);
        sent += raw.samples;
    }
    sent
}

/// How long a full log may take until it has room.
const LIMIT: Duration = Duration::from_secs(400);

/// The trained files of a version.
pub(super) fn trained(models: &str, name: &str, version: u64) -> Vec<Vec<u8>> {
    let version = Path::new(models).join(name).join(version.to_string());
    let mut paths: Vec<_> =
        fs::read_dir(version.join("tables")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.push(version.join("dense.safetensors"));
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Waits until the highest version of the model on disk was trained with this many samples.
pub(super) fn wait_for_samples(models: &str, samples: u64) {
    wait("the learned samples are in a version", || {
        let listed = run_json(&format!("versions --models {models} --name log --json"));
        let versions = listed["models"][0]["versions"].as_array().unwrap();
        versions.last().unwrap()["samples"] == samples
    });
}
