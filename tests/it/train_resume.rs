//! Runs of `train` that publish versions, are killed at any instant, and continue with `--resume`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use flechette::mem::SplitMix64;
use flechette::schema::preset::ArchKind;
use serde_json::json;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::program::{
    Workshop, check_listed_versions, flechette, highest_version, kills, run, run_failing, run_json,
};

/// Kills of each kind of run in CI. With those of `serve_train`, at least 32 runs are killed.
const KILLS: usize = 4;

/// The last version of a model of the workshop.
pub fn last_version(workshop: &Workshop, name: &str) -> BTreeMap<String, u128> {
    last_version_in(&workshop.models, name)
}

/// The checksums of the files of a model's last good version, written as a full version: its rows, states,
/// dense weights and cursor. The manifest has dates and is left out.
pub fn last_version_in(models: &str, name: &str) -> BTreeMap<String, u128> {
    let output = run(&format!("versions --models {models} --name {name} --compact"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let models = Path::new(models);
    let version = models.join(name).join(highest_version(models, name).unwrap().to_string());
    let mut files = BTreeMap::new();
    for entry in walkdir::WalkDir::new(&version).into_iter().map(Result::unwrap) {
        let name = entry.path().strip_prefix(&version).unwrap().to_str().unwrap().to_owned();
        if entry.file_type().is_file() && name != "MANIFEST.json" {
            files.insert(name, xxh3_128(&fs::read(entry.path()).unwrap()));
        }
    }
    files
}

/// How long a run takes that is not killed, and its log.
fn run_whole(line: &str) -> (Duration, String) {
    let begun = Instant::now();
    let output = run(line);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{line}: {log}");
    (begun.elapsed(), log)
}

/// What a run says that does not begin again: it continues after the model's last version, or it is complete
/// with it. `None` without a version.
pub fn continuing(models: &str, name: &str) -> Option<[String; 2]> {
    let version = highest_version(Path::new(models), name)?;
    let continues = format!("the run continues model=\"{name}\" version={version} ");
    Some([continues, format!("the run is complete: {models}/{name}/{version}")])
}

/// Runs a command, and kills it after a while with a signal that it cannot catch. Returns whether it was
/// still running then.
fn run_killed(line: &str, after: Duration) -> bool {
    let mut command = flechette();
    command.args(line.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    sleep(after);
    let running = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    running
}

/// Kills runs with these flags at random instants. Each is resumed to its end, and must write the bytes of a
/// run that is not killed. The optimizers take turns.
fn resumes_after_kills(name: &str, flags: &str, optimizers: &[&str]) {
    let workshop = Workshop::new(1500, 10);
    let config = workshop.config(ArchKind::Dlrm, 4, 400);
    // Two tables are rounded.
    let mut text = fs::read_to_string(&config).unwrap();
    for element in ["f16", "int8"] {
        text = text.replacen("element = \"f32\"", &format!("element = \"{element}\""), 1);
    }
    fs::write(&config, text).unwrap();
    let (models, data) = (&workshop.models, &workshop.train);
    let line = |name: &str, optimizer: &str| {
        format!(
            "train --model-config {config} --format criteo-tsv --data {data} --models {models} --name {name} \
             --batch 32 --threads 2 {flags} --optimizer {optimizer}"
        )
    };
    lines_resume_after_kills(&workshop, name, optimizers, line);
}

/// [`resumes_after_kills`] of the command that `line` gives for the name of a model and an optimizer.
fn lines_resume_after_kills(
    workshop: &Workshop,
    seed: &str,
    optimizers: &[&str],
    line: impl Fn(&str, &str) -> String,
) {
    let whole = |optimizer: &str| {
        let whole = format!("{optimizer}-whole");
        let (took, _) = run_whole(&line(&whole, optimizer));
        let expected = last_version(workshop, &whole);
        // SGD has no state, so only the rounded tables have rows in the checkpoint.
        let states = if optimizer == "sgd" { 2 } else { 26 };
        assert!(expected.len() > 26 + states, "{expected:?}");
        (took, expected)
    };
    let wholes: Vec<_> = optimizers.iter().map(|optimizer| whole(optimizer)).collect();
    let mut random = SplitMix64::new(xxh3_64(seed.as_bytes()));
    let (mut killed, mut runs, mut continued) = (0, 0, 0);
    // All kills may come before the first version. Then more runs are killed, until one continues.
    while killed < kills(KILLS) || continued == 0 {
        assert!(
            runs < 5 * kills(KILLS),
            "{runs} runs were killed {killed} times before their end, {continued} continued"
        );
        let (optimizer, (took, expected)) = (optimizers[runs % wholes.len()], &wholes[runs % wholes.len()]);
        let name = format!("{optimizer}-{runs}");
        let line = line(&name, optimizer);
        // Two kills, and then to the end.
        for resume in ["", " --resume"] {
            let after = took.mul_f64((random.next_u64() % 1000) as f64 / 1000.0);
            killed += usize::from(run_killed(&format!("{line}{resume}"), after));
            check_listed_versions(&workshop.models, &name);
        }
        // The last version is good, because all that are listed are.
        let continuing = continuing(&workshop.models, &name);
        let (_, log) = run_whole(&format!("{line} --resume"));
        if let Some(words) = continuing {
            assert!(words.iter().any(|words| log.contains(words)), "{name} has begun again: {log}");
            continued += 1;
        }
        let found = last_version(workshop, &name);
        let differ: Vec<_> = expected.keys().filter(|file| found.get(*file) != expected.get(*file)).collect();
        assert!(found == *expected, "{name}: {differ:?}, files {} and {}", found.len(), expected.len());
        fs::remove_dir_all(Path::new(&workshop.models).join(name)).unwrap();
        runs += 1;
    }
}

#[test]
fn a_run_in_memory_that_is_killed_at_any_instant_and_resumed_writes_the_bytes_of_one_that_is_not() {
    let flags = "--publish-every 5steps --epochs 2 --shuffle 300";
    resumes_after_kills("memory", flags, &["adam", "sgd"]);
}

#[test]
fn a_run_with_a_scratchpad_that_is_killed_at_any_instant_and_resumed_writes_the_bytes_of_one_that_is_not() {
    let flags = "--publish-every 9steps --epochs 2 --shuffle 300 --scratchpad 0.3";
    resumes_after_kills("scratchpad", flags, &["adam", "adagrad"]);
}

#[test]
fn a_run_that_publishes_by_time_and_is_killed_and_resumed_writes_the_bytes_of_one_that_is_not() {
    resumes_after_kills("time", "--publish-every 20ms --lr-warmup 30", &["rowwise_adagrad"]);
}

#[test]
fn a_run_that_keeps_its_best_version_and_is_killed_and_resumed_writes_the_bytes_of_one_that_is_not() {
    let flags = "--publish-every 5steps --epochs 4 --valid-ratio 0.2 --save-best --early-stop 2 --lr 0.1";
    resumes_after_kills("best", flags, &["adagrad"]);
}

/// A model `m` of short runs.
struct Runs {
    workshop: Workshop,
    config: String,
}

impl Runs {
    fn new() -> Self {
        let workshop = Workshop::new(400, 10);
        let config = workshop.config(ArchKind::Dlrm, 4, 100);
        Self { workshop, config }
    }

    /// A run has published its last version.
    fn published() -> Self {
        let runs = Self::new();
        assert!(run(&runs.line("--publish-every 2steps")).status.success());
        runs
    }

    fn line(&self, more: &str) -> String {
        let Self { workshop: Workshop { models, train, .. }, config } = self;
        format!(
            "train --model-config {config} --format criteo-tsv --data {train} --models {models} --name m \
             {more}"
        )
    }

    fn highest(&self) -> Option<u64> {
        highest_version(Path::new(&self.workshop.models), "m")
    }
}

#[test]
fn resume_without_a_version_starts_at_the_beginning_and_after_the_last_one_does_nothing() {
    let runs = Runs::new();
    let first = run(&runs.line("--publish-every 2steps --resume"));
    let log = String::from_utf8(first.stderr).unwrap();
    assert!(first.status.success() && log.contains("has published nothing yet (no version)"), "{log}");
    let highest = runs.highest();
    let again = run(&runs.line("--publish-every 2steps --resume"));
    assert!(String::from_utf8(again.stderr).unwrap().contains("the run is complete"));
    assert_eq!(runs.highest(), highest);
}

#[test]
fn resume_of_another_run_is_refused_with_the_first_flag_that_differs() {
    let runs = Runs::published();
    for (flags, difference) in [
        ("--batch 64", "--batch: expected 128, as before, got 64"),
        ("--optimizer adam --epochs 2", "--optimizer: expected adagrad, as before, got adam"),
        ("--eps 1e-6 --epochs 2", "--eps: expected 0.0000000001, as before, got 0.000001"),
    ] {
        let refused = run_failing(2, &runs.line(&format!("--resume {flags}")));
        assert!(refused.contains(&format!("is of another run: {difference}")), "{refused}");
    }
}

#[test]
fn resume_with_another_schema_is_refused_with_the_first_difference() {
    let runs = Runs::published();
    let before = runs.highest();
    let text = fs::read_to_string(&runs.config).unwrap();
    let differing = runs.workshop.path("differing.toml");
    // Of two tables.
    fs::write(&differing, text.replacen("default = \"zeros\"", "default = \"error\"", 2)).unwrap();
    let schema = run_failing(2, &runs.line("--resume --epochs 2").replace(&runs.config, &differing));
    let expected = ": tables[\"C1\"].default: expected \"zeros\", got \"error\"";
    assert!(schema.contains("not the schema of version ") && schema.ends_with(expected), "{schema}");
    assert_eq!(runs.highest(), before, "nothing was written");
}

#[test]
fn resume_with_another_file_of_the_same_name_is_refused() {
    let runs = Runs::published();
    let (data, other) = (&runs.workshop.train, runs.workshop.path("other"));
    fs::create_dir(&other).unwrap();
    let other = Path::new(&other).join(Path::new(data).file_name().unwrap());
    fs::copy(&runs.workshop.valid, &other).unwrap();
    let same_name = runs.line("--resume").replace(data.as_str(), other.to_str().unwrap());
    let expected = "with the same beginning, as before, got another file of this name";
    let differs = run_failing(2, &same_name);
    assert!(differs.contains("--data: expected") && differs.contains(expected), "{differs}");
}

#[test]
fn resume_of_a_run_that_another_one_has_overtaken_names_its_last_version_and_the_way_out() {
    let runs = Runs::published();
    // Nothing of the run that begins at version 1 was published.
    let begun = run(&runs.line("--from 1 --resume --batch 64 --publish-every 2steps"));
    let log = String::from_utf8(begun.stderr).unwrap();
    assert!(begun.status.success() && log.contains("it starts at the beginning of its data"), "{log}");
    // Now something was, and a version of another run followed.
    run(&runs.line("--from latest --batch 32 --publish-every 9steps"));
    let between = run_failing(2, &runs.line("--from 1 --resume --batch 64"));
    assert!(between.contains(" is of this run, and continues if "), "{between}");
    assert!(between.ends_with(" moved away or removed"), "{between}");
    let without_from = run_failing(2, &runs.line("--resume --batch 64"));
    assert_eq!(without_from, between);
}

#[test]
fn no_run_writes_versions_beside_a_run_that_publishes() {
    let runs = Runs::published();
    let Runs { workshop, config } = &runs;
    let models = &workshop.models;
    let follow = workshop.path("none");
    fs::create_dir(&follow).unwrap();
    let waiting = format!(
        "train --model-config {config} --format criteo-tsv --models {models} --name m --publish-every 1s \
         --follow {follow}"
    );
    let mut publisher = flechette();
    let mut publisher = publisher.args(waiting.split_whitespace()).stderr(Stdio::null()).spawn().unwrap();
    let lock = fs::File::open(Path::new(models).join("m/state/trainer.lock")).unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    while lock.try_lock_shared().is_ok() {
        lock.unlock().unwrap();
        assert!(publisher.try_wait().unwrap().is_none() && Instant::now() < limit, "it takes no lock");
        sleep(Duration::from_millis(100));
    }
    let versions = highest_version(Path::new(models), "m");
    for line in [runs.line(""), format!("versions --models {models} --name m --compact")] {
        let refused = run_failing(1, &line);
        assert!(refused.contains("another process trains \"m\" and publishes"), "{line}: {refused}");
    }
    assert_eq!(highest_version(Path::new(models), "m"), versions);
    // A run finds the lock before it reads the last version, which cannot be read now.
    let latest = highest_version(Path::new(models), "m").unwrap();
    fs::write(Path::new(models).join(format!("m/{latest}/MANIFEST.json")), "{").unwrap();
    for flags in ["--from latest", "--resume"] {
        let held = run_failing(1, &runs.line(&format!("--publish-every 2steps {flags}")));
        assert!(held.contains("another process trains \"m\" and publishes"), "{flags}: {held}");
    }
    publisher.kill().unwrap();
    publisher.wait().unwrap();
}

#[test]
fn an_old_version_is_written_again_and_others_are_removed_by_commands() {
    let runs = Runs::published();
    let models = &runs.workshop.models;
    let versions = |flags: &str| {
        let output = run(&format!("versions --models {models} --name m {flags}"));
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{flags}: {log}");
        log
    };
    let listed =
        || run_json(&format!("versions --models {models} --name m --json"))["models"][0]["versions"].clone();
    let last = highest_version(Path::new(models), "m").unwrap();
    let old = listed().as_array().unwrap().iter().position(|version| version["kind"] == "delta").unwrap();
    let (old, next) = (listed()[old].clone(), last + 1);
    assert!(
        versions(&format!("--compact --version {}", old["version"])).contains(&format!("m/{next}, with"))
    );
    let written = listed().as_array().unwrap().last().unwrap().clone();
    assert_eq!((&written["version"], &written["kind"]), (&json!(next), &json!("full")));
    assert_eq!((&written["step"], &written["good"]), (&old["step"], &json!(true)));
    // The newest version is the only full one that stays.
    assert!(versions("--keep 1").contains("removed "));
    assert_eq!(listed().as_array().unwrap().len(), 1);
    assert!(versions("--keep 1").contains("no version was removed"));
    // Nothing is removed below a version that cannot be opened.
    assert!(versions(&format!("--compact --version {next}")).contains("is full"));
    assert!(run(&runs.line("")).status.success());
    let damaged = Path::new(models).join(format!("m/{}/dense.safetensors", next + 1));
    fs::write(damaged, "").unwrap();
    let refused = run_failing(2, &format!("versions --models {models} --name m --keep 1"));
    assert!(refused.contains("--keep: ") && refused.contains("dense.safetensors"), "{refused}");
    assert_eq!(listed().as_array().unwrap().len(), 2);
    let unnamed = run(&format!("versions --models {models} --keep 1"));
    assert!(unnamed.status.code() == Some(2) && String::from_utf8_lossy(&unnamed.stderr).contains("--name"));
    run_failing(2, &format!("versions --models {models} --name other --keep 1"));
    assert!(!Path::new(models).join("other").exists());
}

#[test]
fn a_version_that_fails_the_gate_is_not_published() {
    let workshop = Workshop::new(400, 10);
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    let (models, data) = (&workshop.models, &workshop.train);
    let line = |gate: &str| {
        format!(
            "train --model-config {config} --format criteo-tsv --data {data} --models {models} --name m \
             --publish-every 1steps --gate-samples 200 --publish-gate {gate}"
        )
    };
    let refused = run_failing(1, &line("logloss=0.001"));
    assert!(
        refused.contains("log loss of the last 200 samples: expected at most 0.001, got 0."),
        "{refused}"
    );
    let versions = run(&format!("versions --models {models} --name m"));
    assert_eq!(String::from_utf8(versions.stdout).unwrap().lines().count(), 2, "a header and no version");
    assert!(run(&line("logloss=5")).status.success());
}

#[test]
fn a_run_over_several_shuffled_files_that_is_killed_continues_to_the_same_bytes() {
    let workshop = Workshop::new(1500, 10);
    let config = workshop.config(ArchKind::Dlrm, 4, 400);
    let text = fs::read_to_string(&workshop.train).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    // Files, blocks and batches end at different samples.
    let file = |(n, lines): (usize, &[&str])| {
        let path = workshop.path(&format!("part-{n}.tsv"));
        fs::write(&path, lines.concat()).unwrap();
        path
    };
    let data = lines.chunks(430).enumerate().map(file).collect::<Vec<_>>().join(" ");
    let models = &workshop.models;
    let line = |name: &str, optimizer: &str| {
        format!(
            "train --model-config {config} --format criteo-tsv --data {data} --models {models} \
             --name {name} --batch 32 --threads 2 --publish-every 5steps --epochs 2 --shuffle 300 \
             --valid-ratio 0.1 --optimizer {optimizer}"
        )
    };
    lines_resume_after_kills(&workshop, "files", &["adagrad"], line);
}
