//! A layer around the chain of all gRPC services: which calls are served, and which token they need. It sees
//! only the headers of a call, before any of its message is read.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::codegen::{BoxFuture, Service};

use super::{Refusal, Role, Security};
use crate::server::charge::CallKind;
use crate::server::methods::Method;
use crate::server::route::GrpcService;
use crate::server::{ServerState, report};

/// The role that a call needs, by its path; `None`: none. A method that is not listed needs the highest.
fn role(path: &str) -> Option<Role> {
    match Method::of(path) {
        Some(method) => method.role(),
        None if path.starts_with("/grpc.health.v1.Health/") => None,
        None => Some(Role::Admin),
    }
}

impl Security {
    /// The setting that switches a call off.
    fn switched_off(&self, path: &str) -> Option<&'static str> {
        if !self.admin && Method::of(path).is_some_and(|method| method.kind() == Some(CallKind::Change)) {
            return Some("server.admin");
        }
        (!self.reflection && path.starts_with("/grpc.reflection.")).then_some("server.reflection")
    }

    /// Why a call is refused.
    fn refuses(&self, path: &str, headers: &HeaderMap) -> Option<Status> {
        let refusal = match role(path) {
            Some(role) => self.allow(role, headers).err(),
            None => None,
        };
        match refusal {
            Some(refusal @ Refusal::OtherRole(_)) => Some(Status::permission_denied(refusal.to_string())),
            Some(refusal) => Some(Status::unauthenticated(refusal.to_string())),
            None => self.switched_off(path).map(|setting| Status::unimplemented(format!("{setting} is off"))),
        }
    }
}

/// All services, behind the check.
#[derive(Clone)]
pub(crate) struct Guard<S> {
    services: S,
    state: Arc<ServerState>,
}

impl<S> Guard<S> {
    pub(crate) fn new(services: S, state: Arc<ServerState>) -> Self {
        Self { services, state }
    }
}

impl<S: GrpcService> Service<Request<Body>> for Guard<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.services.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.state.security.refuses(request.uri().path(), request.headers()) {
            None => self.services.call(request),
            Some(status) => {
                report::refused(&self.state, &request, &status);
                Box::pin(async move { Ok(status.into_http()) })
            }
        }
    }
}

#[cfg(test)]
mod tests;
