//! The status page: as documents over HTTP, and in a real browser, with a model that serves and is trained.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;
use serde_json::{Value, json};

use crate::fake::until;
use crate::program::{Background, Served, flechette, highest_version, http_page};
use crate::python::python;
use crate::serve_train::site::{MODEL, Site};
use crate::serving::{Running, request};
use crate::skip::skip;
use crate::switching::wait;

/// Series whose values are times, or that change without any request. Each reading is a connection, which may
/// end after the next one has begun.
const CHANGING: [&str; 4] = [
    "process_",
    "flechette_freshness_seconds",
    "flechette_serving_version_age_seconds",
    "flechette_connections{port=\"http\"}",
];

/// Those of them that rise and fall.
const RISING_AND_FALLING: [&str; 4] = [
    "process_threads",
    "process_open_fds",
    "process_resident_memory_bytes",
    "flechette_connections{port=\"http\"}",
];

/// A model that cannot be served. Its name is no text of HTML.
const BROKEN: &str = "<b>broken\"";

/// A model with a good version, and a newer one that is refused.
const OLDER: &str = "wide_deep";

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
    let (mut intervals, begun) = (0, Instant::now());
    while intervals < 2 {
        assert!(begun.elapsed() < Duration::from_secs(300), "{intervals} intervals");
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

/// A quantile of the durations of requests on a metrics page, as Prometheus computes it: linear within a
/// bucket.
fn quantile(metrics: &BTreeMap<&str, f64>, quantile: f64) -> f64 {
    let bucket = |(series, below): (&&str, &f64)| {
        let bound = series.strip_prefix("flechette_request_seconds_bucket{model=\"ads\",le=\"")?;
        Some((bound.strip_suffix("\"}")?.parse::<f64>().unwrap(), *below))
    };
    let mut buckets: Vec<_> = metrics.iter().filter_map(bucket).collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    let rank = quantile * buckets.last().unwrap().1;
    let (mut lower, mut before) = (0.0, 0.0);
    for (upper, below) in buckets {
        if below >= rank {
            return lower + (upper - lower) * (rank - before) / (below - before);
        }
        (lower, before) = (upper, below);
    }
    panic!("no request: {metrics:?}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rates_of_the_last_minute_are_those_of_metrics() {
    const REQUESTS: u64 = 50;
    let started = Instant::now();
    let mut running = Running::start().await;
    let minute = async |running: &Running| {
        let status: Value = serde_json::from_str(&running.get("/status.json").await.1).unwrap();
        status["plots"]["models"]["ads"]["last_minute"].clone()
    };
    // The first reading is before the first request.
    until(async || minute(&running).await["requests_per_second"] == 0.0).await;
    let read = Instant::now();
    for seed in 0..REQUESTS {
        running.client.predict(request(3, seed).0).await.unwrap();
    }
    running.until_metric(&format!("flechette_request_seconds_count{{model=\"ads\"}} {REQUESTS}")).await;
    running.until_metric("flechette_batch_samples_sum{model=\"ads\"} 150").await;
    let at_least = read.elapsed().as_secs_f64();
    let page = running.get("/metrics").await.1;
    let shown = minute(&running).await;
    let at_most = started.elapsed().as_secs_f64();
    let rate = |name: &str| shown[name].as_f64().unwrap();
    let requests = rate("requests_per_second");
    let (least, most) = (REQUESTS as f64 / at_most, REQUESTS as f64 / at_least);
    assert!((least * 0.999..=most * 1.001).contains(&requests), "{shown}: {least} to {most}");
    assert!((rate("samples_per_second") / requests - 3.0).abs() < 1e-4, "{shown}");
    let metrics = series(&page);
    for (name, share) in [("p50_seconds", 0.5), ("p99_seconds", 0.99)] {
        let expected = quantile(&metrics, share);
        assert!((rate(name) / expected - 1.0).abs() < 1e-4, "{shown}: {expected}");
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
        "version" | "versions" => 1.0,
        _ => return None,
    };
    // Shares below 1 are shown as at most 99.99 %.
    let digit = if unit == "%" { 1.01 } else { 0.51 };
    let precision = scale * digit * 0.1f64.powi(decimals as i32);
    Some((number.parse::<f64>().ok()? * scale, precision))
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
    } else if !RISING_AND_FALLING.contains(&name) {
        assert!((least..=most).contains(&value), "{figure}: {least} to {most}");
    }
    if name.contains("training_state") {
        assert_eq!(text, "running");
    } else if name != "process_start_time_seconds" {
        let (said, precision) = read(text).unwrap_or_else(|| panic!("{figure}"));
        assert!((said - value).abs() <= precision, "{figure}: {said}, {precision}");
    }
}

/// Asserts that the page shows the requests per second of the document. Without requests the rate falls. But
/// a minute is what began with one of the last twelve readings, so it may be a twelfth shorter than before.
/// On a slow machine the last request may be more than a minute old.
fn assert_rate(found: &Value, [before, after]: [f64; 2]) {
    let section = format!("Model {MODEL}");
    let figures = found["figures"].as_array().unwrap();
    let figure = figures.iter().find(|figure| figure["section"] == section && figure["title"] == "Served");
    let figure = figure.unwrap_or_else(|| panic!("{figures:#?}"));
    let value: f64 = figure["value"].as_str().unwrap().parse().unwrap();
    let range = 0.9 * before.min(after)..=1.1 * before.max(after);
    assert!((value > 0.0 || after == 0.0) && range.contains(&value), "{figure}: {before}, {after}");
    let (said, precision) = read(figure["text"].as_str().unwrap()).unwrap();
    assert!((said - value).abs() <= precision, "{figure}");
}

/// Asserts that the hit rates of the tables are those of their counters.
fn assert_hit_rates(figures: &[Value], metrics: &BTreeMap<&str, f64>) {
    let section = format!("Model {MODEL}");
    let in_row = |figure: &&Value| {
        figure["section"] == section && figure["series"].is_null() && !figure["row"].is_null()
    };
    let rates: Vec<_> = figures.iter().filter(in_row).collect();
    assert_eq!(rates.len(), 26, "{rates:#?}");
    for figure in rates {
        let table = figure["row"].as_str().unwrap();
        let series = |name| format!("flechette_cache_{name}_total{{model=\"{MODEL}\",table=\"{table}\"}}");
        let [hits, misses] = ["hits", "misses"].map(|name| metrics[series(name).as_str()]);
        let value: f64 = figure["value"].as_str().unwrap().parse().unwrap();
        assert!((value - hits / (hits + misses)).abs() < 1e-9, "{figure}: {hits}, {misses}");
        let (said, precision) = read(figure["text"].as_str().unwrap()).unwrap();
        assert!((said - value).abs() <= precision, "{figure}");
    }
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
    let narrow = variant.as_str().unwrap().ends_with("375");
    // The last events are not far below the three models.
    let top = found["events_top"].as_f64().unwrap();
    assert!(top < if narrow { 3600.0 } else { 1800.0 }, "{variant}: {top}");
    assert!(!narrow || found["scrolls"] == "scroll more", "{variant}: rows are hidden without a sign");
    assert_eq!(found["values"], json!([0, 0.95, 0, "1970-01-01 00:00:00 UTC"]), "{variant}");
}

/// The chips and sentences of a page with an answer, and of one that gets none any more.
fn assert_states(found: &Value) {
    let problems = found["problems"].as_str().unwrap();
    let older = format!("Model {OLDER} serves an older version, 1: version 2 is refused: ");
    assert!(problems.contains(&older), "{problems}");
    let texts = |state: &Value| -> Vec<String> {
        let chips = state["chips"].as_array().unwrap().iter();
        chips.map(|chip| chip[0].as_str().unwrap().to_owned()).collect()
    };
    let (now, cut_off) = (&found["state"], &found["cut_off"]);
    assert_eq!(
        texts(now),
        ["ready, 2 problems", "ready", "training", "ready", "older version", "not served"]
    );
    let old = [
        "no connection",
        "was: ready",
        "was: training",
        "was: ready",
        "was: older version",
        "was: not served",
    ];
    assert_eq!(texts(cut_off), old);
    let chips = cut_off["chips"].as_array().unwrap();
    assert!(chips.iter().all(|chip| chip[1] == cut_off["muted"]), "{cut_off}");
    let sentence = cut_off["problems"][0].as_str().unwrap();
    assert!(
        sentence.starts_with("The server does not answer (") && sentence.ends_with(" UTC."),
        "{sentence}"
    );
}

/// A server with a model that it trains, one that it cannot serve, one of an older version, and requests.
struct Scene {
    site: Site,
    served: Served,
    load: Option<Background>,
    python: String,
}

impl Scene {
    fn new(python: String) -> Self {
        let site = Site::new(1600);
        let broken = Path::new(&site.workshop.models).join(BROKEN).join("1");
        fs::create_dir_all(&broken).unwrap();
        fs::write(broken.join("MANIFEST.json"), "{}").unwrap();
        site.workshop.train(ArchKind::WideDeep);
        let refused = Path::new(&site.workshop.models).join(OLDER).join("2");
        fs::create_dir_all(&refused).unwrap();
        fs::write(refused.join("MANIFEST.json"), "{}").unwrap();
        let served =
            site.follow("--publish-every 8steps --train-threads 1 --cache-mode on --max-malformed 0");
        let (url, file) = (served.url(), &site.workshop.valid);
        let line = format!("load --addr {url} --model {MODEL} --format criteo-tsv {file} --batch 8");
        let line = line + " --rate 20 --seconds 300";
        let load = Some(Background::start(flechette().args(line.split_whitespace())));
        let scene = Self { site, served, load, python };
        (0..5).for_each(|part| scene.site.arrive(part));
        wait("the model is trained", || scene.of_model("training_samples_total") > 900.0);
        wait("versions are taken over", || scene.of_model("switches_total") >= 2.0);
        wait("the cache is hit", || scene.of_model("cache_hits_total") > 1000.0);
        wait("there are plots", || {
            let plots = &scene.served.status()["plots"]["models"][MODEL];
            // An interval that began before the model was loaded has no values.
            let known = |interval: &Value| {
                let fields = ["requests_per_second", "p99_seconds", "hit_rate"];
                fields.into_iter().all(|field| interval[field].is_number())
            };
            plots["auc"].as_array().is_some_and(|auc| !auc.is_empty())
                && plots["intervals"].as_array().is_some_and(|intervals| intervals.iter().any(known))
        });
        scene
    }

    /// The sum of a metric of the trained model.
    fn of_model(&self, metric: &str) -> f64 {
        self.served.sum(&format!("flechette_{metric}"), MODEL)
    }

    /// What the browser finds, for each variant.
    fn look(&self, variants: &[&str]) -> Vec<Value> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/status_page.py");
        let shots = Path::new(env!("CARGO_TARGET_TMPDIR")).join("status-page");
        fs::create_dir_all(&shots).unwrap();
        let url = format!("http://{}/", self.served.http);
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", "300", &self.python, script, "chromium", &url]);
        let output = command.arg(&shots).args(variants).output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{log}");
        for variant in variants {
            let shot = fs::metadata(shots.join(variant).with_extension("png")).unwrap();
            assert!(shot.len() > 10_000, "{variant}");
        }
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Requests per second of the last minute.
    fn rate(&self) -> Option<f64> {
        self.served.status()["plots"]["models"][MODEL]["last_minute"]["requests_per_second"].as_f64()
    }

    /// The figures are those of `/metrics` at that instant.
    fn assert_figures(&mut self) {
        wait("there are requests", || self.rate() > Some(0.0));
        // Without requests nothing changes any more: the trainer waits for the next file.
        self.load = None;
        let page = || self.served.get("/metrics").1;
        let still = |page: &str| {
            let series = series(page).into_iter().filter(|(name, _)| !is_changing(name));
            series.map(|(name, value)| (name.to_owned(), value.to_bits())).collect::<Vec<_>>()
        };
        wait("the last version is served", || {
            let last = highest_version(Path::new(&self.site.workshop.models), MODEL);
            last == Some(self.of_model("serving_version") as u64)
        });
        wait("nothing changes", || {
            let before = still(&page());
            std::thread::sleep(Duration::from_millis(500));
            before == still(&page())
        });
        let (before, rate_before) = (page(), self.rate());
        let found = self.look(&["light-1280"]).remove(0);
        let (after, rate_after) = (page(), self.rate());
        assert_rate(&found, [rate_before, rate_after].map(Option::unwrap));
        let (before, after) = (series(&before), series(&after));
        let figures = found["figures"].as_array().unwrap();
        let of_series: Vec<_> = figures.iter().filter(|figure| !figure["series"].is_null()).collect();
        of_series.iter().for_each(|figure| assert_figure(figure, &before, &after));
        assert_hit_rates(figures, &before);
        for name in
            ["requests_total", "serving_version", "freshness_seconds", "cache_used_bytes", "progressive_auc"]
        {
            let series = format!("flechette_{name}{{");
            let shown = |figure: &&Value| figure["series"].as_str().unwrap().starts_with(&series);
            assert!(of_series.iter().any(shown), "{name}");
        }
    }
}

#[test]
fn in_a_browser_the_page_is_readable_usable_by_keyboard_and_shows_the_figures_of_metrics() {
    if Command::new("chromium").arg("--version").output().is_err() {
        return skip("chromium is not installed");
    }
    let mut scene = match python() {
        Ok(python) => Scene::new(python),
        Err(reason) => return skip(&reason),
    };
    for found in scene.look(&["light-1280", "light-375", "dark-1280", "dark-375"]) {
        assert_usable(&found, &scene.served);
        assert_states(&found);
        let plots = found["plots"].as_array().unwrap();
        assert_eq!(plots.len(), 7, "{plots:?}");
        assert!(plots[..4].iter().all(|text| !text.as_str().unwrap().contains("last \u{2013}")), "{plots:?}");
        let (problems, events) = (found["problems"].as_str().unwrap(), found["events"].as_array().unwrap());
        assert!(problems.contains(&format!("Model {BROKEN} is not served: ")), "{problems}");
        let kinds = ["loaded", "published", "switched", "refused"];
        assert!(kinds.iter().all(|kind| events.contains(&json!(kind))), "{events:?}");
    }
    scene.assert_figures();

    fs::write(format!("{}/5", scene.site.incoming), "not a sample\n").unwrap();
    wait("training fails", || scene.served.status()["models"][0]["training"] == "failed");
    let found = scene.look(&["light-375"]).remove(0);
    let problems = found["problems"].as_str().unwrap();
    assert!(problems.contains(&format!("Training of {MODEL} has failed: ")), "{problems}");
    let version = scene.of_model("serving_version");
    assert!(problems.contains(&format!("Version {version} stays served")), "{problems}");
}
