//! `tritonclient`, the Python client of Triton, works with the KServe service and gets the native scores.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use serde_json::{Value, json};

use crate::certificates::{Authority, Files};
use crate::program::{Served, run_json};
use crate::python::python;
use crate::serving::channel;
use crate::skip::skip;

const SAMPLES: u64 = 50;

/// One-hot and multi-hot features of strings and of ids.
const MODEL: &str = r#"
    [architecture]
    kind = "dlrm"
    bottom = [7]
    top = [9]
    [[dense]]
    name = "price"
    transform = "log1p"
    [[dense]]
    name = "hour"
    [[features]]
    name = "shop"
    table = "shop"
    hash = { seed = 7, modulus = 40 }
    [[features]]
    name = "query"
    table = "word"
    arity = { multi_hot = { max = 5 } }
    hash = { modulus = 60 }
    [[features]]
    name = "seen"
    table = "item"
    arity = { multi_hot = { max = 4 } }
    [[features]]
    name = "item"
    table = "item"
    [[tables]]
    name = "shop"
    rows = 40
    dim = 5
    [[tables]]
    name = "word"
    rows = 60
    dim = 5
    [[tables]]
    name = "item"
    rows = 30
    dim = 5
"#;

/// Samples of the model.
pub fn request() -> PredictRequest {
    let column = |name: &str| FeatureColumn { name: name.to_owned(), ..FeatureColumn::default() };
    let mut features = ["shop", "query", "seen", "item"].map(column);
    let mut dense = Vec::new();
    for sample in 0..SAMPLES {
        dense.extend([sample as f32 * 1.7 - 5.0, (sample % 24) as f32 / 24.0]);
        features[0].strings.push("shöp ".repeat(sample as usize % 4).into_bytes().into());
        let words = (0..sample % 6).map(|word| format!("word {}", sample * 7 + word).into_bytes().into());
        features[1].strings.extend(words);
        features[1].lengths.push((sample % 6) as u32);
        features[2].ids.extend((0..sample % 5).map(|seen| (sample + seen * 3) % 33));
        features[2].lengths.push((sample % 5) as u32);
        features[3].ids.push(sample % 31);
    }
    PredictRequest {
        model: "ads".into(),
        samples: SAMPLES as u32,
        dense,
        features: features.into(),
        ..PredictRequest::default()
    }
}

/// Trains a model `ads` with both kinds of features, and returns its directory.
pub fn train(dir: &Path) -> String {
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (models, config) = (path("models"), path("model.toml"));
    fs::write(&config, MODEL).unwrap();
    run_json(&format!(
        "train --model-config {config} --format synthetic --data rows=1000,seed=1,truth=2 --lr 0.1 \
         --models {models} --name ads --json"
    ));
    models
}

/// A server of the same models that wants certificates and tokens, its files, and what a client must know.
fn secured(models: &str) -> (Served, Files, Value) {
    const PREDICT: &str = "predict-0123456789abcdef";
    const ADMIN: &str = "admin-0123456789abcdef";
    let (files, authority) = (Files::new(), Authority::new());
    let signed = authority.sign(2090);
    files.certificate(&signed);
    files.write("ca.pem", &authority.pem());
    files.write("predict", PREDICT);
    files.write("admin", ADMIN);
    let path = |name: &str| files.path(name).display().to_string();
    let [certificate, key, ca] = ["server.pem", "server.key", "ca.pem"].map(path);
    let config = format!(
        "[tls]\ncertificate = \"{certificate}\"\nkey = \"{key}\"\nclient_ca = \"{ca}\"\n\
         [auth]\npredict = \"{}\"\nadmin = \"{}\"\n[server]\nadmin = \"on\"\n\
         [models.ads]\nlabels = {{ canary = 1 }}\n",
        path("predict"),
        path("admin"),
    );
    let config = files.write("config.toml", &config);
    let served = Served::start(models, &format!("--config {}", config.display()));
    let secure = json!({
        "address": served.grpc.to_string(),
        "root_certificates": ca,
        "private_key": key,
        "certificate_chain": certificate,
        "predict": PREDICT,
        "admin": ADMIN,
    });
    (served, files, secure)
}

#[test]
fn tritonclient_gets_the_native_scores_and_manages_models() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => return skip(&reason),
    };
    let dir = tempfile::tempdir().unwrap();
    let case = dir.path().join("case.json");
    let models = train(dir.path());
    let served = Served::start(&models, "--cache-mode on --cache-fraction 0.5");
    let request = request();
    let native = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut ctr = CtrClient::new(channel(served.grpc).await);
        ctr.predict(request.clone()).await.unwrap().into_inner()
    });
    assert!(native.absent.iter().map(|absent| absent.count).sum::<u64>() > 0);
    let column = |column: &FeatureColumn| {
        let strings = column.strings.iter().map(|s| String::from_utf8(s.to_vec()).unwrap());
        json!({
            "name": column.name,
            "one_hot": column.lengths.is_empty(),
            "lengths": column.lengths,
            "ids": column.ids,
            "strings": strings.collect::<Vec<_>>(),
        })
    };
    let mut described = BTreeMap::from([
        ("address", json!(served.grpc.to_string())),
        ("model", json!(request.model)),
        ("samples", json!(SAMPLES)),
        ("dense", json!(request.dense)),
        ("columns", request.features.iter().map(column).collect()),
    ]);
    described.insert("score_bits", native.scores.iter().map(|score| score.to_bits()).collect());
    let (secured, files, secure) = secured(&models);
    described.insert("secure", secure);
    fs::write(&case, json!(described).to_string()).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/kserve_client.py");
    let output = Command::new("timeout")
        .args(["--kill-after=5", "120", &python, script, case.to_str().unwrap()])
        .output();
    let output = output.unwrap();
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{log}");
    assert_eq!(out.lines().count(), 8, "{out}");
    drop((secured, files));

    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/python/kserve.py");
    let address = served.grpc.to_string();
    let output =
        Command::new("timeout").args(["--kill-after=5", "120", &python, example, &address, "ads"]).output();
    let output = output.unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let scores: Vec<f32> = out.lines().map(|line| line.parse().unwrap()).collect();
    assert!(scores.len() == 3 && scores.iter().all(|score| *score > 0.0), "{output:?}");
}
