//! What the log and the traces say of a request that has ended: who sent it, how it ended, and where its time
//! went.
//!
//! At the level `debug` each request has a line. A request that took `log.slow_seconds` or longer has a
//! warning, and one that failed by the server's fault an error. Nothing is computed for a request without a
//! line and without a span.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic::codegen::http;
use tonic::{Code, Status};
use tracing::{Level, field};

use super::ServerState;
use super::gate::{self, Arrival};
use super::origin::Origin;
use crate::types::{Times, Version};

/// Where the time of a request went. The parts add up to all of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stages {
    /// From the headers of the call to its decoded message.
    pub message: Duration,
    /// In the queue.
    pub queue: Duration,
    /// Its batch looked up and pooled rows.
    pub lookup: Duration,
    /// Its batch was in the dense layers.
    pub dense: Duration,
    /// The rest of the computation of its batch.
    pub compute: Duration,
    /// Everything else: conversion, and the way back.
    pub rest: Duration,
}

impl Stages {
    /// The name and the time of each stage, in the order in which a request passes them.
    pub(crate) fn all(&self) -> [(&'static str, Duration); 6] {
        [
            ("message", self.message),
            ("queue", self.queue),
            ("lookup", self.lookup),
            ("dense", self.dense),
            ("compute", self.compute),
            ("rest", self.rest),
        ]
    }

    fn longest(&self) -> &'static str {
        self.all().into_iter().max_by_key(|(_, time)| *time).map_or("", |(name, _)| name)
    }
}

/// The steps of a request that was queued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    pub queued: Instant,
    /// When a worker took it, or its first part.
    pub taken: Option<Instant>,
    /// What its batches took, which other requests may share; 0 if it was not scored.
    pub times: Times,
}

/// The instants of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instants {
    /// The headers of its call came, or its message in a stream.
    pub arrived: Instant,
    /// Its message was decoded.
    pub decoded: Instant,
    /// `None` if it was not queued.
    pub steps: Option<Steps>,
    pub ended: Instant,
}

impl Instants {
    pub(crate) fn took(&self) -> Duration {
        self.ended.saturating_duration_since(self.arrived)
    }

    pub(crate) fn stages(&self) -> Stages {
        let mut stages =
            Stages { message: self.decoded.saturating_duration_since(self.arrived), ..Stages::default() };
        if let Some(Steps { queued, taken, times }) = self.steps {
            stages.queue = taken.unwrap_or(self.ended).saturating_duration_since(queued);
            let since_taken =
                taken.map_or(Duration::ZERO, |taken| self.ended.saturating_duration_since(taken));
            // For a request without scores, the time of its batch is unknown.
            let computed = if times.total.is_zero() { since_taken } else { times.total.min(since_taken) };
            // Times summed over threads may exceed the time of the batch.
            let both = (times.lookup + times.dense).max(computed).as_secs_f64().max(f64::MIN_POSITIVE);
            let share = |time: Duration| computed.mul_f64(time.as_secs_f64() / both);
            (stages.lookup, stages.dense) = (share(times.lookup), share(times.dense));
            stages.compute = computed.saturating_sub(stages.lookup + stages.dense);
        }
        let known = stages.all().into_iter().map(|(_, time)| time).sum();
        stages.rest = self.took().saturating_sub(known);
        stages
    }
}

/// A request that has ended.
pub(crate) struct Report<'a> {
    /// The arrival of its call.
    pub arrival: &'a Arrival,
    /// Its own id, or an empty text.
    pub id: &'a str,
    /// The model, if it is served.
    pub model: Option<&'a str>,
    /// The version that has scored it.
    pub version: Option<Version>,
    /// 0 if it was not queued.
    pub samples: usize,
    pub code: Code,
    pub error: Option<&'a str>,
    /// Whether the server is at fault.
    pub fault: bool,
    pub times: Instants,
}

/// `log.slow_seconds`, which can change while the server runs.
pub(crate) struct Slow(AtomicU64);

impl Slow {
    /// `None`: no request is slow.
    pub(crate) fn new(limit: Option<Duration>) -> Self {
        let slow = Self(AtomicU64::default());
        slow.set(limit);
        slow
    }

    pub(crate) fn set(&self, limit: Option<Duration>) {
        self.0.store(limit.map_or(u64::MAX, micros), Ordering::Relaxed);
    }

    fn is(&self, took: Duration) -> bool {
        micros(took) >= self.0.load(Ordering::Relaxed)
    }
}

/// Whether the error of each request is reported, and not only an error of the server.
pub(crate) fn wants_errors(state: &ServerState) -> bool {
    state.spans.is_some() || tracing::enabled!(Level::DEBUG)
}

/// Writes a line with all that is known of a request.
macro_rules! line {
    ($level:ident, $report:ident, $trace:ident, $stages:ident, $text:literal) => {
        tracing::$level!(
            model = $report.model,
            version = $report.version.map(|version| version.0),
            id = &*$report.arrival.origin.id($report.id),
            trace_id = $trace.map(field::display),
            method = $report.arrival.method(),
            samples = $report.samples,
            code = ?$report.code,
            error = $report.error,
            took_us = micros($report.times.took()),
            stage = $stages.longest(),
            message_us = micros($stages.message),
            queue_us = micros($stages.queue),
            lookup_us = micros($stages.lookup),
            dense_us = micros($stages.dense),
            compute_us = micros($stages.compute),
            rest_us = micros($stages.rest),
            $text
        )
    };
}

/// Counts a call that no service has taken, and writes its line.
pub(crate) fn refused<B>(state: &ServerState, request: &http::Request<B>, status: &Status) {
    state.metrics.no_model.count(status.code() as i32);
    tracing::debug!(
        id = &*Origin::of(request.headers()).id(""),
        method = gate::method(request.uri().path()),
        code = ?status.code(),
        error = status.message(),
        "request refused"
    );
}

impl Report<'_> {
    /// Makes the spans of the request and writes its lines.
    pub(crate) fn tell(&self) {
        let state = &self.arrival.state;
        let recorded = state.spans.as_ref().and_then(|spans| spans.record(self));
        let slow = state.slow.is(self.times.took());
        if !(slow || self.fault || tracing::enabled!(Level::DEBUG)) {
            return;
        }
        let trace = recorded.or(self.arrival.origin.parent.map(|parent| parent.trace));
        let stages = self.times.stages();
        line!(debug, self, trace, stages, "request");
        if self.fault {
            line!(error, self, trace, stages, "request failed");
        } else if slow {
            line!(warn, self, trace, stages, "slow request");
        }
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}
