//! The HTTP port: metrics for Prometheus, health for an orchestrator, a status page for people
//! (`status_page/`).

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{AppendHeaders, IntoResponse, Response};
use axum::routing::get;

use super::security::{Refusal, Role, Security};
use super::{ServerState, status_page};

/// The routes of the HTTP port. Those of health need no token, because an orchestrator has none.
pub(crate) fn routes(state: Arc<ServerState>) -> Router {
    Router::new()
        .route("/", get(async || status_page::page()))
        .route(
            "/status.json",
            get(async |State(state): State<Arc<ServerState>>| status_page::document(&state)),
        )
        .route("/metrics", get(metrics))
        .route_layer(middleware::from_fn_with_state(state.clone(), if_metrics_are_kept))
        .route_layer(middleware::from_fn_with_state(state.security.clone(), check_token))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(state)
}

/// Refuses a request without a token of the role metrics, if one is needed.
pub(crate) async fn check_token(
    State(security): State<Arc<Security>>,
    request: Request,
    next: Next,
) -> Response {
    match security.allow(Role::Metrics, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refused(&refusal),
    }
}

/// Refuses a request if no metrics are kept.
async fn if_metrics_are_kept(
    State(state): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Response {
    if !state.metrics.are_enabled() {
        return (StatusCode::NOT_FOUND, "metrics are not kept: server.metrics is off\n").into_response();
    }
    next.run(request).await
}

/// The answer to a request without the token that is needed.
fn refused(refusal: &Refusal) -> Response {
    let text = format!("{refusal}\n");
    if let Refusal::OtherRole(_) = refusal {
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    // A browser asks its user for a name and a password, and sends the password as the token.
    let schemes = ["Bearer", "Basic realm=\"flechette: the password is a token\", charset=\"UTF-8\""];
    let schemes = AppendHeaders(schemes.map(|scheme| (header::WWW_AUTHENTICATE, scheme)));
    (StatusCode::UNAUTHORIZED, schemes, text).into_response()
}

async fn metrics(State(state): State<Arc<ServerState>>) -> impl IntoResponse {
    metrics_page(state.metrics_text())
}

/// The answer with the text of all metrics.
pub(crate) fn metrics_page(text: String) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// The first line says whether the server is ready. Each further line is a model that cannot be served, a
/// version that is wanted and cannot be loaded, a version of which a call does not end, a model that takes no
/// learned samples because its log cannot be opened, or a model of which an older version is served.
async fn ready(State(state): State<Arc<ServerState>>) -> impl IntoResponse {
    let (status, mut text) = match state.not_ready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    };
    for (name, reason) in state.not_served.refused() {
        let _ = writeln!(text, "not served: model {name}: {reason}");
    }
    for model in state.models.all() {
        let name = model.name();
        for missing in model.missing() {
            let _ = writeln!(text, "not loaded: model {name}: {}", missing.text);
        }
        let stable = model.stable_version();
        // If this one is stuck, the server is not ready.
        for version in model.stuck_versions().into_iter().filter(|version| *version != stable) {
            let _ = writeln!(text, "stuck: model {name}: a call of version {version} does not end");
        }
        if let Some(reason) = model.main().learn_log.as_ref().and_then(|log| log.failure()) {
            let _ = writeln!(text, "no learned samples: model {name}: {reason}");
        }
        if !model.newer_refused().is_empty() {
            let reasons: Vec<&str> = model.newer_refused().values().map(String::as_str).collect();
            let (version, reasons) = (model.stable_version(), reasons.join("; "));
            let _ = writeln!(text, "older version: model {name} serves version {version}: {reasons}");
        }
    }
    (status, text)
}
