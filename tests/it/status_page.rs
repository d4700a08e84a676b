//! The status page: as documents over HTTP, and in a real browser, with a model that serves and is trained.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::program::{Background, Served, flechette, http_page};
use crate::python::python;
use crate::serve_train::{MODEL, Site};
use crate::serving::{Running, request};
use crate::skip::skip;
use crate::switching::wait;

/// Series whose values are times, or that change without any request.
const CHANGING: [&str; 3] =
    ["process_", "flechette_freshness_seconds", "flechette_serving_version_age_seconds"];

/// The series of a metrics page.
fn series(page: &str) -> BTreeMap<&str, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

fn is_changing(series: &str) -> bool {
    CHANGING.iter().any(|prefix| series.starts_with(prefix))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_series_of_the_document_is_that_of_metrics() {
    let mut running = Running::start().await;
    for seed in 0..20 {
        running.client.predict(request(3, seed).0).await.unwrap();
    }
    running.until_metric("flechette_request_seconds_count{model=\"ads\"} 20").await;
    let page = running.get("/metrics").await.1;
    let status: Value = serde_json::from_str(&running.get("/status.json").await.1).unwrap();
    let shown = status["series"].as_object().unwrap();
    let metrics = series(&page);
    for (name, value) in metrics.iter().filter(|(name, _)| !name.contains("_bucket{") && !is_changing(name)) {
        let finite = Some(*value).filter(|value| value.is_finite());
        assert_eq!(shown[*name].as_f64(), finite, "{name}");
    }
    assert!(shown.keys().all(|name| metrics.contains_key(name.as_str())), "{shown:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_minutes_are_known_to_a_page_that_was_not_open() {
    let mut running = Running::start().await;
    let mut intervals = 0;
    while intervals < 2 {
        running.client.predict(request(3, 0).0).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let status: Value = serde_json::from_str(&running.get("/status.json").await.1).unwrap();
        let plots = &status["plots"]["models"]["ads"];
        intervals = plots["intervals"].as_array().unwrap().len();
        assert_eq!(status["plots"]["times"].as_array().unwrap().len(), intervals);
        if intervals == 2 {
            for rates in [&plots["intervals"][1], &plots["last_minute"]] {
                let rate = |name: &str| rates[name].as_f64().unwrap();
                assert!(rate("requests_per_second") > 0.0 && rate("failed_per_second") == 0.0, "{rates}");
                let samples = rate("samples_per_second") / rate("requests_per_second");
                assert!((2.5..3.5).contains(&samples), "{rates}");
                assert!(rate("p50_seconds") > 0.0 && rate("p99_seconds") >= rate("p50_seconds"), "{rates}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_has_no_outside_assets_and_may_run_nothing_else() {
    let running = Running::start().await;
    let answer = http_page(running.http, "/");
    let (head, page) = answer.split_once("\r\n\r\n").unwrap();
    let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: ")).unwrap();
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
    for asset in ["src=\"", "@import", "url(", "innerHTML"] {
        assert!(!page.contains(asset), "{asset}");
    }
    // The only address is the name of a format, which is not fetched.
    let addresses: Vec<_> = page.match_indices("://").map(|(at, _)| &page[at - 5..]).collect();
    assert!(addresses.iter().all(|address| address.contains("://www.w3.org/2000/svg\"")), "{addresses:?}");
    assert!(!page.contains("{style}") && !page.contains("{script}"));
}

/// What the browser has found.
fn look(served: &Served, python: &str, folder: &Path, variants: &[&str]) -> Vec<Value> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/status_page.py");
    let url = format!("http://{}/", served.http);
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "300", python, script, "chromium", &url]).arg(folder).args(variants);
    let output = command.output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The number that a text such as `1,234`, `12.5 ms` or `3.0 MiB` stands for, and its precision.
fn read(text: &str) -> Option<(f64, f64)> {
    let (number, unit) = match text.split_once(' ') {
        Some((number, unit)) => (number.to_owned(), unit),
        None => (text.replace("/s", ""), ""),
    };
    let number = number.replace(',', "");
    let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let scale = match unit {
        "" | "B" | "s" => 1.0,
        "ms" => 1e-3,
        "\u{b5}s" => 1e-6,
        "%" => 1e-2,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        "GiB" => 1073741824.0,
        "min" => 60.0,
        _ => return None,
    };
    let value: f64 = number.parse().ok()?;
    // Three digits, or the decimals that are shown.
    let precision = (scale * 0.51 * 0.1f64.powi(decimals as i32)).max(if scale == 1.0 {
        0.0
    } else {
        value * scale * 0.005
    });
    Some((value * scale, precision))
}

/// Asserts that a figure has the value that `/metrics` had before and after, and that its text says it.
fn assert_figure(figure: &Value, before: &BTreeMap<&str, f64>, after: &BTreeMap<&str, f64>) {
    let name = figure["series"].as_str().unwrap();
    let text = figure["text"].as_str().unwrap();
    let Some(value) = figure["value"].as_str().and_then(|value| value.parse::<f64>().ok()) else {
        assert!(text == "\u{2013}" && before[name].is_nan(), "{figure}");
        return;
    };
    let (least, most) = (before[name].min(after[name]), before[name].max(after[name]));
    if !is_changing(name) {
        assert_eq!((least, most), (value, value), "{figure}");
    } else if !["process_threads", "process_open_fds", "process_resident"]
        .iter()
        .any(|own| name.starts_with(own))
    {
        assert!((least..=most).contains(&value), "{figure}: {least} to {most}");
    }
    if name.contains("training_state") {
        assert_eq!(text, "running");
    } else if name != "process_start_time_seconds" {
        let (said, precision) = read(text).unwrap_or_else(|| panic!("{figure}"));
        assert!((said - value).abs() <= precision, "{figure}: {said}, {precision}");
    }
}

/// Asserts that the hit rates of the tables are those of their counters. Returns how many there are.
fn assert_hit_rates(figures: &[Value], metrics: &BTreeMap<&str, f64>) -> usize {
    let rates = figures.iter().filter(|figure| figure["series"].is_null() && !figure["row"].is_null());
    let rates = rates.map(|figure| {
        let table = figure["row"].as_str().unwrap();
        let counter = |name: &str| {
            metrics[&*format!("flechette_cache_{name}_total{{model=\"{MODEL}\",table=\"{table}\"}}")]
        };
        let value: f64 = figure["value"].as_str().unwrap().parse().unwrap();
        let expected = counter("hits") / (counter("hits") + counter("misses"));
        assert!((value - expected).abs() < 1e-9, "{figure}: {expected}");
        let (said, precision) = read(figure["text"].as_str().unwrap()).unwrap();
        assert!((said - value).abs() <= precision, "{figure}");
    });
    rates.count()
}

/// A page as a user finds it: readable, usable by keyboard, and without errors.
fn assert_usable(found: &Value, served: &Served) {
    let variant = &found["variant"];
    assert_eq!(found["violations"], Value::Array(Vec::new()), "{variant}");
    let unclear = found["incomplete"].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
    // A single digit may be an icon, so axe-core does not judge it. It has the colours of other figures.
    let unclear: Vec<_> = unclear.filter(|line| !line.contains("too short to determine")).collect();
    assert!(unclear.is_empty(), "{variant}: {unclear:#?}");
    assert_eq!(found["console"], Value::Array(Vec::new()), "{variant}");
    let own = format!("http://{}/", served.http);
    let requests: Vec<_> =
        found["requests"].as_array().unwrap().iter().map(|url| url.as_str().unwrap()).collect();
    assert_eq!(requests, [own.clone(), own + "status.json"], "{variant}");
    assert!(found["overflow"].as_f64().unwrap() <= 0.0, "{variant}: wider than the window");
    let reached = found["reached"].as_array().unwrap();
    assert!(reached.len() >= 14, "{variant}: {reached:#?}");
    for focused in reached {
        assert!(
            focused["outline"].as_f64().unwrap() >= 2.0 && focused["inView"] == true,
            "{variant}: {focused}"
        );
    }
    assert_eq!(found["toggled"], true, "{variant}");
}

#[test]
fn in_a_browser_the_page_is_readable_usable_by_keyboard_and_shows_the_figures_of_metrics() {
    if Command::new("chromium").arg("--version").output().is_err() {
        return skip("chromium is not installed");
    }
    let python = match python() {
        Ok(python) => python,
        Err(reason) => return skip(&reason),
    };
    let site = Site::new(1600);
    let broken = Path::new(&site.workshop.models).join("broken/1");
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join("MANIFEST.json"), "{}").unwrap();
    let served = site.follow("--publish-every 2steps --train-threads 1 --cache-mode on --max-malformed 0");
    let line = format!(
        "load --addr {} --model {MODEL} --format criteo-tsv {} --seconds 300 --batch 8 --rate 20",
        served.url(),
        site.workshop.valid
    );
    let load = Background::start(flechette().args(line.split_whitespace()));
    (0..5).for_each(|part| site.arrive(part));
    let of_model = |metric: &str| served.sum(&format!("flechette_{metric}"), MODEL);
    wait("the model is trained", || of_model("training_samples_total") > 900.0);
    wait("versions are taken over", || of_model("switches_total") >= 3.0);
    wait("the cache is hit", || of_model("cache_hits_total") > 1000.0);
    wait("there are plots", || {
        let plots = &served.status()["plots"]["models"][MODEL];
        plots["auc"].as_array().is_some_and(|auc| !auc.is_empty()) && plots["intervals"][1].is_object()
    });

    let shots = Path::new(env!("CARGO_TARGET_TMPDIR")).join("status-page");
    fs::create_dir_all(&shots).unwrap();
    let variants = ["light-1280", "light-375", "dark-1280", "dark-375"];
    for found in look(&served, &python, &shots, &variants) {
        assert_usable(&found, &served);
        let plots = found["plots"].as_array().unwrap();
        assert_eq!(plots.len(), 4, "{plots:?}");
        assert!(plots.iter().all(|text| !text.as_str().unwrap().contains("last \u{2013}")), "{plots:?}");
        assert!(found["problems"].as_str().unwrap().contains("Model broken is not served: "));
        let shot = fs::metadata(shots.join(found["variant"].as_str().unwrap()).with_extension("png"));
        assert!(shot.unwrap().len() > 10_000);
    }

    // Without requests nothing changes any more: the trainer waits for the next file.
    drop(load);
    let still = || {
        series(&served.get("/metrics").1)
            .into_iter()
            .filter(|(name, _)| !is_changing(name))
            .map(|(name, value)| (name.to_owned(), value.to_bits()))
            .collect::<BTreeMap<_, _>>()
    };
    wait("nothing changes", || {
        let before = still();
        std::thread::sleep(Duration::from_millis(500));
        before == still()
    });
    let before = served.get("/metrics").1;
    let found = look(&served, &python, &shots, &["light-1280"]).remove(0);
    let after = served.get("/metrics").1;
    let (before, after) = (series(&before), series(&after));
    let figures = found["figures"].as_array().unwrap();
    let (of_series, _): (Vec<_>, Vec<_>) = figures.iter().partition(|figure| !figure["series"].is_null());
    of_series.iter().for_each(|figure| assert_figure(figure, &before, &after));
    assert_eq!(assert_hit_rates(figures, &before), 26);
    let names =
        ["requests_total", "serving_version", "freshness_seconds", "cache_used_bytes", "progressive_auc"];
    for name in names {
        let shown =
            |figure: &&&Value| figure["series"].as_str().unwrap().starts_with(&format!("flechette_{name}{{"));
        assert!(of_series.iter().any(|figure| shown(&figure)), "{name}");
    }

    fs::write(format!("{}/5", site.incoming), "not a sample\n").unwrap();
    wait("training fails", || served.status()["models"][0]["training"] == "failed");
    let found = look(&served, &python, &shots, &["light-375"]).remove(0);
    let problems = found["problems"].as_str().unwrap();
    assert!(problems.contains(&format!("Training of {MODEL} has failed: ")), "{problems}");
    let version = of_model("serving_version");
    assert!(problems.contains(&format!("Version {version} stays served")), "{problems}");
}
