//! The HTTP port: metrics for Prometheus, health for an orchestrator, a status page for people.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse};
use axum::routing::get;

use super::{Shared, convert};
use crate::metrics::TrainingState;

/// The routes of the HTTP port.
pub(crate) fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(status_page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(shared)
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    shared.models.all().iter().for_each(|(_, served)| served.predict.measure());
    (kind, shared.metrics.render())
}

async fn ready(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    if shared.draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    let models = shared.models.all().into_iter();
    let names: Vec<String> =
        models.filter(|(_, served)| !served.predict.ready()).map(|(name, _)| name).collect();
    if names.is_empty() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}\n", names.join(", ")))
    }
}

async fn status_page(State(shared): State<Arc<Shared>>) -> Html<String> {
    let mut rows = String::new();
    for (name, served) in &shared.models.all() {
        let description = served.predict.describe();
        let schema = &description.schema;
        // Writing to a string cannot fail.
        let _ = writeln!(
            rows,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}{}",
            escape(name),
            description.version,
            convert::architecture(schema),
            schema.features.len(),
            schema.tables.len(),
            if served.predict.ready() { "ready" } else { "loading" },
            match shared.metrics.training_state(name) {
                None => "",
                Some(TrainingState::Running) => ", training",
                Some(TrainingState::Ended) => ", training has ended",
                Some(TrainingState::Failed) => ", training has failed (see the log)",
            },
        );
    }
    Html(format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>flechette</title>\n\
         <h1>flechette {}</h1>\n\
         <p>gRPC {}, HTTP {}{}\n\
         <table><tr><th>model<th>version<th>architecture<th>features<th>tables<th>state\n{rows}</table>\n\
         <p><a href=/metrics>metrics</a> <a href=/readyz>readyz</a> <a href=/healthz>healthz</a>\n",
        env!("CARGO_PKG_VERSION"),
        shared.grpc_addr,
        shared.http_addr,
        if shared.draining() { ", draining" } else { "" },
    ))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
