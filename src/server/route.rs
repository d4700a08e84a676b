//! Finds the gRPC service of a call by comparing its path with a short chain of names.
//!
//! Four comparisons cost less than a general router and allocate nothing. Without tonic's router, its
//! dependencies need not be built.

use std::convert::Infallible;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

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
    service: S,
    rest: Rest,
}

/// The end of the chain: the service is unknown.
#[derive(Clone)]
pub(crate) struct Unknown;

impl Unknown {
    /// Adds a service.
    pub(crate) fn or<S: NamedService>(self, service: S) -> Route<S, Self> {
        Route { service, rest: self }
    }
}

impl<S, Rest> Route<S, Rest> {
    /// Adds a service to the front of the chain: the service that was added last is compared first.
    pub(crate) fn or<T: NamedService>(self, service: T) -> Route<T, Self> {
        Route { service, rest: self }
    }
}

impl Service<Request<Body>> for Unknown {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        Box::pin(async { Ok(Status::unimplemented("no such service or method").into_http()) })
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

impl<S, Rest> Service<Request<Body>> for Route<S, Rest>
where
    S: GrpcService + NamedService,
    Rest: GrpcService,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        poll_both(&mut self.service, &mut self.rest, cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().strip_prefix('/').unwrap_or_default();
        let own = path.strip_prefix(S::NAME).is_some_and(|method| method.starts_with('/'));
        if own { self.service.call(request) } else { self.rest.call(request) }
    }
}

/// A gRPC service of which another instance serves some methods.
#[derive(Clone)]
pub(crate) struct Apart<S, Rest> {
    /// Whether a path is that of such a method.
    is_apart: fn(&str) -> bool,
    service: S,
    rest: Rest,
}

impl<S, Rest> Apart<S, Rest> {
    pub(crate) fn new(is_apart: fn(&str) -> bool, service: S, rest: Rest) -> Self {
        Self { is_apart, service, rest }
    }
}

impl<S, Rest: NamedService> NamedService for Apart<S, Rest> {
    const NAME: &'static str = Rest::NAME;
}

impl<S: GrpcService, Rest: GrpcService> Service<Request<Body>> for Apart<S, Rest> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        poll_both(&mut self.service, &mut self.rest, cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let is_apart = (self.is_apart)(request.uri().path());
        if is_apart { self.service.call(request) } else { self.rest.call(request) }
    }
}
