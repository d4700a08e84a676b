//! Loading and unloading of models when a client asks for it.
//!
//! The server does not know where models come from. What loads them implements [`Repository`] and is given to
//! [`super::Registry::set_repository`].

use std::collections::BTreeMap;

use tokio::sync::oneshot;
use tonic::Code;

use crate::pace::ClientWaits;
use crate::types::VersionSelector;

/// A change of the set of served models and versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Serve a model. If it is served, take over its newest version.
    Load,
    /// End serving a model and release its memory.
    Unload,
    /// Set or forget a label. The version that it names is loaded first.
    Label {
        #[allow(missing_docs)]
        label: String,
        /// `None`: forget it.
        target: Option<VersionSelector>,
    },
}

/// Where a change is that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    /// Nothing is left to do.
    Whole,
    /// A label is set in memory. It is lost at a restart if it is not made durable.
    InMemory,
}

/// A change that was requested.
pub(crate) struct Requested<A = oneshot::Receiver<Result<Made, ChangeError>>> {
    /// Gets a message when the change begins, and is closed if it will not be made.
    pub begun: oneshot::Receiver<()>,
    pub answer: A,
    /// Ends when the change begins, or the client is gone: what the thread does before should not take long.
    pub waits: ClientWaits,
}

/// Where models are loaded from.
pub(crate) trait Repository: Send + Sync {
    /// The names of all models that it has, served or not. May block.
    ///
    /// # Errors
    /// The reason why they cannot be listed.
    fn names(&self) -> Result<Vec<String>, String>;

    /// Makes the labels of a model durable that clients have set. May block.
    ///
    /// # Errors
    /// The reason why they cannot be written.
    fn keep_labels(&self, model: &str, set: &BTreeMap<String, VersionSelector>) -> Result<(), String>;

    /// Requests a look at a model, because its labels have changed.
    fn look(&self, model: &str);

    /// Requests a change for the call with this id. Changes are made one after the other. If
    /// [`Requested::begun`] is dropped before a change has begun, it is not made.
    fn change(&self, change: Change, model: String, id: String) -> Requested;

    /// The model that is changed now; `None` while models are loaded at the start.
    fn changes_now(&self) -> Option<String>;
}

/// Why a change was not made.
#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeError {
    #[error("model: no model {model:?} is in the directory of the models")]
    Unknown { model: String },
    #[error("model: no model {model:?} is served here")]
    NotServed { model: String },
    #[error("model {model:?}: {reason}")]
    Refused { model: String, reason: String },
    #[error("model {model:?}: {reason}")]
    Late { model: String, reason: String },
    #[error("server.models: {0}")]
    Unreadable(String),
    #[error("repository_name: there is one repository, without a name, got {0:?}")]
    Name(String),
    #[error("parameters: {0:?} is not supported")]
    Parameter(String),
    #[error("this server cannot load or unload models")]
    Unsupported,
    #[error(
        "model {model:?}: the change has not begun after {seconds} s and will not be made: the server \
         still {}",
        .now.as_ref().map_or("loads its models".to_owned(), |now| format!("changes model {now:?}"))
    )]
    NotBegun { model: String, seconds: u64, now: Option<String> },
    #[error("too many lists of models wait for the disk: limit {limit}")]
    Lists { limit: usize },
    #[error("too many changes of models wait for the one that is being made")]
    Busy,
    #[error("model {model:?}: the change failed inside the server, whose log says why")]
    Panicked { model: String },
    #[error("the server is draining: its models do not change any more")]
    Draining,
}

impl ChangeError {
    #[must_use]
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Unknown { .. } | Self::NotServed { .. } => Code::NotFound,
            Self::Refused { .. } => Code::FailedPrecondition,
            Self::Late { .. } | Self::NotBegun { .. } => Code::DeadlineExceeded,
            Self::Name(_) | Self::Parameter(_) => Code::InvalidArgument,
            Self::Unsupported => Code::Unimplemented,
            Self::Busy | Self::Lists { .. } => Code::ResourceExhausted,
            Self::Panicked { .. } => Code::Internal,
            Self::Unreadable(_) | Self::Draining => Code::Unavailable,
        }
    }
}
