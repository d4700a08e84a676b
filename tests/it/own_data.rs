//! One's own data: `csv` and `tsv`, with a header and without, from `init` to scores.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use flechette::dataset::{FieldOptions, Format, Labels, ReadOptions, open};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind, OwnColumns};
use flechette::types::{Batch, RawBatch};
use proptest::prelude::*;
use serde_json::Value;

use crate::program::{Served, Workshop, flechette, highest_version, manifest, run, run_failing, run_json};
use crate::serve_train::site::LAST_ONLY;
use crate::switching::{serves, wait};
use crate::train_data::interrupting::interrupt_after_a_skipped_line;
use crate::train_resume::last_version;

/// A sample: label, user, item, price, tags.
type Sample = (u8, String, String, u32, Vec<String>);

const HEADER: &str = "\"note\",price,user,item,tags,clicked";
const FIELDS: &str = "--label clicked --separator |";
const COLUMNS: &str = "--columns clicked,user,item,_,price,tags";

/// Samples. Items have commas and double quotes.
fn samples(rows: u32) -> Vec<Sample> {
    let mut state = 7_u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut sample = |_| {
        let (user, item, price) = (below(40), below(30), below(1000) as u32);
        let tags = (0..below(4)).map(|_| format!("t{}", below(9))).collect();
        let clicked = u8::from(below(10) < 2 + item % 5);
        (clicked, format!("u{user}"), format!("{item} \"inch\", red"), price, tags)
    };
    (0..rows).map(&mut sample).collect()
}

/// A field in double quotes.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// Comma-separated, with quotes where they are needed, and columns that are no inputs.
fn csv_lines(samples: &[Sample]) -> String {
    let line = |(i, (label, user, item, price, tags)): (usize, &Sample)| {
        let (note, item, tags) = (quoted(&format!("n{i}, \"x\"")), quoted(item), tags.join("|"));
        format!("{note},{price},{user},{item},{tags},{label}\n")
    };
    samples.iter().enumerate().map(line).collect()
}

/// Tab-separated without a header and, if wanted, without labels.
fn tsv(samples: &[Sample], labelled: bool) -> String {
    let line = |(label, user, item, price, tags): &Sample| {
        let label = if labelled { format!("{label}\t") } else { String::new() };
        format!("{label}{user}\t{item}\tnot read\t{price}\t{}\n", tags.join("|"))
    };
    samples.iter().map(line).collect()
}

/// A workshop with these samples as `own.csv` and `own.tsv`, and a `model.toml` for both.
struct Own {
    workshop: Workshop,
    samples: Vec<Sample>,
    csv: String,
    tsv: String,
    config: String,
}

impl Own {
    fn new(rows: u32) -> Self {
        let workshop = Workshop::new(1, 1);
        let samples = samples(rows);
        let own = Self {
            csv: workshop.path("own.csv"),
            tsv: workshop.path("own.tsv"),
            config: workshop.path("own.toml"),
            workshop,
            samples,
        };
        fs::write(&own.csv, format!("\u{feff}{HEADER}\r\n{}", csv_lines(&own.samples))).unwrap();
        fs::write(&own.tsv, tsv(&own.samples, true)).unwrap();
        let init = "--label clicked --dense price --arch dcn --dim 4 --rows 50";
        let toml = init_toml(&format!("--dataset csv --data {} --skip note {init}", own.csv));
        // The order of the columns is that of the features, and both files have the same.
        assert_eq!(toml, init_toml(&format!("--dataset tsv --data {} {COLUMNS} {init}", own.tsv)));
        let several = "\"tags\"\narity = { multi_hot = { max = 3 } }";
        let one = "\"tags\"\narity = \"one_hot\"";
        assert_eq!(toml.matches(one).count(), 1);
        fs::write(&own.config, toml.replace(one, several)).unwrap();
        own
    }

    fn train(&self, name: &str, format: &str) -> String {
        let (config, models) = (&self.config, &self.workshop.models);
        format!(
            "train --model-config {config} --models {models} --name {name} --json --format {format} {FIELDS}"
        )
    }

    /// The checksums of a model's files, except of its place in the data.
    fn contents(&self, name: &str) -> Value {
        let mut manifest = manifest(&self.workshop.models, name, 1);
        manifest["quality"].take();
        manifest["files"]["checkpoint/cursor.json"].take();
        manifest
    }
}

fn init_toml(flags: &str) -> String {
    let output = run(&format!("init {flags}"));
    assert!(output.status.success(), "{flags}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_csv_with_a_header_and_a_tsv_without_one_train_the_same_bytes_and_get_the_same_scores() {
    let own = Own::new(600);
    let Own { workshop, csv, tsv: with_labels, .. } = &own;
    run_json(&format!("{} --data {csv} --valid {csv}", own.train("csv", "csv")));
    let trained = run_json(&format!("{} --data {with_labels}", own.train("tsv", &format!("tsv {COLUMNS}"))));
    assert_eq!((&trained["rows"], &trained["skipped"]), (&600.into(), &0.into()));
    assert_eq!(own.contents("csv"), own.contents("tsv"));

    // Other ways to the same samples: standard input, and files that each have a header.
    let mut child = flechette()
        .args(format!("{} --data -", own.train("stdin", "csv")).split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&fs::read(csv).unwrap()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(own.contents("stdin"), own.contents("csv"));
    let dir = workshop.path("days");
    fs::create_dir(&dir).unwrap();
    for (day, part) in own.samples.chunks(200).enumerate() {
        fs::write(format!("{dir}/{day}.csv"), format!("{HEADER}\n{}", csv_lines(part))).unwrap();
    }
    run_json(&format!("{} --follow {dir} --follow-until 2.csv", own.train("follow", "csv")));
    assert_eq!(own.contents("follow"), own.contents("csv"));

    let bare = workshop.path("bare.tsv");
    fs::write(&bare, tsv(&own.samples, false)).unwrap();
    let served = Served::start(&workshop.models, "--cache-mode off");
    let score = |name: &str, file: &str, flags: &str| {
        let (url, out) = (served.url(), workshop.path(name));
        let line = format!("score --addr {url} --model csv {FIELDS} {flags} {file} --out {out} --json");
        (run_json(&line), fs::read_to_string(&out).unwrap())
    };
    let (report, scores) = score("1.txt", csv, "--format csv");
    assert_eq!((&report["rows"], scores.lines().count()), (&600.into(), 600));
    assert!(report["auc"].is_f64(), "{report}");
    assert_eq!(score("2.txt", with_labels, &format!("--format tsv {COLUMNS}")).1, scores);
    let (report, unlabelled) = score("3.txt", &bare, &format!("--format tsv {COLUMNS} --unlabelled"));
    assert!(unlabelled == scores && report["auc"].is_null(), "{report}");
    let without = COLUMNS.replace("clicked,", "");
    assert_eq!(score("4.txt", &bare, &format!("--format tsv {without}")).1, scores);
    let load = format!("load --addr {} --model csv {FIELDS} --format csv {csv}", served.url());
    run_json(&format!("{load} --seconds 0.2 --concurrency 1 --json"));

    let data = format!("--model-config {} --format csv {FIELDS} --data {csv}", own.config);
    assert_eq!(run_json(&format!("verify {data} --steps 4 --json"))["equal"], true);
    assert_eq!(run(&format!("plan {data} --sizes 0.5")).status.code(), Some(0));
}

#[test]
fn a_server_trains_on_files_with_headers() {
    let own = Own::new(400);
    let models = &own.workshop.models;
    let train = format!("--train own={} --model-config {} --format csv", own.csv, own.config);
    // In a shell, which would take | as a pipe.
    let served = Served::start(models, &format!("{train} {LAST_ONLY} {}", FIELDS.replace('|', "'|'")));
    wait("the version of all samples", || highest_version(Path::new(models), "own") == Some(2));
    wait("the version is served", || serves(&served, "own", 2));
    served.terminate();
    served.ended();
    run_json(&format!("{} --data {}", own.train("alone", "csv"), own.csv));
    let [beside, alone] = ["own", "alone"].map(|name| last_version(&own.workshop, name));
    assert!(beside == alone && beside.len() > 3, "{beside:?}, {alone:?}");
}

#[test]
fn a_line_that_does_not_fit_is_skipped_with_its_reason() {
    let own = Own::new(20);
    let (bad, out) = (own.workshop.path("bad.csv"), own.workshop.path("out"));
    let lines = [
        ("a,1,u,i,t,1,more", "expected 6 fields as in line 1, got 7"),
        ("a,1,u,\"i,t,1", "a double quote is not closed in the line"),
        ("a,1,u,i,t,2", "expected label 0 or 1, got \"2\""),
        ("a,one,u,i,t,1", "field 2: expected a number, got \"one\""),
        ("a,1e39,u,i,t,1", "field 2: expected a finite number up to 3.4e38, got \"1e39\""),
        ("a,1,u,i,t|t|t|t,1", "field 5: expected at most 3 ids, got 4"),
    ];
    let text: String = lines.iter().map(|(line, _)| format!("{line}\n")).collect();
    fs::write(&bad, format!("{HEADER}\n{text}{}", csv_lines(&own.samples))).unwrap();
    let output = run(&format!("{} --data {bad} --valid {bad} --valid-out {out}", own.train("m", "csv")));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    for (number, (_, reason)) in lines.iter().enumerate() {
        let line = format!("bad.csv: line {}: {reason}: skipped", number + 2);
        assert!(log.contains(&line), "{line}: {log}");
    }
    let strict = format!("{} --data {bad} --max-malformed 2", own.train("strict", "csv"));
    let error = run_failing(2, &strict);
    assert!(error.ends_with("got \"2\": more than 2 malformed lines"), "{error}");
}

#[test]
fn data_and_flags_that_do_not_fit_are_refused_by_name() {
    let own = Own::new(20);
    let Own { csv, tsv, config, .. } = &own;
    let unlabelled = own.workshop.path("unlabelled.csv");
    let text = fs::read_to_string(csv).unwrap();
    fs::write(&unlabelled, text.replacen("clicked", "viewed", 1)).unwrap();
    let list = "note, price, user, item, tags, viewed";
    let no_list = own.workshop.path("no_list.toml");
    fs::write(&no_list, preset::criteo(ArchKind::Dcn, 4, 50).to_toml()).unwrap();
    let train = |data: &str, fields: &str| {
        let models = &own.workshop.models;
        format!("train --model-config {config} --models {models} --name m --data {data} {fields}")
    };
    for (line, words) in [
        (
            train(&unlabelled, "--format csv --label clicked"),
            format!("header: labels are needed, but there is no column \"clicked\" (--label), only {list}"),
        ),
        (train(csv, "--format csv"), "labels are needed, but there is no column \"label\"".into()),
        (
            train(csv, "--format csv --label user"),
            "\"user\" of the schema is not a column, expected one of note, price, item, tags".into(),
        ),
        (
            train(tsv, "--format tsv --columns label,user,item,_,cost,tags"),
            "--columns: \"price\" of the schema is not a column, expected one of user, item".into(),
        ),
        (
            train(tsv, "--format tsv --columns label,user,item,price,tags"),
            "expected 5 fields with the label, got 6".into(),
        ),
        (
            train(tsv, "--format tsv --columns label,user,user"),
            "--columns: column \"user\" occurs twice".into(),
        ),
        (
            train(tsv, "--format tsv --columns label,,user"),
            "--columns: name 2 is empty; the name of a field that is not read is _".into(),
        ),
        (train(tsv, "--format tsv --columns user,item,price,tags"), "--columns: labels are needed".into()),
        (train(csv, "--format csv --label _"), "--label: expected the name of a column, got \"_\"".into()),
        (
            format!("plan --model-config {no_list} --format criteo-tsv --data {tsv} --separator |"),
            "--separator: the schema has no feature with several ids".into(),
        ),
        (
            format!("plan --model-config {config} --format trace --data {tsv} --label x"),
            "--label: not used by the format trace".into(),
        ),
        (
            format!("plan --model-config {config} --format synthetic --data rows=9 --columns a"),
            "--columns: not used by the format synthetic".into(),
        ),
    ] {
        let error = run_failing(2, &line);
        assert!(error.contains(&words), "{line}: {error}");
    }
}

#[test]
fn a_run_continues_only_with_the_same_columns() {
    let own = Own::new(300);
    let line = format!("{} --data {}", own.train("m", &format!("tsv {COLUMNS}")), own.tsv);
    run_json(&line);
    run_json(&format!("{line} --resume --epochs 2"));
    let error = run_failing(2, &format!("{} --resume", line.replace(",item,_", ",item,other")));
    assert!(error.contains("is of another run: --columns: expected [\"clicked\", "), "{error}");
    let error = run_failing(2, &format!("{} --resume", line.replace(" --separator |", "")));
    assert!(error.contains("is of another run: --separator: expected '|'"), "{error}");
}

#[test]
fn a_signal_ends_training_that_waits_for_a_header() {
    let own = Own::new(1);
    let bad = own.workshop.path("bad.csv");
    fs::write(&bad, format!("{HEADER}\nnot a sample\n")).unwrap();
    let mut child = flechette()
        .args(format!("{} --data {bad} -", own.train("m", "csv")).split_whitespace())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(HEADER.as_bytes()).unwrap();
    interrupt_after_a_skipped_line(&mut child);
    drop(stdin);
}

#[test]
fn init_refuses_columns_that_do_not_exist() {
    let own = Own::new(3);
    let (csv, empty) = (&own.csv, own.workshop.path("empty.csv"));
    fs::write(&empty, "").unwrap();
    let plain = "--arch dlrm --dim 4 --rows 9";
    let exist = "is not a column, expected one of note, price, user, item, tags, clicked";
    for (flags, words) in [
        (
            "--dataset csv".to_owned(),
            "--dataset csv: the columns are needed: --data FILE or --columns".to_owned(),
        ),
        (format!("--dataset csv --data {csv}"), format!("--label: \"label\" {exist}")),
        (
            format!("--dataset csv --data {csv} --label clicked --dense cost"),
            format!("--dense: \"cost\" {exist}"),
        ),
        (format!("--dataset csv --data {csv} --label clicked --skip a,b"), format!("--skip: \"a\" {exist}")),
        (
            format!("--dataset csv --data {csv} --label clicked --dense price --skip price"),
            "--skip: \"price\" is also in --dense".into(),
        ),
        (
            format!("--dataset csv --data {csv} --label clicked --dense clicked"),
            "--dense: \"clicked\" is the label".into(),
        ),
        (
            "--dataset csv --columns label,a --dense a".to_owned(),
            "features: at least one is needed, got none".into(),
        ),
        ("--dataset tsv --columns label,a,a".to_owned(), "--columns: column \"a\" occurs twice".into()),
        (
            format!("--dataset tsv --data {} --columns label,a", own.tsv),
            format!("--columns: 2 fields are named, but line 1 of {} has 6", own.tsv),
        ),
        (format!("--dataset csv --data {empty}"), "header: the file is empty".into()),
        ("--dataset criteo --label x".to_owned(), "--label: only for --dataset csv and tsv".into()),
        (
            "--dataset criteo --dense 3".to_owned(),
            "--dense: only for --dataset csv, tsv and synthetic".into(),
        ),
        (
            "--dataset synthetic --dense x".to_owned(),
            "--dense: expected a whole number from 0 to 10000".into(),
        ),
        (
            "--dataset csv --columns label,a.b,c~d".to_owned(),
            "features[1].name: \"c~d\" cannot be a file name".into(),
        ),
    ] {
        let error = run_failing(2, &format!("init {flags} {plain}"));
        assert!(error.contains(&words), "{flags}: {error}");
    }
    // A column without a name, as that of an index, is no feature.
    fs::write(&empty, ",label,a\n").unwrap();
    let schema = Schema::parse(&init_toml(&format!("--dataset csv --data {empty} {plain}"))).unwrap();
    let columns = OwnColumns { features: vec!["a".to_owned()], ..OwnColumns::default() };
    assert_eq!(schema, preset::own(ArchKind::Dlrm, 4, 9, columns));
}

/// All samples of a file, and their labels.
fn read(path: &Path, format: Format, fields: FieldOptions, schema: &Schema) -> (Batch, Vec<f32>) {
    let options = ReadOptions { labels: Labels::Required, fields, ..ReadOptions::default() };
    let mut reader = open(format, &[path.to_owned()], schema, options).unwrap();
    let (mut raw, mut part) = (RawBatch::default(), Batch::default());
    let (mut batch, mut labels) = (Batch::empty(schema.features.len()), Vec::new());
    while reader.read(7, &mut raw).unwrap() > 0 {
        schema.encode(&raw, &mut part).unwrap();
        batch.append(&part);
        labels.extend(raw.labels.iter().flatten());
    }
    assert_eq!(reader.skipped(), 0);
    (batch, labels)
}

proptest! {
    /// The fields of Criteo's lines, in any order, are the same samples in every format.
    #[test]
    fn the_format_of_a_file_does_not_change_its_samples(
        rows in prop::collection::vec(prop::collection::vec("[a-z,\" |]{0,6}", 26), 1..12),
        numbers in prop::collection::vec(-99..999i32, 13),
        order in Just((0..40usize).collect::<Vec<_>>()).prop_shuffle(),
        label in "[a-z]{1,5}",
    ) {
        let dir = tempfile::tempdir().unwrap();
        let schema = preset::criteo(ArchKind::Dcn, 4, 1000);
        let names: Vec<String> = [label.clone()].into_iter()
            .chain((1..=13).map(|i| format!("I{i}")))
            .chain((1..=26).map(|i| format!("C{i}")))
            .collect();
        let lines: Vec<Vec<String>> = rows.iter().enumerate().map(|(r, texts)| {
            let numbers = numbers.iter().map(|n| (n + r as i32).to_string());
            [(r % 2).to_string()].into_iter().chain(numbers).chain(texts.iter().cloned()).collect()
        }).collect();
        let permuted = |line: &[String]| order.iter().map(|&i| line[i].clone()).collect::<Vec<_>>();
        let file = |name: &str, lines: Vec<String>| -> PathBuf {
            let path = dir.path().join(name);
            fs::write(&path, lines.join("\n")).unwrap();
            path
        };
        let criteo = file("criteo", lines.iter().map(|line| line.join("\t")).collect());
        let expected = read(&criteo, Format::CriteoTsv, FieldOptions::default(), &schema);
        prop_assert_eq!(expected.1.len(), rows.len());

        let quote = |(i, text): (usize, String)| match i % 3 == 0 || text.contains(['"', ',']) {
            true => quoted(&text),
            false => text,
        };
        let csv_line = |line: &[String]| {
            permuted(line).into_iter().enumerate().map(quote).collect::<Vec<_>>().join(",")
        };
        let csv = file("csv", [&names].into_iter().chain(&lines).map(|line| csv_line(line)).collect());
        let fields = FieldOptions { label: Some(label), ..FieldOptions::default() };
        prop_assert_eq!(&read(&csv, Format::Csv, fields.clone(), &schema), &expected);

        let tsv = file("tsv", lines.iter().map(|line| permuted(line).join("\t")).collect());
        let fields = FieldOptions { columns: Some(permuted(&names)), ..fields };
        prop_assert_eq!(&read(&tsv, Format::Tsv, fields, &schema), &expected);
    }
}
