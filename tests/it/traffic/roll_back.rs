//! The stable version goes back and forth: cached rows are those of the version, no table is read, and no
//! request fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::client::{Client, score_until};
use super::world::{MODEL, World};
use crate::program::{PATIENT, Served};
use crate::switching::publish_delta;

#[test]
fn cached_rows_are_those_of_the_version_after_roll_backs_over_deltas_with_and_without_pointers() {
    let world = World::publish(3, publish_delta);
    for pointers in ["0", "0.5"] {
        let settings = format!("export FLECHETTE_CACHE_ADMISSION=all FLECHETTE_CACHE_POINTERS={pointers}");
        let flags = "--cache-mode on --cache-fraction 0.9";
        let client = Client::of(Served::start_in(&settings, &world.workshop.models, flags));
        for stable in [3, 1, 3, 2, 3, 1, 2, 1] {
            assert_eq!(client.set_label("stable", stable).unwrap(), stable);
            // The second time, most rows are cached.
            for (number, request) in
                world.requests.iter().enumerate().chain(world.requests.iter().enumerate())
            {
                let (version, scores) = client.predict(request.clone()).unwrap();
                assert_eq!(version, stable, "pointers {pointers}");
                let scored_by = world.version_of(number, &scores);
                assert_eq!(scored_by, stable, "pointers {pointers}");
            }
        }
        client.ends_well();
        fs::remove_file(Path::new(&world.workshop.models).join(MODEL).join("state/labels.json")).unwrap();
    }
}

#[test]
fn a_roll_back_to_an_earlier_version_of_the_served_chain_reads_no_table() {
    let world = World::publish(3, publish_delta);
    for memory in ["ram", "mapped"] {
        let settings = format!("export FLECHETTE_STORE_MEMORY={memory}");
        let client = Client::of(Served::start_in(&settings, &world.workshop.models, ""));
        let bytes = || ["ram", "mapped"].map(|place| client.metric(&format!("store_{place}_bytes"), ""));
        let before = bytes();
        // Damage that only reading the tables would find.
        let model = Path::new(&world.workshop.models).join(MODEL);
        let tables = |version| model.join(format!("{version}/tables"));
        let away = |version| PathBuf::from(world.workshop.path(&format!("tables-{version}")));
        for version in 1..4 {
            fs::rename(tables(version), away(version)).unwrap();
            fs::create_dir(tables(version)).unwrap();
            for table in fs::read_dir(away(version)).unwrap().map(Result::unwrap) {
                let zeros = vec![0; table.metadata().unwrap().len() as usize];
                fs::write(tables(version).join(table.file_name()), zeros).unwrap();
            }
        }
        for stable in [2, 1, 3, 1] {
            assert_eq!(client.set_label("stable", stable).unwrap(), stable);
            for (number, request) in world.requests.iter().enumerate() {
                let (version, scores) = client.predict(request.clone()).unwrap();
                assert_eq!((version, world.version_of(number, &scores)), (stable, stable));
            }
            let now = bytes();
            assert!(now.iter().zip(&before).all(|(now, before)| now <= before), "{now:?}, {before:?}");
        }
        for version in 1..4 {
            fs::remove_dir_all(tables(version)).unwrap();
            fs::rename(away(version), tables(version)).unwrap();
        }
        client.ends_well();
        fs::remove_file(model.join("state/labels.json")).unwrap();
    }
}

#[test]
fn no_request_fails_while_stable_goes_back_and_forth() {
    let world = Arc::new(World::new(4));
    let latest_2 = "versions = \"latest 2\"";
    for (flags, table) in [
        ("--cache-mode off", latest_2),
        ("--cache-mode on --cache-fraction 0.1", latest_2),
        // The main engine goes back from version 3 to 1 while it computes the parts of requests.
        ("--cache-mode off", "batcher = { max_samples = 1 }"),
    ] {
        let client = world.serve_in(PATIENT, &format!("{table}\nlabels = {{ old = 2 }}"), flags);
        let stop = Arc::new(AtomicBool::new(false));
        let clients = score_until(&world, client.served.grpc, &client.runtime, &stop);
        for round in 0..3 {
            for version in [3, 1, 2, 4] {
                let begun = std::time::Instant::now();
                assert_eq!(client.set_label("stable", version).unwrap(), version);
                println!("{flags}, {table}: round {round}: stable {version} after {:?}", begun.elapsed());
                for _ in 0..20 {
                    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), version, "the next request");
                }
            }
        }
        stop.store(true, Ordering::Release);
        let seen: Vec<_> = clients.into_iter().map(|seen| client.runtime.block_on(seen).unwrap()).collect();
        assert!(seen.iter().all(|seen| seen.len() == 4), "{seen:?}");
        client.ends_well();
    }
}
