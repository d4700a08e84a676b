//! How `train` refuses wrong input: with exit code 2 and one line that names the input, if possible before it
//! trains. A version that is already written stays.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use flechette::schema::preset::{self, ArchKind};
use flechette::types::Version;

use crate::program::{Workshop, flechette, run, run_failing, run_json};

/// The parts of a `train` command line.
struct Line<'a> {
    config: &'a str,
    data: &'a str,
    name: &'a str,
    more: &'a str,
}

impl Line<'_> {
    fn text(&self, models: &str) -> String {
        let Self { config, data, name, more } = self;
        format!(
            "train --model-config {config} --format criteo-tsv --data {data} --models {models} --name {name} \
             {more}"
        )
    }
}

/// Valid data and a valid schema.
fn workshop() -> (Workshop, String) {
    let workshop = Workshop::new(300, 50);
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    (workshop, config)
}

/// The training file, compressed with gzip and with zstd, and each cut to its first half.
fn truncated(workshop: &Workshop) -> [String; 2] {
    let text = fs::read(&workshop.train).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(&text[..], ruzstd::encoding::CompressionLevel::Fastest);
    [("half.gz", gzip), ("half.zst", zstd)].map(|(name, bytes)| {
        fs::write(workshop.path(name), &bytes[..bytes.len() / 2]).unwrap();
        workshop.path(name)
    })
}

#[test]
fn data_that_cannot_be_trained_on_is_an_input_error_and_only_what_was_trained_before_is_written() {
    let (workshop, config) = workshop();
    let train = fs::read_to_string(&workshop.train).unwrap();
    let [gzip, zstd] = truncated(&workshop);
    let file = |name: &str, text: String| {
        fs::write(workshop.path(name), text).unwrap();
        workshop.path(name)
    };
    let broken = file("broken.tsv", train.clone() + &"not a sample\n".repeat(200));
    let short = train.lines().map(|line| line.replacen('\t', " ", 1) + "\n").collect();
    let short = file("short.tsv", short);
    let unlabelled = train.lines().map(|line| line.split_once('\t').unwrap().1.to_owned() + "\n").collect();
    let unlabelled = file("unlabelled.tsv", unlabelled);
    let schema = preset::criteo(ArchKind::Dlrm, 4, 100).to_toml();
    let (before, hashed) = schema.split_at(schema.find("name = \"C7\"").unwrap());
    let (hash, after) = hashed.split_at(hashed.find("[[features]]").unwrap());
    let (hash, _) = hash.split_at(hash.find("hash").unwrap());
    let hashless = file("hashless.toml", [before, hash, "\n", after].concat());
    let good = &workshop.train;
    for (config, data, words, trains) in [
        (&config, broken.as_str(), ["broken.tsv: line 40", "more than 100 malformed"], true),
        (
            &config,
            &short,
            ["short.tsv: line 101: expected 40 fields with the label, got 39", "malformed"],
            false,
        ),
        (&config, &format!("{good} {gzip}"), ["half.gz: cannot be read after line", ""], true),
        (&config, &zstd, ["half.zst: cannot be read after line", "zstd"], false),
        (
            &config,
            &unlabelled,
            ["unlabelled.tsv: line 101: expected 40 fields with the label, got 39", ""],
            false,
        ),
        (
            &config,
            &format!("{good} {unlabelled}"),
            ["unlabelled.tsv: line 101: expected 40 fields with the label, got 39", ""],
            true,
        ),
        (&hashless, good, ["feature \"C7\"", "no hash"], false),
        (&config, &format!("{good} --data-seed 7"), ["--data-seed: used only with --shuffle", ""], false),
    ] {
        let line = Line { config, data, name: "m", more: "" }.text(&workshop.models);
        let error = run_failing(2, &line);
        assert!(words.iter().all(|words| error.contains(words)), "{words:?}: {error}");
        let model = Path::new(&workshop.models).join("m");
        assert_eq!(model.join("1").exists(), trains, "{error}");
        if trains {
            fs::remove_dir_all(model).unwrap();
        }
    }
}

#[test]
fn a_line_with_a_value_that_no_model_can_be_trained_on_is_malformed() {
    let (workshop, _) = workshop();
    let schema = preset::criteo(ArchKind::Dlrm, 4, 100).to_toml();
    assert!(schema.contains("transform = \"log1p\""));
    let (log, plain) = (workshop.path("log.toml"), workshop.path("plain.toml"));
    fs::write(&plain, schema.replace("transform = \"log1p\"", "transform = \"none\"")).unwrap();
    fs::write(&log, schema).unwrap();
    let text = fs::read_to_string(&workshop.train).unwrap();
    let mut fields: Vec<&str> = text.lines().next().unwrap().split('\t').collect();
    fields[1] = "1e30";
    let data = workshop.path("large.tsv");
    fs::write(&data, text.clone() + &fields.join("\t") + "\n").unwrap();
    let cross = workshop.path("cross.toml");
    let dcn = preset::criteo(ArchKind::Dcnv2, 4, 100).to_toml();
    fs::write(&cross, dcn.replace("transform = \"log1p\"", "transform = \"none\"")).unwrap();
    // Three cross layers raise it to its fourth power.
    let limits = [(&plain, Some("5.7e17")), (&log, None), (&cross, Some("2.7e4"))];
    for (config, limit) in limits {
        let rows = if limit.is_some() { 300 } else { 301 };
        let more = "--optimizer sgd --lr 1e-12 --json";
        let output = run(&Line { config, data: &data, name: "m", more }.text(&workshop.models));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["rows"], &report["skipped"]), (&rows.into(), &(301 - rows).into()), "{said}");
        let reason =
            |limit| format!("line 301: field 2: expected a number up to {limit} after the transform");
        assert!(limit.is_none_or(|limit| said.contains(&reason(limit))), "{said}");
    }
}

#[test]
fn a_run_without_a_sample_writes_no_version_also_if_it_may_continue() {
    let (workshop, config) = workshop();
    let (empty, models) = (workshop.path("empty"), Path::new(&workshop.models));
    fs::write(&empty, "").unwrap();
    let line =
        |data: &str, more: &str| Line { config: &config, data, name: "m", more }.text(&workshop.models);
    run_failing(2, &line(&empty, "--resume"));
    assert!(!models.join("m/1").exists());
    assert_eq!(run_json(&line(&workshop.train, "--json"))["rows"], 300);
    run_failing(2, &line(&empty, "--from latest --resume"));
    assert!(!models.join("m/2").exists());
    // A run that is complete has no news.
    let report = run_json(&line(&workshop.train, "--json --resume"));
    assert_eq!(report, serde_json::json!({ "model": "m", "version": 1, "rows": 0 }));
}

#[test]
fn wrong_flags_and_files_are_reported_before_training() {
    let (workshop, config) = workshop();
    let (good, out) = (workshop.train.as_str(), workshop.path("out"));
    let (gone, empty) = (workshop.path("gone"), workshop.path("empty"));
    fs::write(&empty, "").unwrap();
    let two = format!("{good} {gone}");
    let valid = |valid: &str, out: &str| format!("--valid {valid} --valid-out {out}");
    fs::write(&out, "as it was").unwrap();
    for (data, name, more, words) in [
        (good, "../m", valid(good, &out), "--name: model name \"../m\": starts with a dot"),
        (good, "a/m", valid(good, &out), "--name: model name \"a/m\": has a path separator"),
        (&two, "m", valid(good, &out), "gone: cannot be opened: No such file or directory (os error 2)"),
        (good, "m", valid(&gone, &out), "gone: cannot be opened: No such file or directory (os error 2)"),
        (workshop.dir.path().to_str().unwrap(), "m", String::new(), "expected a file, got a directory"),
        (good, "m", valid(good, &format!("{gone}/out")), "--valid-out: "),
        // Scores are written under a longer name first.
        (good, "m", valid(good, &workshop.path(&"x".repeat(250))), "File name too long"),
        (good, "m", valid(&workshop.valid, good), "which is read"),
        (good, "m", valid(&empty, &out), "empty: no samples"),
    ] {
        let line = Line { config: &config, data, name, more: &more }.text(&workshop.models);
        let error = run_failing(2, &line);
        assert!(error.contains(words), "{words}: {error}");
        // The models directory is created right before training.
        assert!(!Path::new(&workshop.models).exists(), "{error}");
    }
    assert_eq!(fs::read_to_string(&out).unwrap(), "as it was");
}

#[test]
fn a_failed_evaluation_keeps_the_version_and_names_it() {
    let (workshop, config) = workshop();
    let [gzip, _] = truncated(&workshop);
    let (data, more) = (workshop.train.as_str(), format!("--valid {gzip} --json"));
    let error =
        run_failing(2, &Line { config: &config, data, name: "m", more: &more }.text(&workshop.models));
    let version = Path::new(&workshop.models).join("m/1");
    assert!(error.contains(&format!("wrote {}", version.display())), "{error}");
    assert!(error.contains("half.gz: cannot be read after line"), "{error}");
    let opened = flechette::store::open(
        Path::new(&workshop.models),
        "m",
        Version(1),
        flechette::store::Purpose::Serve,
    )
    .unwrap();
    assert_eq!(opened.metadata["optimizer"], "adagrad");
}

#[test]
fn weights_that_overflowed_in_the_last_step_are_not_written() {
    let (workshop, config) = workshop();
    let more = "--optimizer sgd --lr 1e300 --batch 300";
    let line = Line { config: &config, data: &workshop.train, name: "m", more }.text(&workshop.models);
    let output = run(&line);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("is not finite after step 1") && error.contains("lr"), "{error}");
    assert!(!Path::new(&workshop.models).join("m").exists(), "{error}");
}

#[test]
fn a_failure_of_training_is_reported_although_no_further_file_comes() {
    let (workshop, config) = workshop();
    let dir = workshop.path("incoming");
    fs::create_dir(&dir).unwrap();
    fs::copy(&workshop.train, format!("{dir}/a")).unwrap();
    for flags in
        ["--scratchpad 0.5", "--publish-every 1000steps", "--scratchpad 0.5 --publish-every 1000steps"]
    {
        let line = format!(
            "train --model-config {config} --format criteo-tsv --follow {dir} --models {} --name m \
             --optimizer sgd --lr 1e20 --batch 30 {flags}",
            workshop.models
        );
        let mut command = flechette();
        let mut child = command.args(line.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() && Instant::now() < limit {
            sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{flags}: {error}");
        assert!(error.contains("loss: not finite at step"), "{flags}: {error}");
    }
}
