//! Every gRPC method of both protocols, and what its calls do. From this follow the token that they need
//! (`security/guard.rs`) and the places that they take (`charge.rs`).

use super::charge::CallKind;
use super::security::Role;

/// The services that score.
pub(super) const CTR: &str = "flechette.v1.Ctr";
pub(super) const KSERVE: &str = "inference.GRPCInferenceService";

/// A method of a gRPC service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Method {
    service: &'static str,
    name: &'static str,
    /// `None` for a method that says whether the server and its models are well. It is not behind the gate.
    kind: Option<CallKind>,
}

const fn ctr(name: &'static str, kind: CallKind) -> Method {
    Method { service: CTR, name, kind: Some(kind) }
}

const fn kserve(name: &'static str, kind: CallKind) -> Method {
    Method { service: KSERVE, name, kind: Some(kind) }
}

const fn kserve_health(name: &'static str) -> Method {
    Method { service: KSERVE, name, kind: None }
}

const METHODS: &[Method] = &[
    ctr("Predict", CallKind::Use),
    ctr("PredictStream", CallKind::Stream),
    kserve("ModelInfer", CallKind::Use),
    kserve("ModelStreamInfer", CallKind::Stream),
    ctr("Learn", CallKind::Learn),
    ctr("GetModel", CallKind::Describe),
    ctr("SetLabel", CallKind::Change),
    kserve("ServerMetadata", CallKind::Describe),
    kserve("ModelMetadata", CallKind::Describe),
    kserve("ModelStatistics", CallKind::Describe),
    kserve("RepositoryIndex", CallKind::Describe),
    kserve("RepositoryModelLoad", CallKind::Change),
    kserve("RepositoryModelUnload", CallKind::Change),
    kserve_health("ServerLive"),
    kserve_health("ServerReady"),
    kserve_health("ModelReady"),
];

impl Method {
    /// The method of a path, `/SERVICE/METHOD`.
    pub(crate) fn of(path: &str) -> Option<&'static Self> {
        let (service, name) = path.strip_prefix('/')?.split_once('/')?;
        METHODS.iter().find(|method| method.service == service && method.name == name)
    }

    /// What a call does with its model; `None` for health.
    pub(crate) fn kind(&self) -> Option<CallKind> {
        self.kind
    }

    /// The role that a call needs; `None`: none.
    pub(crate) fn role(&self) -> Option<Role> {
        self.kind.map(|kind| match kind {
            CallKind::Change => Role::Admin,
            CallKind::Use | CallKind::Learn | CallKind::Describe | CallKind::Stream => Role::Predict,
        })
    }
}
