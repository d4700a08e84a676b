//! Models that clients load and unload, by KServe's repository calls, and labels that they set.
//!
//! The server sends a request to the thread of `watch`, which makes one change after the other. A model that
//! is unloaded is not served again before a client loads it, whatever happens in its directory, or before a
//! restart.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tokio::sync::oneshot;

use super::add::LoadPanicked;
use super::versions::{NotSettled, SettleOptions};
use super::warm;
use super::watch::{NoRoom, Wake, WatchCommand, Watcher, unless_it_panics};
use crate::pace::ClientWaits;
use crate::server::{
    Change, ChangeError, LabelChange, Labels, Made, NotChanged, Repository, Requested, clip,
};
use crate::store;
use crate::sync::EvenPoisoned;
use crate::types::VersionSelector;

/// A change that a client has requested.
pub(crate) struct ChangeRequest {
    change: Change,
    model: String,
    /// The id of the client's call, for the log.
    id: String,
    /// Gets a message when the change begins. Closed if the client is gone before.
    begun: oneshot::Sender<()>,
    reply: oneshot::Sender<Result<Made, ChangeError>>,
}

/// The model that the thread works on; `None` before its first one.
#[derive(Clone, Default)]
pub(crate) struct ModelInProgress(Arc<Mutex<Option<String>>>);

impl ModelInProgress {
    pub(crate) fn set(&self, model: &str) {
        *self.0.lock().even_poisoned() = Some(model.to_owned());
    }

    fn get(&self) -> Option<String> {
        self.0.lock().even_poisoned().clone()
    }
}

/// A look at a model, because its labels have changed. A model waits for one at most.
pub(crate) struct LabelsChanged {
    model: String,
    waiting: Arc<Mutex<BTreeSet<String>>>,
    _waits: ClientWaits,
}

impl LabelsChanged {
    /// The model. From now on, changes of its labels need another look.
    pub(crate) fn begin(self) -> String {
        self.model.clone()
    }
}

impl Drop for LabelsChanged {
    fn drop(&mut self) {
        self.waiting.lock().even_poisoned().remove(&self.model);
    }
}

/// Passes requests to the thread.
pub(crate) struct CommandSender {
    /// The directory of the models.
    models: PathBuf,
    wake: Wake,
    now: ModelInProgress,
    /// The models that wait for a look.
    waiting: Arc<Mutex<BTreeSet<String>>>,
}

impl CommandSender {
    pub(crate) fn new(models: &Path, wake: Wake, now: ModelInProgress) -> Self {
        Self { models: models.to_owned(), wake, now, waiting: Arc::default() }
    }
}

impl Repository for CommandSender {
    fn names(&self) -> Result<Vec<String>, String> {
        store::models(&self.models).map_err(|error| error.to_string())
    }

    fn keep_labels(&self, model: &str, set: &BTreeMap<String, VersionSelector>) -> Result<(), String> {
        store::labels::save(&self.models, model, set).map_err(|error| error.to_string())
    }

    fn look(&self, model: &str) {
        if self.waiting.lock().even_poisoned().insert(model.to_owned()) {
            let (model, waiting) = (model.to_owned(), self.waiting.clone());
            let look = LabelsChanged { model, waiting, _waits: ClientWaits::begin() };
            let _ = self.wake.send(WatchCommand::Labels(look));
        }
    }

    fn change(&self, change: Change, model: String, id: String) -> Requested {
        let (begins, begun) = oneshot::channel();
        let (reply, answer) = oneshot::channel();
        let waits = ClientWaits::begin();
        if store::check_name("model", &model).is_err() {
            // Such a name may be as long as a message, and the log would have it.
            let model = clip(model);
            let _ = reply.send(Err(ChangeError::Unknown { model }));
            return Requested { begun, answer, waits };
        }
        let request = ChangeRequest { change, model, id, begun: begins, reply };
        // If the thread has ended, the reply is dropped, and the answer says so.
        if let Err(NoRoom(WatchCommand::Change(ChangeRequest { reply, .. }))) =
            self.wake.send(WatchCommand::Change(request))
        {
            let _ = reply.send(Err(ChangeError::Busy));
        }
        Requested { begun, answer, waits }
    }

    fn changes_now(&self) -> Option<String> {
        self.now.get()
    }
}

/// A change, for the log.
fn words(change: &Change) -> String {
    match change {
        Change::Load => "loading the model".to_owned(),
        Change::Unload => "unloading the model".to_owned(),
        Change::Label { label, target: None } => format!("removing label {label}"),
        Change::Label { label, target: Some(VersionSelector::Latest) } => {
            format!("setting label {label} to the latest version")
        }
        Change::Label { label, target: Some(VersionSelector::Version(version)) } => {
            format!("setting label {label} to version {version}")
        }
    }
}

impl ChangeRequest {
    /// Makes the change, unless its client is gone, and answers the client.
    fn settle(self, make: impl FnOnce(&Change, &str, &str) -> Result<Made, ChangeError>) {
        let Self { change, model, id, begun, reply } = self;
        // A label and an unload wait for the model's switch, too, if one is running.
        let _waits = matches!(change, Change::Label { .. } | Change::Unload).then(ClientWaits::begin);
        // Either it fails, or whoever waits knows that the change is made, also if it goes now.
        if begun.send(()).is_err() {
            return;
        }
        let result = unless_it_panics(|| make(&change, &model, &id));
        let result = result.unwrap_or_else(|| Err(ChangeError::Panicked { model: model.clone() }));
        if let Err(reason) = &result {
            tracing::warn!(model, id, %reason, "{}, requested by a client, has failed", words(&change));
        }
        // The client may be gone.
        let _ = reply.send(result);
    }
}

fn not_settled(model: &str, error: NotSettled) -> ChangeError {
    let model = model.to_owned();
    match error {
        NotSettled::Refused(reason) => ChangeError::Refused { model, reason },
        NotSettled::Switching(reason) => ChangeError::Late { model, reason },
    }
}

impl Watcher {
    /// Makes a change, unless its client is gone.
    pub(crate) fn change(&mut self, requested: ChangeRequest) {
        self.now.set(&requested.model);
        requested.settle(|change, model, id| match change {
            Change::Load => self.load(model, id).map(|()| Made::Whole),
            Change::Unload => self.unload(model, id).map(|()| Made::Whole),
            Change::Label { label, target } => {
                self.set_label(model, LabelChange { label, target: *target }, id)
            }
        });
    }

    /// Checks that the directory has a model.
    fn check_known(&self, name: &str) -> Result<(), ChangeError> {
        let names = store::models(&self.adder.loader.models);
        let names = names.map_err(|error| ChangeError::Unreadable(error.to_string()))?;
        let known = names.iter().any(|known| known == name);
        if known { Ok(()) } else { Err(ChangeError::Unknown { model: name.to_owned() }) }
    }

    /// Loads the version that a label should name, and sets the label. The server makes it durable.
    fn set_label(&mut self, name: &str, change: LabelChange<'_>, id: &str) -> Result<Made, ChangeError> {
        self.check_known(name)?;
        let refused = |reason| ChangeError::Refused { model: name.to_owned(), reason };
        let Some(model) = self.adder.served.find(name) else {
            self.set_label_of_refused(name, change).map_err(refused)?;
            let target = change.target.map_or("none".to_owned(), |target| target.to_string());
            tracing::info!(model = name, label = change.label, target, id, "label set by a client");
            return Ok(Made::Whole);
        };
        self.forget_refused(name);
        // It also fails if only other versions than the label's are refused.
        let new = change.target == Some(VersionSelector::Latest);
        let options = SettleOptions { new, label: Some(change), urgent: true, asked: true };
        let settled = self.adder.versions.settle(&model, options);
        match self.adder.registry.set_label(name, change) {
            Ok(version) => {
                let version = version.map(|version| version.0);
                tracing::info!(model = name, label = change.label, version, id, "label set by a client");
            }
            Err(NotChanged::NotLoaded) => {
                settled.map_err(|error| not_settled(name, error))?;
                return Err(refused(NotChanged::NotLoaded.to_string()));
            }
            Err(error) => return Err(refused(error.to_string())),
        }
        Ok(Made::InMemory)
    }

    /// Sets a label of a model that is not served, perhaps because of that label, and tries to serve it.
    fn set_label_of_refused(&mut self, name: &str, change: LabelChange<'_>) -> Result<(), String> {
        let models = self.adder.loader.models.clone();
        let save = |labels: &BTreeMap<_, _>| {
            store::labels::save(&models, name, labels).map_err(|error| error.to_string())
        };
        // One that the model had when it was served must not overwrite this one.
        let writes = self.adder.registry.hold_label_writes();
        let set = store::labels::load(&models, name).map_err(|error| error.to_string())?;
        let settings = self.adder.loader.live.traffic(name).labels;
        let before = Labels { settings, set };
        let labels = before.changed(change).map_err(|error| error.to_string())?;
        save(&labels.set)?;
        drop(writes);
        if self.unloaded.contains(name) {
            return Ok(());
        }
        self.forget_refused(name);
        self.adder.add(name).map(drop).map_err(|reason| {
            // The label did not help. If this fails too, it stays.
            let _ = save(&before.set);
            format!("{reason:#}")
        })
    }

    fn load(&mut self, name: &str, id: &str) -> Result<(), ChangeError> {
        self.check_known(name)?;
        self.forget_refused(name);
        let refused = |reason| ChangeError::Refused { model: name.to_owned(), reason };
        if let Some(model) = self.adder.served.find(name) {
            self.adder.registry.retry_learn_logs();
            let settled = self.adder.versions.settle(&model, SettleOptions::LOAD);
            return settled.map_err(|error| not_settled(name, error));
        }
        if let Err(reason) = self.adder.add(name) {
            if self.unloaded.contains(name) {
                // It is still not served because a client wanted that.
                self.adder.registry.forget(name);
            }
            return Err(match reason.is::<LoadPanicked>() {
                true => ChangeError::Panicked { model: name.to_owned() },
                false => refused(format!("{reason:#}")),
            });
        }
        self.unloaded.remove(name);
        tracing::info!(model = name, id, "loaded for a client");
        Ok(())
    }

    fn unload(&mut self, name: &str, id: &str) -> Result<(), ChangeError> {
        self.adder.versions.wait_for_switch(name);
        if !self.adder.registry.remove(name) {
            return Err(ChangeError::NotServed { model: name.to_owned() });
        }
        self.unloaded.insert(name.to_owned());
        self.forget_refused(name);
        let model = self.adder.served.remove(name);
        self.adder.versions.remove(name);
        if let Some(model) = model.filter(|_| self.adder.loader.config.cache.warm) {
            // For the next load. A failure is logged.
            let engine = model.engine.clone();
            drop(model);
            warm::save_unloaded(engine, &self.adder.loader.models);
        }
        // The memory of the model is released by now, unless its hot rows are still being saved, or a call of
        // it or its switch has not ended, which the log says.
        tracing::info!(model = name, id, "unloaded for a client");
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::sync::mpsc::{SyncSender, sync_channel};

    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;
    use crate::types::Version;

    fn sender(wake: SyncSender<WatchCommand>) -> CommandSender {
        CommandSender::new(Path::new("models"), Wake::of(wake), ModelInProgress::default())
    }

    fn load(sender: &CommandSender) -> Requested {
        sender.change(Change::Load, "ads".to_owned(), String::new())
    }

    #[test]
    fn a_change_that_panics_is_answered_and_the_thread_goes_on() {
        let (wake, woken) = sync_channel(2);
        let Requested { mut answer, begun: _begun, .. } = load(&sender(wake));
        let Ok(WatchCommand::Change(requested)) = woken.try_recv() else { panic!("no change") };
        requested.settle(|_, _, _| panic!("on purpose"));
        let error = answer.try_recv().unwrap().unwrap_err();
        assert_eq!(error.code(), tonic::Code::Internal, "{error}");
    }

    #[test]
    fn a_change_whose_client_goes_is_made_if_it_has_begun_and_is_answered_then() {
        let (wake, woken) = sync_channel(2);
        let sender = sender(wake);
        let mut made = 0;
        let mut settle = || {
            let Ok(WatchCommand::Change(requested)) = woken.try_recv() else { panic!("no change") };
            requested.settle(|_, _, _| {
                made += 1;
                Ok(Made::Whole)
            });
        };
        let Requested { begun, mut answer, .. } = load(&sender);
        drop(begun);
        settle();
        assert!(matches!(answer.try_recv(), Err(TryRecvError::Closed)), "it is not made");
        let Requested { mut begun, mut answer, .. } = load(&sender);
        settle();
        assert_eq!(begun.try_recv(), Ok(()));
        drop(begun);
        assert!(answer.try_recv().unwrap().is_ok());
        assert_eq!(made, 1);
    }

    #[test]
    fn what_waits_for_the_thread_is_bounded() {
        let (wake, woken) = sync_channel(2);
        let sender = sender(wake);
        (0..10).for_each(|_| sender.look("ads"));
        let mut waits = load(&sender);
        let mut refused = load(&sender);
        assert!(waits.answer.try_recv().is_err(), "it waits for the thread");
        let error = refused.answer.try_recv().unwrap().unwrap_err();
        assert!(matches!(error, ChangeError::Busy), "{error}");
        let Ok(WatchCommand::Labels(look)) = woken.try_recv() else { panic!("no look") };
        assert_eq!(look.begin(), "ads");
        assert!(matches!(woken.try_recv(), Ok(WatchCommand::Change(_))));
        sender.look("ads");
        assert!(
            matches!(woken.try_recv(), Ok(WatchCommand::Labels(_))),
            "another look after the beginning of the first"
        );
    }

    #[test]
    fn a_change_is_logged_in_words() {
        let label = |target| words(&Change::Label { label: "stable".to_owned(), target });
        assert_eq!(label(Some(VersionSelector::Version(Version(7)))), "setting label stable to version 7");
        assert_eq!(label(Some(VersionSelector::Latest)), "setting label stable to the latest version");
        assert_eq!(label(None), "removing label stable");
    }
}
