use super::*;
use crate::schema::{Architecture, Loss, TableSchema};

fn schema() -> Schema {
    let table =
        |name: &str| TableSchema { name: name.to_owned(), rows: 10, dim: 4, ..TableSchema::default() };
    Schema {
        architecture: Architecture::Dlrm { bottom: vec![], top: vec![] },
        loss: Loss::BinaryCrossEntropy,
        dense: vec![],
        features: vec![],
        tables: vec![table("a"), table("b")],
    }
}

#[test]
fn the_page_has_the_documented_names_and_labels() {
    let metrics = Metrics::new().unwrap();
    let model = metrics.model("m", &schema());
    model.cache.capacity_bytes.set(1.0);
    model.tables[1].hits.increment(7);
    model.tables[0].absent.increment(2);
    model.requests.count(8);
    model.requests.count(99);
    model.batches.request_seconds.record(0.003);
    let page = metrics.render();
    for line in [
        "flechette_cache_hits_total{model=\"m\",table=\"b\"} 7",
        "flechette_cache_misses_total{model=\"m\",table=\"a\"} 0",
        "flechette_cache_evictions_total{model=\"m\",table=\"a\"} 0",
        "flechette_absent_ids_total{model=\"m\",table=\"a\"} 2",
        "flechette_requests_total{model=\"m\",code=\"RESOURCE_EXHAUSTED\"} 1",
        "flechette_requests_total{model=\"m\",code=\"UNKNOWN\"} 1",
        "flechette_requests_total{model=\"(none)\",code=\"OK\"} 0",
        "flechette_request_seconds_bucket{model=\"m\",le=\"0.005\"} 1",
        "flechette_request_seconds_bucket{model=\"m\",le=\"0.0025\"} 0",
    ] {
        assert!(page.lines().any(|l| l == line), "{line} is missing in\n{page}");
    }
}

/// A page that has every metric, of a model with a cache.
fn whole_page() -> String {
    let metrics = Metrics::new().unwrap();
    let model = metrics.model("m", &schema());
    model.cache.capacity_bytes.set(1.0);
    let batches = &model.batches;
    let durations = [&batches.request_seconds, &batches.queue_seconds, &batches.predict_seconds];
    for histogram in durations.into_iter().chain([&batches.lookup_seconds, &batches.dense_seconds]) {
        histogram.record(0.1);
    }
    batches.batch_samples.record(3.0);
    model.switches.seconds.record(0.1);
    model.learn.sync_seconds.record(0.1);
    let training = metrics.training("m");
    training.series.publish_seconds.record(0.1);
    training.series.pause_seconds.record(0.1);
    metrics.certificate_expiry().set(1.0);
    metrics.connections("grpc");
    let (_label, shadow) = (metrics.label("m", "stable"), metrics.shadow("m"));
    shadow.difference.record(0.1);
    metrics.spans().dropped.increment(1);
    metrics.render()
}

#[test]
fn every_metric_is_described() {
    let page = whole_page();
    for MetricSpec { name, help, .. } in ALL.into_iter().flatten() {
        assert!(page.contains(&format!("# HELP {name} {help}")), "{name} in\n{page}");
        assert!(page.contains(&format!("# TYPE {name} ")), "{name} in\n{page}");
    }
    for name in ["process_cpu_seconds_total", "process_open_fds", "process_max_fds", "process_threads"] {
        assert!(page.contains(&format!("# HELP {name} ")), "{name} in\n{page}");
        assert!(page.contains(&format!("\n{name} ")), "{name} in\n{page}");
    }
    assert!(!page.contains("summary"), "a histogram without buckets:\n{page}");
}

/// The text of `docs/metrics.md`: a row for each metric of a page.
fn reference(page: &str) -> String {
    let mut text = String::from(
        "# Metrics\n\nAll metrics of `/metrics`, in the order of that page. This page is generated from the \
         program.\n\
         [operations.md](operations.md#prometheus) has alerts and a dashboard for them.\n\
         [benchmarks.md](benchmarks.md#what-metrics-cost) has what they cost; `server.metrics = \"off\"` \
         leaves them out.\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for metric in page.split("# HELP ").skip(1) {
        let (name, rest) = metric.split_once(' ').unwrap();
        let mut lines = rest.lines();
        let (help, kind) = (lines.next().unwrap(), lines.next().unwrap().rsplit(' ').next().unwrap());
        let series = lines.next().unwrap_or_else(|| panic!("{name} has no series"));
        let labels = series.split_once('{').map_or("", |(_, labels)| labels);
        let of_label = |part: &str| part.split_once('=').map(|(label, _)| label.to_owned());
        let mut labels: Vec<_> = labels.split(',').filter_map(of_label).collect();
        labels.retain(|label| label != "le");
        text += &format!("| `{name}` | {kind} | {} | {help} |\n", labels.join(", "));
    }
    text
}

#[test]
fn the_page_of_metrics_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
    let page = reference(&whole_page());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == page, "docs/metrics.md is stale: run UPDATE_DOCS=1 cargo test --lib metrics");
}

#[test]
fn a_model_that_is_registered_twice_has_one_set_of_series() {
    let metrics = Metrics::new().unwrap();
    metrics.model("m", &schema()).tables[0].absent.increment(1);
    metrics.model("m", &schema()).tables[0].absent.increment(1);
    assert!(metrics.render().contains("flechette_absent_ids_total{model=\"m\",table=\"a\"} 2"));
}

#[test]
fn the_labels_that_clients_name_have_a_limited_number_of_series() {
    let metrics = Metrics::new().unwrap();
    for name in 0..1000 {
        let label = metrics.label("m", &format!("label-{name}"));
        label.version.set(0.0);
        label.requests.increment(1);
    }
    for name in ["canary", "label-0"] {
        metrics.label("m", name).version.set(7.0);
    }
    let page = metrics.render();
    assert_eq!(page.matches("flechette_label_requests_total{").count(), 65, "{page}");
    for name in ["canary", "label-0"] {
        let line = format!("flechette_label_version{{model=\"m\",label=\"{name}\"}} 7");
        assert!(page.contains(&line), "{page}");
    }
}

#[test]
fn a_model_that_is_unloaded_refuses_no_newer_version_any_more() {
    let metrics = Metrics::new().unwrap();
    metrics.model("m", &schema()).switches.refused_now.set(1.0);
    metrics.forget("m");
    let page = metrics.render();
    assert!(page.contains("flechette_newer_versions_refused{model=\"m\"} 0"), "{page}");
}

#[test]
fn the_counters_of_an_unloaded_model_stay_on_the_page() {
    let metrics = Metrics::new().unwrap();
    let model = metrics.model("m", &schema());
    model.cache.capacity_bytes.set(1.0);
    model.tables[1].hits.increment(7);
    model.requests.count(0);
    metrics.forget("m");
    let page = metrics.render();
    for line in [
        "flechette_cache_hits_total{model=\"m\",table=\"b\"} 7",
        "flechette_cache_capacity_bytes{model=\"m\"} 0",
        "flechette_requests_total{model=\"m\",code=\"OK\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line} is missing in\n{page}");
    }
}
