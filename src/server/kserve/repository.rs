//! KServe's calls about the repository: its list of models, and loading and unloading them.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::server::Shared;
use crate::server::convert::clip;
use crate::server::inference::repository_index_response::ModelIndex;
use crate::server::inference::{RepositoryIndexRequest, RepositoryIndexResponse};
use crate::server::not_served::Reason;
use crate::server::repository::{Change, ChangeError, Requested};
use crate::server::status::CallError;

/// Checks the name of a repository, and that a request has no other parameters than these.
///
/// # Errors
/// [`ChangeError::Name`] or [`ChangeError::Parameter`].
pub(crate) fn check(
    repository: String,
    mut parameters: impl Iterator<Item = String>,
    allowed: &[&str],
) -> Result<(), CallError> {
    if !repository.is_empty() {
        return Err(ChangeError::Name(clip(repository)).into());
    }
    match parameters.find(|name| !allowed.contains(&name.as_str())) {
        Some(name) => Err(ChangeError::Parameter(clip(name)).into()),
        None => Ok(()),
    }
}

/// All models, by ascending name, with a row for each loaded version and each newer one that is refused.
///
/// # Errors
/// When the repository cannot be read.
pub(crate) async fn index(
    shared: &Shared,
    request: RepositoryIndexRequest,
) -> Result<RepositoryIndexResponse, CallError> {
    check(request.repository_name, std::iter::empty(), &[])?;
    let mut models = BTreeMap::new();
    if let Some(repository) = shared.repository.get().cloned().filter(|_| !request.ready) {
        let names = tokio::task::spawn_blocking(move || repository.names()).await;
        // The task is not cancelled, and does not panic.
        let names = names.map_err(|error| ChangeError::Unreadable(error.to_string()))?;
        for name in names.map_err(ChangeError::Unreadable)? {
            let (state, reason) = match shared.not_served.get(&name) {
                Some(Reason::Loading) => ("LOADING", String::new()),
                Some(Reason::Refused(reason)) => ("UNAVAILABLE", reason),
                None => ("UNAVAILABLE", "not loaded".to_owned()),
            };
            let state = state.to_owned();
            models.insert((name.clone(), 0), ModelIndex { name, version: String::new(), state, reason });
        }
    }
    for (name, model) in shared.models.all() {
        models.remove(&(name.clone(), 0));
        let refused = model.newer_refused().iter().filter(|_| !request.ready);
        for (version, reason) in refused.map(|(version, reason)| (version.0, reason.clone())) {
            let (text, state) = (version.to_string(), "UNAVAILABLE".to_owned());
            let row = ModelIndex { name: name.clone(), version: text, state, reason };
            models.insert((name.clone(), version), row);
        }
        for (version, served) in model.versions() {
            let ready = served.predict.ready();
            if ready || !request.ready {
                let state = if ready { "READY" } else { "LOADING" }.to_owned();
                let (text, reason) = (version.to_string(), String::new());
                let row = ModelIndex { name: name.clone(), version: text, state, reason };
                models.insert((name.clone(), version), row);
            }
        }
    }
    Ok(RepositoryIndexResponse { models: models.into_values().collect() })
}

/// How long a change waits for those before it. Opening a large version takes minutes.
const BEGIN_WAIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 300 });

/// Loads or unloads a model for the call with this id, and waits for it.
///
/// # Errors
/// When the change is not made.
pub(crate) async fn change(
    shared: &Shared,
    change: Change,
    model: String,
    id: String,
) -> Result<(), CallError> {
    let repository = shared.repository.get().ok_or(ChangeError::Unsupported)?;
    let Requested { begun, answer } = repository.change(change, model.clone(), id);
    if tokio::time::timeout(BEGIN_WAIT, begun).await.is_err() {
        let (seconds, now) = (BEGIN_WAIT.as_secs(), repository.changes_now());
        return Err(ChangeError::NotBegun { model, seconds, now }.into());
    }
    // Without an answer the server is draining.
    Ok(answer.await.unwrap_or(Err(ChangeError::Draining))?)
}
