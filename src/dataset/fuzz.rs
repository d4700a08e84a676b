//! Click logs, plain and compressed, and descriptions of generated data.

use std::fs;
use std::io::Write;

use flate2::write::GzEncoder;
use proptest::prelude::*;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::synthetic::write_criteo_tsv;
use super::*;
use crate::fuzz::bytes::{Input, mutated};
use crate::fuzz::run;
use crate::schema::Arity;
use crate::schema::preset::{self, ArchKind, OwnColumns};
use crate::types::Batch;

const WORDS: &[&str] = &[
    "\t", ",", "\n", "\r\n", "\"", "\"\"", "click", "hour,", "\u{feff}", "-", "1e30", "nan", "\0",
    "\t\t\t\t", ",,,,", "|", "||||", "_", "price",
];

/// All samples of a file.
#[derive(Debug, PartialEq)]
struct Contents {
    batch: Batch,
    labels: Vec<f32>,
    skipped: u64,
}

/// Reads a file in batches of this size.
fn read(file: &Case, schema: &Schema, at_once: usize) -> Result<Contents, DatasetError> {
    let options = ReadOptions {
        malformed_lines: 5,
        line_bytes: 2000,
        labels: file.labels,
        fields: file.fields.clone(),
    };
    let mut reader = open(file.format, std::slice::from_ref(&file.path), schema, options)?;
    let (mut raw, mut part) = (RawBatch::default(), Batch::default());
    let (mut batch, mut labels) = (Batch::empty(schema.features.len()), Vec::new());
    while reader.read(at_once, &mut raw)? > 0 {
        assert!(raw.samples <= at_once);
        assert!(raw.labels.as_ref().is_none_or(|labels| labels.len() == raw.samples));
        assert_eq!(reader.runs().iter().map(|run| run.samples).sum::<usize>(), raw.samples);
        labels.extend(raw.labels.iter().flatten());
        schema.encode(&raw, &mut part).unwrap();
        batch.append(&part);
    }
    Ok(Contents { batch, labels, skipped: reader.skipped() })
}

struct Case {
    path: PathBuf,
    format: Format,
    labels: Labels,
    fields: FieldOptions,
}

fn criteo(rows: u64) -> Vec<u8> {
    let mut text = Vec::new();
    write_criteo_tsv(rows, 1, &mut text).unwrap();
    text
}

fn check(format: Format, schema: &Schema, inputs: impl Strategy<Value = Input>) {
    check_with(&FieldOptions::default(), format, schema, inputs);
}

fn check_with(fields: &FieldOptions, format: Format, schema: &Schema, inputs: impl Strategy<Value = Input>) {
    let dir = tempfile::tempdir().unwrap();
    let labels =
        proptest::sample::select(&[Labels::Expected, Labels::Expected, Labels::Required, Labels::None][..]);
    run((inputs, labels), |(Input(text), labels)| {
        let case = Case { path: dir.path().join("data"), format, labels, fields: fields.clone() };
        fs::write(&case.path, text).unwrap();
        let whole = read(&case, schema, 1000);
        let pieces = read(&case, schema, 3);
        match (whole, pieces) {
            (Ok(whole), Ok(pieces)) => {
                assert_eq!(whole, pieces);
                whole.batch.samples > 0
            }
            (Err(whole), Err(pieces)) => {
                assert_eq!(whole.to_string(), pieces.to_string());
                false
            }
            (whole, pieces) => panic!("{whole:?} and {pieces:?}"),
        }
    });
}

#[test]
fn criteo_tsv() {
    check(
        Format::CriteoTsv,
        &preset::criteo(ArchKind::Dlrm, 4, 1000),
        mutated([criteo(4), criteo(20)], WORDS),
    );
}

#[test]
fn avazu_csv() {
    let text = feed::tests::avazu_csv(6, 1);
    check(Format::AvazuCsv, &preset::avazu(ArchKind::Dlrm, 4, 1000), mutated([text], WORDS));
}

/// A feature with one id, one with at most three, and a dense input.
fn own() -> Schema {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let columns = OwnColumns { dense: names(&["price"]), features: names(&["user", "tags"]) };
    let mut schema = preset::own(ArchKind::Dlrm, 4, 1000, columns);
    schema.features[1].arity = Arity::MultiHot { max: 3 };
    schema
}

#[test]
fn own_csv() {
    let text = "note,click,user,price,tags\n,1,a,3,x|y\n\"a, b\",0,\"\"\"q\"\"\",,\nc,1,b,1e3,\"x|y|z\"\n";
    for separator in [None, Some('|')] {
        let fields = FieldOptions { label: Some("click".to_owned()), separator, columns: None };
        check_with(&fields, Format::Csv, &own(), mutated([text], WORDS));
    }
}

#[test]
fn own_tsv_without_a_header() {
    let columns = ["_", "label", "user", "price", "tags"].map(str::to_owned).to_vec();
    let fields = FieldOptions { columns: Some(columns), separator: Some('|'), label: None };
    let seeds = ["n\t1\ta\t3\tx|y\nn\t0\t\"\t\t\nm\t1\tb\t-2.5\tx|y|z\n", "n\ta\t3\tx\nn\tb\t\t\n"];
    check_with(&fields, Format::Tsv, &own(), mutated(seeds, WORDS));
}

#[test]
fn compressed_data() {
    let text = criteo(60);
    let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    let (gzip, zstd) = (gzip.finish().unwrap(), compress_to_vec(&text[..], CompressionLevel::Fastest));
    let skippable = b"\x5a\x2a\x4d\x18\x03\0\0\0abc".to_vec();
    let seeds = [gzip.repeat(2), [skippable, zstd.clone(), zstd].concat(), gzip];
    check(Format::CriteoTsv, &preset::criteo(ArchKind::Dlrm, 4, 1000), mutated(seeds, &["\x50\x2a\x4d\x18"]));
}

#[test]
fn descriptions_of_generated_data() {
    let schema = preset::avazu(ArchKind::Dlrm, 4, 1000);
    let seeds = ["rows=1000,seed=1,skew=medium,lengths=uniform,truth=3", "rows=5,skew=1.05,lengths=7"];
    let words = &["rows", "skew", "lengths", "max", "high", ",", "=", "-", "1.2"];
    run(mutated(seeds, words), |Input(text)| {
        let path = PathBuf::from(String::from_utf8_lossy(&text).into_owned());
        let Ok(mut reader) = open(Format::Synthetic, &[path], &schema, ReadOptions::default()) else {
            return false;
        };
        reader.read(3, &mut RawBatch::default()).unwrap();
        true
    });
}
