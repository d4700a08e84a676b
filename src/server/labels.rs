//! Setting a label of a model when a client asks for it.
//!
//! A label that gets a loaded version changes at once, and is then made durable. Otherwise the repository
//! loads the version first, and changes the label itself.

use std::sync::Arc;
use std::time::Duration;

use super::convert::clip;
use super::models::NotChanged;
use super::proto::SetLabelRequest;
use super::repository::{Change, ChangeError};
use super::status::CallError;
use super::{Shared, kserve};
use crate::config::is_label;
use crate::types::{Follow, Version};

/// How long a client waits for the disk. After that the answer says that the label is not kept.
const DISK_WAIT: Duration = Duration::from_secs(5);

/// Sets or forgets a label for the call with this id. Returns the version that it names now.
///
/// # Errors
/// When the label has no valid name, the version cannot be loaded, or the model does not have the label that
/// shall be forgotten. Then nothing changes.
pub(crate) async fn set(
    shared: &Arc<Shared>,
    request: SetLabelRequest,
    id: &str,
) -> Result<Option<Version>, CallError> {
    let SetLabelRequest { model, label, version, remove } = request;
    if !is_label(&label) {
        return Err(CallError::LabelName { got: clip(label) });
    }
    // The repository's thread checks that too, but may be busy for long.
    if remove
        && let Some(named) = shared.models.get(&model)
        && let Some(Err(error)) = named.labels().map(|labels| labels.changed(&label, None))
    {
        return Err(ChangeError::Refused { model, reason: error.to_string() }.into());
    }
    let follow = match (remove, version) {
        (true, _) => None,
        (false, 0) => Some(Follow::Latest),
        (false, number) => Some(Follow::Version(Version(number))),
    };
    if matches!(follow, Some(Follow::Version(_))) {
        match set_loaded(shared, &model, (&label, follow)).await? {
            Ok(version) => {
                let number = version.map(|version| version.0);
                tracing::info!(model, label, version = number, id, "label set by a client");
                settle(shared, &model);
                return Ok(version);
            }
            // It has to be loaded first.
            Err(NotChanged::NotServed | NotChanged::NotLoaded) => {}
            Err(error) => return Err(ChangeError::Refused { model, reason: error.to_string() }.into()),
        }
    }
    kserve::change(shared, Change::Label { label: label.clone(), follow }, model.clone(), id.to_owned())
        .await?;
    settle(shared, &model);
    let named = shared.models.get(&model);
    let version = named.and_then(|named| named.named().find(|(name, ..)| *name == label)?.2);
    Ok(version.map(Version))
}

/// Lets the repository unload versions that no label names any more. Nobody waits for that.
fn settle(shared: &Shared, model: &str) {
    shared.repository.get().iter().for_each(|repository| repository.look(model));
}

/// Sets a label without the repository's thread, which may be opening a large version, and writes it.
async fn set_loaded(
    shared: &Arc<Shared>,
    model: &str,
    (label, follow): (&str, Option<Follow>),
) -> Result<Result<Option<Version>, NotChanged>, CallError> {
    let repository = shared.repository.get().ok_or(ChangeError::Unsupported)?.clone();
    // Not in a blocking task, because all of those may wait for the disk.
    let set = shared.models.set_label(model, (label, follow));
    if set.is_ok() {
        let (of_task, name) = (shared.clone(), model.to_owned());
        let keeping = tokio::task::spawn_blocking(move || {
            of_task.models.keep_labels(&name, |labels| repository.keep_labels(&name, &labels.set));
        });
        if tokio::time::timeout(DISK_WAIT, keeping).await.is_err() {
            tracing::warn!(
                model,
                label,
                "a label that a client has set is not written yet: the disk is slow"
            );
        }
    }
    Ok(set)
}
