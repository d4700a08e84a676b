//! The Python client in `clients/python`: it installs, and its own tests pass with a real server. Its scores
//! are those of a Rust client, to the bit.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use serde_json::{Value, json};

use crate::kserve_python::{request, train};
use crate::program::Served;
use crate::python::python;
use crate::serving::channel;
use crate::skip::skip;

const CLIENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/python");

/// Runs a Python program, and returns its output.
fn run(program: &mut Command) -> String {
    let output = program.output().unwrap();
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program:?}: {out}{log}");
    out.into_owned()
}

/// The values of a column, as a list of each sample's value or values.
fn column(column: &FeatureColumn) -> Value {
    let values: Vec<Value> = match column.strings.is_empty() {
        true => column.ids.iter().map(|&id| id.into()).collect(),
        false => column.strings.iter().map(|s| std::str::from_utf8(s).unwrap().into()).collect(),
    };
    if column.lengths.is_empty() {
        return values.into();
    }
    let mut values = values.into_iter();
    column.lengths.iter().map(|&length| values.by_ref().take(length as usize).collect::<Value>()).collect()
}

/// A trained model, samples, and the answer of a Rust client for them.
fn case(dir: &Path) -> Value {
    let models = train(dir);
    let served = Served::start(&models, "--cache-mode off");
    let request = PredictRequest { logits: true, ..request() };
    let native = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut ctr = CtrClient::new(channel(served.grpc).await);
        ctr.predict(request.clone()).await.unwrap().into_inner()
    });
    let mut columns: BTreeMap<&str, Value> =
        request.features.iter().map(|feature| (feature.name.as_str(), column(feature))).collect();
    for (i, name) in ["price", "hour"].into_iter().enumerate() {
        columns.insert(name, request.dense.iter().skip(i).step_by(2).copied().collect());
    }
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let absent: BTreeMap<_, _> = native.absent.iter().map(|ids| (&ids.feature, ids.count)).collect();
    json!({
        "models": models,
        "columns": columns,
        "score_bits": bits(&native.scores),
        "logit_bits": bits(&native.logits),
        "absent": absent,
    })
}

#[test]
fn the_python_client_gets_the_scores_of_the_rust_client() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => return skip(&reason),
    };
    let dir = tempfile::tempdir().unwrap();
    let (installed, file) = (dir.path().join("installed"), dir.path().join("case.json"));
    // What the package needs is installed already.
    let flags = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"];
    run(Command::new(&python).args(flags).arg(&installed).arg(CLIENT));
    fs::write(&file, case(dir.path()).to_string()).unwrap();
    let mut pytest = Command::new("timeout");
    pytest.args(["--kill-after=5", "900", &python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]);
    pytest.current_dir(CLIENT).env("PYTHONPATH", &installed).env("PYTHONDONTWRITEBYTECODE", "1");
    pytest.env("CLIENT_TEST_PROGRAM", env!("CARGO_BIN_EXE_flechette")).env("CLIENT_TEST_CASE", &file);
    let out = run(&mut pytest);
    assert!(out.contains(" passed") && !out.contains("skipped"), "{out}");
}
