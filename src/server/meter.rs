//! Measures the memory of a `Ctr` message while its bytes arrive, before it is decoded.
//!
//! A decoded message can be much larger than its encoding: an empty column or string takes two bytes on the
//! wire, but tens of bytes in memory. So a limit on a message's bytes does not bound memory, and a check of
//! the decoded message is too late. The meter parses the wire format of a body, two levels deep (requests
//! and their columns), and charges each entry with its decoded size before the decoder sees the entry. It
//! refuses what it cannot parse, so nothing is decoded that was not charged.

use std::mem::size_of;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use http_body::{Frame, SizeHint};
use prost::bytes::Bytes;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;

use super::Shared;
use super::proto::FeatureColumn;
use crate::schema::MAX_FEATURES;

/// Most memory of one entry in a vector that grows by doubling: twice the entry's size.
const fn grown(bytes: usize) -> usize {
    2 * bytes
}

/// Memory of a column: its entry in the vector of columns, and the smallest allocations of its name and its
/// three vectors.
const COLUMN_BYTES: usize = grown(size_of::<FeatureColumn>()) + 4 * size_of::<Bytes>() + 128;

/// The fields of numbers of a request.
const DENSE: u64 = 4;
const LABELS: u64 = 6;

/// Why a message is refused before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("message: malformed: {0}")]
    Malformed(&'static str),
    #[error("features: limit {} columns, got more", MAX_FEATURES)]
    TooManyColumns,
}

impl From<Fault> for Status {
    fn from(fault: Fault) -> Self {
        match fault {
            // The decoder has the same code for such a message.
            Fault::Malformed(_) => Self::internal(fault.to_string()),
            Fault::TooManyColumns => Self::invalid_argument(fault.to_string()),
        }
    }
}

/// What the next byte belongs to.
#[derive(Clone, Copy)]
enum State {
    /// The prefix of a message: a compression flag and a 4-byte length. `read` is the number of bytes read.
    Prefix { read: u8, length: u32 },
    /// The key of a field: its number and wire type.
    Key(Varint),
    /// The length of the field with this key. The varint holds the bytes read so far.
    Length(u64, Varint),
    /// A number. Its value does not matter.
    Number(Varint),
    /// The value of a field, with `left` bytes to read. Each number in it takes
    /// `each` bytes of memory when it is decoded.
    Bytes { left: usize, each: usize },
    /// A message that the decoder refuses because of its length.
    Refused,
}

#[derive(Clone, Copy, Default)]
struct Varint {
    value: u64,
    bits: u32,
}

impl Varint {
    /// Adds a byte. Returns the value if this byte is the last one.
    fn push(&mut self, byte: u8) -> Result<Option<u64>, Fault> {
        if self.bits > 63 {
            return Err(Fault::Malformed("a number of more than ten bytes"));
        }
        self.value |= u64::from(byte & 0x7f) << self.bits;
        self.bits += 7;
        Ok((byte < 0x80).then_some(self.value))
    }
}

/// Parses the messages of one call.
struct Meter {
    state: State,
    /// The decoder's limit for a message.
    max_bytes: usize,
    /// Bytes of the message that were not read yet.
    message: usize,
    /// Bytes of the current column that were not read yet; `None` outside of a column.
    column: Option<usize>,
    columns: usize,
}

impl Meter {
    fn new(max_bytes: usize) -> Self {
        let state = State::Prefix { read: 0, length: 0 };
        Self { state, max_bytes, message: 0, column: None, columns: 0 }
    }

    /// Parses the next bytes of the body. Returns the memory that they take, encoded and decoded.
    fn feed(&mut self, mut bytes: &[u8]) -> Result<usize, Fault> {
        let mut cost = bytes.len();
        while let [first, rest @ ..] = bytes {
            match self.state {
                State::Refused => break,
                State::Prefix { read, length } => {
                    self.prefix(read, length, *first);
                    bytes = rest;
                }
                State::Bytes { left, each } => {
                    let (now, later) = bytes.split_at(left.min(bytes.len()));
                    if each > 0 {
                        cost += each * now.iter().filter(|byte| **byte < 0x80).count();
                    }
                    bytes = later;
                    self.spend(now.len())?;
                    match left - now.len() {
                        0 => self.next(),
                        left => self.state = State::Bytes { left, each },
                    }
                }
                State::Key(_) | State::Length(..) | State::Number(_) => {
                    self.spend(1)?;
                    cost += self.number(*first)?;
                    bytes = rest;
                }
            }
        }
        Ok(cost)
    }

    fn prefix(&mut self, read: u8, length: u32, byte: u8) {
        let length = if read == 0 { 0 } else { length << 8 | u32::from(byte) };
        self.state = State::Prefix { read: read + 1, length };
        if read == 4 {
            self.message = length as usize;
            self.columns = 0;
            self.state = match self.message {
                0 => State::Prefix { read: 0, length: 0 },
                message if message > self.max_bytes => State::Refused,
                _ => State::Key(Varint::default()),
            };
        }
    }

    /// Adds a byte of a key, a length or a number. Returns the cost of the entry that it completes.
    fn number(&mut self, byte: u8) -> Result<usize, Fault> {
        let mut cost = 0;
        match &mut self.state {
            State::Key(varint) => {
                if let Some(key) = varint.push(byte)? {
                    cost = self.field(key)?;
                }
            }
            State::Length(field, varint) => {
                let field = *field;
                if let Some(length) = varint.push(byte)? {
                    return self.delimited(field, length);
                }
            }
            State::Number(varint) => {
                if varint.push(byte)?.is_some() {
                    self.next();
                    return Ok(0);
                }
            }
            State::Prefix { .. } | State::Bytes { .. } | State::Refused => {}
        }
        if self.message == 0 || self.column == Some(0) {
            return Err(Fault::Malformed("it ends within a field"));
        }
        Ok(cost)
    }

    /// Begins a field. Returns its cost, or 0 for a field with a length, whose cost [`Self::delimited`]
    /// returns.
    fn field(&mut self, key: u64) -> Result<usize, Fault> {
        let field = key >> 3;
        if field == 0 || key > u64::from(u32::MAX) {
            return Err(Fault::Malformed("a field number that is not valid"));
        }
        self.state = match key & 7 {
            0 => State::Number(Varint::default()),
            1 => State::Bytes { left: 8, each: 0 },
            2 => State::Length(field, Varint::default()),
            5 => State::Bytes { left: 4, each: 0 },
            _ => return Err(Fault::Malformed("a group, which the protocol does not use")),
        };
        // A number that is not packed costs one entry of its vector.
        Ok(if key & 7 == 2 { 0 } else { self.each(field) })
    }

    /// The decoded size of one number of a field.
    fn each(&self, field: u64) -> usize {
        match (self.column.is_some(), field) {
            (false, DENSE | LABELS) => grown(size_of::<f32>()),
            (true, 2) => grown(size_of::<u32>()),
            (true, 3) => grown(size_of::<u64>()),
            _ => 0,
        }
    }

    /// Begins the value of a field with this length. Returns its cost.
    fn delimited(&mut self, field: u64, length: u64) -> Result<usize, Fault> {
        let room = self.column.unwrap_or(self.message);
        let length = usize::try_from(length).ok().filter(|length| *length <= room);
        let length = length.ok_or(Fault::Malformed("a field is longer than its message or column"))?;
        let mut each = 0;
        let cost = match (self.column.is_some(), field) {
            (false, DENSE | LABELS) => grown(length),
            (false, 5) => {
                self.columns += 1;
                if self.columns > MAX_FEATURES {
                    return Err(Fault::TooManyColumns);
                }
                self.column = Some(length);
                self.next();
                return Ok(COLUMN_BYTES);
            }
            (true, 4) => grown(size_of::<Bytes>()),
            (true, 2 | 3) => {
                each = self.each(field);
                0
            }
            _ => length,
        };
        if length == 0 {
            self.next();
        } else {
            self.state = State::Bytes { left: length, each };
        }
        Ok(cost)
    }

    fn spend(&mut self, bytes: usize) -> Result<(), Fault> {
        let too_long = Fault::Malformed("a field is longer than its message or column");
        self.message = self.message.checked_sub(bytes).ok_or(too_long)?;
        if let Some(column) = &mut self.column {
            *column = column.checked_sub(bytes).ok_or(too_long)?;
        }
        Ok(())
    }

    /// Ends a field: the key of a field or the next message follows.
    fn next(&mut self) {
        if self.column == Some(0) {
            self.column = None;
        }
        self.state = match self.message {
            0 => State::Prefix { read: 0, length: 0 },
            _ => State::Key(Varint::default()),
        };
    }
}

/// A call in flight: its place, and its memory, which counts towards `server.max_inflight_bytes`. Both are
/// free when this is dropped.
pub(crate) struct Charge {
    shared: Arc<Shared>,
    bytes: AtomicUsize,
}

impl Charge {
    /// Counts a call. Also returns the number of calls in flight.
    pub(crate) fn enter(shared: Arc<Shared>) -> (Arc<Self>, usize) {
        let in_flight = shared.in_flight.fetch_add(1, Ordering::AcqRel) + 1;
        (Arc::new(Self { shared, bytes: AtomicUsize::new(0) }), in_flight)
    }

    fn add(&self, bytes: usize) -> Result<(), Status> {
        let limit = self.shared.max_inflight_bytes;
        let own = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let all = self.shared.in_flight_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        if all <= limit {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "bytes of calls in flight: limit {limit} (server.max_inflight_bytes), got {all}, {own} of them \
             for this call's message so far"
        )))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.in_flight_bytes.fetch_sub(*self.bytes.get_mut(), Ordering::AcqRel);
        self.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A request body whose bytes are charged before the decoder gets them. It fails if it is not complete in
/// time, because its call takes a place.
pub(crate) struct Metered {
    body: Body,
    meter: Meter,
    charge: Arc<Charge>,
    due: Instant,
    /// Set when the body is first waited for. Most bodies arrive with their headers.
    late: Option<Pin<Box<Sleep>>>,
}

impl Metered {
    pub(crate) fn new(body: Body, charge: Arc<Charge>) -> Self {
        let meter = Meter::new(charge.shared.limits.max_bytes);
        let due = Instant::now() + charge.shared.limits.body;
        Self { body, meter, charge, due, late: None }
    }

    /// Waits for the body, but not for too long.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let late = self.late.get_or_insert_with(|| Box::pin(sleep_until(self.due)));
        ready!(late.as_mut().poll(cx));
        let limit = self.charge.shared.limits.body.as_secs_f64();
        let text = format!("message: it must be complete {limit} s (server.body_seconds) after its headers");
        Poll::Ready(Status::deadline_exceeded(text))
    }
}

impl http_body::Body for Metered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        if polled.is_pending() {
            return this.poll_late(cx).map(|status| Some(Err(status)));
        }
        let Poll::Ready(Some(Ok(frame))) = &polled else { return polled };
        let Some(bytes) = frame.data_ref() else { return polled };
        let charged = this.meter.feed(bytes).map_err(Status::from).and_then(|cost| this.charge.add(cost));
        match charged {
            Ok(()) => polled,
            Err(status) => Poll::Ready(Some(Err(status))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
