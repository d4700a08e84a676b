//! Finds the gRPC service of a call by comparing its path with a short chain of names.
//!
//! Four comparisons cost less than a general router and allocate nothing. Without tonic's router, its
//! dependencies need not be built.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

use super::{ServerState, report};

/// The trait bounds that tonic's generated services satisfy.
pub(crate) trait GrpcService:
    Service<
        Request<Body>,
        Response = Response<Body>,
        Error = Infallible,
        Future = BoxFuture<Response<Body>, Infallible>,
    > + Clone
    + Send
    + 'static
{
}

impl<S> GrpcService for S where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future = BoxFuture<Response<Body>, Infallible>,
        > + Clone
        + Send
        + 'static
{
}

/// A gRPC service, and the rest of the chain.
#[derive(Clone)]
pub(crate) struct Route<S, Rest> {
    /// Whether a path is one of this service.
    is_own: fn(&str) -> bool,
    service: S,
    rest: Rest,
}

/// The end of the chain: the service is unknown.
#[derive(Clone)]
pub(crate) struct Unknown(pub Arc<ServerState>);

impl Unknown {
    /// Adds a service.
    pub(crate) fn or<S: NamedService>(self, service: S) -> Route<S, Self> {
        Route { is_own: is_of::<S>, service, rest: self }
    }
}

impl<S, Rest> Route<S, Rest> {
    /// Adds a service to the front of the chain: the service that was added last is compared first.
    pub(crate) fn or<T: NamedService>(self, service: T) -> Route<T, Self> {
        Route { is_own: is_of::<T>, service, rest: self }
    }

    /// Two instances of one gRPC service: `service` serves the paths that are its own, and `rest` all others.
    pub(crate) fn within(is_own: fn(&str) -> bool, service: S, rest: Rest) -> Self {
        Self { is_own, service, rest }
    }
}

impl<S, Rest: NamedService> NamedService for Route<S, Rest> {
    const NAME: &'static str = Rest::NAME;
}

/// Whether a path is `/SERVICE/METHOD` of this service.
fn is_of<S: NamedService>(path: &str) -> bool {
    let method = path.strip_prefix('/').and_then(|path| path.strip_prefix(S::NAME));
    method.is_some_and(|method| method.starts_with('/'))
}

impl Service<Request<Body>> for Unknown {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let status = Status::unimplemented("no such service or method");
        report::refused(&self.0, &request, &status);
        Box::pin(async { Ok(status.into_http()) })
    }
}

/// Both services must be ready, because the path is not known yet.
fn poll_both(
    service: &mut impl GrpcService,
    rest: &mut impl GrpcService,
    cx: &mut Context<'_>,
) -> Poll<Result<(), Infallible>> {
    match service.poll_ready(cx) {
        Poll::Ready(Ok(())) => rest.poll_ready(cx),
        other => other,
    }
}

impl<S: GrpcService, Rest: GrpcService> Service<Request<Body>> for Route<S, Rest> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        poll_both(&mut self.service, &mut self.rest, cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let is_own = (self.is_own)(request.uri().path());
        if is_own { self.service.call(request) } else { self.rest.call(request) }
    }
}
