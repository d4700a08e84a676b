//! `flechette plan` as a program: its JSON compared with slow simulations of the same file, its other
//! outputs, its errors, and the access traces of a server.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use flechette::schema::preset::{self, ArchKind};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::files::Counts;
use crate::program::{Served, Workshop, real_part, run, run_failing, run_json};
use crate::skip::skip;

const POLICIES: [&str; 7] = ["arc", "lfu", "lru", "random", "s3fifo", "server", "wtinylfu"];

/// The accesses of a Criteo file, computed without the library: column and hashed id, in the order of the
/// file.
fn accesses(file: &str, modulus: u64) -> Vec<(usize, u64)> {
    let text = fs::read_to_string(file).unwrap();
    let ids = |line: &str| -> Vec<(usize, u64)> {
        let columns = line.split('\t').skip(14).enumerate();
        columns.map(|(c, value)| (c, xxh3_64_with_seed(value.as_bytes(), 0) % modulus)).collect()
    };
    text.lines().flat_map(ids).collect()
}

fn distinct(accesses: &[(usize, u64)]) -> usize {
    accesses.iter().collect::<std::collections::HashSet<_>>().len()
}

/// The hits of an LRU cache. It finds a victim by searching all its rows.
fn slow_lru(accesses: &[(usize, u64)], capacity: usize) -> usize {
    let mut held: HashMap<(usize, u64), usize> = HashMap::new();
    let mut hits = 0;
    for (now, access) in accesses.iter().enumerate() {
        if held.contains_key(access) {
            hits += 1;
        } else if capacity == 0 {
            continue;
        } else if held.len() == capacity {
            let oldest = *held.iter().min_by_key(|(_, at)| **at).unwrap().0;
            held.remove(&oldest);
        }
        held.insert(*access, now);
    }
    hits
}

/// The hits of the optimal cache. It finds the row with the furthest next use by searching all its rows.
fn slow_optimal(accesses: &[(usize, u64)], capacity: usize) -> usize {
    let mut next = vec![usize::MAX; accesses.len()];
    let mut seen = HashMap::new();
    for (at, access) in accesses.iter().enumerate().rev() {
        next[at] = seen.insert(*access, at).unwrap_or(usize::MAX);
    }
    // For each cached row: its next access.
    let mut held: HashMap<(usize, u64), usize> = HashMap::new();
    let mut hits = 0;
    for (at, access) in accesses.iter().enumerate() {
        if held.contains_key(access) {
            hits += 1;
        } else if capacity == 0 {
            continue;
        } else if held.len() == capacity {
            let farthest = *held.iter().max_by_key(|(_, next)| **next).unwrap().0;
            held.remove(&farthest);
        }
        held.insert(*access, next[at]);
    }
    hits
}

/// `cache.bytes` for rows of 4 elements: 22 bytes more for each row, and a tenth of the cache stays free.
fn cache_bytes(rows: usize) -> u64 {
    (rows as f64 * (16.0 + 22.0) / 0.9).ceil() as u64
}

/// From `enough` on, doubling an LRU cache gains less than 1 % of the accesses; one row less is not enough.
fn check_enough(enough: &Value, accesses: &[(usize, u64)]) {
    let rate = |rows: usize| slow_lru(accesses, rows) as f64 / accesses.len() as f64;
    let rows = enough["rows"].as_u64().unwrap() as usize;
    assert_eq!(enough["bytes"], cache_bytes(rows));
    assert!((enough["hit_rate"].as_f64().unwrap() - rate(rows)).abs() < 1e-12, "{enough}");
    assert!(rate(2 * rows) - rate(rows) < 0.01, "{enough}");
    assert!(rate(2 * (rows - 1)) - rate(rows - 1) >= 0.01, "{enough}");
}

fn rate(size: &Value, kind: &str, policy: &str) -> f64 {
    size[kind][policy].as_f64().unwrap()
}

#[test]
fn json_agrees_with_a_slow_simulation_of_the_same_file() {
    let workshop = Workshop::new(1500, 1);
    let config = workshop.config(ArchKind::Dlrm, 4, 5000);
    let accesses = accesses(&workshop.train, 5000);
    let train = &workshop.train;
    let json = run_json(&format!(
        "plan --model-config {config} --format criteo-tsv --data {train} --sizes 0.02,0.1,0,1 --json"
    ));
    let keys: Vec<_> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["accesses", "enough", "ids", "sizes", "tables"]);
    assert_eq!(json["accesses"], accesses.len());
    assert_eq!(json["ids"], distinct(&accesses));
    let of_column = |c: usize| accesses.iter().copied().filter(|a| a.0 == c).collect::<Vec<_>>();
    let columns: Vec<_> = (0..26).map(of_column).collect();
    let tables = json["tables"].as_array().unwrap();
    assert_eq!(tables.len(), columns.len());
    check_enough(&json["enough"], &accesses);
    for (i, fraction) in [0.02, 0.1, 0.0, 1.0].into_iter().enumerate() {
        let size = &json["sizes"][i];
        let share = |rows: usize| (fraction * rows as f64).floor() as usize;
        let close = |got: f64, hits: usize| (got - hits as f64 / accesses.len() as f64).abs() < 1e-12;
        let rows = share(distinct(&accesses));
        assert_eq!(size["fraction"], fraction);
        assert_eq!(size["rows"], rows);
        assert_eq!(size["bytes"], cache_bytes(rows));
        assert!(close(rate(size, "flat", "lru"), slow_lru(&accesses, rows)), "{size}");
        assert!(close(size["optimal"].as_f64().unwrap(), slow_optimal(&accesses, rows)), "{size}");
        for (column, table) in columns.iter().zip(tables) {
            let own = share(distinct(column));
            let expected = slow_lru(column, own) as f64 / column.len() as f64;
            let of_size = &table["sizes"][i];
            assert_eq!((&table["rows"], &of_size["own_cache"]), (&distinct(column).into(), &own.into()));
            assert!((of_size["per_table_lru"].as_f64().unwrap() - expected).abs() < 1e-12, "{table}");
        }
        let apart = columns.iter().map(|column| slow_lru(column, share(distinct(column)))).sum();
        assert!(close(rate(size, "per_table", "lru"), apart), "{size}");
        let apart = columns.iter().map(|column| slow_optimal(column, share(distinct(column)))).sum();
        assert!(close(rate(size, "per_table", "optimal"), apart), "{size}");
        for kind in ["flat", "per_table"] {
            let names = size[kind].as_object().unwrap().keys().filter(|name| *name != "optimal");
            assert_eq!(names.collect::<Vec<_>>(), POLICIES);
            assert!(POLICIES.iter().all(|p| (0.0..=1.0).contains(&rate(size, kind, p))), "{size}");
        }
    }
}

#[test]
fn text_counts_and_plot_are_written() {
    let workshop = Workshop::new(500, 500);
    let config = workshop.config(ArchKind::WideDeep, 4, 300);
    let (counts, plot) = (workshop.path("counts.safetensors"), workshop.path("plan.svg"));
    let (train, valid) = (&workshop.train, &workshop.valid);
    let output = run(&format!(
        "plan --model-config {config} --format criteo-tsv --data {train} {valid} --counts {counts} \
         --plot {plot}"
    ));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("1000 samples, 52000 accesses of "), "{text}");
    for words in ["cache.bytes", "wtinylfu", "more memory stops paying at"] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    assert!(text.lines().count() <= 24 && text.lines().all(|line| line.len() <= 100), "{text}");
    assert!(fs::read_to_string(&plot).unwrap().starts_with("<svg "));
    let ranked = Counts::read(Path::new(&counts));
    let both = [accesses(train, 300), accesses(valid, 300)].concat();
    for (c, name) in (0..26).map(|c| (c, format!("C{}", c + 1))) {
        let table = ranked.tables.iter().find(|table| table.name == name).unwrap();
        assert_eq!(table.counts.iter().sum::<u64>(), 1000, "{name}");
        for (&row, &count) in table.rows.iter().zip(&table.counts) {
            assert_eq!(count as usize, both.iter().filter(|a| **a == (c, row)).count(), "{name} {row}");
        }
    }
}

#[test]
fn tables_are_printed_if_they_are_asked_for() {
    let workshop = Workshop::new(500, 1);
    let config = workshop.config(ArchKind::WideDeep, 4, 300);
    let plan = format!("plan --model-config {config} --format criteo-tsv --data {}", workshop.train);
    let text = |flags: &str| String::from_utf8(run(&format!("{plan} {flags}")).stdout).unwrap();
    let tables = text("--tables");
    assert!(tables.starts_with(&text("")), "{tables}");
    // There are 26 tables, and a wide table for each. The output lists 40 of the 52 and sums up the others.
    for words in ["a cache of its own for each table", "by table at 20 % of the rows", "\nC1 ", "12 others"] {
        assert!(tables.contains(words), "{words} in\n{tables}");
    }
}

#[test]
fn replicas_suffice_for_the_wanted_scores_and_fit_the_screen() {
    let workshop = Workshop::new(1000, 1);
    let config = workshop.config(ArchKind::Dlrm, 16, 5000);
    let plan = format!("plan --model-config {config} --format criteo-tsv --data {}", workshop.train);
    let wanted = "--scores-per-s 1M --replica-scores-per-s 60_000";
    let json = run_json(&format!("{plan} {wanted} --replica-reads-per-s 500K --table-bytes 10T --json"));
    let capacity = &json["capacity"];
    assert_eq!((&capacity["scores_per_s"], &capacity["rows_per_score"]), (&1e6.into(), &26.0.into()));
    let number = |value: &Value| value.as_f64().unwrap();
    let mut before = u64::MAX;
    let [sizes, planned] = [capacity, &json].map(|of| of["sizes"].as_array().unwrap());
    assert_eq!(sizes.len(), planned.len());
    assert!(!sizes.is_empty(), "{capacity}");
    for (size, planned) in sizes.iter().zip(planned) {
        let hit_rate = rate(planned, "flat", "server");
        assert!((number(&size["hit_rate"]) - hit_rate).abs() < 1e-9, "{size}");
        // Rows of 64 bytes are in one page each.
        let reads = 26e6 * (1.0 - hit_rate);
        assert!((number(&size["disk_reads_per_s"]) / reads - 1.0).abs() < 1e-9, "{size}");
        let replicas = (reads / 5e5).ceil().max(17.0) as u64;
        assert_eq!(size["replicas"], replicas, "{size}");
        let scale = 1e13 / (26.0 * 5000.0 * 64.0);
        let cache = number(&planned["bytes"]) * scale;
        assert!((number(&size["memory_bytes"]) / (cache * replicas as f64) - 1.0).abs() < 1e-6, "{size}");
        assert!(replicas <= before);
        before = replicas;
    }
    for flags in ["", "--replica-reads-per-s 500K --table-bytes 10T"] {
        let text = String::from_utf8(run(&format!("{plan} {wanted} {flags}")).stdout).unwrap();
        assert!(text.contains("1.00 M scores/s of 26.0 rows each"), "{text}");
        assert!(text.lines().count() <= 30 && text.lines().all(|line| line.len() <= 100), "{text}");
    }
}

#[test]
fn invalid_flags_and_files_are_refused_by_name() {
    let workshop = Workshop::new(10, 1);
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    let train = &workshop.train;
    let plan = |rest: &str| run_failing(2, &format!("plan --model-config {config} {rest}"));
    let with = |flags: &str| plan(&format!("--format criteo-tsv --data {train} {flags}"));
    for sizes in ["1.5", "0.1,,0.2", "-0.1", "NaN", "some"] {
        let error = with(&format!("--sizes={sizes}"));
        assert!(error.contains("--sizes: expected fractions from 0 to 1"), "{error}");
    }
    for (flags, words) in [
        ("--scores-per-s 1M", "required arguments"),
        ("--table-bytes 1T", "required arguments"),
        ("--scores-per-s 0 --replica-scores-per-s 1", "expected a number from 0.001 to 1e18"),
        ("--scores-per-s 1M --replica-scores-per-s fast", "expected a number from 0.001 to 1e18"),
        ("--tables --counts-bytes 1Mi --counts /nowhere", "cannot be used with"),
    ] {
        let error = with(flags);
        assert!(error.contains(words), "{error}");
    }
    assert!(with("--plot plan.png").contains("--plot: expected a name that ends in .svg, got plan.png"));
    assert!(plan("--format criteo-tsv --data /nowhere").contains("/nowhere"));
    let error = plan(&format!("--format criteo --data {train}"));
    assert!(error.contains("expected criteo-tsv, avazu-csv, csv, tsv, synthetic or trace"), "{error}");
    let empty = workshop.path("empty.tsv");
    fs::write(&empty, "").unwrap();
    assert!(plan(&format!("--format criteo-tsv --data {empty}")).contains("--data: no accesses"));
    let error = plan(&format!("--format trace --data {train}"));
    assert!(error.contains("train.tsv") && error.contains("expected an access trace"), "{error}");
}

#[test]
fn a_server_records_the_accesses_of_the_file_that_it_scores() {
    let workshop = Workshop::new(300, 2000);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("dlrm.toml");
    let state = format!("{}/dlrm/state", workshop.models);
    let valid = &workshop.valid;
    let whole = run_json(&format!("plan --model-config {config} --format criteo-tsv --data {valid} --json"));

    // `record` scores all rows in one request, so the recorded accesses have the order of the file.
    let traces = record(&workshop, 1.0, &state);
    let trace = &traces[0];
    let planned = run_json(&format!("plan --model-config {config} --format trace --data {trace} --json"));
    assert_eq!(planned, whole);

    let rate = format!("--format trace --data {trace} --scores-per-s 1M --replica-scores-per-s 1K");
    let error = run_failing(2, &format!("plan --model-config {config} {rate}"));
    assert!(error.contains("--rows-per-score: expected"), "{error}");
    // A trace does not say how many rows a score looks up. With that, it leads to the replicas of its data.
    let capacity = |data: &str| {
        let wanted = "--scores-per-s 1M --replica-scores-per-s 1K --replica-reads-per-s 500K";
        let mut json = run_json(&format!("plan --model-config {config} {data} {wanted} --json"));
        json["capacity"].take()
    };
    let of_trace = capacity(&format!("--format trace --data {trace} --rows-per-score 26"));
    assert_eq!(of_trace, capacity(&format!("--format criteo-tsv --data {valid}")));
    assert!(of_trace["sizes"].as_array().is_some_and(|sizes| !sizes.is_empty()), "{of_trace}");

    // Records again after a restart, with a tenth of the rows.
    let traces = record(&workshop, 0.1, &state);
    assert_eq!(traces.len(), 2);
    let counts = workshop.path("sampled");
    let sampled = run_json(&format!(
        "plan --model-config {config} --format trace --data {} --counts {counts} --json",
        traces[1]
    ));
    let share = sampled["ids"].as_f64().unwrap() / whole["ids"].as_f64().unwrap();
    assert!((0.07..0.13).contains(&share), "{share}");
    let all = accesses(valid, 1000);
    for (c, table) in Counts::read(Path::new(&counts)).tables.iter().enumerate() {
        for (&row, &count) in table.rows.iter().zip(&table.counts) {
            assert_eq!(count as usize, all.iter().filter(|a| **a == (c, row)).count());
        }
    }

    let both = format!("--format trace --data {} {}", traces[0], traces[1]);
    let error = run_failing(2, &format!("plan --model-config {config} {both}"));
    assert!(error.contains("recorded at rate 0.1, but the files before it at 1"), "{error}");
    damaged_recordings(&workshop, trace, &whole);
}

/// Serves with recording, scores the validation rows in one request, stops, and returns all recordings.
fn record(workshop: &Workshop, rate: f64, state: &str) -> Vec<String> {
    let config = workshop.path("serve.toml");
    fs::write(&config, format!("[trace]\nrate = {rate}\n")).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    served.score("dlrm", &workshop.valid, "--batch 2000");
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    let files = fs::read_dir(state).unwrap().map(|entry| entry.unwrap().path().to_str().unwrap().to_owned());
    let mut traces: Vec<String> = files.filter(|file| file.ends_with(".fltrace")).collect();
    traces.sort();
    traces
}

fn damaged_recordings(workshop: &Workshop, trace: &str, whole: &Value) {
    let config = workshop.path("dlrm.toml");
    let bytes = fs::read(trace).unwrap();
    let damaged = workshop.path("damaged");
    let mut changed = bytes.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    fs::write(&damaged, changed).unwrap();
    let error = run_failing(2, &format!("plan --model-config {config} --format trace --data {damaged}"));
    assert!(error.contains("damaged: at byte ") && error.contains("checksum does not match"), "{error}");

    fs::write(&damaged, &bytes[..bytes.len() - 1]).unwrap();
    let line = format!("plan --model-config {config} --format trace --data {damaged} {trace} --json");
    let output = run(&line);
    assert!(output.status.success());
    let warned = String::from_utf8(output.stderr).unwrap();
    let expected = format!("{damaged}: ends within a block: ");
    assert!(warned.contains(&expected) && warned.contains(" bytes were read, the last "), "{warned}");
    let json: Value =
        serde_json::from_str(String::from_utf8(output.stdout).unwrap().lines().last().unwrap()).unwrap();
    assert!(json["accesses"].as_u64() >= whole["accesses"].as_u64());

    // If the disk is full or the server is killed, a file may be empty or have only a part of its header.
    for length in [0, 5, 30] {
        fs::write(&damaged, &bytes[..length]).unwrap();
        let line = format!("plan --model-config {config} --format trace --data {damaged} {trace} --json");
        let output = run(&line);
        let warned = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{warned}");
        let expected =
            format!("{damaged}: ends within its header, after {length} bytes: no accesses were read");
        assert!(warned.contains(&expected), "{warned}");
        let json: Value =
            serde_json::from_str(String::from_utf8(output.stdout).unwrap().lines().last().unwrap()).unwrap();
        assert_eq!(&json, whole);
    }

    let other = workshop.config(ArchKind::Dcn, 4, 77);
    let error = run_failing(2, &format!("plan --model-config {other} --format trace --data {trace}"));
    assert!(
        error.contains("recorded for table \"C1\" of 1000 rows, but the schema has \"C1\" of 77"),
        "{error}"
    );
}

#[test]
fn the_real_traces_have_the_published_hit_rates() {
    // Hit rates of LRU at 2 % and 10 % of the rows, and with room for all, as published in the data folder's
    // README.md.
    let traces = [
        ("criteo_kaggle_head10k.tsv.zst", [58.9, 71.3, 83.2]),
        ("criteo_terabyte_day0_head10k.tsv.zst", [67.2, 78.7, 87.8]),
        ("avazu_head10k.csv.zst", [82.7, 91.0, 94.7]),
    ];
    let workshop = Workshop::new(1, 1);
    // The tables have so many rows that hardly any ids share a row.
    let criteo = workshop.config(ArchKind::Dlrm, 16, 100_000_000);
    // The published Avazu figures leave out the column `hour`.
    let mut schema = preset::avazu(ArchKind::Dlrm, 16, 100_000_000);
    schema.features.retain(|feature| feature.name != "hour");
    schema.tables.retain(|table| table.name != "hour");
    let avazu = workshop.path("avazu.toml");
    fs::write(&avazu, schema.to_toml()).unwrap();
    let mut found = 0;
    for (file, wanted) in traces {
        let Some(path) = real_part(file) else { continue };
        found += 1;
        let path = path.display();
        let (config, format) =
            if file.contains("avazu") { (&avazu, "avazu-csv") } else { (&criteo, "criteo-tsv") };
        let json = run_json(&format!(
            "plan --model-config {config} --format {format} --data {path} --sizes 0.02,0.1,1 --json"
        ));
        for (i, wanted) in wanted.into_iter().enumerate() {
            let got = 100.0 * rate(&json["sizes"][i], "flat", "lru");
            assert!((got - wanted).abs() <= 0.1, "{file}: {got} for {wanted}");
        }
    }
    if found == 0 {
        skip("there is no trace");
    }
}
