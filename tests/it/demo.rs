//! The output of `flechette demo`, and that it leaves no files.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::program::flechette;

/// One demo at a time: each takes the default ports if they are free.
pub fn alone() -> MutexGuard<'static, ()> {
    static DEMO: Mutex<()> = Mutex::new(());
    DEMO.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_demo_shows_everything_and_leaves_no_files() {
    let _alone = alone();
    let scratch = tempfile::tempdir().unwrap();
    let mut command = flechette();
    let output =
        command.args(["demo", "--once", "--rows", "2000"]).env("TMPDIR", scratch.path()).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let logged = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{logged}");
    let after = |words: &str| stdout.split_once(words).unwrap_or_else(|| panic!("no {words:?}: {stdout}")).1;
    let number = |words: &str| {
        let word = after(words).split([' ', ',', '\n']).next().unwrap();
        word.parse::<f64>().unwrap_or_else(|_| panic!("{words:?}, and then {word:?}: {stdout}"))
    };

    let auc = number("\nAUC ");
    assert!(auc > 0.5 && auc < 1.0, "{stdout}");
    let scores: Vec<f64> = after("\nfirst scores: ")
        .lines()
        .next()
        .unwrap()
        .split(", ")
        .map(|score| score.parse().unwrap())
        .collect();
    assert_eq!(scores.len(), 5, "{stdout}");
    assert!(scores.iter().all(|score| (0.0..=1.0).contains(score)), "{stdout}");
    let percentiles = ["p50", "p90", "p99", "p99.9"].map(|p| {
        let latency = after("latency from the send:");
        assert!(latency.contains(&format!("{p} ")), "{stdout}");
        number(&format!("latency from the send:{}{p} ", latency.split_once(&format!("{p} ")).unwrap().0))
    });
    assert!(percentiles[0] > 0.0 && percentiles.is_sorted(), "{stdout}");
    let hits = number("\ncache: ");
    assert!(hits > 0.0 && hits <= 100.0 && after("\ncache: ").contains("row lookups hit"), "{stdout}");
    assert!(!stdout.contains("> serving"), "the server has ended: {stdout}");
    let schema = after("--model-config ").split(' ').next().unwrap();
    assert!(
        after("\n> flechette init ").lines().next().unwrap().ends_with(&format!(" > {schema}")),
        "{stdout}"
    );

    let left: Vec<_> =
        std::fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_directory_of_the_demo_can_be_named_in_two_ways() {
    let _alone = alone();
    for flag in ["--dir", "--keep"] {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("demo");
        let output = flechette().args(["demo", "--once", "--rows", "1000", flag]).arg(&dir).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for name in ["train.tsv", "test.tsv", "model.toml", "models/demo/1/MANIFEST.json"] {
            assert!(dir.join(name).is_file(), "{flag}: {name}");
        }
    }
}

#[test]
fn the_demo_replaces_its_own_files_and_no_others() {
    let _alone = alone();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.toml");
    std::fs::write(&file, "mine").unwrap();
    let demo = || {
        let mut command = flechette();
        command.args(["demo", "--once", "--rows", "1000", "--dir"]).arg(scratch.path());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, error) = demo();
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("--dir: ") && error.contains("model.toml exists already"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    std::fs::remove_file(&file).unwrap();
    for version in ["1", "2"] {
        assert_eq!(demo().0, Some(0));
        assert!(scratch.path().join("models/demo").join(version).is_dir());
    }
}
