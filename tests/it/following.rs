//! Training on a stream of files in one process, while another process serves what is published.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;

use crate::program::{
    Served, Workshop, flechette, highest_version, manifest, real, run, run_failing, run_json,
};
use crate::switching::wait;
use crate::train_data::interrupting::signal;
use crate::train_resume::last_version;

const PARTS: usize = 10;

/// The rows and dense weights of a model's last version with their states, without the cursor.
fn trained(workshop: &Workshop, name: &str) -> BTreeMap<String, u128> {
    let mut files = last_version(workshop, name);
    files.remove("checkpoint/cursor.json").expect("every version has a cursor");
    files
}

/// Gives lines in ten files, one after the other, to a trainer that follows a directory, and scores rows with
/// a server meanwhile. The last version has the bytes of one run over all lines.
fn follow_in_ten_files(workshop: &Workshop, config: &str, lines: &[&str], flags: &str) {
    let models = &workshop.models;
    let whole = workshop.path("whole.tsv");
    fs::write(&whole, lines.concat()).unwrap();
    let common = format!("--model-config {config} --format criteo-tsv --models {models} --batch 64");
    run_json(&format!("train {common} --data {whole} --name whole --json"));

    let dir = workshop.path("stream");
    fs::create_dir(&dir).unwrap();
    let line = format!(
        "train {common} --follow {dir} --follow-until part-9 --name live --publish-every 100ms {flags}"
    );
    let mut trainer = flechette();
    let mut trainer = trainer.args(line.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(trainer.stderr.take().unwrap());
    let log = std::thread::spawn(move || log.lines().map_while(Result::ok).collect::<Vec<_>>());

    let newest = || highest_version(Path::new(models), "live");
    let mut served: Option<Served> = None;
    let mut versions = Vec::new();
    for (n, part) in lines.chunks(lines.len().div_ceil(PARTS)).enumerate() {
        let temporary = format!("{dir}/.part-{n}");
        fs::write(&temporary, part.concat()).unwrap();
        fs::rename(temporary, format!("{dir}/part-{n}")).unwrap();
        // Every part is published, also while the trainer waits for the next one.
        wait("a version of the part", || newest() > versions.last().copied());
        let served = served.get_or_insert_with(|| {
            // The server loads the model `whole` too.
            Served::start(models, "--cache-mode on --cache-fraction 0.2")
        });
        wait("the version is served", || {
            let now = served.metric("flechette_serving_version", &["model=\"live\""]) as u64;
            now > versions.last().copied().unwrap_or(0)
        });
        let scored = served.score("live", &workshop.valid, "");
        assert_eq!(scored["rows"], 50);
        versions.push(scored["version"].as_u64().unwrap());
    }
    let mut rest = String::new();
    trainer.stdout.take().map(|mut out| out.read_to_string(&mut rest));
    assert!(trainer.wait().unwrap().success());
    let log = log.join().unwrap();
    assert!(versions.windows(2).all(|pair| pair[0] < pair[1]), "{versions:?}");
    let (last, served) = (newest().unwrap(), served.unwrap());
    wait("the last version is served", || {
        served.metric("flechette_serving_version", &["model=\"live\""]) == last as f64
    });
    let answered = |code| served.metric("flechette_requests_total", &["model=\"live\"", code]);
    assert!(answered("code=\"OK\"") > 0.0);
    for code in ["code=\"DEADLINE_EXCEEDED\"", "code=\"INTERNAL\"", "code=\"UNAVAILABLE\""] {
        assert_eq!(answered(code), 0.0, "{code}");
    }
    for n in 0..PARTS {
        let wanted = format!("part-{n}: ");
        let found = log.iter().find(|line| line.starts_with(&wanted));
        assert!(found.is_some_and(|line| line.contains("before training on them: AUC 0.")), "{log:#?}");
    }
    let (live, whole) = (trained(workshop, "live"), trained(workshop, "whole"));
    let differ: Vec<_> = whole.keys().filter(|file| live.get(*file) != whole.get(*file)).collect();
    assert!(live == whole, "{differ:?}");
    // There is nothing to continue with.
    let last = newest();
    let output = run(&format!("{line} --resume"));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && log.contains("no new samples since "), "{log}");
    assert_eq!(newest(), last);
}

fn follow_generated_data(flags: &str) {
    let workshop = Workshop::new(1500, 50);
    let config = workshop.config(ArchKind::Dlrm, 8, 1000);
    let text = fs::read_to_string(&workshop.train).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    follow_in_ten_files(&workshop, &config, &lines, flags);
}

#[test]
fn a_followed_stream_is_served_while_it_is_trained_and_ends_with_the_bytes_of_one_run() {
    follow_generated_data("");
}

#[test]
fn a_stream_that_is_followed_with_a_scratchpad_ends_with_the_bytes_of_one_run() {
    follow_generated_data("--scratchpad 0.4");
}

#[test]
fn the_criteo_sample_in_ten_files_is_served_while_it_is_trained_and_ends_with_the_bytes_of_one_run() {
    let Some(sample) = real("criteo_kaggle_train.tsv.zst") else { return };
    let mut text = String::new();
    let mut file = fs::File::open(sample).unwrap();
    ruzstd::decoding::StreamingDecoder::new(&mut file).unwrap().read_to_string(&mut text).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    assert!(lines.len() > 15_000);
    let workshop = Workshop::new(10, 50);
    let config = workshop.config(ArchKind::Dlrm, 8, 10_000);
    follow_in_ten_files(&workshop, &config, &lines, "");
}

/// A directory to follow, the command that follows it until `zz`, and the lines of the training data.
fn incoming(workshop: &Workshop) -> (String, String, Vec<String>) {
    let (dir, models) = (workshop.path("incoming"), &workshop.models);
    fs::create_dir(&dir).unwrap();
    let config = workshop.config(ArchKind::Dlrm, 4, 300);
    let line = format!(
        "train --model-config {config} --format criteo-tsv --models {models} --batch 100 --threads 1 \
         --follow {dir} --follow-until zz"
    );
    let text = fs::read_to_string(&workshop.train).unwrap();
    (dir, line, text.split_inclusive('\n').map(str::to_owned).collect())
}

/// A command that runs, with the lines of its log. It is killed when dropped, so a failed test leaves none.
pub struct Running {
    child: Child,
    pub log: Receiver<String>,
}

impl Running {
    fn start(line: &str) -> Self {
        Self::spawn(flechette().args(line.split_whitespace()))
    }

    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, log) = channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, log }
    }

    /// Interrupts the command. It must end with the code of a signal. Returns the rest of its log.
    pub fn interrupt(mut self) -> Vec<String> {
        signal(&self.child, "-INT");
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(60) {
            sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let (code, log) = (self.child.wait().unwrap().code(), self.log.iter().collect::<Vec<_>>());
        assert_eq!(code, Some(130), "{log:#?}");
        log
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Trains until a version was written, and interrupts the run.
fn train_a_version(workshop: &Workshop, line: &str, name: &str) {
    let running = Running::start(&format!("{line} --name {name} --publish-every 1steps"));
    wait("a version", || highest_version(Path::new(&workshop.models), name).is_some());
    running.interrupt();
}

#[test]
fn a_followed_file_that_was_cut_is_named_and_the_samples_of_the_next_file_are_not_skipped_instead() {
    let workshop = Workshop::new(1000, 10);
    let (dir, line, lines) = incoming(&workshop);
    fs::write(format!("{dir}/a"), lines[..400].concat()).unwrap();
    train_a_version(&workshop, &line, "m");
    fs::write(format!("{dir}/a"), "").unwrap();
    fs::write(format!("{dir}/b"), lines[400..].concat()).unwrap();
    fs::write(format!("{dir}/zz"), "").unwrap();
    let before = highest_version(Path::new(&workshop.models), "m");
    let error = run_failing(2, &format!("{line} --name m --resume"));
    assert!(
        error.contains("incoming/a: has 0 samples, but ") && error.contains("00 were trained"),
        "{error}"
    );
    assert_eq!(highest_version(Path::new(&workshop.models), "m"), before);
}

#[test]
fn a_followed_file_that_was_trained_may_be_deleted_and_the_bytes_are_those_of_one_run() {
    let workshop = Workshop::new(1000, 10);
    let (dir, line, lines) = incoming(&workshop);
    let [a, b] =
        [("a", &lines[..400]), ("b", &lines[400..])].map(|(name, l)| (format!("{dir}/{name}"), l.concat()));
    fs::write(&a.0, &a.1).unwrap();
    let running = Running::start(&format!("{line} --name m --publish-every 100ms"));
    // The cursor of the version says that the file is complete, although no other one has begun.
    let is_complete = || {
        let models = Path::new(&workshop.models);
        let version = highest_version(models, "m")?.to_string();
        let cursor = fs::read(models.join("m").join(version).join("checkpoint/cursor.json")).ok()?;
        let cursor: serde_json::Value = serde_json::from_slice(&cursor).ok()?;
        (cursor["samples"] == 400).then(|| cursor["file"]["complete"] == true)
    };
    wait("a version of the file", || is_complete().is_some());
    assert_eq!(is_complete(), Some(true));
    running.interrupt();
    fs::remove_file(&a.0).unwrap();
    fs::write(&b.0, &b.1).unwrap();
    fs::write(format!("{dir}/zz"), "").unwrap();
    let output = run(&format!("{line} --name m --resume"));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && log.contains("a: is gone, and all of it was trained on"), "{log}");
    fs::write(&a.0, &a.1).unwrap();
    let whole = run(&format!("{line} --name whole"));
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    // With their cursors.
    assert!(last_version(&workshop, "m") == last_version(&workshop, "whole"));
}

#[test]
fn a_followed_directory_with_pipes_and_links_is_trained_and_may_be_away_for_a_while() {
    let workshop = Workshop::new(1000, 10);
    let (dir, line, lines) = incoming(&workshop);
    assert!(Command::new("mkfifo").arg(format!("{dir}/a-pipe")).status().unwrap().success());
    symlink("nothing", format!("{dir}/b-link")).unwrap();
    symlink(&workshop.models, format!("{dir}/c-link")).unwrap();
    fs::write(workshop.path("elsewhere"), lines[..400].concat()).unwrap();
    symlink(workshop.path("elsewhere"), format!("{dir}/d")).unwrap();
    let running = Running::start(&format!("{line} --name m --publish-every 100ms"));
    let samples = |wanted: u64| {
        let version = highest_version(Path::new(&workshop.models), "m");
        version.is_some_and(|last| manifest(&workshop.models, "m", last)["training"]["samples"] == wanted)
    };
    wait("the file is trained", || samples(400));
    let away = workshop.path("away");
    fs::rename(&dir, &away).unwrap();
    let mut report = Vec::new();
    while !report.iter().any(|line: &String| line.contains("training waits until it can be read again")) {
        report.push(running.log.recv_timeout(Duration::from_secs(60)).unwrap());
    }
    fs::write(format!("{away}/e"), lines[400..].concat()).unwrap();
    fs::rename(&away, &dir).unwrap();
    wait("the next file is trained", || samples(1000));
    report.extend(running.interrupt());
    for words in
        ["\"a-pipe\" is not ", "\"b-link\" is not ", "\"c-link\" is not ", "incoming: can be read again"]
    {
        assert_eq!(report.iter().filter(|line| line.contains(words)).count(), 1, "{words}: {report:#?}");
    }
}

#[test]
fn the_name_of_a_followed_file_forges_no_line() {
    let workshop = Workshop::new(200, 10);
    let (dir, line, lines) = incoming(&workshop);
    fs::write(format!("{dir}/a\nforged: 1"), lines.concat()).unwrap();
    fs::write(format!("{dir}/zz"), "").unwrap();
    let output = run(&format!("{line} --name m"));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && !log.contains("\nforged"), "{log}");
    assert!(log.contains(r#""a\nforged: 1": 200 samples, before training on them: AUC "#), "{log}");
}
