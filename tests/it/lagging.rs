//! A server that stands still while versions are published and removed.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use flechette::schema::preset::ArchKind;

use crate::following::Running;
use crate::program::{PATIENT, Served, Workshop, flechette, highest_version};
use crate::switching::{MODEL, check_every_answer, folder, wait};

/// How often the server stands still.
const STOPS: u64 = 3;

/// Versions that are published meanwhile.
const MISSED: u64 = 32;

#[test]
fn a_server_that_stood_still_while_versions_came_and_went_serves_the_newest_one() {
    let workshop = Workshop::in_memory(300, 400);
    workshop.train(ArchKind::Dlrm);
    let Workshop { models, train, valid, .. } = &workshop;
    let served = Served::start_in(PATIENT, models, "--cache-mode on --cache-fraction 0.01");
    let line = format!(
        "train --from latest --models {models} --name {MODEL} --format criteo-tsv --data {train} --batch 8 \
         --threads 1 --epochs 1000000 --publish-every 2steps"
    );
    let mut trainer = flechette();
    trainer.args(line.split_whitespace());
    // Every second version is full, and removes the versions before it that are not in use.
    trainer.env("FLECHETTE_VERSIONS_KEEP", "1").env("FLECHETTE_VERSIONS_COMPACT_AT", "0.2");
    let mut trainer = Some(Running::spawn(&mut trainer));
    let newest = || highest_version(Path::new(models), MODEL).unwrap();
    let serving = || served.metric("flechette_serving_version", &["model=\"dlrm\""]) as u64;
    for stop in 1..=STOPS {
        let before = serving();
        wait("a version is taken over", || serving() > before);
        // Rows of this version are in the cache.
        served.score(MODEL, valid, "");
        // The server looks at new versions all the time, so it stops at another point of that.
        sleep(Duration::from_millis(17 * stop));
        served.signal("-STOP");
        let listed = newest();
        wait("versions are published", || newest() >= listed + MISSED);
        if stop == STOPS {
            // The next version that is served is the last one.
            trainer.take().unwrap().interrupt();
        }
        let last = newest();
        // The server may have locked versions up to `listed`.
        let left: Vec<u64> = (1..last).filter(|&version| folder(models, MODEL, version).exists()).collect();
        assert!(!left.contains(&(listed + 1)) && left.len() < MISSED as usize / 2, "{left:?} up to {last}");
        served.signal("-CONT");
        wait("a version that came after the stop is served", || serving() >= last);
    }
    assert_eq!(serving(), newest());
    let requests = || served.sum("flechette_requests_total", MODEL);
    let answered = requests();
    let versions = check_every_answer(served.grpc, &workshop, || {
        wait("the clients have answers", || requests() >= answered + 100.0);
    });
    assert_eq!(versions, 1);
    wait("no newer version is refused", || served.get("/readyz") == (200, "ready\n".to_owned()));
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
