//! What is known about a gRPC connection, shared by its task, its socket and its calls: how much it may read,
//! which calls are open, and which answers have not left. From this follows whether a client is idle or late.
//!
//! A connection that resets calls faster than the server can end them is read more slowly
//! ([`ConnectionState::poll_may_read`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;
use tonic::codegen::http::Request;

use super::connection::ClientTimes;
use crate::sync::EvenPoisoned;

/// Most bytes that are read from a connection before the calls in them are accepted.
const READ_BYTES: usize = 16 << 10;

/// With more accepted calls than this whose tasks have not begun, nothing is read. Those tasks and other
/// connections take turns, so this bounds how long a connection can keep others waiting.
const MOST_NEW: usize = 128;

/// The first bytes of every HTTP/2 client: a fixed text of 24 bytes, and the 9 bytes of a frame's head.
const PREFACE_BYTES: usize = 24 + 9;

/// What a connection's client does.
pub(super) enum ClientState {
    Good,
    /// No call was open for the idle limit, except health and reflection.
    Idle,
    /// The limit of this setting has passed.
    Overdue(&'static str),
}

/// The state of one connection. Its calls find it with [`Self::of`].
pub(crate) struct ConnectionState {
    opened: Instant,
    /// Bytes that arrived, up to [`PREFACE_BYTES`].
    received: AtomicUsize,
    /// Bytes that may be read before the task gives way. The task accepts the calls that have arrived only
    /// when there is nothing more to read.
    may_read: AtomicUsize,
    /// Calls that the gate let in, counted by [`super::charge::Charge`].
    pub in_flight: AtomicUsize,
    /// The memory of their messages, and of the connection's answers.
    pub bytes: AtomicUsize,
    /// With more calls than this, nothing is read.
    max_calls: usize,
    activity: Mutex<Activity>,
}

struct Activity {
    calls: usize,
    /// Those of them that do not keep the connection open ([`ExcludedCall`]).
    excluded: usize,
    /// Those of them whose tasks have not begun.
    new: usize,
    /// The last end of a call that keeps the connection open.
    idle_since: Instant,
    /// Wakes the connection's task when there are few enough calls to read on.
    reader: Option<Waker>,
    /// The start of each message that has not left, by the order of their starts.
    unsent: BTreeMap<u64, Instant>,
    next: u64,
}

impl ConnectionState {
    pub(crate) fn new(max_calls: usize) -> Self {
        let now = Instant::now();
        let (unsent, reader) = (BTreeMap::new(), None);
        let activity = Activity { calls: 0, excluded: 0, new: 0, idle_since: now, reader, unsent, next: 0 };
        let [received, may_read, in_flight, bytes] = [(); 4].map(|()| AtomicUsize::new(0));
        Self { opened: now, received, may_read, in_flight, bytes, max_calls, activity: Mutex::new(activity) }
    }

    /// The state of the connection on which the call arrived.
    pub(crate) fn of<T>(request: &Request<T>) -> Option<&Arc<Self>> {
        request.extensions().get()
    }

    /// Excludes a call from the count that keeps the connection open. `None` if `most` calls are excluded
    /// already.
    pub(crate) fn exclude_call(self: &Arc<Self>, most: usize) -> Option<ExcludedCall> {
        let mut activity = self.activity();
        (activity.excluded < most).then(|| {
            activity.excluded += 1;
            ExcludedCall(self.clone())
        })
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().even_poisoned()
    }

    /// Changes the counts of calls, and lets the connection's task read on if it may.
    fn change(&self, counts: impl FnOnce(&mut Activity)) {
        let mut activity = self.activity();
        counts(&mut activity);
        let reader = if self.reads(&activity) { activity.reader.take() } else { None };
        drop(activity);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn reads(&self, activity: &Activity) -> bool {
        activity.calls <= self.max_calls && activity.new <= MOST_NEW
    }

    /// Bytes of an answer wait for the socket. Returns their number, for [`Self::end_send`].
    pub(super) fn begin_send(&self, bytes: usize) -> u64 {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut activity = self.activity();
        let number = activity.next;
        activity.next += 1;
        activity.unsent.insert(number, Instant::now());
        number
    }

    /// They have left, or are dropped.
    pub(super) fn end_send(&self, number: u64, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.activity().unsent.remove(&number);
    }

    /// Lets the connection's task read again.
    pub(super) fn read_more(&self) {
        self.may_read.store(READ_BYTES, Ordering::Relaxed);
    }

    /// Waits until the connection may be read from.
    ///
    /// HTTP/2 no longer counts a call that its client, or HTTP/2 itself, has reset. But the call takes memory
    /// and a turn of the processor until its task has seen that. So with more calls than HTTP/2 allows, those
    /// that were reset are ended first, and with many new calls those are begun first. None of this needs
    /// anything that is still to be read.
    pub(crate) fn poll_may_read(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.may_read.load(Ordering::Relaxed) == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut activity = self.activity();
        if self.reads(&activity) {
            return Poll::Ready(());
        }
        activity.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Only the connection's task calls this.
    pub(crate) fn received(&self, bytes: usize) {
        let may_read = self.may_read.load(Ordering::Relaxed);
        self.may_read.store(may_read.saturating_sub(bytes), Ordering::Relaxed);
        let before = self.received.load(Ordering::Relaxed);
        if before < PREFACE_BYTES {
            self.received.store(before + bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn greeted(&self) -> bool {
        self.received.load(Ordering::Relaxed) >= PREFACE_BYTES
    }

    pub(super) fn client(&self, times: &ClientTimes, now: Instant) -> ClientState {
        if !self.greeted() {
            let late = now >= self.opened + times.handshake;
            return if late { ClientState::Overdue("server.handshake_seconds") } else { ClientState::Good };
        }
        let activity = self.activity();
        if activity.unsent.values().next().is_some_and(|start| now >= *start + times.write) {
            return ClientState::Overdue("server.write_seconds");
        }
        let idle = times.idle.is_some_and(|limit| now >= activity.idle_since + limit);
        if idle && activity.calls <= activity.excluded { ClientState::Idle } else { ClientState::Good }
    }
}

/// Counts as a call of its connection until it is dropped, also if the call is excluded.
pub(crate) struct OpenCallCount(Arc<ConnectionState>);

impl OpenCallCount {
    pub(super) fn new(connection: Arc<ConnectionState>) -> Self {
        connection.change(|activity| activity.calls += 1);
        Self(connection)
    }
}

impl Drop for OpenCallCount {
    fn drop(&mut self) {
        self.0.change(|activity| {
            if activity.calls > activity.excluded {
                activity.idle_since = Instant::now();
            }
            activity.calls -= 1;
        });
    }
}

/// How a call counts for its connection, until this is dropped.
#[derive(Clone)]
pub(crate) struct CountedCall {
    /// Ends before `_excluded`, so that the connection knows whether this call has kept it open.
    open: Arc<OpenCallCount>,
    _excluded: Option<Arc<ExcludedCall>>,
}

impl CountedCall {
    /// `excluded` is `None` for a call that keeps its connection open.
    pub(super) fn new(open: Arc<OpenCallCount>, excluded: Option<Arc<ExcludedCall>>) -> Self {
        Self { open, _excluded: excluded }
    }

    pub(super) fn connection(&self) -> &ConnectionState {
        &self.open.0
    }
}

/// A call whose task has not begun.
pub(super) struct NewCall(Arc<ConnectionState>);

impl NewCall {
    pub(super) fn new(connection: Arc<ConnectionState>) -> Self {
        connection.change(|activity| activity.new += 1);
        Self(connection)
    }
}

impl Drop for NewCall {
    fn drop(&mut self) {
        self.0.change(|activity| activity.new -= 1);
    }
}

/// A call that does not keep its connection open.
pub(crate) struct ExcludedCall(Arc<ConnectionState>);

impl Drop for ExcludedCall {
    fn drop(&mut self) {
        self.0.activity().excluded -= 1;
    }
}
