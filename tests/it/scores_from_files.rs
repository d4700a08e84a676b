//! The files of a version suffice to compute a score: `examples/python/score_from_files.py` reads only these
//! files and gives the scores of `serve`, for every architecture and element type.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest};
use serde_json::{Value, json};

use crate::program::{Served, run_json};
use crate::python::python;
use crate::serving::channel;
use crate::skip::skip;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const SAMPLES: usize = 200;
const TOLERANCE: f64 = 1e-5;

/// The rows of table `item`. Its default for absent ids is row 3.
const ITEMS: u64 = 30;
/// The ids of table `user`. Its default is zeros, and it stores fewer rows than ids.
const USERS: u64 = 200;

/// Name, `[architecture]`, whether it has first-order weights, and the dims of tables shop, word, item, user.
const MODELS: [(&str, &str, bool, [usize; 4]); 6] = [
    ("dlrm", "kind = \"dlrm\"\nbottom = [7]\ntop = [9, 4]", false, [5; 4]),
    ("dcn", "kind = \"dcn\"\ncross_layers = 3\ndeep = [8, 6]", false, [5, 6, 8, 3]),
    ("dcnv2", "kind = \"dcnv2\"\ncross_layers = 2\ndeep = [8, 6]", false, [7, 9, 4, 2]),
    ("dcnv2_low_rank", "kind = \"dcnv2\"\ncross_layers = 3\nrank = 3\ndeep = [6]", false, [4, 5, 6, 7]),
    ("deepfm", "kind = \"deepfm\"\ndeep = [10, 6]", true, [6; 4]),
    ("wide_deep", "kind = \"wide_deep\"\ndeep = [10]", true, [3, 8, 5, 6]),
];

/// A schema with every kind of transform, arity, pooling, hash, element type and default, except the default
/// `error`, and with a lossy table and a table that two features share.
fn model_toml(architecture: &str, wide: bool, dims: [usize; 4]) -> String {
    let mut text = format!("[architecture]\n{architecture}\n");
    text += "
        [[dense]]\nname = \"price\"\ntransform = \"log1p\"
        [[dense]]\nname = \"age\"\ntransform = { standardize = { mean = 41.5, std = 12.25 } }
        [[dense]]\nname = \"hour\"\n";
    for (name, table, rest) in [
        ("shop", "shop", "hash = { seed = 7, modulus = 40 }"),
        ("query", "word", "arity = { multi_hot = { max = 5 } }\nhash = { modulus = 60 }"),
        ("seen", "item", "arity = { multi_hot = { max = 4 } }\npooling = \"mean\""),
        ("item", "item", ""),
        ("user", "user", ""),
    ] {
        text += &format!("\n[[features]]\nname = \"{name}\"\ntable = \"{table}\"\n{rest}\n");
        if wide {
            text += &format!("wide_table = \"{table}_wide\"\n");
        }
    }
    for ((name, rest), dim) in [
        ("shop", "rows = 50\nelement = \"f16\"".to_owned()),
        ("word", "rows = 60\nelement = \"int8\"".to_owned()),
        ("item", format!("rows = {ITEMS}\nelement = \"int8\"\ndefault = {{ row = 3 }}")),
        ("user", format!("rows = {USERS}\nlossy_bits = 5")),
    ]
    .into_iter()
    .zip(dims)
    {
        text += &format!("\n[[tables]]\nname = \"{name}\"\ndim = {dim}\n{rest}\n");
        if wide {
            let rows = rest.lines().next().unwrap();
            text += &format!("\n[[tables]]\nname = \"{name}_wide\"\ndim = 1\n{rows}\n");
        }
    }
    text
}

/// Samples in the form that the script reads: values by the names of their inputs.
fn samples() -> Vec<BTreeMap<&'static str, Value>> {
    let mut state = 1_u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut sample = |_| {
        // About one id in nine is absent.
        let mut ids =
            |count: u64, rows: u64| (0..count).map(|_| below(rows + rows / 8)).collect::<Vec<u64>>();
        let (seen, item, user) = (ids(4, ITEMS), ids(1, ITEMS)[0], ids(1, USERS)[0]);
        let words: Vec<String> = (0..below(6)).map(|_| format!("wörd {}", below(1000))).collect();
        BTreeMap::from([
            ("price", json!(below(1000) as f64 / 8.0 - 5.0)),
            ("age", json!(below(100))),
            ("hour", json!(below(24) as f64 / 24.0)),
            ("shop", json!("shop".repeat(below(100) as usize))),
            ("query", json!(words)),
            ("seen", json!(seen[..below(5) as usize])),
            ("item", json!(item)),
            ("user", json!(user)),
        ])
    };
    (0..SAMPLES).map(&mut sample).collect()
}

fn request(model: &str, samples: &[BTreeMap<&str, Value>]) -> PredictRequest {
    let column = |name: &str| {
        let mut column = FeatureColumn { name: name.to_owned(), ..FeatureColumn::default() };
        for sample in samples {
            let one = [sample[name].clone()];
            let values = sample[name].as_array().map_or(&one[..], Vec::as_slice);
            column.lengths.push(values.len() as u32);
            column.ids.extend(values.iter().filter_map(Value::as_u64));
            column.strings.extend(values.iter().filter_map(Value::as_str).map(|text| text.to_owned().into()));
        }
        column
    };
    let dense =
        samples.iter().flat_map(|s| ["price", "age", "hour"].map(|name| s[name].as_f64().unwrap() as f32));
    PredictRequest {
        model: model.to_owned(),
        samples: samples.len() as u32,
        dense: dense.collect(),
        features: ["shop", "query", "seen", "item", "user"].map(column).into(),
        ..PredictRequest::default()
    }
}

/// Runs the script, and returns the scores that it computes from the files of a version.
fn scores_from_files(python: &str, version: &str, input: &str) -> Vec<f64> {
    let mut script = Command::new(python)
        .args([&format!("{ROOT}/examples/python/score_from_files.py"), version])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    script.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = script.wait_with_output().unwrap();
    assert!(output.status.success(), "{version}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_python_script_computes_the_served_scores_from_the_files_of_a_version() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => return skip(&reason),
    };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let models = path("models");
    for (name, architecture, wide, dims) in MODELS {
        let config = path("model.toml");
        fs::write(&config, model_toml(architecture, wide, dims)).unwrap();
        run_json(&format!(
            "train --model-config {config} --format synthetic --data rows=1000,seed=1,truth=2 --lr 0.1 \
             --models {models} --name {name} --json"
        ));
    }
    let samples = samples();
    let input: String = samples.iter().map(|sample| json!(sample).to_string() + "\n").collect();
    let served = Served::start(&models, "--cache-mode on --cache-fraction 0.5");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (name, ..) in MODELS {
        let ours = runtime.block_on(async {
            let mut ctr = CtrClient::new(channel(served.grpc).await);
            ctr.predict(request(name, &samples)).await.unwrap().into_inner()
        });
        assert!(ours.absent.len() >= 3, "{name}: seen, item and user have ids past their tables");
        let theirs = scores_from_files(&python, &format!("{models}/{name}/1"), &input);
        assert_eq!((ours.scores.len(), theirs.len()), (SAMPLES, SAMPLES), "{name}");
        for (sample, (ours, theirs)) in ours.scores.iter().zip(&theirs).enumerate() {
            let difference = (f64::from(*ours) - theirs).abs();
            assert!(difference <= TOLERANCE, "{name}, sample {sample}: served {ours}, from files {theirs}");
        }
        let range = |scores: &[f64]| {
            scores
                .iter()
                .fold((1.0_f64, 0.0_f64), |(least, most), score| (least.min(*score), most.max(*score)))
        };
        let (least, most) = range(&theirs);
        assert!(most - least > 0.05, "{name}: scores from {least} to {most} hardly depend on the samples");
    }
}
