//! The whole program on a real GPU, if there is one. `cusim_serve` has more of it, on a simulated one.

use std::fs;

use flechette::device::cuda;
use flechette::schema::preset::ArchKind;

use crate::program::{Served, Workshop, manifest, run_json};
use crate::skip::skip;
use crate::switching::{
    MODEL, every_answer_is_of_the_version_that_it_names, publish_by_training, publish_full_versions,
};

/// Whether there is a GPU to test on. Otherwise reports that the test is skipped.
fn is_there() -> bool {
    let opened = cuda::open(0, None);
    opened.inspect_err(|reason| skip(&format!("no real GPU: {reason}"))).is_ok()
}

#[test]
fn a_real_gpu_serves_the_trainers_scores_bit_for_bit() {
    if !is_there() {
        return;
    }
    let workshop = Workshop::new(20_000, 5000);
    let kinds = [ArchKind::Dlrm, ArchKind::Deepfm, ArchKind::Dcnv2];
    kinds.iter().for_each(|kind| drop(workshop.train(*kind)));
    let out = workshop.path("served.scores");
    for settings in [
        "fraction = 1.0",
        "fraction = 0.02\nadmission = \"all\"",
        "fraction = 0.05\nkey_bits = 12",
        "fraction = 0.05\npointers = 0.5",
    ] {
        let file = workshop.path("settings.toml");
        fs::write(&file, format!("[cache]\n{settings}\n")).unwrap();
        let served = Served::start(&workshop.models, &format!("--device cuda --config {file}"));
        for (kind, batch) in kinds.iter().flat_map(|kind| [1024, 33, 1].map(|batch| (*kind, batch))) {
            served.score(kind.name(), &workshop.valid, &format!("--out {out} --batch {batch}"));
            let [ours, own] = [&out, &workshop.trained_scores(kind)].map(|file| fs::read(file).unwrap());
            assert!(ours == own, "{kind:?}, batches of {batch}: {settings}");
        }
        for kind in kinds {
            assert_eq!(served.sum("flechette_device_lost", kind.name()), 0.0, "{settings}");
            assert!(served.sum("flechette_cache_hits_total", kind.name()) > 0.0, "{settings}");
        }
    }
}

/// Checks every answer of a cache of 1 % of the rows, with and without pointers to other rows.
fn every_answer_of_a_real_gpu_is_right(publish: fn(&Workshop, &Served)) {
    if !is_there() {
        return;
    }
    for settings in ["admission = \"all\"", "admission = \"all\"\npointers = 0.5"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("settings.toml");
        fs::write(&file, format!("[cache]\nmode = \"on\"\nfraction = 0.01\n{settings}\n")).unwrap();
        let flags = format!("--device cuda --config {}", file.display());
        every_answer_is_of_the_version_that_it_names(&flags, publish);
    }
}

#[test]
fn every_answer_of_a_real_gpu_is_of_the_version_that_it_names() {
    every_answer_of_a_real_gpu_is_right(publish_full_versions);
}

#[test]
fn every_answer_of_a_real_gpu_is_of_the_version_that_it_names_while_cached_rows_change_by_deltas() {
    every_answer_of_a_real_gpu_is_right(publish_by_training);
}

#[test]
fn training_on_a_real_gpu_writes_the_hosts_bytes() {
    if !is_there() {
        return;
    }
    let workshop = Workshop::new(20_000, 1);
    let config = workshop.config(ArchKind::Dlrm, 16, 5000);
    let train = |device: &str, optimizer: &str| {
        let models = workshop.path(&format!("{device}-{optimizer}"));
        run_json(&format!(
            "train --model-config {config} --format criteo-tsv --data {} --batch 256 --optimizer {optimizer} \
             --scratchpad 0.3 --device {device} --models {models} --name {MODEL} --json",
            workshop.train
        ));
        manifest(&models, MODEL, 1)
    };
    for optimizer in ["sgd", "adagrad", "rowwise_adagrad", "adam"] {
        assert!(train("cuda", optimizer) == train("host", optimizer), "{optimizer}");
        let verified = run_json(&format!(
            "verify --model-config {config} --format criteo-tsv --data {} --steps 40 --batch 256 --optimizer \
             {optimizer} --scratchpad 0.3 --device cuda --json",
            workshop.train
        ));
        assert_eq!(verified["equal"], true, "{optimizer}: {verified}");
    }
}
