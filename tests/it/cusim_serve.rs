//! Serving on a stub GPU: the real CUDA driver code runs on the stub libcuda, and the simulator
//! executes the kernels. All other code, from the configuration to the scores, is the code that runs on a
//! machine with a GPU.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use flechette::cli::serve::{Serving, runtime};
use flechette::config::{Config, Flags};
use flechette::device::cusim::stub::{LAUNCHES_LEFT, execute_kernels, execute_kernels_but};
use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::{Served, Workshop, flechette, highest_version, manifest, run, run_json};
use crate::prometheus::{Prometheus, RULES, faster, is_installed};
use crate::stub_driver::Machine;
use crate::switching::{check_every_answer, publish_all_changed, published_for, wait};

/// The configuration of a server on free ports and a device.
fn config(device: &str, settings: &str) -> Config {
    let flags = Flags {
        grpc: Some("127.0.0.1:0".into()),
        http: Some("127.0.0.1:0".into()),
        device: Some(device.into()),
        ..Flags::default()
    };
    let environment = [("FLECHETTE_DEVICE_KERNEL_CACHE".into(), "off".into())];
    Config::resolve(&flags, environment, Some(settings)).unwrap()
}

/// Runs a server on the stub GPU, in this process, while `then` runs. Returns the result of `then`.
fn served<T: Send + 'static>(
    device: &str,
    models: &str,
    settings: &str,
    then: impl FnOnce(String, String) -> T + Send + 'static,
) -> T {
    let config = config(device, settings);
    let serving = Serving::load(&config, Path::new(models)).unwrap();
    let saving = serving.save_hot_rows(&config, Path::new(models)).unwrap();
    let result = runtime(&config).unwrap().block_on(async {
        let server = serving.bind(&config).await.unwrap();
        let watching = serving.watch(&server).unwrap();
        let (grpc, http) = (format!("http://{}", server.grpc_addr()), server.http_addr().to_string());
        let (done, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(server.run(async { drop(stopped.await) }));
        let result = tokio::task::spawn_blocking(move || then(grpc, http)).await.unwrap();
        done.send(()).unwrap();
        running.await.unwrap().unwrap();
        drop(watching);
        result
    });
    drop(saving);
    result
}

fn score(grpc: &str, model: &str, file: &str, out: &str, batch: usize) -> Value {
    run_json(&format!(
        "score --addr {grpc} --model {model} --format criteo-tsv {file} --out {out} --batch {batch} --json"
    ))
}

/// The value of a metric, summed over its labels.
fn sum(http: &str, name: &str) -> f64 {
    let page = crate::program::metrics_page(http.parse().unwrap());
    let lines = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Trains two models. Returns for each the trainer's scores of the validation rows.
fn workshop() -> (Workshop, [(&'static str, String); 2]) {
    let workshop = Workshop::new(2000, 400);
    let own = [ArchKind::Dlrm, ArchKind::Deepfm].map(|kind| {
        workshop.train(kind);
        (kind.name(), fs::read_to_string(workshop.trained_scores(kind)).unwrap())
    });
    (workshop, own)
}

const COUNTS: [&str; 4] = ["cache_hits_total", "cache_misses_total", "cache_evictions_total", "device_lost"];

/// Checks that a server on the stub GPU returns the trainer's scores. Returns the server's [`COUNTS`].
fn scores_alike(workshop: &Workshop, own: &[(&'static str, String); 2], settings: &str) -> [f64; 4] {
    scores_alike_on("cuda", i64::MAX, workshop, own, settings)
}

/// As [`scores_alike`], on a device that fails after this many launches.
fn scores_alike_on(
    device: &str,
    launches: i64,
    workshop: &Workshop,
    own: &[(&'static str, String); 2],
    settings: &str,
) -> [f64; 4] {
    let (valid, out, own) = (workshop.valid.clone(), workshop.path("served.scores"), own.clone());
    let shown = settings.to_owned();
    served(device, &workshop.models, settings, move |grpc, http| {
        LAUNCHES_LEFT.store(launches, Ordering::SeqCst);
        for (model, own) in own {
            for batch in [200, 33] {
                score(&grpc, model, &valid, &out, batch);
                assert!(fs::read_to_string(&out).unwrap() == own, "{model}, batches of {batch}: {shown}");
            }
        }
        COUNTS.map(|what| sum(&http, &format!("flechette_{what}")))
    })
}

#[test]
fn a_gpu_serves_the_trainers_scores_bit_for_bit() {
    Machine::whole().runs(|_| {
        execute_kernels();
        let (workshop, own) = workshop();
        for (settings, evicts) in [
            ("[cache]\nfraction = 1.0\n", false),
            ("[cache]\nfraction = 0.02\nadmission = \"all\"\n", true),
            ("[cache]\nfraction = 0.05\nkey_bits = 12\n", true),
            ("[cache]\nfraction = 0.05\npointers = 0.5\n", true),
        ] {
            let [hits, misses, evictions, lost] = scores_alike(&workshop, &own, settings);
            assert!(hits > 0.0 && misses > 0.0 && lost == 0.0, "{settings}: {hits} {misses} {lost}");
            assert!((evictions > 0.0) == evicts, "{settings}: {evictions}");
        }
    });
}

#[test]
fn the_metrics_say_what_memory_a_device_uses() {
    Machine::whole().runs(|_| {
        execute_kernels();
        let (workshop, _) = workshop();
        let settings = "[cache]\nfraction = 0.05\npointers = 0.5\n";
        let (valid, out) = (workshop.valid.clone(), workshop.path("served.scores"));
        served("cuda", &workshop.models, settings, move |grpc, http| {
            score(&grpc, "dlrm", &valid, &out, 33);
            for what in ["worker", "pinned"] {
                wait(what, || sum(&http, &format!("flechette_device_{what}_bytes")) > 0.0);
            }
        });
    });
}

#[test]
fn a_batch_whose_missing_rows_exceed_the_staging_buffer_is_scored_in_parts() {
    Machine::whole().runs(|_| {
        execute_kernels();
        let (workshop, own) = workshop();
        // DeepFM's 26 rows of dim 8 and 26 of dim 1 take 936 bytes per sample. The buffer has room for two
        // samples of a batch of 200.
        let settings = "[cache]\nfraction = 0.5\nstaging_bytes = 2000\n[batcher]\nworkers = 1\n";
        let [hits, misses, _, lost] = scores_alike(&workshop, &own, settings);
        assert!(hits > 0.0 && misses > 0.0 && lost == 0.0);
        let refused = |bytes: &str| {
            let settings = format!("[cache]\nstaging_bytes = {bytes}\n[batcher]\nworkers = 2\n");
            let error =
                Serving::load(&config("cuda", &settings), Path::new(&workshop.models)).map(drop).unwrap_err();
            format!("{error:#}")
        };
        let text = refused("1000");
        assert!(
            text.contains("cache.staging_bytes: 1000 bytes for 2 workers") && text.contains("minimum 1872"),
            "{text}"
        );
    });
}

#[test]
fn a_gpu_whose_scores_differ_from_the_hosts_is_not_used() {
    Machine::whole().runs(|_| {
        execute_kernels_but("gather_pool");
        let (workshop, own) = workshop();
        let load = |device| Serving::load(&config(device, ""), Path::new(&workshop.models));
        let text = format!("{:#}", load("cuda").map(drop).unwrap_err());
        assert!(text.contains("differently from the host: expected 0."), "{text}");
        let [.., lost] = scores_alike_on("auto", i64::MAX, &workshop, &own, "");
        assert_eq!(lost, 2.0);
    });
}

#[test]
fn a_gpu_that_fails_while_serving_changes_no_score() {
    for launches in [0, 5, 20] {
        let output = Machine::whole().with_setting("CASE", &launches.to_string()).runs(|_| {
            let launches = std::env::var("PRETEND_CASE").unwrap().parse().unwrap();
            execute_kernels();
            let (workshop, own) = workshop();
            let settings = "[cache]\nfraction = 0.05\n";
            let [.., lost] = scores_alike_on("cuda", launches, &workshop, &own, settings);
            assert_eq!(lost, 2.0, "both models lose their device");
        });
        if output.is_none() {
            return;
        }
    }
}

#[test]
fn hot_rows_warm_the_gpu_cache_before_serving() {
    Machine::whole().runs(|_| {
        execute_kernels();
        let (workshop, own) = workshop();
        let settings = "[cache]\nfraction = 1.0\n";
        let [_, cold, ..] = scores_alike(&workshop, &own, settings);
        let [hits, warm, ..] = scores_alike(&workshop, &own, settings);
        assert!(cold > 0.0 && warm == 0.0 && hits > 0.0, "{cold} misses, then {warm}");
    });
}

#[test]
fn a_gpu_takes_over_new_versions_with_and_without_pointers() {
    // glibc then allocates far from the other memory on some threads, so pointers do not reach all tables.
    Machine::whole().with_variable("MALLOC_ARENA_MAX", "2").runs(|_| {
        execute_kernels();
        let workshop = Workshop::new(1000, 200);
        workshop.train(ArchKind::Dlrm);
        for (settings, first) in [("fraction = 0.3", 2), ("fraction = 0.05\npointers = 0.5", 4)] {
            let (models, valid) = (workshop.models.clone(), workshop.valid.clone());
            let [ours, own] = ["served.scores", "host.scores"].map(|name| workshop.path(name));
            let settings = format!("[cache]\n{settings}\nadmission = \"all\"\n");
            served("cuda", &workshop.models, &settings, move |grpc, http| {
                for version in first..first + 2 {
                    for _ in 0..3 {
                        score(&grpc, "dlrm", &valid, &ours, 50);
                    }
                    publish_all_changed(&models, version);
                    wait("the version is taken over", || {
                        sum(&http, "flechette_serving_version") == version as f64
                    });
                    let host = Served::start(&models, "--cache-mode off --device host");
                    let scored = score(&host.url(), "dlrm", &valid, &own, 50);
                    assert_eq!(scored["version"], version);
                    assert_eq!(score(&grpc, "dlrm", &valid, &ours, 50)["version"], version);
                    let read = |path: &String| fs::read_to_string(path).unwrap();
                    assert!(read(&ours) == read(&own), "version {version}");
                }
                assert_eq!(sum(&http, "flechette_device_lost"), 0.0);
                assert!(sum(&http, "flechette_switch_rows_carried_total") > 0.0);
            });
        }
    });
}

#[test]
fn a_gpu_takes_over_deltas_and_new_models() {
    Machine::whole().with_variable("MALLOC_ARENA_MAX", "2").runs(|_| {
        execute_kernels();
        for settings in ["fraction = 0.3", "fraction = 0.05\npointers = 0.5"] {
            let workshop = Workshop::new(100, 200);
            workshop.train(ArchKind::Dlrm);
            let settings = format!("[cache]\n{settings}\nadmission = \"all\"\n");
            let models = workshop.models.clone();
            served("cuda", &models, &settings, move |grpc, http| {
                let Workshop { models, train, valid, .. } = &workshop;
                let [ours, own] = ["served.scores", "host.scores"].map(|name| workshop.path(name));
                let read = |path: &str| fs::read_to_string(path).unwrap();
                for _ in 0..2 {
                    score(&grpc, "dlrm", valid, &ours, 50);
                    let line = format!(
                        "train --from latest --format criteo-tsv --data {train} --models {models} \
                         --name dlrm --batch 32 --publish-every 1steps"
                    );
                    let mut train = flechette();
                    // So that all versions are deltas.
                    train.args(line.split_whitespace()).env("FLECHETTE_VERSIONS_COMPACT_AT", "100");
                    assert!(train.status().unwrap().success());
                    let version = highest_version(Path::new(models), "dlrm").unwrap();
                    assert!(manifest(models, "dlrm", version)["base"].is_object());
                    wait("the delta is taken over", || {
                        sum(&http, "flechette_serving_version") == version as f64
                    });
                    let host = Served::start(models, "--cache-mode off --device host");
                    assert_eq!(score(&host.url(), "dlrm", valid, &own, 50)["version"], version);
                    assert_eq!(score(&grpc, "dlrm", valid, &ours, 50)["version"], version);
                    assert!(read(&ours) == read(&own), "version {version}");
                }
                assert!(sum(&http, "flechette_switch_rows_carried_total") > 0.0);
                workshop.train(ArchKind::Deepfm);
                let line = format!("score --addr {grpc} --model deepfm --format criteo-tsv {valid}");
                wait("the new model is served", || run(&line).status.success());
                score(&grpc, "deepfm", valid, &ours, 50);
                assert!(read(&ours) == read(&workshop.trained_scores(ArchKind::Deepfm)));
                assert_eq!(sum(&http, "flechette_device_lost"), 0.0);
            });
        }
    });
}

#[test]
fn a_server_that_has_lost_its_gpu_takes_over_new_versions() {
    Machine::whole().runs(|_| {
        execute_kernels();
        let workshop = Workshop::new(300, 100);
        workshop.train(ArchKind::Dlrm);
        let (models, valid) = (workshop.models.clone(), workshop.valid.clone());
        let out = workshop.path("served.scores");
        let settings = "[cache]\nfraction = 0.05\npointers = 0.5\n";
        served("cuda", &workshop.models, settings, move |grpc, http| {
            LAUNCHES_LEFT.store(0, Ordering::SeqCst);
            score(&grpc, "dlrm", &valid, &out, 50);
            assert_eq!(sum(&http, "flechette_device_lost"), 1.0);
            publish_all_changed(&models, 2);
            wait("the version is taken over", || sum(&http, "flechette_serving_version") == 2.0);
            assert_eq!(score(&grpc, "dlrm", &valid, &out, 50)["version"], 2);
        });
    });
}

#[test]
fn every_answer_of_a_gpu_is_of_the_version_that_it_names() {
    Machine::whole().runs(|_| {
        execute_kernels();
        let workshop = Workshop::new(300, 400);
        workshop.train(ArchKind::Dlrm);
        let models = workshop.models.clone();
        let settings = "[cache]\nfraction = 0.05\npointers = 0.5\nadmission = \"all\"\n";
        served("cuda", &models.clone(), settings, move |grpc, http| {
            let grpc = grpc.strip_prefix("http://").unwrap().parse().unwrap();
            let begun = Instant::now();
            let versions = check_every_answer(grpc, &workshop, || {
                for version in (2..).take_while(|version| *version < 5 || begun.elapsed() < published_for()) {
                    publish_all_changed(&models, version);
                    wait("the version is taken over", || {
                        sum(&http, "flechette_serving_version") == version as f64
                    });
                }
            });
            assert!(versions >= 3, "{versions}");
            assert_eq!(sum(&http, "flechette_device_lost"), 0.0);
        });
    });
}

#[test]
fn a_gpu_without_memory_for_the_cache_is_an_error_and_auto_falls_back_to_the_host() {
    Machine::whole().with_setting("MEMORY", "100000").runs(|_| {
        execute_kernels();
        let (workshop, own) = workshop();
        let load = |device| Serving::load(&config(device, ""), Path::new(&workshop.models));
        let text = format!("{:#}", load("cuda").map(drop).unwrap_err());
        assert!(
            text.contains("device memory: ") && text.contains("bytes refused") && text.contains("100000"),
            "{text}"
        );
        let serving = load("auto").unwrap();
        assert_eq!(serving.engines().len(), own.len());
    });
}

#[test]
fn the_alert_of_a_lost_device_fires_for_one_that_fails_while_it_serves() {
    if !is_installed() {
        return;
    }
    Machine::whole().runs(|_| {
        execute_kernels();
        let (workshop, own) = workshop();
        let (valid, out) = (workshop.valid.clone(), workshop.path("served.scores"));
        served("cuda", &workshop.models, "[cache]\nfraction = 0.05\n", move |grpc, http| {
            let prometheus = Prometheus::start(&[http.parse().unwrap()], &faster(RULES));
            let fires = || {
                let query = "ALERTS{alertname=\"FlechetteDeviceLost\", alertstate=\"firing\"}";
                prometheus.query(query).is_ok_and(|alerts| !alerts.is_empty())
            };
            let score_all = || own.iter().for_each(|(model, _)| drop(score(&grpc, model, &valid, &out, 33)));
            score_all();
            assert!(!fires(), "the device works");
            LAUNCHES_LEFT.store(3, Ordering::SeqCst);
            score_all();
            wait("the alert fires", fires);
        });
    });
}
