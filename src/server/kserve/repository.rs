//! KServe's calls about the repository: its list of models, and loading and unloading them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::server::ServerState;
use crate::server::convert::clip;
use crate::server::inference::repository_index_response::ModelIndex;
use crate::server::inference::{RepositoryIndexRequest, RepositoryIndexResponse};
use crate::server::model::VersionEngine;
use crate::server::not_served::Reason;
use crate::server::repository::{Change, ChangeError, Repository, Requested};
use crate::server::status::CallError;
use crate::types::Version;

/// How long a client waits for the list of models.
const LIST_WAIT: Duration = Duration::from_secs(5);

/// How long a change waits for those before it. Opening a large version takes minutes.
const BEGIN_WAIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 300 });

/// How long a client waits for a change that has begun. Only a disk that does not answer takes so long.
const END_WAIT: Duration = Duration::from_secs(3600);

/// Most lists that are read or wait for that, each with a place that no other call gets.
const WAITING_LISTS: usize = 64;

/// Limits of the lists of models.
struct Lists {
    /// Most lists read at once. If the disk hangs, at most this many threads wait for it.
    reading: Semaphore,
    waiting: Semaphore,
}

impl Lists {
    const fn new() -> Self {
        Self { reading: Semaphore::const_new(2), waiting: Semaphore::const_new(WAITING_LISTS) }
    }
}

static LISTS: Lists = Lists::new();

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

/// All models, by ascending name, with a row for each loaded version, and for each one that is refused
/// although it is newer, or a setting or a label names it.
///
/// # Errors
/// When the repository cannot be read.
pub(crate) async fn index(
    state: &ServerState,
    request: RepositoryIndexRequest,
) -> Result<RepositoryIndexResponse, CallError> {
    check(request.repository_name, std::iter::empty(), &[])?;
    let mut models = BTreeMap::new();
    if let Some(repository) = state.repository.get().cloned().filter(|_| !request.ready) {
        for name in names(repository, LIST_WAIT, &LISTS).await? {
            let (word, reason) = match state.not_served.get(&name) {
                Some(Reason::Loading { .. }) => ("LOADING", String::new()),
                Some(Reason::Refused(reason)) => ("UNAVAILABLE", reason),
                None => ("UNAVAILABLE", "not loaded".to_owned()),
            };
            let state = word.to_owned();
            models.insert((name.clone(), 0), ModelIndex { name, version: String::new(), state, reason });
        }
    }
    for model in state.models.all() {
        let name = model.name().to_owned();
        models.remove(&(name.clone(), 0));
        for (Version(version), reason) in model.refused_versions().into_iter().filter(|_| !request.ready) {
            let (text, word) = (version.to_string(), "UNAVAILABLE".to_owned());
            let row = ModelIndex { name: name.clone(), version: text, state: word, reason };
            models.insert((name.clone(), version), row);
        }
        for VersionEngine { version: Version(version), engine } in model.versions() {
            let ready = engine.ready();
            if ready || !request.ready {
                let (word, reason) = match () {
                    () if ready => ("READY", ""),
                    () if engine.predict.ready() => {
                        ("UNAVAILABLE", "stuck: a call of the version does not end")
                    }
                    () => ("LOADING", ""),
                };
                let (text, word, reason) = (version.to_string(), word.to_owned(), reason.to_owned());
                let row = ModelIndex { name: name.clone(), version: text, state: word, reason };
                models.insert((name.clone(), version), row);
            }
        }
    }
    Ok(RepositoryIndexResponse { models: models.into_values().collect() })
}

/// The names of all models of the repository.
///
/// # Errors
/// [`ChangeError::Unreadable`] if they cannot be listed within this time, and [`ChangeError::Lists`].
async fn names(
    repository: Arc<dyn Repository>,
    most: Duration,
    lists: &'static Lists,
) -> Result<Vec<String>, ChangeError> {
    let _waits = lists.waiting.try_acquire().map_err(|_| ChangeError::Lists { limit: WAITING_LISTS })?;
    let listed = async {
        let permit = lists.reading.acquire().await;
        // It keeps the permit until the disk answers, also if the call has ended.
        let listed = tokio::task::spawn_blocking(move || (repository.names(), permit)).await;
        // The task is not cancelled, and does not panic.
        listed.map_err(|error| error.to_string())?.0
    };
    let late = |_| Err(format!("the models are not listed after {} s: the disk is slow", most.as_secs_f64()));
    tokio::time::timeout(most, listed).await.unwrap_or_else(late).map_err(ChangeError::Unreadable)
}

/// Loads or unloads a model for the call with this id, and waits for it.
///
/// # Errors
/// When the change is not made.
pub(crate) async fn change(
    state: &ServerState,
    change: Change,
    model: String,
    id: String,
) -> Result<(), CallError> {
    let repository = state.repository.get().ok_or(ChangeError::Unsupported)?;
    let requested = repository.change(change, model.clone(), id);
    wait_for(&**repository, model, requested).await.map(drop)
}

/// Waits for the answer to a change of a model.
///
/// # Errors
/// When the change is not made.
pub(crate) async fn wait_for<T, E>(
    repository: &dyn Repository,
    model: String,
    requested: Requested<impl Future<Output = Result<Result<T, ChangeError>, E>>>,
) -> Result<T, CallError> {
    let Requested { mut begun, answer, waits } = requested;
    let in_time = tokio::time::timeout(BEGIN_WAIT, &mut begun).await.is_ok();
    drop(waits);
    // From here on it cannot begin. It may have, just now.
    begun.close();
    if !in_time && begun.try_recv().is_err() {
        let (seconds, now) = (BEGIN_WAIT.as_secs(), repository.changes_now());
        return Err(ChangeError::NotBegun { model, seconds, now }.into());
    }
    let Ok(answer) = tokio::time::timeout(END_WAIT, answer).await else {
        let reason = format!("the change is not made after {} s and goes on", END_WAIT.as_secs());
        return Err(ChangeError::Late { model, reason }.into());
    };
    // Without an answer the server is draining.
    Ok(answer.unwrap_or(Err(ChangeError::Draining))?)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;
    use crate::pace::ClientWaits;
    use crate::types::VersionSelector;

    /// A repository on a disk that does not answer while this is locked, and how often it was asked.
    #[derive(Default)]
    struct Stuck(Mutex<()>, AtomicUsize);

    impl Repository for Stuck {
        fn names(&self) -> Result<Vec<String>, String> {
            self.1.fetch_add(1, Ordering::SeqCst);
            let _answers = self.0.lock().unwrap();
            Ok(vec!["ads".to_owned()])
        }

        fn keep_labels(&self, _: &str, _: &BTreeMap<String, VersionSelector>) -> Result<(), String> {
            Ok(())
        }

        fn look(&self, _: &str) {}

        fn change(&self, _: Change, _: String, _: String) -> Requested {
            let (begun, answer) = (oneshot::channel().1, oneshot::channel().1);
            Requested { begun, answer, waits: ClientWaits::begin() }
        }

        fn changes_now(&self) -> Option<String> {
            None
        }
    }

    #[test]
    fn lists_of_a_disk_that_does_not_answer_take_a_limited_time_and_two_threads_and_64_places() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let repository = Arc::new(Stuck::default());
        // Other tests list models meanwhile.
        static OWN: Lists = Lists::new();
        let list = |most| runtime.block_on(names(repository.clone(), most, &OWN));
        let stuck = repository.0.lock().unwrap();
        for _ in 0..5 {
            let error = list(Duration::from_millis(100)).unwrap_err().to_string();
            assert_eq!(error, "server.models: the models are not listed after 0.1 s: the disk is slow");
        }
        assert_eq!(repository.1.load(Ordering::SeqCst), 2);
        let long = Duration::from_secs(600);
        let waiting: Vec<_> =
            (0..WAITING_LISTS).map(|_| runtime.spawn(names(repository.clone(), long, &OWN))).collect();
        // Until all tasks have begun.
        while OWN.waiting.available_permits() > 0 {
            runtime.block_on(tokio::task::yield_now());
        }
        let error = list(long).unwrap_err();
        assert_eq!(error.to_string(), "too many lists of models wait for the disk: limit 64");
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        drop(stuck);
        for waits in waiting {
            assert_eq!(runtime.block_on(waits).unwrap().unwrap(), ["ads"]);
        }
        assert_eq!(list(long).unwrap(), ["ads"]);
    }
}
