//! The readers of click logs, on generated files and, if they are present, on real files.

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flechette::dataset::synthetic::write_criteo_tsv;
use flechette::dataset::{DatasetError, Format, Labels, ReadOptions, Reader, open};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind};
use flechette::types::{Batch, RawBatch, RawValues};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::program::{Workshop, real, run, run_failing};

/// All samples of a reader, encoded.
struct Contents {
    batch: Batch,
    labels: Option<Vec<f32>>,
    skipped: u64,
}

fn contents(mut reader: Box<dyn Reader + Send>, schema: &Schema) -> Result<Contents, DatasetError> {
    let (mut raw, mut part) = (RawBatch::default(), Batch::default());
    let mut batch = Batch::empty(schema.features.len());
    let mut labels: Option<Vec<f32>> = None;
    while reader.read(97, &mut raw)? > 0 {
        schema.encode(&raw, &mut part).unwrap();
        batch.append(&part);
        if let Some(more) = &raw.labels {
            assert_eq!(more.len(), raw.samples);
            labels.get_or_insert_default().extend(more);
        }
    }
    Ok(Contents { batch, labels, skipped: reader.skipped() })
}

fn read(format: Format, paths: &[PathBuf], schema: &Schema) -> Result<Contents, DatasetError> {
    contents(open(format, paths, schema, ReadOptions::default())?, schema)
}

/// A file with these bytes. Dropping the directory removes the file.
fn file(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn criteo() -> Schema {
    preset::criteo(ArchKind::Dlrm, 4, 1000)
}

fn criteo_tsv(rows: u64) -> Vec<u8> {
    let mut text = Vec::new();
    write_criteo_tsv(rows, 1, &mut text).unwrap();
    text
}

fn read_unlabelled(format: Format, paths: &[PathBuf], schema: &Schema) -> Result<Contents, DatasetError> {
    let options = ReadOptions { labels: Labels::None, ..ReadOptions::default() };
    contents(open(format, paths, schema, options)?, schema)
}

fn read_criteo(text: &[u8]) -> Result<Contents, DatasetError> {
    let (_directory, path) = file(text);
    read(Format::CriteoTsv, &[path], &criteo())
}

/// The same data with every line changed.
fn each_line(text: &[u8], change: impl Fn(&str) -> String) -> Vec<u8> {
    std::str::from_utf8(text).unwrap().lines().map(change).collect::<String>().into_bytes()
}

#[test]
fn criteo_columns_are_found_by_their_numbers() {
    let mut schema = criteo();
    schema.dense = vec![schema.dense[12].clone(), schema.dense[0].clone()];
    schema.features = vec![schema.features[25].clone(), schema.features[0].clone()];
    let mut line: Vec<String> = (0..40).map(|i| i.to_string()).collect();
    line[0] = "1".into();
    line[1] = "-7".into();
    line[39] = String::new();
    let (_directory, path) = file(line.join("\t").as_bytes());
    let mut reader = open(Format::CriteoTsv, &[path], &schema, ReadOptions::default()).unwrap();
    let mut raw = RawBatch::default();
    assert_eq!(reader.read(10, &mut raw).unwrap(), 1);
    assert_eq!(raw.dense, [13.0, -7.0]);
    assert_eq!(raw.labels, Some(vec![1.0]));
    assert_eq!(raw.features[0].values, RawValues::Text { bytes: vec![], ends: vec![0] });
    assert_eq!(raw.features[1].values, RawValues::Text { bytes: b"14".to_vec(), ends: vec![2] });
    assert_eq!(raw.features[1].offsets, [0, 1]);
    assert_eq!(reader.read(10, &mut raw).unwrap(), 0);
}

#[test]
fn line_ends_and_compression_change_nothing() {
    let text = criteo_tsv(500);
    let plain = read_criteo(&text).unwrap();
    assert_eq!((plain.batch.samples, plain.skipped), (500, 0));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(&text[..], ruzstd::encoding::CompressionLevel::Fastest);
    let crlf = each_line(&text, |line| format!("{line}\r\n"));
    for same in [gzip.finish().unwrap(), zstd, crlf, text[..text.len() - 1].to_vec()] {
        let other = read_criteo(&same).unwrap();
        assert_eq!((&other.batch, &other.labels), (&plain.batch, &plain.labels));
    }
}

#[test]
fn a_file_without_labels_gives_none_and_mixing_is_refused() {
    let text = criteo_tsv(50);
    let unlabelled = each_line(&text, |line| format!("{}\n", &line[2..]));
    let (_first, labelled) = file(&text);
    let (_second, bare) = file(&unlabelled);
    let with = read_criteo(&text).unwrap();
    let without = read_unlabelled(Format::CriteoTsv, std::slice::from_ref(&bare), &criteo()).unwrap();
    assert_eq!(with.batch, without.batch);
    assert!(with.labels.is_some() && without.labels.is_none());
    let mixed = read(Format::CriteoTsv, &[labelled.clone(), bare.clone()], &criteo()).err().unwrap();
    let counts = "line 1: expected 40 fields, or 39 with --unlabelled, got 39";
    let refused = "no line has the expected number of fields";
    assert_eq!(mixed.to_string(), format!("{}: {refused}; {counts}", bare.display()));
    let mixed = read_unlabelled(Format::CriteoTsv, &[bare, labelled.clone()], &criteo()).err().unwrap();
    let counts = "line 1: expected 39 fields, or 40 without --unlabelled, got 40";
    assert_eq!(mixed.to_string(), format!("{}: {refused}; {counts}", labelled.display()));
}

#[test]
fn a_criteo_file_that_lacks_a_column_is_refused_with_both_counts() {
    let text = each_line(&criteo_tsv(300), |line| {
        let fields: Vec<_> = line.split('\t').enumerate().filter(|(i, _)| *i != 30).map(|(_, f)| f).collect();
        format!("{}\n", fields.join("\t"))
    });
    let refusal = read_criteo(&text).err().unwrap().to_string();
    let counts = "expected 40 fields, or 39 with --unlabelled, got 39";
    assert!(refusal.ends_with(&format!("line 101: {counts}: more than 100 malformed lines")), "{refusal}");

    let workshop = Workshop::new(1, 1);
    let (config, short) = (workshop.config(ArchKind::Dlrm, 4, 50), workshop.path("short.tsv"));
    fs::write(&short, &text).unwrap();
    let data = format!("--model-config {config} --format criteo-tsv --data {short}");
    let error = run_failing(2, &format!("plan {data}"));
    assert!(error.contains(counts), "{error}");
    let train = format!("train {data} --models {} --name m", workshop.models);
    let error = run_failing(2, &train);
    assert!(error.contains("expected 40 fields with the label, got 39"), "{error}");
    let error = run_failing(2, &format!("{} --valid {short}", train.replace(&short, &workshop.train)));
    assert!(
        error.contains("short.tsv") && error.contains("expected 40 fields with the label, got 39"),
        "{error}"
    );
    let plan = run(&format!("plan {data} --unlabelled --sizes 0.1"));
    let log = String::from_utf8_lossy(&plan.stderr).into_owned();
    assert!(plan.status.success() && log.contains("39 fields per line, without a label"), "{log}");
}

#[test]
fn an_avazu_file_without_labels_is_refused_for_training_by_the_name_of_the_label_column() {
    let workshop = Workshop::new(1, 1);
    let text = avazu_csv(30);
    let bare = each_line(&text, |line| {
        let fields: Vec<_> = line.split(',').enumerate().filter(|(i, _)| *i != 1).map(|(_, f)| f).collect();
        format!("{}\n", fields.join(","))
    });
    let (labelled, unlabelled) = (workshop.path("labelled.csv"), workshop.path("unlabelled.csv"));
    fs::write(&labelled, &text).unwrap();
    fs::write(&unlabelled, &bare).unwrap();
    let config = workshop.path("avazu.toml");
    fs::write(&config, preset::avazu(ArchKind::Dcn, 4, 50).to_toml()).unwrap();
    let train =
        format!("train --model-config {config} --format avazu-csv --models {} --name m", workshop.models);
    for data in [format!("--data {unlabelled}"), format!("--data {labelled} --valid {unlabelled}")] {
        let error = run_failing(2, &format!("{train} {data}"));
        assert!(error.contains("labels are needed, but there is no column \"click\""), "{error}");
    }
}

#[test]
fn several_files_are_one_input() {
    let text = criteo_tsv(100);
    let (_one, path) = file(&text);
    let (_two, empty) = file(b"");
    let twice = read(Format::CriteoTsv, &[path.clone(), empty, path], &criteo()).unwrap();
    let mut expected = read_criteo(&text).unwrap().batch;
    expected.append(&expected.clone());
    assert_eq!(twice.batch, expected);
}

#[test]
fn malformed_lines_are_skipped_and_the_other_lines_are_read() {
    let text = String::from_utf8(criteo_tsv(4)).unwrap();
    let good: Vec<&str> = text.lines().collect();
    let two = good[1].replacen(['0', '1'], "2", 1);
    let word = good[2].split('\t').enumerate().map(|(i, f)| if i == 5 { "x" } else { f });
    let word = word.collect::<Vec<_>>().join("\t");
    let long = "x".repeat(2 << 20);
    let mixed = ["", good[0], &two, "a\tb", good[1], &word, &long, good[2], "\u{0}", good[3]].join("\n");
    let read = read_criteo(mixed.as_bytes()).unwrap();
    assert_eq!(read.batch, read_criteo(text.as_bytes()).unwrap().batch);
    assert_eq!(read.skipped, 6);
}

#[test]
fn past_the_limit_malformed_lines_are_refused_with_file_line_and_reason() {
    let mut text = criteo_tsv(3);
    text.extend_from_slice(b"bad\nbad\nworse\tline\n");
    let (_directory, path) = file(&text);
    let limits = ReadOptions { malformed_lines: 2, ..ReadOptions::default() };
    let reader = open(Format::CriteoTsv, std::slice::from_ref(&path), &criteo(), limits).unwrap();
    let refusal = contents(reader, &criteo()).err().unwrap().to_string();
    let expected = "line 6: expected 40 fields as in line 1, got 2: more than 2 malformed lines";
    assert_eq!(refusal, format!("{}: {expected}", path.display()));
}

#[test]
fn the_first_malformed_lines_are_reported_with_file_and_number() {
    let workshop = Workshop::new(1, 1);
    let (config, data) = (workshop.config(ArchKind::Dlrm, 4, 50), workshop.path("bad.tsv"));
    std::fs::write(&data, [b"bad\n".repeat(50), criteo_tsv(3)].concat()).unwrap();
    let models = &workshop.models;
    let line = format!(
        "train --model-config {config} --format criteo-tsv --data {data} --models {models} --name m --json"
    );
    let output = run(&line);
    let report = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{report}");
    let reason = "expected 40 fields with the label, got 1: skipped";
    for number in 1..=5 {
        assert!(report.contains(&format!("{data}: line {number}: {reason}")), "{report}");
    }
    assert!(
        !report.contains("line 7:") && report.contains("further malformed lines are not reported"),
        "{report}"
    );
}

#[test]
fn strings_need_not_be_utf8() {
    let mut line = vec![b"0".to_vec()];
    line.extend(std::iter::repeat_n(b"3".to_vec(), 13));
    line.extend(std::iter::repeat_n(b"\xff\xfe\0\"".to_vec(), 26));
    let read = read_criteo(&line.join(&b'\t')).unwrap();
    assert_eq!(read.batch.samples, 1);
    assert_eq!(read.batch.features[25].ids, [xxh3_64_with_seed(b"\xff\xfe\0\"", 0) % 1000]);
}

#[test]
fn a_directory_and_a_missing_file_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let refusal =
        |path: &Path| read(Format::CriteoTsv, &[path.to_owned()], &criteo()).err().unwrap().to_string();
    assert!(refusal(directory.path()).ends_with("expected a file, got a directory"));
    assert!(refusal(&directory.path().join("none")).contains("none: cannot be opened: No such file"));
    assert!(matches!(read(Format::AvazuCsv, &[], &criteo()), Err(DatasetError::NoFiles)));
    assert_eq!(read_criteo(b"").unwrap().batch.samples, 0);
    let message = "parquet".parse::<Format>().err().unwrap().to_string();
    let names = "criteo-tsv, avazu-csv, csv, tsv or synthetic";
    assert_eq!(message, format!("unknown format \"parquet\", expected {names}"));
}

#[test]
fn a_truncated_compressed_file_is_refused_after_its_last_whole_line() {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&criteo_tsv(5000)).unwrap();
    let gzip = gzip.finish().unwrap();
    let error = read_criteo(&gzip[..gzip.len() / 2]).err().unwrap();
    assert!(matches!(error, DatasetError::Read { line: 1.., .. }), "{error}");
}

#[test]
fn a_feature_that_is_no_column_is_refused() {
    let mut schema = criteo();
    schema.features[4].name = "C27".into();
    let (_directory, path) = file(b"");
    let refusal = read(Format::CriteoTsv, std::slice::from_ref(&path), &schema).err().unwrap().to_string();
    let expected = "criteo-tsv: \"C27\" of the schema is not a column, expected one of I1, I2, ";
    assert!(refusal.starts_with(expected) && refusal.ends_with(", C25, C26"), "{refusal}");
    for name in ["c1", "C0", "C01", "C+1", "C", "label", ""] {
        schema.features[4].name = name.into();
        assert!(read(Format::CriteoTsv, std::slice::from_ref(&path), &schema).is_err(), "{name}");
    }
}

/// Lines in Avazu's format. A value is different in each line and column.
fn avazu_csv(rows: usize) -> Vec<u8> {
    let mut text = format!("id,click,{}\n", preset::AVAZU_FEATURES.join(","));
    for row in 0..rows {
        let values: Vec<_> = (0..22).map(|i| format!("{:08x}", row * 22 + i)).collect();
        text += &format!("{row},{},{}\n", u8::from(row % 6 == 0), values.join(","));
    }
    text.into_bytes()
}

#[test]
fn avazu_columns_are_found_by_the_header() {
    let schema = preset::avazu(ArchKind::Dcn, 4, 1000);
    let text = avazu_csv(300);
    let read_text = |text: &[u8]| {
        let (_directory, path) = file(text);
        read(Format::AvazuCsv, &[path], &schema)
    };
    let whole = read_text(&text).unwrap();
    assert_eq!((whole.batch.samples, whole.skipped), (300, 0));
    let reversed = each_line(&text, |line| {
        let fields: Vec<_> = line.split(',').rev().map(|f| format!("\"{f}\"")).collect();
        format!("{}\r\n", fields.join(","))
    });
    let bare = each_line(&text, |line| {
        let fields: Vec<_> = line.split(',').enumerate().filter(|(i, _)| *i != 1).map(|(_, f)| f).collect();
        format!("{}\n", fields.join(","))
    });
    let reversed = read_text(&reversed).unwrap();
    assert_eq!((&reversed.batch, &reversed.labels), (&whole.batch, &whole.labels));
    let bare = read_text(&bare).unwrap();
    assert_eq!((&bare.batch, &bare.labels), (&whole.batch, &None));
    assert_eq!(read_text(b"").unwrap().batch.samples, 0);
    let refusal = read_text(b"id,click,hour\n1,0,2\n").err().unwrap().to_string();
    assert!(refusal.contains("\"C1\" of the schema is not a column, expected one of id, hour"));
    let refusal = read_text(b"id,id\n").err().unwrap().to_string();
    assert!(refusal.ends_with("header: column \"id\" occurs twice"), "{refusal}");
}

#[test]
fn an_error_about_a_header_shows_neither_control_bytes_nor_a_whole_long_line() {
    let schema = preset::avazu(ArchKind::Dlrm, 2, 1000);
    let name = format!("\x1b[31m{}", "x".repeat(400_000));
    for header in [name.clone(), format!("{name},{name}"), format!("id,{name}"), format!("click,{name}")] {
        let (_directory, path) = file(format!("{header}\n").as_bytes());
        let options = ReadOptions { labels: Labels::Required, ..ReadOptions::default() };
        let refusal = open(Format::AvazuCsv, &[path], &schema, options).err().unwrap().to_string();
        assert!(refusal.contains(r#""\u{1b}[31mxxx"#) && refusal.contains(r#"xxx"..."#), "{refusal:.2000}");
        assert!(refusal.len() < 1000 && !refusal.contains('\x1b'), "{refusal:.2000}");
    }
}

#[test]
fn a_generated_file_has_the_click_rate_of_the_real_file() {
    let rate = |labels: Option<Vec<f32>>| {
        let labels = labels.unwrap();
        labels.iter().sum::<f32>() / labels.len() as f32
    };
    let criteo = rate(read_criteo(&criteo_tsv(10_000)).unwrap().labels);
    assert!((0.22..0.28).contains(&criteo), "{criteo}");
}

#[test]
fn generated_files_depend_only_on_the_seed() {
    let text = |seed| {
        let mut text = Vec::new();
        write_criteo_tsv(20, seed, &mut text).unwrap();
        text
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte =
        prop_oneof![4 => Just(b'\t'), 4 => Just(b','), 1 => Just(b'\n'), 2 => b'0'..=b'1', 1 => any::<u8>()];
    prop::collection::vec(byte, 0..600)
}

proptest! {
    #[test]
    fn no_bytes_make_a_reader_panic(junk in any_bytes(), at in 0..4000usize) {
        let (avazu, criteo) = (preset::avazu(ArchKind::Dcn, 4, 1000), criteo());
        for (format, schema, mut text) in
            [(Format::CriteoTsv, &criteo, criteo_tsv(10)), (Format::AvazuCsv, &avazu, avazu_csv(10))]
        {
            let at = at.min(text.len());
            text.splice(at..at, junk.iter().copied());
            for bytes in [&text, &junk] {
                let (_directory, path) = file(bytes);
                if let Ok(read) = read(format, &[path], schema) {
                    let lines = bytes.split(|&b| b == b'\n').count();
                    prop_assert!(read.batch.samples + read.skipped as usize <= lines);
                }
            }
        }
    }
}

fn check_real(name: &str, format: Format, rows: usize, rate: Option<std::ops::Range<f32>>) {
    let Some(path) = real(name) else { return };
    let schema = match format {
        Format::AvazuCsv => preset::avazu(ArchKind::Dcn, 4, 1 << 40),
        _ => preset::criteo(ArchKind::Dcn, 4, 1 << 40),
    };
    let Contents { batch, labels, skipped } = read(format, &[path], &schema).unwrap();
    assert_eq!((batch.samples, skipped), (rows, 0), "{name}");
    assert_eq!(labels.is_some(), rate.is_some(), "{name}");
    if let (Some(labels), Some(rate)) = (labels, rate) {
        let clicked = labels.iter().sum::<f32>() / rows as f32;
        assert!(rate.contains(&clicked), "{name}: click rate {clicked}");
    }
    // The schema's tables have so many rows that hardly any values share an id.
    let distinct = |f: usize| batch.features[f].ids.iter().collect::<HashSet<_>>().len();
    match format {
        // In the full data C9 has 3 values, C20 has 4, and C3 is nearly unique per row.
        Format::CriteoTsv => {
            assert!(distinct(8) <= 3 && distinct(19) <= 5 && distinct(2) > rows / 10, "{name}")
        }
        // In the full data C18 has 4 values, and device_ip has millions.
        _ => assert!(distinct(18) == 4 && distinct(10) > rows / 10, "{name}"),
    }
}

#[test]
fn the_real_criteo_files_are_read_whole() {
    let criteo = Format::CriteoTsv;
    check_real("criteo_kaggle_train.tsv.zst", criteo, 15_662, Some(0.24..0.27));
    check_real("criteo_kaggle_test.tsv.zst", criteo, 3_916, Some(0.24..0.28));
    check_real("criteo_kaggle_head10k.tsv.zst", criteo, 10_000, Some(0.2..0.3));
}

#[test]
fn the_real_avazu_files_are_read_whole() {
    let avazu = Format::AvazuCsv;
    check_real("avazu_train.csv.zst", avazu, 18_609, Some(0.15..0.19));
    check_real("avazu_test.csv.zst", avazu, 4_653, Some(0.14..0.19));
    check_real("avazu_head10k.csv.zst", avazu, 9_999, Some(0.14..0.2));
    check_real("avazu_testday_head10k_unlabelled.csv.zst", avazu, 9_999, None);
}
