//! A share of the requests goes to the canary, and every user stays on one side.

use super::world::{MODEL, World};
use crate::program::run_failing;
use crate::switching::wait;

#[test]
fn a_share_of_the_requests_is_the_canarys_and_every_user_stays_on_one_side() {
    let world = World::new(2);
    let table = |sticky: &str| {
        format!("labels = {{ stable = 1, canary = 2 }}\ncanary_share = 0.3\nsticky = \"{sticky}\"")
    };
    let client = world.serve(&table("request_id"), "");
    for (flags, version) in
        [("--model-label canary", 2), ("--model-label stable", 1), ("--model-version 2", 2)]
    {
        let scored = client.served.score(MODEL, &world.workshop.valid, flags);
        assert_eq!(scored["versions"], serde_json::json!([version]), "{flags}");
    }
    for (flags, words) in [
        ("--model-label other", "--model-label: the model has no label \"other\""),
        ("--model-version 9", "--model-version: 9 is not loaded, only 1, 2"),
    ] {
        let data = format!("--model {MODEL} --format criteo-tsv {} {flags}", world.workshop.valid);
        let error = run_failing(2, &format!("score --addr {} {data}", client.served.url()));
        assert!(error.contains(words), "{error}");
    }
    let by = |id: &str| client.scored_by(&world, |request| request.request_id = id.to_owned()).unwrap();
    let users: Vec<u64> = (0..400).map(|user| by(&format!("user-{user}"))).collect();
    let canaries = |versions: &[u64]| versions.iter().filter(|version| **version == 2).count();
    // 120 are expected, with a standard deviation of 9.2.
    assert!(canaries(&users).abs_diff(120) < 46, "{}", canaries(&users));
    assert!((0..400).step_by(7).all(|user| by(&format!("user-{user}")) == users[user]));
    let without: Vec<u64> = (0..400).map(|_| by("")).collect();
    assert!(canaries(&without).abs_diff(120) < 46, "{}", canaries(&without));
    let counted = |label: &str| client.metric("label_requests_total", &format!("label=\"{label}\""));
    let both = canaries(&users) + canaries(&without);
    assert!(counted("canary") >= both as f64 && counted("stable") + counted("canary") >= 800.0);
    assert_eq!(client.metric("label_version", "label=\"canary\""), 2.0);
    for label in ["canary", "stable"] {
        let only = format!("label=\"{label}\"");
        assert_eq!(client.metric("label_request_seconds_count", &only), counted(label), "{label}");
        assert_eq!(client.metric("label_failures_total", &only), 0.0, "{label}");
    }

    world.configure(&table("feature:C3"));
    client.served.signal("-HUP");
    let by_feature = |user: u64, id: &str| {
        let mut request = world.requests[0].clone();
        let column = request.features.iter_mut().find(|column| column.name == "C3").unwrap();
        column.strings.iter_mut().for_each(|string| *string = format!("{user:08x}").into());
        request.request_id = id.to_owned();
        client.predict(request).unwrap().0
    };
    wait("the feature decides", || (0..20).all(|id| by_feature(1, &id.to_string()) == by_feature(1, "")));
    let users: Vec<u64> = (0..400).map(|user| by_feature(user, &user.to_string())).collect();
    assert!(canaries(&users).abs_diff(120) < 46, "{}", canaries(&users));
    assert!((0..400).step_by(7).all(|user| by_feature(user as u64, "other") == users[user]));
    client.ends_well();
}
