//! Which versions are loaded, by a policy, and that each of them has the scores that it has alone.

use flechette::server::proto::PredictRequest;
use tonic::Code;

use super::world::{World, publish_other};
use crate::switching::wait;

#[test]
fn every_loaded_version_has_the_scores_that_it_has_alone() {
    let world = World::new(4);
    for flags in ["--cache-mode off", "--cache-mode on --cache-fraction 0.1"] {
        let client = world.serve("versions = \"all\"", flags);
        for version in [4, 1, 3, 2, 1, 4] {
            for (number, request) in world.requests.iter().enumerate() {
                let request = PredictRequest { version, ..request.clone() };
                let (by, scores) = client.predict(request).unwrap();
                assert_eq!((by, world.version_of(number, &scores)), (version, version));
            }
        }
        assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 4, "stable is the latest");
        let status = client.scored_by(&world, |request| request.version = 9).unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(status.message(), "version: model \"dlrm\" serves version 1, 2, 3, 4, got 9");
        client.ends_well();
    }
}

#[test]
fn a_policy_says_which_versions_are_loaded_and_follows_new_ones_and_new_settings() {
    let world = World::new(4);
    let client = world.serve("versions = \"latest 2\"", "");
    assert_eq!(client.loaded(), "3, 4");
    publish_other(&world.workshop.models, 5);
    wait("the new version is loaded", || client.loaded() == "4, 5");
    assert_eq!(
        client.predict(PredictRequest { version: 3, ..world.requests[0].clone() }).unwrap_err().code(),
        Code::NotFound
    );
    for (table, loaded) in [
        ("versions = [1, 3]", "1, 3"),
        ("versions = \"latest\"", "5"),
        ("versions = \"latest\"\nlabels = { canary = 2 }", "2, 5"),
        ("versions = \"all\"", "1, 2, 3, 4, 5"),
        ("versions = \"latest 3\"\nlabels = { stable = 1 }", "1, 3, 4, 5"),
    ] {
        world.configure(table);
        client.served.signal("-HUP");
        wait(table, || client.loaded() == loaded);
        for version in loaded.split(", ").map(|version| version.parse().unwrap()) {
            let request = PredictRequest { version, ..world.requests[0].clone() };
            assert_eq!(client.predict(request).unwrap().0, version);
        }
    }
    assert_eq!(client.scored_by(&world, |_| {}).unwrap(), 1);
    world.configure("versions = [1, 9]");
    client.served.signal("-HUP");
    wait("the missing version is shown", || {
        client.served.get("/readyz").1.contains("not loaded: model dlrm: version 9")
    });
    assert_eq!((client.served.get("/readyz").0, client.loaded()), (200, "1".to_owned()));
    client.ends_well();
}
