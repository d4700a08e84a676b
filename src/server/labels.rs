//! Setting a label of a model when a client asks for it.
//!
//! A label that gets a loaded version changes at once. Otherwise the repository loads the version first, and
//! changes the label. Then the labels of the model are made durable, also if the call has ended meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use super::convert::clip;
use super::models::NotChanged;
use super::pressure::Pressure;
use super::proto::SetLabelRequest;
use super::repository::{Change, ChangeError, Made, Repository, Requested};
use super::status::CallError;
use super::traffic::LabelChange;
use super::{ServerState, kserve};
use crate::config::is_label;
use crate::sync::EvenPoisoned;
use crate::types::{Version, VersionSelector};

/// How long a client waits for the disk. After that the answer says that the label is not kept.
const DISK_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });

/// A change of a label.
pub(crate) struct Changed {
    /// The version that the label names now.
    pub version: Option<Version>,
    /// Whether it names the highest good version.
    pub latest: bool,
    /// Why the change is lost at a restart.
    pub not_kept: Option<String>,
}

/// Sets or forgets a label for the call with this id.
///
/// # Errors
/// When the label has no valid name, the version cannot be loaded, or the model does not have the label that
/// shall be forgotten. Then nothing changes.
pub(crate) async fn set(
    state: &Arc<ServerState>,
    request: SetLabelRequest,
    id: &str,
) -> Result<Changed, CallError> {
    let target = target_of(state, &request)?;
    let SetLabelRequest { model, label, .. } = request;
    let repository = state.repository.get().ok_or(ChangeError::Unsupported)?;
    let change = LabelChange { label: &label, target };
    let set_on = state.models.labelled(&model);
    let named = match target {
        Some(VersionSelector::Version(_)) => set_loaded(state, &model, change, id)?,
        Some(VersionSelector::Latest) | None => None,
    };
    let kept = match named {
        Some(_) => Kept::begin(state, repository, &model, set_on),
        None => {
            let change = Change::Label { label: label.clone(), target };
            let Requested { begun, answer, waits } = repository.change(change, model.clone(), id.to_owned());
            // Whoever drops this future drops `begun`, so a change that has not begun is not made.
            let answer = tokio::spawn(keep_when_made(state.clone(), model.clone(), set_on, answer));
            kserve::wait_for(&**repository, model.clone(), Requested { begun, answer, waits }).await?
        }
    };
    let not_kept = kept.end(&model, &label).await.err();
    if not_kept.is_some() {
        // The disk may hang, and the write looks only when it has ended.
        repository.look(&model);
    }
    if named.is_some() {
        return Ok(Changed { version: named, latest: false, not_kept });
    }
    let loaded = state.models.get(&model);
    let shown = loaded.as_ref().and_then(|loaded| loaded.shown_labels().find(|shown| shown.label == label));
    let latest = shown.as_ref().is_some_and(|shown| shown.target == VersionSelector::Latest);
    Ok(Changed { version: shown.and_then(|shown| shown.version), latest, not_kept })
}

/// What the label shall name; `None` if it shall be forgotten.
///
/// # Errors
/// When the label has no valid name, or shall be forgotten and the model does not have it or a version is
/// given.
fn target_of(state: &ServerState, request: &SetLabelRequest) -> Result<Option<VersionSelector>, CallError> {
    let SetLabelRequest { model, label, version, remove } = request;
    if !is_label(label) {
        return Err(CallError::LabelName { got: clip(label.clone()) });
    }
    if *remove && *version != 0 {
        return Err(CallError::VersionToRemove { got: *version });
    }
    // The repository's thread checks that too, but may be busy for long.
    if *remove
        && let Some(named) = state.models.get(model)
        && let Some(Err(error)) =
            named.labels().map(|labels| labels.changed(LabelChange { label, target: None }))
    {
        return Err(ChangeError::Refused { model: model.clone(), reason: error.to_string() }.into());
    }
    Ok(match (remove, version) {
        (true, _) => None,
        (false, 0) => Some(VersionSelector::Latest),
        (false, number) => Some(VersionSelector::Version(Version(*number))),
    })
}

/// Waits for a change of a label, and has it made durable: also if the call has ended by then, because the
/// label counts from now on.
async fn keep_when_made(
    state: Arc<ServerState>,
    model: String,
    before: Option<Arc<Pressure>>,
    answer: oneshot::Receiver<Result<Made, ChangeError>>,
) -> Result<Kept, ChangeError> {
    let set_on = match answer.await.unwrap_or(Err(ChangeError::Draining))? {
        // The model was not served, and has its labels only on disk.
        Made::Whole => None,
        // The model may have been unloaded since.
        Made::InMemory => state.models.labelled(&model).or(before),
    };
    let repository = state.repository.get().ok_or(ChangeError::Unsupported)?;
    Ok(Kept::begin(&state, repository, &model, set_on))
}

/// Sets a label to a loaded version, without the repository's thread, which may be opening a large version.
/// Returns `None` if the version has to be loaded first.
fn set_loaded(
    state: &ServerState,
    model: &str,
    change: LabelChange<'_>,
    id: &str,
) -> Result<Option<Version>, CallError> {
    match state.models.set_label(model, change) {
        Ok(version) => {
            let number = version.map(|version| version.0);
            tracing::info!(model, label = change.label, version = number, id, "label set by a client");
            Ok(version)
        }
        Err(NotChanged::NotServed | NotChanged::NotLoaded) => Ok(None),
        Err(error) => Err(ChangeError::Refused { model: model.to_owned(), reason: error.to_string() }.into()),
    }
}

/// Whose labels were written, as [`super::models::Models::keep_labels`]; or why they are lost at a restart.
type Written = Result<Option<Arc<Pressure>>, String>;

/// The writes of labels, one after the other, each with the labels of that time, so that the last ones stay.
/// Those that wait hold no thread.
#[derive(Default)]
pub(crate) struct Keeping {
    writing: tokio::sync::Mutex<()>,
    /// The write that waits, by model. All calls that set a label before it begins share it, so that a disk
    /// that hangs does not pile them up.
    waiting: Mutex<BTreeMap<String, watch::Receiver<Option<Written>>>>,
}

impl Keeping {
    /// Waits for a write that has begun, and keeps others from beginning until what is returned is dropped.
    /// Blocks.
    pub(crate) fn hold(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.writing.blocking_lock()
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<String, watch::Receiver<Option<Written>>>> {
        self.waiting.lock().even_poisoned()
    }
}

/// A label that is being made durable, also if this is dropped.
struct Kept {
    written: watch::Receiver<Option<Written>>,
    /// The model that has the label in memory, as [`super::models::Models::labelled`].
    set_on: Option<Arc<Pressure>>,
}

impl Kept {
    /// Begins to write all labels of a model. Then versions that no label names any more are unloaded, when
    /// the repository has time.
    fn begin(
        state: &Arc<ServerState>,
        repository: &Arc<dyn Repository>,
        model: &str,
        set_on: Option<Arc<Pressure>>,
    ) -> Self {
        let mut waiting = state.models.keeping.waiting();
        if let Some(written) = waiting.get(model) {
            return Self { written: written.clone(), set_on };
        }
        let (done, written) = watch::channel(None);
        waiting.insert(model.to_owned(), written.clone());
        tokio::spawn(write(state.clone(), repository.clone(), model.to_owned(), done));
        Self { written, set_on }
    }

    /// Waits for the disk, but not for long: the labels hold until a restart anyway, and are written when the
    /// disk answers.
    ///
    /// # Errors
    /// Why the label may be lost at a restart.
    async fn end(mut self, model: &str, label: &str) -> Result<(), String> {
        let Ok(written) = tokio::time::timeout(DISK_WAIT, self.written.wait_for(Option::is_some)).await
        else {
            tracing::warn!(
                model,
                label,
                "a label that a client has set is not written yet: the disk is slow"
            );
            return Err("the disk has not answered yet".to_owned());
        };
        // Closed without a result when the server ends.
        let written = written.ok().and_then(|written| written.clone());
        let written = written.ok_or_else(|| "the server has ended".to_owned())??;
        match self.set_on {
            Some(set_on) if !written.is_some_and(|written| Arc::ptr_eq(&written, &set_on)) => {
                Err("the model was unloaded meanwhile".to_owned())
            }
            Some(_) | None => Ok(()),
        }
    }
}

async fn write(
    state: Arc<ServerState>,
    repository: Arc<dyn Repository>,
    model: String,
    done: watch::Sender<Option<Written>>,
) {
    let keeping = &state.models.keeping;
    let _writing = keeping.writing.lock().await;
    // Before the labels are read: a call that sets one from now on needs another write.
    keeping.waiting().remove(&model);
    let keep = {
        let (state, repository, name) = (state.clone(), repository.clone(), model.clone());
        move || state.models.keep_labels(&name, |labels| repository.keep_labels(&name, &labels.set))
    };
    let written = tokio::task::spawn_blocking(keep).await;
    repository.look(&model);
    done.send_replace(Some(written.unwrap_or_else(|error| Err(error.to_string()))));
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
