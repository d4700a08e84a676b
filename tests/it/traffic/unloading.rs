//! Loading and unloading versions and models again and again gives all memory, files and threads back.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use flechette::server::inference::{RepositoryModelLoadRequest, RepositoryModelUnloadRequest};

use super::client::Client;
use super::world::{MODEL, World};
use crate::switching::wait;

/// Mapped regions, open files and threads of a process.
fn held(pid: u32) -> [usize; 3] {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let files = maps.lines().filter(|line| line.contains("/models/")).count();
    [files, count("fd"), count("task")]
}

/// A cache with room for nearly all rows, which takes a row at its first miss. So every round uses much of
/// its memory, and a cache that is not freed shows in the memory of the process.
const FULL_CACHE: [&str; 2] = ["[cache]\nadmission = \"all\"", "--cache-mode on --cache-fraction 0.9"];

/// The most that the memory of a server may grow in 60 to 100 rounds. The weights, the tables and the cache
/// of a version take several hundred kilobytes each.
const GROWTH: u64 = 3 << 20;

/// Runs a round 100 times, and then 100 times more, which must not take more memory, mappings, files or
/// threads. Before, the threads share ever more of the allocator's arenas: memory grows by a half in the
/// first 150 rounds, and not at all after 500. A round leaves one version loaded.
fn a_hundred_rounds_give_everything_back(client: &Client, mut round: impl FnMut(u64)) {
    let pid = client.served.id();
    (0..100).for_each(&mut round);
    wait("one version is loaded", || client.loaded() == "3");
    sleep(Duration::from_millis(500));
    let before = held(pid);
    let memory: Vec<u64> = (0..100)
        .map(|number| {
            round(number);
            crate::program::bytes_of(pid, "RssAnon").unwrap()
        })
        .collect();
    // An idle thread may end meanwhile.
    wait("everything is given back", || held(pid).iter().zip(before).all(|(now, before)| *now <= before));
    // What is being freed, and huge pages, make single values larger.
    let (first, last) = (memory[..20].iter().max().unwrap(), memory[80..].iter().min().unwrap());
    let grown = last.saturating_sub(*first);
    println!("{before:?} before and after, memory grew by {grown} bytes from {first}");
    assert!(grown < GROWTH, "{grown}: {memory:?}");
}

/// Sends all requests, which the stable version scores.
fn score_all(client: &Client, world: &World) {
    for (number, request) in world.requests.iter().enumerate() {
        let (version, scores) = client.predict(request.clone()).unwrap();
        assert_eq!((version, world.version_of(number, &scores)), (3, 3));
    }
}

#[test]
fn a_hundred_loads_and_unloads_of_versions_give_everything_back() {
    let world = World::new(3);
    let [table, flags] = FULL_CACHE;
    let client = world.serve(table, flags);
    a_hundred_rounds_give_everything_back(&client, |round| {
        let version = 1 + round % 2;
        let label = if round % 10 < 8 { "other" } else { "stable" };
        client.set_label(label, version).unwrap();
        assert_eq!(client.by_label(&world, label).unwrap(), version);
        client.remove_label(label).unwrap();
        score_all(&client, &world);
    });
    client.ends_well();
}

#[test]
fn a_hundred_loads_and_unloads_of_a_model_give_everything_back() {
    let world = World::new(3);
    let [table, flags] = FULL_CACHE;
    let client = world.serve(table, flags);
    a_hundred_rounds_give_everything_back(&client, |_| {
        let mut kserve = client.kserve.clone();
        let model_name = MODEL.to_owned();
        let unload = RepositoryModelUnloadRequest { model_name, ..RepositoryModelUnloadRequest::default() };
        client.runtime.block_on(kserve.repository_model_unload(unload)).unwrap();
        let model_name = MODEL.to_owned();
        let load = RepositoryModelLoadRequest { model_name, ..RepositoryModelLoadRequest::default() };
        client.runtime.block_on(kserve.repository_model_load(load)).unwrap();
        score_all(&client, &world);
    });
    client.ends_well();
}
