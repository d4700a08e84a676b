//! Models that clients load and unload, by KServe's repository calls.
//!
//! The server sends a request to the thread of `watch`, which makes one change after the other. A model that
//! is unloaded is not served again before a client loads it, whatever happens in its directory, or before a
//! restart.

use std::path::PathBuf;
use std::sync::mpsc::Sender;

use tokio::sync::oneshot;

use super::warm;
use super::watch::{Ask, Watcher};
use crate::server::{Change, ChangeError, Repository};
use crate::store;

/// A change that a client has requested.
pub(crate) struct Requested {
    change: Change,
    model: String,
    reply: oneshot::Sender<Result<(), ChangeError>>,
}

/// Passes requests to the thread.
pub(crate) struct Asks {
    /// The directory of the models.
    pub models: PathBuf,
    pub wake: Sender<Ask>,
}

impl Repository for Asks {
    fn names(&self) -> Result<Vec<String>, String> {
        store::models(&self.models).map_err(|error| error.to_string())
    }

    fn change(&self, change: Change, model: String) -> oneshot::Receiver<Result<(), ChangeError>> {
        let (reply, answer) = oneshot::channel();
        // If the thread has ended, the reply is dropped, and the answer says so.
        let _ = self.wake.send(Ask::Change(Requested { change, model, reply }));
        answer
    }
}

impl Watcher {
    /// Makes a change, unless its client is gone.
    pub(crate) fn change(&mut self, requested: Requested) {
        let Requested { change, model, reply } = requested;
        if reply.is_closed() {
            return;
        }
        let result = match change {
            Change::Load => self.load(&model),
            Change::Unload => self.unload(&model),
        };
        if let Err(reason) = &result {
            tracing::warn!(model, %reason, "{change:?} requested by a client has failed");
        }
        // The client may be gone.
        let _ = reply.send(result);
    }

    fn load(&mut self, name: &str) -> Result<(), ChangeError> {
        let names = store::models(&self.adder.loader.models);
        let names = names.map_err(|error| ChangeError::Unreadable(error.to_string()))?;
        if !names.iter().any(|known| known == name) {
            return Err(ChangeError::Unknown { model: name.to_owned() });
        }
        self.forget_refused(name);
        let refused = |reason| ChangeError::Refused { model: name.to_owned(), reason };
        if let Some(model) = self.adder.served.find(name) {
            return self.look_at(&model).map_err(refused);
        }
        if let Err(reason) = self.adder.add(name) {
            if self.unloaded.contains(name) {
                // It is still not served because a client wanted that.
                self.adder.registry.forget(name);
            }
            return Err(refused(format!("{reason:#}")));
        }
        self.unloaded.remove(name);
        tracing::info!(model = name, "loaded for a client");
        Ok(())
    }

    fn unload(&mut self, name: &str) -> Result<(), ChangeError> {
        if !self.adder.registry.remove(name) {
            return Err(ChangeError::NotServed { model: name.to_owned() });
        }
        self.unloaded.insert(name.to_owned());
        self.forget_refused(name);
        let model = self.adder.served.remove(name);
        if self.adder.loader.config.cache.warm {
            // For the next load. A failure is logged.
            model.iter().for_each(|model| warm::save_once(&model.engine, &self.adder.loader.models));
        }
        // The memory of the model is released here, unless its hot rows are being saved by another thread.
        drop(model);
        tracing::info!(model = name, "unloaded for a client");
        Ok(())
    }
}
