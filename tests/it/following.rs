//! Training on a stream of files in one process, while another process serves what is published.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;

use crate::program::{Served, Workshop, flechette, highest_version, real, run, run_json};
use crate::switching::wait;
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

#[test]
fn a_followed_stream_is_served_while_it_is_trained_and_ends_with_the_bytes_of_one_run() {
    for flags in ["", "--scratchpad 0.4"] {
        let workshop = Workshop::new(1500, 50);
        let config = workshop.config(flechette::schema::preset::ArchKind::Dlrm, 8, 1000);
        let text = fs::read_to_string(&workshop.train).unwrap();
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        follow_in_ten_files(&workshop, &config, &lines, flags);
    }
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
    let config = workshop.config(flechette::schema::preset::ArchKind::Dlrm, 8, 10_000);
    follow_in_ten_files(&workshop, &config, &lines, "");
}
