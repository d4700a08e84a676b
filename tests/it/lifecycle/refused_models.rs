//! Models that cannot be loaded, and versions with numbers that are not finite: they are named, and the
//! others are served.

use std::fs;
use std::path::{Path, PathBuf};

use flechette::schema::preset::ArchKind;
use tonic::Code;

use super::readiness::{call, index, is_ready};
use crate::program::{Served, Workshop, run};
use crate::switching::{publish, wait};

#[test]
fn a_model_without_a_good_version_is_named_and_the_others_are_served() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    workshop.train(ArchKind::Dcn);
    let manifest = Path::new(&workshop.models).join("dcn/1/MANIFEST.json");
    let away = PathBuf::from(workshop.path("MANIFEST.json"));
    fs::rename(&manifest, &away).unwrap();
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    let (code, text) = served.get("/readyz");
    let lines: Vec<&str> = text.lines().collect();
    assert!(code == 200 && lines.len() == 2 && lines[0] == "ready", "{text}");
    let reason = lines[1].strip_prefix("not served: model dcn: no good version").expect(&text);
    assert!(reason.contains("MANIFEST.json"), "{text}");
    let status = served.status();
    let models = status["models"].as_array().unwrap();
    let dcn = models.iter().find(|model| model["name"] == "dcn").unwrap();
    let reason = dcn["reason"].as_str().unwrap();
    assert!(dcn["state"] == "refused" && reason.contains("MANIFEST.json"), "{dcn}");
    let status = call(&served, "dcn").unwrap_err();
    let unavailable = status.code() == Code::Unavailable;
    assert!(unavailable && status.message().contains("could not be loaded"), "{status}");
    let rows = index(&served);
    let [[name, version, state, why], other] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!([name, version, state].map(String::as_str), ["dcn", "", "UNAVAILABLE"]);
    assert_eq!((why.as_str(), other), (reason, &["dlrm", "1", "READY", ""].map(str::to_owned)));

    fs::rename(&away, &manifest).unwrap();
    wait("the model is served", || is_ready(&served));
    assert_eq!(index(&served), [["dcn", "1", "READY", ""], ["dlrm", "1", "READY", ""]]);
    assert_eq!(served.score("dcn", &workshop.valid, "")["version"], 1);
    served.terminate();
    let (_, log) = served.ended();
    let refused: Vec<_> = log.lines().filter(|line| line.contains("model refused")).collect();
    assert!(refused.len() == 1 && refused[0].contains("model=\"dcn\""), "{log}");
}

#[test]
fn a_directory_that_cannot_be_read_is_named_and_the_models_beside_it_are_served() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let models = Path::new(&workshop.models);
    fs::create_dir(models.join("lost+found")).unwrap();
    // Also root cannot read a link to itself.
    std::os::unix::fs::symlink("loop", models.join("loop")).unwrap();
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    let (code, text) = served.get("/readyz");
    let lines: Vec<&str> = text.lines().collect();
    assert!(code == 200 && lines.len() == 2 && lines[0] == "ready", "{text}");
    assert!(lines[1].starts_with("not served: model loop: ") && lines[1].contains("models/loop"), "{text}");
    let listed = run(&format!("versions --models {} --json", workshop.models));
    let versions: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(versions["models"][0]["name"], "dlrm");
    assert!(String::from_utf8_lossy(&listed.stderr).contains("models/loop"), "{listed:?}");
    assert_eq!(listed.status.code(), Some(2));
    // New versions and new models are still found.
    workshop.train(ArchKind::Dlrm);
    workshop.train(ArchKind::Dcn);
    let ready = [["dcn", "1", "READY"], ["dlrm", "2", "READY"]];
    wait("the new versions are served", || {
        let index = index(&served);
        ready.iter().all(|row| index.iter().any(|found| found[..3] == *row))
    });
}

#[test]
fn a_server_without_a_good_version_of_any_model_is_not_ready_and_waits_for_one() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    fs::remove_file(Path::new(&workshop.models).join("dlrm/1/MANIFEST.json")).unwrap();
    let served = Served::start(&workshop.models, "");
    let (code, text) = served.get("/readyz");
    assert!(code == 503 && text.starts_with("no model is served\nnot served: model dlrm: "), "{text}");
    workshop.train(ArchKind::Dlrm);
    wait("the model is served", || is_ready(&served));
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 2);
}

#[test]
fn a_server_of_an_empty_directory_waits_for_a_model() {
    let workshop = Workshop::new(300, 50);
    fs::create_dir(&workshop.models).unwrap();
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.get("/readyz"), (503, "no model is served\n".to_owned()));
    assert_eq!(served.get("/healthz").0, 200);
    workshop.train(ArchKind::Dlrm);
    wait("the model is served", || is_ready(&served));
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

#[test]
fn weights_that_are_not_finite_are_refused_with_the_name_of_their_tensor() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let with = |bad: f32| {
        move |file: &str, i: usize, value: f32| if file.starts_with("dense") && i == 3 { bad } else { value }
    };
    publish(&workshop.models, 2, with(f32::NAN));
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    publish(&workshop.models, 3, with(f32::INFINITY));
    wait("it is refused", || served.sum("flechette_switches_refused_total", "dlrm") == 2.0);
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    served.terminate();
    let (_, log) = served.ended();
    for version in ["version=2", "version=3"] {
        let refused = |line: &&str| line.contains("version refused") && line.contains(version);
        let line = log.lines().find(refused).expect(&log);
        assert!(line.contains("tensor \"") && line.contains("expected finite weights"), "{line}");
    }
}

#[test]
fn rows_that_are_not_finite_are_refused_with_their_table_and_number() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let with = |bad: f32| {
        // Rows have 8 elements.
        move |file: &str, i: usize, value: f32| {
            if file.ends_with("C3.safetensors") && i == 13 { bad } else { value }
        }
    };
    publish(&workshop.models, 2, with(f32::NAN));
    let served = Served::start(&workshop.models, "");
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
    publish(&workshop.models, 3, with(f32::INFINITY));
    wait("it is refused", || served.sum("flechette_switches_refused_total", "dlrm") == 2.0);
    served.terminate();
    let (_, log) = served.ended();
    for version in ["version=2", "version=3"] {
        let refused = |line: &&str| line.contains("version refused") && line.contains(version);
        let line = log.lines().find(refused).expect(&log);
        let words = "C3.safetensors: row 1: element 5: expected a finite number";
        assert!(line.contains(words), "{line}");
    }
}
