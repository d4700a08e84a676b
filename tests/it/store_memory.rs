//! Where a server has its tables (`store.memory`), and what happens when a file of a served version is cut
//! short.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use flechette::schema::preset::ArchKind;

use crate::program::{Served, Workshop, run};
use crate::switching::{publish, wait};

const MODEL: &str = "dlrm";
/// 26 tables of 1,000 rows of 8 f32.
const ROW_BYTES: f64 = (26 * 1000 * 8 * 4) as f64;
/// The number of SIGBUS on Linux.
const SIGBUS: i32 = 7;

fn workshop() -> Workshop {
    let workshop = Workshop::new(300, 200);
    workshop.train(ArchKind::Dlrm);
    workshop
}

fn serve(workshop: &Workshop, memory: &str) -> Served {
    Served::start(&workshop.models, &format!("--cache-mode off --store-memory {memory}"))
}

/// The scores of the validation rows.
fn scores(workshop: &Workshop, served: &Served) -> String {
    let out = workshop.path("scores");
    served.score(MODEL, &workshop.valid, &format!("--out {out}"));
    fs::read_to_string(out).unwrap()
}

/// Cuts a file of the first table short, as another program could.
fn cut(workshop: &Workshop) -> PathBuf {
    let tables = fs::read_dir(format!("{}/{MODEL}/1/tables", workshop.models)).unwrap();
    let file = tables.map(|entry| entry.unwrap().path()).min().unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(4096).unwrap();
    file
}

#[test]
fn scores_are_the_trainers_in_memory_and_mapped_and_the_log_and_the_metrics_say_where_the_tables_are() {
    let workshop = workshop();
    let own = fs::read_to_string(workshop.trained_scores(ArchKind::Dlrm)).unwrap();
    for (memory, place) in [("mapped", "mapped"), ("ram", "ram"), ("auto", "ram")] {
        let served = serve(&workshop, memory);
        assert!(scores(&workshop, &served) == own, "{memory}");
        let bytes = |of| served.metric(&format!("flechette_store_{of}_bytes"), &["model=\"dlrm\""]);
        let expected = if place == "ram" { (ROW_BYTES, 0.0) } else { (0.0, ROW_BYTES) };
        assert_eq!((bytes("ram"), bytes("mapped")), expected, "{memory}");
        let maps = fs::read_to_string(format!("/proc/{}/maps", served.id())).unwrap();
        assert_eq!(maps.contains("/dlrm/1/"), place == "mapped", "{memory}: {maps}");
        served.terminate();
        let (status, log) = served.ended();
        let line = log.lines().find(|line| line.contains("memory=\"ram\""));
        let reason = if memory == "auto" { "iB of memory are available" } else { "store.memory is ram" };
        let said = line.is_some_and(|line| line.contains(reason));
        assert!(status.success() && said == (place == "ram"), "{memory}: {log}");
    }
}

#[test]
fn all_loaded_versions_and_the_shadow_have_their_tables_where_the_setting_says() {
    let workshop = workshop();
    (2..=3).for_each(|version| publish(&workshop.models, version, |_, _, value| value));
    let config = workshop.path("versions.toml");
    let table = format!("[models.{MODEL}]\nversions = \"latest 2\"\nshadow = 1\n");
    fs::write(&config, table + "labels = { stable = 2 }\n").unwrap();
    for memory in ["mapped", "ram"] {
        let served = Served::start(
            &workshop.models,
            &format!("--config {config} --store-memory {memory} --cache-mode off"),
        );
        scores(&workshop, &served);
        let maps = fs::read_to_string(format!("/proc/{}/maps", served.id())).unwrap();
        for version in 1..=3 {
            assert_eq!(
                maps.contains(&format!("/{MODEL}/{version}/")),
                memory == "mapped",
                "{version}: {maps}"
            );
        }
        served.terminate();
        assert!(served.ended().0.success());
    }
}

#[test]
fn a_mapped_table_that_is_cut_short_ends_the_server_by_sigbus_after_one_line_with_the_file() {
    let workshop = workshop();
    let served = serve(&workshop, "mapped");
    scores(&workshop, &served);
    let file = cut(&workshop);
    let (url, valid) = (served.url(), &workshop.valid);
    let failed = run(&format!("score --addr {url} --model {MODEL} --format criteo-tsv {valid}"));
    assert!(!failed.status.success());
    let (status, log) = served.ended();
    assert_eq!(status.signal(), Some(SIGBUS), "{status}: {log}");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("SIGBUS")).collect();
    let [line] = lines[..] else { panic!("{log}") };
    let expected = format!("flechette: SIGBUS: the mapped file {} was cut short", file.display());
    assert!(line.starts_with(&expected) && line.ends_with("see docs/files-in-use.md"), "{line}");
}

#[test]
fn tables_in_memory_are_served_on_when_a_file_is_cut_short() {
    let workshop = workshop();
    let served = serve(&workshop, "ram");
    let before = scores(&workshop, &served);
    cut(&workshop);
    assert!(scores(&workshop, &served) == before);
    served.terminate();
    assert!(served.ended().0.success());
}

#[test]
fn a_sigbus_that_no_file_has_caused_ends_the_server_as_without_the_handler() {
    let workshop = workshop();
    let served = serve(&workshop, "mapped");
    // The handler that std installs takes the first one, and puts the default action back.
    let signals = Cell::new(0);
    wait("it has ended", || {
        signals.set(signals.get() + 1);
        assert!(signals.get() <= 20, "signals do not end it");
        served.signal("-BUS");
        sleep(Duration::from_millis(200));
        // Nobody has waited for it yet.
        fs::read_to_string(format!("/proc/{}/status", served.id())).unwrap().contains("State:\tZ")
    });
    let (status, log) = served.ended();
    assert_eq!(status.signal(), Some(SIGBUS), "{status}: {log}");
    assert!(!log.contains("mapped file"), "{log}");
}
