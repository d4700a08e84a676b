//! A served score equals the trainer's to the bit: from `score` or from a single request, by string or by
//! id, alone or batched with other samples, with any cache and without one.

use std::fs;
use std::path::PathBuf;

use flechette::cli::client;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{FeatureColumn, PredictRequest, PredictResponse};
use flechette::store;
use flechette::types::{Batch, Element, RawBatch, RawFeature, RawValues, Version};
use serde_json::Value;
use tonic::transport::Channel;

use crate::program::{self, Served, Workshop, real, run_json};
use crate::serving::channel;
use crate::switching::wait;

const KINDS: [ArchKind; 5] =
    [ArchKind::Dlrm, ArchKind::Dcn, ArchKind::Dcnv2, ArchKind::Deepfm, ArchKind::WideDeep];

/// No cache, and caches of 1 %, 10 % and all of the rows.
const CACHES: [&str; 4] = [
    "--cache-mode off",
    "--cache-mode on --cache-fraction 0.01",
    "--cache-mode on --cache-fraction 0.1",
    "--cache-mode on --cache-fraction 1",
];

#[test]
fn served_scores_equal_the_trainers_with_any_cache() {
    let workshop = Workshop::new(3000, 2000);
    let trained = KINDS.map(|kind| workshop.train(kind));
    for (flags, batch) in CACHES.into_iter().zip(["2000", "7", "33", "64"]) {
        let served = Served::start(&workshop.models, flags);
        for (kind, trained) in KINDS.into_iter().zip(&trained) {
            let out = workshop.path("served.scores");
            let reported =
                served.score(kind.name(), &workshop.valid, &format!("--out {out} --batch {batch}"));
            let own = fs::read_to_string(workshop.trained_scores(kind)).unwrap();
            assert!(fs::read_to_string(&out).unwrap() == own, "{kind:?} {flags}");
            assert!(reported["auc"].is_f64() && reported["auc"] == trained["auc"], "{reported} {trained}");
            for key in ["logloss", "normalized_entropy"] {
                assert_nearly_equal(&reported[key], &trained[key]);
            }
            assert_eq!(
                (&reported["rows"], &reported["version"], &reported["absent"]),
                (&2000.into(), &1.into(), &0.into())
            );
        }
        for kind in KINDS {
            assert_cache_worked(&served, kind.name(), flags);
        }
    }
}

#[test]
fn the_file_of_scores_has_logits_of_which_the_scores_are_the_sigmoid() {
    let workshop = Workshop::new(1000, 300);
    workshop.train(ArchKind::Dlrm);
    let served = Served::start(&workshop.models, "--cache-mode off");
    let [plain, both] = ["plain", "both"].map(|name| workshop.path(name));
    for (out, logits) in [(&plain, ""), (&both, "--logits")] {
        served.score("dlrm", &workshop.valid, &format!("--out {out} --batch 7 {logits}"));
    }
    let [plain, both] = [plain, both].map(|path| fs::read_to_string(path).unwrap());
    assert_eq!(plain.lines().count(), 300);
    for (score, line) in plain.lines().zip(both.lines()) {
        let (beside, logit) = line.split_once('\t').unwrap();
        assert_eq!(beside, score);
        let [score, logit]: [f64; 2] = [score, logit].map(|number| number.parse().unwrap());
        assert!((1.0 / (1.0 + (-logit).exp()) - score).abs() < 1e-6, "{line}");
    }
}

/// The trainer computes losses from logits, a client from probabilities that are rounded to f32.
#[track_caller]
fn assert_nearly_equal(client: &Value, trainer: &Value) {
    let [client, trainer] = [client, trainer].map(|loss| loss.as_f64().unwrap());
    assert!((client - trainer).abs() < 1e-6 * trainer, "{client} {trainer}");
}

/// Asserts that the cache had hits and misses, and that a cache of 1 % evicts rows.
fn assert_cache_worked(served: &Served, model: &str, flags: &str) {
    let counted = |what: &str| served.sum(&format!("flechette_cache_{what}_total"), model);
    let (hits, misses) = (counted("hits"), counted("misses"));
    let on = flags.contains("on");
    assert_eq!((hits > 0.0, misses > 0.0), (on, on), "{model} {flags}: {hits} hits, {misses} misses");
    // The models that are named after element types score real clicks, whose rows fit even in 1 %.
    if flags.ends_with("0.01") && Element::ALL.iter().all(|element| model != element.name()) {
        wait(&format!("{model} {flags}: a row is evicted"), || counted("evictions") > 0.0);
    }
}

/// Tests rows in f16 and int8. Tables whose f32 rows are shorter keep f32. docs/schema.md has the effect on
/// AUC.
#[test]
fn served_scores_of_rounded_rows_equal_the_trainers_with_any_cache() {
    let workshop = Workshop::new(3000, 2000);
    let names =
        [(ArchKind::Dlrm, Element::F16), (ArchKind::Deepfm, Element::Int8), (ArchKind::Dcn, Element::Int8)];
    let trained = names.map(|(kind, element)| {
        let config = workshop.path("rounded.toml");
        fs::write(&config, preset::criteo(kind, 8, 1000).stored_as(element).to_toml()).unwrap();
        let (out, f32_config) = (workshop.trained_scores(kind), workshop.config(kind, 8, 1000));
        let [reported, exact] =
            [(&config, kind.name(), &out), (&f32_config, "exact", &workshop.path("exact"))].map(
                |(config, name, out)| {
                    let Workshop { models, train, valid, .. } = &workshop;
                    run_json(&format!(
                        "train --model-config {config} --format criteo-tsv --data {train} --valid {valid} \
                     --valid-out {out} --models {models} --name {name} --json"
                    ))
                },
            );
        let scores = |path: &str| fs::read_to_string(path).unwrap();
        assert!(
            scores(&out) != scores(&workshop.path("exact")),
            "{kind:?}: rounded rows have the scores of f32 rows"
        );
        let auc = |reported: &Value| reported["auc"].as_f64().unwrap();
        assert!((auc(&reported) - auc(&exact)).abs() < 0.005, "{kind:?}: {reported} {exact}");
        reported
    });
    for (flags, batch) in CACHES.into_iter().zip(["2000", "7", "33", "64"]) {
        let served = Served::start(&workshop.models, flags);
        for ((kind, element), trained) in names.into_iter().zip(&trained) {
            let out = workshop.path("served.scores");
            let reported =
                served.score(kind.name(), &workshop.valid, &format!("--out {out} --batch {batch}"));
            let own = fs::read_to_string(workshop.trained_scores(kind)).unwrap();
            assert!(fs::read_to_string(&out).unwrap() == own, "{kind:?} {element} {flags}");
            assert_eq!(reported["auc"], trained["auc"]);
            assert_nearly_equal(&reported["logloss"], &trained["logloss"]);
            assert_cache_worked(&served, kind.name(), flags);
        }
    }
}

#[test]
fn served_scores_of_real_clicks_equal_the_trainers_with_any_cache_and_element_type() {
    let (Some(train), Some(test)) = (real("criteo_kaggle_train.tsv.zst"), real("criteo_kaggle_test.tsv.zst"))
    else {
        return;
    };
    let workshop = Workshop::new(1, 1);
    let (train, test) = (train.to_str().unwrap(), test.to_str().unwrap());
    let own = |element: Element| workshop.path(&format!("{element}.scores"));
    let trained = Element::ALL.map(|element| {
        let (config, own, models) = (workshop.path("real.toml"), own(element), &workshop.models);
        fs::write(&config, preset::criteo(ArchKind::Dlrm, 16, 100_000).stored_as(element).to_toml()).unwrap();
        run_json(&format!(
            "train --model-config {config} --format criteo-tsv --data {train} --valid {test} \
             --valid-out {own} --models {models} --name {element} --json"
        ))
    });
    let auc = trained.each_ref().map(|reported| reported["auc"].as_f64().unwrap());
    let bytes = Element::ALL.map(|element| {
        let opened =
            store::open(workshop.models.as_ref(), element.name(), Version(1), store::Purpose::Serve).unwrap();
        opened.store.row_bytes()
    });
    eprintln!("test AUC by element {auc:?}, logloss {:?}", trained.each_ref().map(|t| &t["logloss"]));
    assert_eq!(bytes, [26 * 100_000 * 64, 26 * 100_000 * 32, 26 * 100_000 * 24]);
    assert!(auc.iter().all(|of| (of - auc[0]).abs() < 0.0005), "{auc:?}");
    for flags in CACHES {
        let served = Served::start(&workshop.models, flags);
        for (element, trained) in Element::ALL.into_iter().zip(&trained) {
            let out = workshop.path("served.scores");
            // In the first pass all requests may be one batch without hits. So there is a second one.
            for _ in 0..2 {
                let reported = served.score(element.name(), test, &format!("--out {out}"));
                assert!(fs::read(&out).unwrap() == fs::read(own(element)).unwrap(), "{element} {flags}");
                assert_eq!(reported["auc"], trained["auc"]);
            }
            assert_cache_worked(&served, element.name(), flags);
        }
    }
}

#[test]
fn served_scores_of_a_lossy_model_equal_the_trainers_and_fewer_rows_are_stored() {
    let workshop = Workshop::new(3000, 1000);
    let (config, own) = (workshop.path("lossy.toml"), workshop.path("lossy.own"));
    let schema = program::run("init --dataset criteo --arch dcnv2 --dim 8 --rows 5000 --lossy-bits 14");
    fs::write(&config, schema.stdout).unwrap();
    let trained = run_json(&format!(
        "train --model-config {config} --format criteo-tsv --data {} --valid {} --valid-out {own} \
         --models {} --name lossy --json",
        workshop.train, workshop.valid, workshop.models
    ));
    let schema = Schema::parse(&fs::read_to_string(&config).unwrap()).unwrap();
    let stored: u64 = schema.tables.iter().map(|t| t.stored_rows()).sum();
    assert!(stored < 1 << 14, "{stored} rows");
    for flags in CACHES {
        let served = Served::start(&workshop.models, flags);
        let out = workshop.path("lossy.served");
        let reported = served.score("lossy", &workshop.valid, &format!("--out {out}"));
        assert!(fs::read_to_string(&out).unwrap() == fs::read_to_string(&own).unwrap(), "{flags}");
        assert_eq!(reported["auc"], trained["auc"]);
    }
}

#[test]
fn served_scores_of_generated_bags_equal_the_trainers() {
    let workshop = Workshop::new(1, 1);
    let shape = preset::SyntheticShape { tables: 5, rows: 300, dense: 3, multi_hot: Some(4) };
    let config = workshop.path("bags.toml");
    fs::write(&config, preset::synthetic(ArchKind::Dcnv2, 8, shape).to_toml()).unwrap();
    let (own, out) = (workshop.path("own.scores"), workshop.path("served.scores"));
    let models = &workshop.models;
    run_json(&format!(
        "train --model-config {config} --format synthetic --data rows=2000,seed=1 --valid rows=700,seed=2 \
         --valid-out {own} --models {models} --name bags --json"
    ));
    for flags in CACHES {
        let served = Served::start(&workshop.models, flags);
        let url = served.url();
        let reported = run_json(&format!(
            "score --addr {url} --model bags --format synthetic rows=700,seed=2 --out {out} --batch 64 --json"
        ));
        assert_eq!(reported["rows"], 700);
        assert!(fs::read(&out).unwrap() == fs::read(&own).unwrap(), "{flags}");
        assert_cache_worked(&served, "bags", flags);
    }
}

/// Samples `from..to` of a file, not encoded.
fn rows(schema: &Schema, file: &str, from: usize, to: usize) -> RawBatch {
    let mut reader =
        dataset::open(Format::CriteoTsv, &[PathBuf::from(file)], schema, ReadOptions::default()).unwrap();
    let mut raw = RawBatch::default();
    if from > 0 {
        assert_eq!(reader.read(from, &mut raw).unwrap(), from);
    }
    assert_eq!(reader.read(to - from, &mut raw).unwrap(), to - from);
    raw
}

async fn predict(client: &CtrClient<Channel>, request: PredictRequest) -> PredictResponse {
    client.clone().predict(request).await.unwrap().into_inner()
}

fn bits(scores: &[f32]) -> Vec<u32> {
    scores.iter().map(|score| score.to_bits()).collect()
}

#[test]
fn a_score_does_not_depend_on_the_size_of_the_request_or_on_other_clients() {
    let workshop = Workshop::new(1000, 4096);
    for kind in KINDS {
        workshop.train(kind);
    }
    // There is only one worker. While it computes, requests of the other clients wait and are merged with
    // ours.
    let config = workshop.path("serve.toml");
    fs::write(&config, "[batcher]\nworkers = 1\nmax_delay_us = 2000\n").unwrap();
    let flags = format!("--config {config} --cache-mode on --cache-fraction 0.1");
    let served = Served::start(&workshop.models, &flags);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ctr = CtrClient::new(channel(served.grpc).await);
        for kind in KINDS {
            let schema = preset::criteo(kind, 8, 1000);
            let request =
                |from, to| client::request(kind.name(), &schema, &rows(&schema, &workshop.valid, from, to));
            let all = bits(&predict(&ctr, request(0, 4096)).await.scores);
            assert_eq!(all.len(), 4096);
            let others: Vec<_> = (0..4)
                .map(|other| {
                    let (ctr, request) = (ctr.clone(), request(100 * other, 100 * other + 41));
                    tokio::spawn(async move {
                        loop {
                            predict(&ctr, request.clone()).await;
                        }
                    })
                })
                .collect();
            for from in [0, 700, 4089] {
                let seven = bits(&predict(&ctr, request(from, from + 7)).await.scores);
                assert_eq!(seven, all[from..from + 7], "{kind:?} from {from}");
                for row in from..from + 7 {
                    let alone = bits(&predict(&ctr, request(row, row + 1)).await.scores);
                    assert_eq!(alone, all[row..=row], "{kind:?} row {row}");
                }
            }
            for other in others {
                assert!(!other.is_finished(), "another client stopped");
                other.abort();
            }
        }
    });
    let batches = served.metric("flechette_batch_samples_count", &["model=\"dlrm\""]);
    let requests = served.metric("flechette_requests_total", &["model=\"dlrm\"", "code=\"OK\""]);
    assert!(batches > 0.0 && batches < requests, "no requests were merged");
}

#[test]
fn ids_score_like_their_strings_and_absent_ids_take_the_default_and_are_counted() {
    let workshop = Workshop::new(1000, 50);
    workshop.train(ArchKind::Dlrm);
    for flags in CACHES {
        let served = Served::start(&workshop.models, flags);
        let schema = preset::criteo(ArchKind::Dlrm, 8, 1000);
        let strings = rows(&schema, &workshop.valid, 0, 50);
        let mut encoded = Batch::default();
        schema.encode(&strings, &mut encoded).unwrap();
        let columns = encoded.features.into_iter();
        let columns =
            columns.map(|column| RawFeature { offsets: column.offsets, values: RawValues::Ids(column.ids) });
        let ids = RawBatch { features: columns.collect(), ..strings.clone() };
        let mut absent = ids.clone();
        for (feature, sample, id) in [(2, 0, 1000), (2, 49, u64::MAX), (7, 3, 1001)] {
            let RawValues::Ids(ids) = &mut absent.features[feature].values else { panic!("not ids") };
            ids[sample] = id;
        }
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let ctr = CtrClient::new(channel(served.grpc).await);
            let scores = async |raw: &RawBatch| predict(&ctr, client::request("dlrm", &schema, raw)).await;
            let (by_string, by_id) = (scores(&strings).await, scores(&ids).await);
            assert_eq!(bits(&by_string.scores), bits(&by_id.scores), "{flags}");
            assert!(by_id.absent.is_empty() && by_string.absent.is_empty());
            let with_absent = scores(&absent).await;
            let counts: Vec<_> = with_absent.absent.iter().map(|a| (a.feature.as_str(), a.count)).collect();
            assert_eq!(counts, [("C3", 2), ("C8", 1)]);
            for (sample, (a, b)) in with_absent.scores.iter().zip(&by_id.scores).enumerate() {
                let changed = [0, 3, 49].contains(&sample);
                assert_eq!(a.to_bits() != b.to_bits(), changed, "sample {sample}");
            }
        });
        for (table, count) in [("C3", 2.0), ("C8", 1.0), ("C1", 0.0)] {
            let labels = ["model=\"dlrm\"", &format!("table=\"{table}\"")];
            assert_eq!(served.metric("flechette_absent_ids_total", &labels), count, "{table}");
        }
    }
}

#[test]
fn an_infinite_logit_is_refused_and_is_no_score_of_0_or_1() {
    let workshop = Workshop::new(10, 10);
    let config = workshop.path("dcn.toml");
    let init = program::run("init --dataset synthetic --arch dcn --dim 4 --rows 100 --tables 1 --dense 1");
    fs::write(&config, init.stdout).unwrap();
    run_json(&format!(
        "train --model-config {config} --format synthetic --data rows=256,seed=1 --models {} --name m --json",
        workshop.models
    ));
    let served = Served::start(&workshop.models, "");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = CtrClient::new(channel(served.grpc).await);
        let column = FeatureColumn { name: "F1".to_owned(), ids: vec![1], ..FeatureColumn::default() };
        for (value, logits) in [(1e20, false), (-1e20, true), (1e30, true), (-1e30, false)] {
            let request = PredictRequest {
                model: "m".to_owned(),
                samples: 1,
                dense: vec![value],
                features: vec![column.clone()],
                logits,
                ..PredictRequest::default()
            };
            let status = client.predict(request).await.unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{value}: {status}");
            assert!(status.message().starts_with("score of sample 0 is not finite"), "{value}: {status}");
        }
    });
}
