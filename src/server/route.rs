//! Which gRPC service a call goes to: a short chain of names, compared with the path.
//!
//! A chain of four comparisons costs less than a general router, allocates nothing and keeps
//! tonic's router and its dependencies out of the build.

use std::convert::Infallible;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

/// What tonic's generated services are, under one name.
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

/// A gRPC service and everything that comes after it.
#[derive(Clone)]
pub(crate) struct Route<S, Rest> {
    service: S,
    rest: Rest,
}

/// The end of the chain: nobody has the service.
#[derive(Clone)]
pub(crate) struct Unknown;

impl Unknown {
    /// Puts a service before the end of the chain.
    pub(crate) fn or<S: NamedService>(self, service: S) -> Route<S, Self> {
        Route { service, rest: self }
    }
}

impl<S, Rest> Route<S, Rest> {
    /// Puts a service before this chain: the last one added is compared first.
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

impl<S, Rest> Service<Request<Body>> for Route<S, Rest>
where
    S: GrpcService + NamedService,
    Rest: GrpcService,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Every service of the chain must be ready, because the path is not known yet.
        match self.service.poll_ready(cx) {
            Poll::Ready(Ok(())) => self.rest.poll_ready(cx),
            other => other,
        }
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().strip_prefix('/').unwrap_or_default();
        let own = path.strip_prefix(S::NAME).is_some_and(|method| method.starts_with('/'));
        if own { self.service.call(request) } else { self.rest.call(request) }
    }
}
