//! `flechette plan --counts-bytes` as a program, on click logs and access traces. Counts are exact while all
//! rows fit. When they do not, the program stays within the given memory, and counts are exact up to the
//! floor.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind, SyntheticShape};
use flechette::types::{Batch, RawBatch};
use serde_json::{Value, json};

use crate::files::{Counts, recording_block, recording_header};
use crate::program::{Workshop, run, run_failing, run_json, run_measured};

/// Memory of the program in addition to `--counts-bytes`, according to docs/cache.md.
const EXTRA: u64 = 24 << 20;
const LIMIT: u64 = 2 << 20;
/// Bytes of a counted row.
const ROW: u64 = 24;

/// Skewed data with many times more distinct rows than fit into the limit.
struct Skewed {
    dir: tempfile::TempDir,
    schema: Schema,
    config: String,
}

impl Skewed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let shape = SyntheticShape { tables: 4, rows: 3_000_000, dense: 0, multi_hot: None };
        let schema = preset::synthetic(ArchKind::Dcn, 4, shape);
        let config = dir.path().join("model.toml").to_str().unwrap().to_owned();
        fs::write(&config, schema.to_toml()).unwrap();
        Self { dir, schema, config }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Exact counts, computed in a hash map.
    fn exact(&self, data: &str) -> HashMap<(usize, u64), u64> {
        let files = [PathBuf::from(data)];
        let mut reader =
            dataset::open(Format::Synthetic, &files, &self.schema, ReadOptions::default()).unwrap();
        let (mut raw, mut batch, mut counts) = (RawBatch::default(), Batch::default(), HashMap::new());
        while reader.read(10_000, &mut raw).unwrap() > 0 {
            self.schema.encode(&raw, &mut batch).unwrap();
            for (feature, column) in self.schema.features.iter().zip(&batch.features) {
                let table = self.schema.tables.iter().position(|t| t.name == feature.table).unwrap();
                column.ids.iter().for_each(|&id| *counts.entry((table, id)).or_default() += 1);
            }
        }
        counts
    }
}

#[test]
fn rows_that_do_not_fit_are_counted_within_the_given_memory_and_the_hottest_are_found() {
    let skewed = Skewed::new();
    let (config, file) = (&skewed.config, skewed.path("counts"));
    let line = |samples: u64| {
        format!(
            "plan --model-config {config} --format synthetic --data rows={samples},skew=0.9 --counts {file} \
             --counts-bytes 2Mi --json"
        )
    };
    let (short, long) = (run_measured(&line(40_000)).peak, run_measured(&line(900_000)));
    let json: Value = serde_json::from_str(long.stdout.lines().last().unwrap()).unwrap();
    let long = long.peak;
    let exact = skewed.exact("rows=900000,skew=0.9");
    let would_take = exact.len() as u64 * ROW;
    eprintln!("peak memory: {short} bytes short, {long} long; {would_take} bytes of rows, {json}");
    assert!(would_take > LIMIT + EXTRA, "{would_take} bytes of rows");
    assert!(long <= LIMIT + EXTRA, "{long} bytes");
    assert!(long <= short + (2 << 20), "{long} bytes, {short} of a small part of the data");

    let ranked = Counts::read(Path::new(&file));
    let keys: Vec<_> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["accesses", "exact", "floor", "ids"]);
    assert_eq!((&json["accesses"], &json["exact"]), (&json!(3_600_000), &json!(false)));
    assert_eq!((&json["ids"], &json["floor"]), (&json!(ranked.hottest().len()), &json!(ranked.floor)));
    check(&ranked, &exact);
}

/// Compares counts with exact counts: they must be within their bounds and contain the hottest rows.
fn check(ranked: &Counts, exact: &HashMap<(usize, u64), u64>) {
    let hottest = ranked.hottest();
    assert!(hottest.len() as u64 <= LIMIT / ROW);
    let held: HashMap<_, _> = hottest.iter().map(|r| ((r.table, r.row), r.count)).collect();
    for (row, &accesses) in exact {
        let count = held.get(row).copied();
        let in_bounds =
            count.map_or(accesses <= ranked.floor, |c| (accesses..=accesses + ranked.floor).contains(&c));
        assert!(in_bounds, "{row:?}: {accesses} accesses, counted {count:?}, floor {}", ranked.floor);
    }
    let accesses: u64 = exact.values().sum();
    assert!(ranked.floor * (LIMIT / ROW).div_ceil(2) <= accesses, "floor {}", ranked.floor);
    // The order of the hottest rows is correct, except for rows whose counts differ by at most the floor.
    let mut truth: Vec<u64> = exact.values().copied().collect();
    truth.sort_unstable_by(|a, b| b.cmp(a));
    assert!(truth[999] > 3 * ranked.floor, "the thousandth row has {}, floor {}", truth[999], ranked.floor);
    for (place, row) in hottest[..1000].iter().enumerate() {
        let (got, wanted) = (exact[&(row.table, row.row)], truth[place]);
        assert!(got + ranked.floor >= wanted, "place {place}: {got} accesses, expected {wanted}");
    }
}

#[test]
fn rows_that_fit_give_the_same_file_as_a_whole_plan_and_the_text_says_when_rows_do_not_fit() {
    let workshop = Workshop::new(700, 1);
    let config = workshop.config(ArchKind::WideDeep, 4, 300);
    let (whole, streamed) = (workshop.path("whole"), workshop.path("streamed"));
    let plan = format!("plan --model-config {config} --format criteo-tsv --data {}", workshop.train);
    let planned = run_json(&format!("{plan} --sizes 0 --counts {whole} --json"));
    let counted = run_json(&format!("{plan} --counts {streamed} --counts-bytes 1Mi --json"));
    let (accesses, ids) = (&planned["accesses"], &planned["ids"]);
    assert_eq!(counted, json!({ "accesses": accesses, "ids": ids, "floor": 0, "exact": true }));
    assert_eq!(fs::read(&whole).unwrap(), fs::read(&streamed).unwrap());

    let text = |bytes: &str| {
        let output = run(&format!("{plan} --counts {streamed} --counts-bytes {bytes}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(text("1Mi"), format!("700 samples, {accesses} accesses of {ids} rows of 52 tables\n"));
    assert!(text("2Ki").contains(" accesses of more rows than fit: "));
    assert!(Counts::read(Path::new(&streamed)).floor > 0);
}

#[test]
fn access_traces_give_the_same_counts_file_with_and_without_a_limit() {
    let skewed = Skewed::new();
    let recording = skewed.path("recording");
    let mut file = fs::File::create(&recording).unwrap();
    let tables = skewed.schema.tables.iter().map(|table| (table.name.as_str(), table.rows));
    file.write_all(&recording_header(0.5, tables)).unwrap();
    for block in 0..20u64 {
        let accesses: Vec<_> = (0..1000).map(|n| (n % 4, n * n % (50 + block))).collect();
        file.write_all(&recording_block(&accesses)).unwrap();
    }
    drop(file);
    let (whole, streamed) = (skewed.path("whole"), skewed.path("streamed"));
    let plan = format!("plan --model-config {} --format trace --data {recording} {recording}", skewed.config);
    let planned = run_json(&format!("{plan} --sizes 0 --counts {whole} --json"));
    let counted = run_json(&format!("{plan} --counts {streamed} --counts-bytes 64K --json"));
    assert_eq!(counted["accesses"], 40_000);
    assert_eq!(counted["ids"], planned["ids"]);
    assert_eq!(fs::read(&whole).unwrap(), fs::read(&streamed).unwrap());
    let output = run(&format!("{plan} --counts {streamed} --counts-bytes 64K"));
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("a sample of 50 % of the rows\n"));
}

#[test]
fn flags_that_need_a_simulation_and_invalid_limits_are_refused_by_name() {
    let workshop = Workshop::new(10, 1);
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    let (train, counts) = (&workshop.train, workshop.path("counts"));
    let plan = |format: &str, data: &str, flags: &str| {
        let data = format!("--format {format} --data {data}");
        run_failing(2, &format!("plan --model-config {config} {data} {flags}"))
    };
    let with = |flags: &str| plan("criteo-tsv", train, &format!("--counts-bytes 1Mi {flags}"));
    for (flags, named) in [
        (format!("--counts {counts} --sizes 0.1"), "--sizes"),
        (format!("--counts {counts} --plot plan.svg"), "--plot"),
    ] {
        let error = with(&flags);
        assert!(error.contains("--counts-bytes") && error.contains(named), "{error}");
    }
    // clap writes the missing flag on a line of its own.
    let line = format!("plan --model-config {config} --format criteo-tsv --data {train} --counts-bytes 1Mi");
    let output = run(&line);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--counts <FILE>"));
    for bytes in ["1023", "0", "some", "-1", "1X"] {
        let error = plan("criteo-tsv", train, &format!("--counts {counts} --counts-bytes={bytes}"));
        assert!(error.contains("--counts-bytes") && error.contains("Ti, at least 1024"), "{error}");
    }
    let empty = workshop.path("empty.tsv");
    fs::write(&empty, "").unwrap();
    let error = plan("criteo-tsv", &empty, &format!("--counts {counts} --counts-bytes 1Mi"));
    assert!(error.contains("--data: no accesses"), "{error}");
    assert!(!Path::new(&counts).exists());
}
