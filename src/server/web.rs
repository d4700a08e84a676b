//! The HTTP port: metrics for Prometheus, health for an orchestrator, a status page for people.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;

use super::model::Model;
use super::not_served::Reason;
use super::security::{Refusal, Role};
use super::{Shared, convert};
use crate::metrics::TrainingState;

/// The routes of the HTTP port. Those of health need no token, because an orchestrator has none.
pub(crate) fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(status_page))
        .route("/metrics", get(metrics))
        .route_layer(middleware::from_fn_with_state(shared.clone(), allowed))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(shared)
}

/// Refuses a request without a token of the role metrics, if one is needed.
async fn allowed(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    match shared.security.allow(Role::Metrics, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal @ Refusal::OtherRole(_)) => {
            (StatusCode::FORBIDDEN, format!("{refusal}\n")).into_response()
        }
        Err(refusal) => {
            let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
            (StatusCode::UNAUTHORIZED, scheme, format!("{refusal}\n")).into_response()
        }
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    shared.models.all().iter().for_each(|(_, model)| model.main().predict.measure());
    let server = &shared.metrics.server;
    server.ready.set(f64::from(shared.ready()));
    server.not_served.set(shared.not_served.refused().len() as f64);
    (kind, shared.metrics.render())
}

/// The first line says whether the server is ready. Each further line is a model that cannot be served, or a
/// version that is wanted and cannot be loaded.
async fn ready(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let (status, mut text) = match shared.not_ready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    };
    for (name, reason) in shared.not_served.refused() {
        let _ = writeln!(text, "not served: model {name}: {reason}");
    }
    for (name, model) in shared.models.all() {
        for reason in model.missing() {
            let _ = writeln!(text, "not loaded: model {name}: {reason}");
        }
    }
    (status, text)
}

async fn status_page(State(shared): State<Arc<Shared>>) -> Html<String> {
    let mut rows = String::new();
    for (name, model) in &shared.models.all() {
        let served = model.stable();
        let description = served.predict.describe();
        let schema = &description.schema;
        // Writing to a string cannot fail.
        let _ = writeln!(
            rows,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}{}",
            escape(name),
            versions(model),
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
    for (name, reason) in &shared.not_served.all() {
        let state = match reason {
            Reason::Loading => "loading".to_owned(),
            Reason::Refused(reason) => format!("not served: {}", escape(reason)),
        };
        let _ = writeln!(rows, "<tr><td>{}<td><td><td><td><td>{state}", escape(name));
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

/// The loaded versions, each with its labels.
fn versions(model: &Model) -> String {
    let labels = |version| {
        let named = model.named().filter(|(_, _, named)| *named == Some(version));
        let labels: Vec<&str> = named.map(|(label, ..)| label).collect();
        if labels.is_empty() { String::new() } else { format!(" ({})", labels.join(", ")) }
    };
    let versions = model.versions();
    if let [(version, _)] = versions.as_slice() {
        return version.to_string();
    }
    versions
        .iter()
        .map(|(version, _)| format!("{version}{}", labels(*version)))
        .collect::<Vec<_>>()
        .join(", ")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
