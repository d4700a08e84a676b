//! Setting a label of a model when a client asks for it.
//!
//! A label that gets a loaded version changes at once. Otherwise the repository loads the version first, and
//! changes the label. Then the labels of the model are made durable.

use std::sync::Arc;
use std::time::Duration;

use super::convert::clip;
use super::models::NotChanged;
use super::proto::SetLabelRequest;
use super::repository::{Change, ChangeError, Repository};
use super::status::CallError;
use super::traffic::LabelChange;
use super::{Shared, kserve};
use crate::config::is_label;
use crate::types::{LabelTarget, Version};

/// How long a client waits for the disk. After that the answer says that the label is not kept.
const DISK_WAIT: Duration = Duration::from_secs(5);

/// A change of a label.
pub(crate) struct Changed {
    /// The version that the label names now.
    pub version: Option<Version>,
    /// Why the change is lost at a restart.
    pub not_kept: Option<String>,
}

/// Sets or forgets a label for the call with this id.
///
/// # Errors
/// When the label has no valid name, the version cannot be loaded, or the model does not have the label that
/// shall be forgotten. Then nothing changes.
pub(crate) async fn set(
    shared: &Arc<Shared>,
    request: SetLabelRequest,
    id: &str,
) -> Result<Changed, CallError> {
    let SetLabelRequest { model, label, version, remove } = request;
    if !is_label(&label) {
        return Err(CallError::LabelName { got: clip(label) });
    }
    // The repository's thread checks that too, but may be busy for long.
    if remove
        && let Some(named) = shared.models.get(&model)
        && let Some(Err(error)) =
            named.labels().map(|labels| labels.changed(LabelChange { label: &label, target: None }))
    {
        return Err(ChangeError::Refused { model, reason: error.to_string() }.into());
    }
    let target = match (remove, version) {
        (true, _) => None,
        (false, 0) => Some(LabelTarget::Latest),
        (false, number) => Some(LabelTarget::Version(Version(number))),
    };
    let repository = shared.repository.get().ok_or(ChangeError::Unsupported)?;
    let change = LabelChange { label: &label, target };
    let named = match target {
        Some(LabelTarget::Version(_)) => set_loaded(shared, &model, change, id)?,
        Some(LabelTarget::Latest) | None => None,
    };
    if named.is_none() {
        let change = Change::Label { label: label.clone(), target };
        kserve::change(shared, change, model.clone(), id.to_owned()).await?;
    }
    let not_kept = keep(shared, repository.clone(), &model, &label).await.err();
    // Unloads versions that no label names any more, when the repository has time.
    repository.look(&model);
    if named.is_some() {
        return Ok(Changed { version: named, not_kept });
    }
    let served = shared.models.get(&model);
    let version = served.and_then(|served| served.named().find(|(name, ..)| *name == label)?.2);
    Ok(Changed { version: version.map(Version), not_kept })
}

/// Sets a label to a loaded version, without the repository's thread, which may be opening a large version.
/// Returns `None` if the version has to be loaded first.
fn set_loaded(
    shared: &Shared,
    model: &str,
    change: LabelChange<'_>,
    id: &str,
) -> Result<Option<Version>, CallError> {
    match shared.models.set_label(model, change) {
        Ok(version) => {
            let number = version.map(|version| version.0);
            tracing::info!(model, label = change.label, version = number, id, "label set by a client");
            Ok(version)
        }
        Err(NotChanged::NotServed | NotChanged::NotLoaded) => Ok(None),
        Err(error) => Err(ChangeError::Refused { model: model.to_owned(), reason: error.to_string() }.into()),
    }
}

/// Makes the labels of a model durable. Waits for the disk, but not for long: the labels hold until a restart
/// anyway, and are written when the disk answers.
///
/// # Errors
/// Why they may be lost at a restart.
async fn keep(
    shared: &Arc<Shared>,
    repository: Arc<dyn Repository>,
    model: &str,
    label: &str,
) -> Result<(), String> {
    let (shared, name) = (shared.clone(), model.to_owned());
    let keeping = tokio::spawn(async move {
        let _keeping = shared.models.keeping.lock().await;
        let shared = shared.clone();
        let keep =
            move || shared.models.keep_labels(&name, |labels| repository.keep_labels(&name, &labels.set));
        tokio::task::spawn_blocking(keep).await.map_err(|error| error.to_string())?
    });
    match tokio::time::timeout(DISK_WAIT, keeping).await {
        Ok(kept) => kept.map_err(|error| error.to_string())?,
        Err(_) => {
            tracing::warn!(
                model,
                label,
                "a label that a client has set is not written yet: the disk is slow"
            );
            Err("the disk has not answered yet".to_owned())
        }
    }
}
