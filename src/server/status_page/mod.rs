//! The status page: one HTML document without other files, and the JSON document that it reads every two
//! seconds.
//!
//! The page (`page.html`, `style.css`, `script.js`) has no facts of the server. All figures come from one
//! rendering of the metrics page, so they are those of `/metrics` at that instant. Its policy for contents
//! lets the browser run only this script and style, and connect only to this server.

mod history;
mod overload;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use serde::Serialize;

use super::model::{Model, ShownLabel};
use super::not_served::Reason;
use super::{ServerState, convert};
use crate::metrics::{Event, Page, TrainingState};
use crate::types::{VersionSelector, unix_ms};
use history::{Plots, PlottedModel};

pub(crate) use history::{EVERY, History};
pub(crate) use overload::Overloads;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The page, and its policy for contents.
static PAGE: LazyLock<(String, String)> = LazyLock::new(|| {
    let page = include_str!("page.html").replace("{style}", STYLE).replace("{script}", SCRIPT);
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(digest(&SHA256, text.as_bytes())));
    let policy = format!(
        "default-src 'none'; style-src {}; script-src {}; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    );
    (page, policy)
});

/// The page.
pub(crate) fn page() -> impl IntoResponse {
    let (page, policy) = &*PAGE;
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // The next version of the program has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, page.as_str())
}

/// What the page shows.
#[derive(Serialize)]
struct Document<'d> {
    unix_ms: u64,
    program: &'static str,
    grpc: SocketAddr,
    http: SocketAddr,
    /// `None`: the server is ready.
    not_ready: Option<String>,
    models: Vec<ModelStatus>,
    plots: Plots,
    events: Vec<Event>,
    /// The series of `/metrics`, without the buckets of histograms.
    series: BTreeMap<&'d str, Option<f64>>,
}

/// A model of the directory, as far as metrics do not say it.
#[derive(Default, Serialize)]
struct ModelStatus {
    name: String,
    state: &'static str,
    /// Why it is not served.
    reason: Option<String>,
    architecture: &'static str,
    features: usize,
    tables: Vec<String>,
    /// The loaded versions, ascending.
    versions: Vec<u64>,
    labels: Vec<LabelStatus>,
    /// Versions that are wanted and cannot be loaded: why.
    missing: Vec<String>,
    /// Versions that are newer than all that can be served: why they are refused.
    newer_refused: Vec<String>,
    /// Versions of which a call does not end.
    stuck: Vec<u64>,
    /// Why it takes no learned samples.
    no_learning: Option<String>,
    /// The version of requests that name none.
    serving: u64,
    training: Option<&'static str>,
    overloaded: bool,
}

#[derive(Serialize)]
struct LabelStatus {
    label: String,
    /// `None`: the highest good version.
    follows: Option<u64>,
    /// `None`: it is not loaded.
    version: Option<u64>,
}

/// What the page shows now, as JSON.
pub(crate) fn document(state: &ServerState) -> Response {
    let text = state.metrics_text();
    let metrics = Page::read(&text);
    let loaded = state.models.all();
    let mut models: Vec<ModelStatus> = loaded.iter().map(|model| status(model)).collect();
    for (name, reason) in state.not_served.all() {
        let (word, reason) = match reason {
            Reason::Loading { .. } => ("loading", None),
            Reason::Refused(reason) => ("refused", Some(reason)),
        };
        match models.iter_mut().find(|model| model.name == name) {
            // Its further versions are being loaded.
            Some(model) => model.state = word,
            None => models.push(ModelStatus { name, state: word, reason, ..ModelStatus::default() }),
        }
    }
    for model in &mut models {
        model.training = state.metrics.training_state(&model.name).map(|training| match training {
            TrainingState::Running => "running",
            TrainingState::Ended => "ended",
            TrainingState::Failed => "failed",
        });
    }
    let document = Document {
        unix_ms: unix_ms(),
        program: env!("CARGO_PKG_VERSION"),
        grpc: state.grpc_addr,
        http: state.http_addr,
        not_ready: state.not_ready(),
        models,
        plots: state.history.plots(&metrics, &plotted_models(state)),
        events: state.metrics.events.last(),
        series: metrics.without_buckets(),
    };
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    // Its maps have text for keys, so this cannot fail.
    let json = serde_json::to_vec(&document).unwrap_or_default();
    (headers, json).into_response()
}

fn status(model: &Model) -> ModelStatus {
    let predict = &model.stable().predict;
    let schema = predict.describe().schema;
    let labels = model.shown_labels().map(|ShownLabel { label, target, version }| {
        let follows = match target {
            VersionSelector::Latest => None,
            VersionSelector::Version(version) => Some(version.0),
        };
        LabelStatus { label: label.to_owned(), follows, version: version.map(|version| version.0) }
    });
    ModelStatus {
        name: model.name().to_owned(),
        state: if predict.ready() { "ready" } else { "loading" },
        reason: None,
        architecture: convert::architecture(&schema),
        features: schema.features.len(),
        tables: schema.tables.iter().map(|table| table.name.clone()).collect(),
        versions: model.versions().iter().map(|loaded| loaded.version.0).collect(),
        labels: labels.collect(),
        missing: model.missing().iter().map(|missing| missing.text.clone()).collect(),
        newer_refused: model.newer_refused().values().cloned().collect(),
        stuck: model.stuck_versions().into_iter().map(|version| version.0).collect(),
        no_learning: model.main().learn_log.as_ref().and_then(|log| log.failure()),
        serving: model.stable_version().0,
        training: None,
        overloaded: model.pressure().overloaded(),
    }
}

/// Keeps the present figures for the plots.
pub(crate) fn sample(state: &ServerState) {
    let text = state.metrics_text();
    state.history.add(&Page::read(&text), &plotted_models(state));
}

/// The served models.
fn plotted_models(state: &ServerState) -> Vec<PlottedModel> {
    let models = state.models.all().into_iter();
    let plotted = models.map(|model| {
        let schema = model.main().predict.describe().schema;
        let tables = schema.tables.iter().map(|table| table.name.clone()).collect();
        PlottedModel { name: model.name().to_owned(), tables }
    });
    plotted.collect()
}
