//! The command that trains in a workshop, what a version has, and the data in parts.

use std::fs;

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::{Workshop, manifest};

/// A workshop, and the command that trains in it.
pub(super) fn workshop(rows: u64) -> (Workshop, String) {
    let workshop = Workshop::new(rows, 200);
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let models = &workshop.models;
    let line = format!("train --model-config {config} --format criteo-tsv --models {models} --json");
    (workshop, line)
}

/// The checksums of all files of a version, and its notes.
pub(super) fn contents(workshop: &Workshop, name: &str, version: u64) -> Value {
    let mut manifest = manifest(&workshop.models, name, version);
    // Two ways to train the same bytes have other places in their data and qualities on the way.
    manifest["quality"].take();
    manifest["files"]["checkpoint/cursor.json"].take();
    manifest
}

/// Makes a directory. Returns the paths and the contents of ten files, which are the data in parts.
pub fn parts(workshop: &Workshop, dir: &str) -> Vec<(String, Vec<u8>)> {
    fs::create_dir(dir).unwrap();
    let text = fs::read_to_string(&workshop.train).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let part = |(n, lines): (usize, &[&str])| (format!("{dir}/{n:02}"), lines.concat().into_bytes());
    lines.chunks(lines.len().div_ceil(10)).enumerate().map(part).collect()
}
