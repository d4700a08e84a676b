use super::*;
use crate::schema::{Architecture, Loss, Table};

fn schema() -> Schema {
    let table = |name: &str| Table { name: name.to_owned(), rows: 10, dim: 4, ..Table::default() };
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

#[test]
fn every_metric_is_described() {
    let metrics = Metrics::new().unwrap();
    let model = metrics.model("m", &schema());
    model.cache.capacity_bytes.set(1.0);
    let batches = &model.batches;
    let durations = [&batches.request_seconds, &batches.queue_seconds, &batches.predict_seconds];
    for histogram in durations.into_iter().chain([&batches.lookup_seconds, &batches.dense_seconds]) {
        histogram.record(0.1);
    }
    batches.batch_samples.record(3.0);
    let training = metrics.training("m");
    training.series.publish_seconds.record(0.1);
    training.series.pause_seconds.record(0.1);
    metrics.certificate_expiry().set(1.0);
    metrics.spans().dropped.increment(1);
    let (_label, shadow) = (metrics.label("m", "stable"), metrics.shadow("m"));
    shadow.difference.record(0.1);
    let page = metrics.render();
    for Spec(name, _, help) in ALL.into_iter().flatten() {
        assert!(page.contains(&format!("# HELP {name} {help}")), "{name} in\n{page}");
        assert!(page.contains(&format!("# TYPE {name} ")), "{name} in\n{page}");
    }
    for name in ["process_cpu_seconds_total", "process_open_fds", "process_max_fds", "process_threads"] {
        assert!(page.contains(&format!("# HELP {name} ")), "{name} in\n{page}");
        assert!(page.contains(&format!("\n{name} ")), "{name} in\n{page}");
    }
    assert!(!page.contains("summary"), "a histogram without buckets:\n{page}");
}

#[test]
fn a_model_that_is_registered_twice_has_one_set_of_series() {
    let metrics = Metrics::new().unwrap();
    metrics.model("m", &schema()).tables[0].absent.increment(1);
    metrics.model("m", &schema()).tables[0].absent.increment(1);
    assert!(metrics.render().contains("flechette_absent_ids_total{model=\"m\",table=\"a\"} 2"));
}
