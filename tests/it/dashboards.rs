//! The dashboard of `deploy/grafana/`, the alert rules and the docs name metrics that a live server has, and
//! that change while it works.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use flechette::schema::preset::ArchKind;
use flechette::server::proto::ctr_client::CtrClient;
use serde_json::Value;
use tonic::Code;

use crate::certificates::{Authority, Files, endpoint};
use crate::learn::served::labelled;
use crate::program::{Background, Served, Workshop, flechette, metrics_page};
use crate::prometheus::{Prometheus, RULES, is_installed, promtool};
use crate::switching::{MODEL, publish_all_changed, requests, wait};

const DASHBOARD: &str = include_str!("../../deploy/grafana/flechette.json");

/// Metrics that do not change while nothing fails (`alerts.rs` makes servers fail), or that are constant.
const CONSTANT: &[&str] = &[
    "flechette_batch_panics_total",
    "flechette_build_info",
    "flechette_cache_capacity_bytes",
    "flechette_cache_entries_max",
    "flechette_cache_pool_bytes",
    "flechette_connections_max",
    "flechette_connections_overdue_total",
    "flechette_connections_refused_total",
    "flechette_device_lost",
    "flechette_label_failures_total",
    "flechette_learn_refused_total",
    "flechette_models_not_served",
    "flechette_newer_versions_refused",
    "flechette_publishes_failed_total",
    "flechette_ready",
    "flechette_shadow_dropped_total",
    "flechette_shadow_failed_total",
    "flechette_switches_refused_total",
    "flechette_tls_certificate_expiry_seconds",
    "flechette_tls_handshakes_failed_total",
    "flechette_trace_dropped_total",
    "flechette_training_state",
    "process_max_fds",
    "process_start_time_seconds",
    "process_threads",
    "process_virtual_memory_max_bytes",
];

/// Metrics of a cache that is small for its load, with narrow keys, from which a switch drops what changed.
const SMALL_CACHE: [&str; 3] = [
    "flechette_cache_collisions_total",
    "flechette_cache_rejected_total",
    "flechette_switch_rows_dropped_total",
];

/// Metrics that need a GPU (`cusim_serve.rs`), or other places of the tables (`store_memory.rs`).
const ELSEWHERE: &[&str] = &[
    "flechette_cache_pointed_total",
    "flechette_cache_pointers",
    "flechette_device_pinned_bytes",
    "flechette_device_worker_bytes",
    "flechette_store_mapped_bytes",
    "flechette_store_ram_bytes",
];

/// The text of every page that names metrics.
fn pages() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = files.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let text = |path| fs::read_to_string(path).unwrap();
    pages.map(text).chain([DASHBOARD, RULES].map(str::to_owned)).collect()
}

/// The names of metrics in a text. Names with a colon are those of recording rules.
fn names(text: &str, histograms: &BTreeSet<&str>) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let metric = |word: &&str| {
        let ours = word.starts_with("flechette_") || word.starts_with("process_");
        ours && !word.contains(':') && !word.ends_with('_')
    };
    words.filter(metric).map(|word| base(word, histograms).to_owned()).collect()
}

/// The name of the metric of a series, which for a histogram has a suffix.
fn base<'n>(series: &'n str, histograms: &BTreeSet<&str>) -> &'n str {
    let suffixes = ["_bucket", "_sum", "_count"];
    let names = suffixes.iter().filter_map(|suffix| series.strip_suffix(suffix));
    names.into_iter().find(|name| histograms.contains(name)).unwrap_or(series)
}

fn histograms(page: &str) -> BTreeSet<&str> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|line| line.strip_suffix(" histogram")).collect()
}

/// The lines of each metric.
fn lines(page: &str) -> BTreeMap<&str, Vec<&str>> {
    let (histograms, mut lines) = (histograms(page), BTreeMap::<_, Vec<_>>::new());
    for line in page.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let series = line.split(['{', ' ']).next().unwrap();
        lines.entry(base(series, &histograms)).or_default().push(line);
    }
    lines
}

/// The queries of all panels, with values for their variables.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let query = |target: &Value| {
        let text = target["expr"].as_str().unwrap().replace("$__rate_interval", "5s");
        text.replace("$job", "flechette").replace("$instance", ".*").replace("$model", ".*")
    };
    targets.map(query).collect()
}

/// A server with TLS, a cache, a canary, a shadow and an access trace, which trains its model and takes
/// samples, and a client.
struct Site {
    workshop: Workshop,
    incoming: String,
    files: Files,
    authority: Authority,
}

impl Site {
    fn new() -> Self {
        let (workshop, files, authority) = (Workshop::new(2000, 400), Files::new(), Authority::new());
        workshop.train(ArchKind::Dlrm);
        files.certificate(&authority.sign(2090));
        files.write("ca.pem", &authority.pem());
        let incoming = workshop.path("incoming");
        fs::create_dir(&incoming).unwrap();
        Self { workshop, incoming, files, authority }
    }

    fn serve(&self) -> Served {
        let path = |name: &str| self.files.path(name).display().to_string();
        let text = format!(
            "[tls]\ncertificate = \"{}\"\nkey = \"{}\"\n[cache]\nmode = \"on\"\nfraction = 0.05\n\
             [trace]\nrate = 1\n[learn]\nenabled = \"on\"\n\
             [models.dlrm]\nlabels = \"canary = 1\"\ncanary_share = 0.2\nshadow = 1\nshadow_share = 0.5\n",
            path("server.pem"),
            path("server.key")
        );
        let config = self.files.write("serve.toml", &text);
        let (config, incoming) = (config.display(), &self.incoming);
        let train = "--format criteo-tsv --batch 32 --publish-every 4steps";
        Served::start(&self.workshop.models, &format!("--config {config} --train dlrm={incoming} {train}"))
    }

    fn load(&self, served: &Served, flags: &str) -> Background {
        let (port, file, ca) = (served.grpc.port(), &self.workshop.valid, self.files.path("ca.pem"));
        let line = format!(
            "load --addr https://localhost:{port} --ca {} --model dlrm --format criteo-tsv {file} \
             --batch 16 {flags}",
            ca.display()
        );
        Background::start(flechette().args(line.split_whitespace()))
    }
}

impl Site {
    /// Sends a sample to be learned, and a request with an id beyond the rows of its table.
    fn learn_and_miss(&self, served: &Served) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let channel = endpoint(served.grpc, &self.authority, None).connect().await.unwrap();
            let (mut client, mut request) = (CtrClient::new(channel), requests(&self.workshop).remove(0).0);
            let learned = client.learn(labelled(request.clone(), 1.0)).await;
            let samples = request.samples as usize;
            request.features[0].strings.clear();
            request.features[0].ids = vec![u64::MAX; samples];
            // On a slow machine the load of this test is an overload. This is called again and again.
            match client.predict(request).await {
                Ok(answer) => assert_eq!(answer.into_inner().absent[0].count, samples as u64),
                Err(refused) => assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}"),
            }
            learned.map_or_else(|refused| assert_eq!(refused.code(), Code::ResourceExhausted), drop);
        });
    }

    /// Waits until each panel had data once. Most panels show a rate of the last seconds, so what they show
    /// happens again and again meanwhile.
    fn wait_for_data(&self, served: &Served, prometheus: &Prometheus) {
        let elsewhere = |query: &str| ELSEWHERE.iter().chain(&SMALL_CACHE).any(|name| query.contains(name));
        let mut empty = queries();
        for _ in 0..600 {
            self.learn_and_miss(served);
            let answer = |query: &str| prometheus.query(query).unwrap_or_else(|error| panic!("{error}"));
            empty.retain(|query| answer(query).is_empty() && !elsewhere(query));
            if empty.is_empty() {
                return;
            }
            sleep(Duration::from_millis(500));
        }
        panic!("no data: {empty:#?}");
    }
}

#[test]
fn every_metric_that_a_page_names_exists_is_described_and_changes_and_every_panel_has_data() {
    if !is_installed() {
        return;
    }
    let site = Site::new();
    let served = site.serve();
    let prometheus = Prometheus::start(&[served.http], RULES);
    let before = metrics_page(served.http);
    // Training and taking over need processors that are idle now and then.
    let some = site.load(&served, "--rate 50 --seconds 3600");
    fs::rename(&site.workshop.train, format!("{}/1", site.incoming)).unwrap();
    wait("versions are taken over", || served.sum("flechette_switches_total", "dlrm") >= 2.0);
    let full = site.load(&served, "--concurrency 16 --seconds 120");
    site.wait_for_data(&served, &prometheus);
    // The first one may have ended.
    let again = site.load(&served, "--concurrency 16 --seconds 3600");
    let after = metrics_page(served.http);
    let (_, body) = after.split_once("\r\n\r\n").unwrap();
    promtool(&["check", "metrics"], body);
    let (now, mut named) = (lines(&after), names(&pages(), &histograms(&after)));
    // `otel.rs` looks at these, because they need the feature `otel`.
    named.retain(|name| !name.starts_with("flechette_spans_"));
    for name in &named {
        assert!(now.contains_key(name.as_str()), "{name} is not on the page");
        assert!(after.contains(&format!("# HELP {name} ")), "{name} has no help");
    }
    let mut still: Vec<&str> = named.iter().map(String::as_str).collect();
    let others = [CONSTANT, ELSEWHERE, &SMALL_CACHE].concat();
    still.retain(|name| !others.contains(name));
    // A gauge may have its first value again by chance.
    for _ in 0..1200 {
        let page = metrics_page(served.http);
        let (then, now) = (lines(&before), lines(&page));
        still.retain(|name| then.get(name) == now.get(name));
        if still.is_empty() {
            break;
        }
        sleep(Duration::from_millis(50));
    }
    assert!(still.is_empty(), "{still:?} do not change");
    drop((some, full, again));
    assert!(named.len() > 50, "{named:?}");
}

#[test]
fn the_metrics_of_a_cache_that_is_small_for_its_load_change() {
    let workshop = Workshop::new(2000, 400);
    workshop.train(ArchKind::Dlrm);
    let config = Path::new(&workshop.models).with_file_name("small.toml");
    let cache = "fraction = 0.05\nadmission = \"all\"\nkey_bits = 13\nswitch_bytes = \"1B\"\n";
    fs::write(&config, format!("[cache]\nmode = \"on\"\n{cache}")).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {}", config.display()));
    let change = |[collisions, rejected, dropped]: [f64; 3]| (collisions > 0.0 && rejected > 0.0, dropped);
    let values = || change(SMALL_CACHE.map(|name| served.sum(name, MODEL)));
    assert_eq!(values(), (false, 0.0));
    let file = &workshop.valid;
    wait("rows collide and find no room", || {
        served.score(MODEL, file, "--batch 32");
        values().0
    });
    publish_all_changed(&workshop.models, 2);
    wait("changed rows are dropped", || values().1 > 0.0);
}

#[test]
fn every_alert_is_explained_in_the_operators_page() {
    let page = include_str!("../../docs/operations.md");
    for alert in RULES.lines().filter_map(|line| line.trim_start().strip_prefix("- alert: ")) {
        assert!(page.contains(&format!("| `{alert}` |")), "{alert}");
    }
}

#[test]
fn every_message_of_the_symptoms_in_the_operators_page_is_one_of_the_program() {
    let page = include_str!("../../docs/operations.md");
    let section = page.split("\n## Symptoms\n").nth(1).unwrap().split("\n## ").next().unwrap();
    // What a message names at run time is left out.
    let messages = |line: &str| -> Vec<String> {
        let cell = line.strip_prefix("| ").and_then(|row| row.split(" | ").next()).unwrap_or_default();
        let quoted = cell.split('`').skip(1).step_by(2).flat_map(|text| text.split(" ctr"));
        let text = |part: &str| part.trim_matches([' ', '.', ':']).to_owned();
        quoted.map(text).filter(|text| text.contains(' ')).collect()
    };
    let sources = walkdir::WalkDir::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).into_iter();
    let sources: String = sources
        .map(|file| file.unwrap().into_path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let messages: Vec<String> = section.lines().flat_map(messages).collect();
    assert!(messages.len() > 15, "{messages:?}");
    for message in messages {
        assert!(sources.contains(&message), "{message}");
    }
}
