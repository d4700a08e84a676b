//! The real server with each of the cache's settings, and with hot rows that one run saves for the next. In
//! all cases scores equal the trainer's to the bit.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use flechette::schema::preset::ArchKind;

use crate::files::hot_rows;
use crate::program::{Served, Workshop, run, run_failing};
use crate::skip::skip_part;
use crate::switching::wait;

const MODEL: &str = "dlrm";

/// A trained model, and the trainer's scores.
struct Trained {
    workshop: Workshop,
    own: String,
}

impl Trained {
    /// Trains a model. `rows` samples with 26 ids each are to be scored.
    fn new(rows: u64) -> Self {
        let workshop = Workshop::new(1000, rows);
        workshop.train(ArchKind::Dlrm);
        let own = fs::read_to_string(workshop.trained_scores(ArchKind::Dlrm)).unwrap();
        Self { workshop, own }
    }

    /// A server with a cache of 10 % of the rows and these settings of section `cache`.
    fn serve(&self, keys: &str) -> Served {
        Served::start(&self.workshop.models, &format!("--config {}", self.config(keys)))
    }

    fn config(&self, keys: &str) -> String {
        let path = self.workshop.path("serve.toml");
        fs::write(&path, format!("[cache]\nmode = \"on\"\nfraction = 0.1\n{keys}\n")).unwrap();
        path
    }

    /// Scores all samples and compares the scores with the trainer's.
    fn score(&self, served: &Served) {
        let out = self.workshop.path("served.scores");
        let reported = served.score(MODEL, &self.workshop.valid, &format!("--batch 64 --out {out}"));
        assert_eq!(reported["version"], 1);
        assert!(fs::read_to_string(&out).unwrap() == self.own, "served scores differ from the trainer's");
    }

    fn state(&self) -> PathBuf {
        PathBuf::from(&self.workshop.models).join(MODEL).join("state")
    }

    fn hot_rows(&self) -> PathBuf {
        self.state().join("hot_rows.flhot")
    }

    /// A file with the counts of each row in the scored samples.
    fn counts(&self) -> String {
        let (config, path) = (self.workshop.config(ArchKind::Dlrm, 8, 1000), self.workshop.path("counts"));
        let line = format!(
            "plan --model-config {config} --format criteo-tsv --data {} --counts {path}",
            self.workshop.valid
        );
        let output = run(&line);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        path
    }
}

fn counted(served: &Served, what: &str) -> f64 {
    served.sum(&format!("flechette_cache_{what}"), MODEL)
}

/// Stops a server and returns its log.
fn end(served: Served) -> String {
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{status}: {log}");
    log
}

#[test]
fn a_restarted_server_hits_from_its_first_request_on() {
    // 20 samples use at most 520 rows, and the cache holds 2,600.
    let trained = Trained::new(20);
    let served = trained.serve("");
    trained.score(&served);
    assert!(counted(&served, "misses_total") > 0.0);
    assert!(!trained.hot_rows().exists(), "hot rows are saved only at the end");
    end(served);

    let served = trained.serve("");
    let before = counted(&served, "entries");
    assert!(before > 0.0, "the cache is warm before the first request");
    trained.score(&served);
    assert_eq!((counted(&served, "hits_total"), counted(&served, "misses_total")), (20.0 * 26.0, 0.0));
    assert_eq!(counted(&served, "entries"), before);
    let log = end(served);
    let line = log.lines().find(|line| line.contains("cache warmed")).expect(&log);
    assert!(line.contains("hot rows") && line.contains("skipped=0") && line.contains("full=false"), "{line}");

    let served = trained.serve("warm = \"off\"");
    assert_eq!(counted(&served, "entries"), 0.0);
    trained.score(&served);
}

#[test]
fn a_full_cache_is_warm_again_and_a_smaller_one_takes_the_hottest() {
    let trained = Trained::new(2000);
    let served = trained.serve("");
    trained.score(&served);
    let held = counted(&served, "entries");
    end(served);
    let saved = fs::metadata(trained.hot_rows()).unwrap().len();
    let served = trained.serve("");
    assert!(counted(&served, "entries") > 0.8 * held, "of {held}");
    assert_eq!(counted(&served, "evictions_total"), 0.0, "warming evicts nothing");
    trained.score(&served);
    drop(served);
    let served = trained.serve("high_watermark = 0.3");
    let entries = counted(&served, "entries");
    assert!(entries > 0.0 && entries < 0.5 * held, "{entries} of {held}");
    trained.score(&served);
    assert!(end(served).contains("full=true"));
    assert!(fs::metadata(trained.hot_rows()).unwrap().len() < saved);
}

#[test]
fn rows_and_tables_that_the_model_does_not_have_are_skipped_and_counted() {
    let trained = Trained::new(20);
    let hot = hot_rows(&["C1", "gone"], &[(0, 7), (1, 7), (0, 1000), (0, u64::MAX), (0, 3)]);
    fs::create_dir_all(trained.hot_rows().parent().unwrap()).unwrap();
    fs::write(trained.hot_rows(), hot).unwrap();
    let served = trained.serve("");
    assert_eq!(counted(&served, "entries"), 2.0);
    trained.score(&served);
    let log = end(served);
    assert!(log.contains("rows=2") && log.contains("skipped=3"), "{log}");
}

#[test]
fn a_damaged_or_foreign_file_is_named_and_ignored() {
    let trained = Trained::new(20);
    let served = trained.serve("");
    trained.score(&served);
    end(served);
    let good = fs::read(trained.hot_rows()).unwrap();
    let half = good[..good.len() / 2].to_vec();
    let mut changed = good;
    changed[100] ^= 1;
    for (bytes, words) in
        [(half, "damaged"), (changed, "checksum"), (b"C1,7\n".to_vec(), "not a hot rows file")]
    {
        fs::remove_file(trained.hot_rows()).unwrap();
        fs::write(trained.hot_rows(), bytes).unwrap();
        let served = trained.serve("save_seconds = 0");
        assert_eq!(counted(&served, "entries"), 0.0);
        trained.score(&served);
        let log = end(served);
        let line = log.lines().find(|line| line.contains("hot rows ignored")).expect(&log);
        assert!(line.contains("WARN") && line.contains(words), "{line}");
        assert!(line.contains(trained.hot_rows().to_str().unwrap()), "{line}");
        assert!(log.contains("stopped"), "{log}");
    }
    assert!(counted(&trained.serve(""), "entries") > 0.0, "the last run saved a good file");
}

#[test]
fn a_server_that_cannot_save_warns_and_keeps_serving() {
    let trained = Trained::new(20);
    let model = trained.state().parent().unwrap().to_owned();
    let serve = |words: &str| {
        let served = trained.serve("save_seconds = 1");
        trained.score(&served);
        served.said("hot rows not saved", 2);
        trained.score(&served);
        let log = end(served);
        let warnings: Vec<&str> = log.lines().filter(|line| line.contains("hot rows not saved")).collect();
        // The last one is of the end.
        assert!(warnings.len() > 2 && warnings.iter().all(|line| line.contains(words)), "{log}");
    };
    // A file in place of the directory is an obstacle even for root.
    fs::remove_dir_all(trained.state()).unwrap();
    fs::write(trained.state(), "").unwrap();
    serve("state");
    fs::remove_file(trained.state()).unwrap();
    fs::set_permissions(&model, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::create_dir(model.join("probe")).is_ok() {
        skip_part("root can write to a read-only directory");
        fs::remove_dir(model.join("probe")).unwrap();
    } else {
        serve("permission denied");
    }
    fs::set_permissions(&model, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn rows_saved_while_serving_survive_a_kill() {
    let trained = Trained::new(20);
    let served = trained.serve("save_seconds = 1");
    trained.score(&served);
    let rows = counted(&served, "entries") as u64;
    wait("the hot rows are saved", || {
        fs::metadata(trained.hot_rows()).map_or(0, |meta| meta.len()) >= 12 * rows
    });
    // Dropping the server kills it with SIGKILL.
    drop(served);
    let served = trained.serve("");
    trained.score(&served);
    assert_eq!(counted(&served, "misses_total"), 0.0);
}

#[test]
fn counts_warm_the_cache_if_there_are_no_hot_rows() {
    let trained = Trained::new(20);
    let counts = trained.counts();
    for eviction in ["lru", "lfu"] {
        let served = trained.serve(&format!("counts = \"{counts}\"\neviction = \"{eviction}\""));
        trained.score(&served);
        assert_eq!(counted(&served, "misses_total"), 0.0, "{eviction}");
        let log = end(served);
        assert!(log.contains("cache warmed") && log.contains("cache.counts"), "{log}");
        fs::remove_file(trained.hot_rows()).unwrap();
    }
    let served = trained.serve(&format!("counts = \"{counts}\"\neviction = \"lfu\"\nwarm = \"off\""));
    assert_eq!(counted(&served, "entries"), 0.0, "with cache.warm off, counts only rank rows");
}

/// Checks that settings of the cache raise a counter and change no score.
fn takes_effect(trained: &Trained, keys: &str, shown: &str) {
    let served = trained.serve(&format!("warm = \"off\"\n{keys}"));
    assert_eq!(counted(&served, shown), 0.0);
    // Scores twice, and then again until the eviction thread has run.
    trained.score(&served);
    for _ in 0..200 {
        trained.score(&served);
        if counted(&served, shown) > 0.0 {
            break;
        }
    }
    assert!(counted(&served, shown) > 0.0, "{keys}: {shown}");
    assert!(counted(&served, "hits_total") > 0.0, "{keys}");
    assert!(!trained.state().join("hot_rows.flhot").exists(), "cache.warm is off");
}

#[test]
fn narrow_keys_collide_and_change_no_score() {
    takes_effect(&Trained::new(2000), "key_bits = 12", "collisions_total");
}

#[test]
fn admission_by_frequency_admits_fewer_rows_and_changes_no_score() {
    takes_effect(&Trained::new(2000), "admission = \"frequency\"", "not_admitted_total");
}

#[test]
fn admission_by_probability_admits_fewer_rows_and_changes_no_score() {
    let keys = "admission = \"probability\"\nadmission_probability = 0.5";
    takes_effect(&Trained::new(2000), keys, "not_admitted_total");
}

#[test]
fn eviction_by_counts_evicts_rows_and_changes_no_score() {
    let trained = Trained::new(2000);
    let keys = format!("eviction = \"lfu\"\ncounts = \"{}\"", trained.counts());
    takes_effect(&trained, &keys, "evictions_total");
}

#[test]
fn low_watermarks_evict_rows_and_change_no_score() {
    let keys = "key_bits = 32\nhigh_watermark = 0.5\nlow_watermark = 0.2";
    takes_effect(&Trained::new(2000), keys, "evictions_total");
}

#[test]
fn more_required_misses_admit_fewer_rows() {
    let trained = Trained::new(2000);
    let rejected = [1, 2, 15].map(|misses| {
        let served = trained.serve(&format!("warm = \"off\"\nadmission_misses = {misses}"));
        trained.score(&served);
        trained.score(&served);
        counted(&served, "not_admitted_total")
    });
    assert!(rejected[0] == 0.0 && rejected.is_sorted_by(|a, b| a < b), "{rejected:?}");
}

#[test]
fn pointers_answer_if_tables_are_in_memory() {
    let trained = Trained::new(2000);
    let served = trained.serve("warm = \"off\"\nadmission = \"all\"\npointers = 0.9");
    let (url, valid) = (served.url(), &trained.workshop.valid);
    let line = format!(
        "load --addr {url} --model {MODEL} --format criteo-tsv {valid} --batch 64 --concurrency 2 --seconds 2"
    );
    for _ in 0..60 {
        assert!(run(&line).status.success());
        if counted(&served, "pointed_total") > 0.0 {
            break;
        }
    }
    trained.score(&served);
    assert!(counted(&served, "pointed_total") > 0.0);
    assert!(counted(&served, "hits_total") > 0.0);
    assert!(end(served).contains("without a GPU a pointer saves nothing"));
}

#[test]
fn invalid_cache_settings_are_input_errors() {
    let trained = Trained::new(20);
    for (keys, words) in [
        ("eviction = \"lfu\"", ["cache.counts: missing", "cache.eviction = lfu"]),
        ("counts = \"/nowhere/ids\"", ["cache.counts", "/nowhere/ids"]),
        ("key_bits = 4", ["4 bits", "26 tables"]),
        ("low_watermark = 0.99", ["cache.low_watermark", "at most 0.95"]),
    ] {
        let (models, config) = (&trained.workshop.models, trained.config(keys));
        let error = run_failing(
            2,
            &format!("serve --models {models} --config {config} --grpc 127.0.0.1:0 --http 127.0.0.1:0"),
        );
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}
