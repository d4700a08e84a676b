//! Measures the memory of a message while its bytes arrive, before it is decoded.
//!
//! A decoded message can be much larger than its encoding: an empty column or string takes two bytes on the
//! wire, but tens of bytes in memory. So a limit on a message's bytes does not bound memory, and a check of
//! the decoded message is too late. The meter parses the wire format of a body, including the nested
//! messages that have repeated fields (`meter/layout.rs` describes them), and charges each entry with its
//! decoded size before the decoder sees the entry. It refuses what it cannot parse, so nothing is decoded
//! that was not charged. What is not decoded, but read in place, is charged with what the conversion takes.

mod body;
mod layout;
mod target;

use tonic::Status;

use super::charge::MessageSize;
pub(crate) use body::Metered;
pub(crate) use layout::{CTR, KSERVE, Layout};
use layout::{DEPTH, Field, LIMITS, Limit, SHORT};
use target::CallTarget;

/// Why a message is refused before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("message: malformed: {0}")]
    Malformed(&'static str),
    #[error("{}: limit {} {}, got more", .0.name, .0.most, .0.entries)]
    TooMany(&'static Limit),
}

impl From<Fault> for Status {
    fn from(fault: Fault) -> Self {
        match fault {
            // The decoder has the same code for such a message.
            Fault::Malformed(_) => Self::internal(fault.to_string()),
            Fault::TooMany(..) => Self::invalid_argument(fault.to_string()),
        }
    }
}

/// How many numbers of variable length end in these bytes: a byte below 0x80 ends one.
fn ends(bytes: &[u8]) -> usize {
    // A sum of bytes is computed many at a time. It holds the bytes of a chunk.
    let goes_on = |chunk: &[u8]| usize::from(chunk.iter().map(|byte| byte >> 7).sum::<u8>());
    bytes.len() - bytes.chunks(usize::from(u8::MAX)).map(goes_on).sum::<usize>()
}

/// The number of a field, and the length of its content.
struct ShortHead {
    field: u64,
    length: u64,
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
    /// The number of the field with this key.
    Number(u64, Varint),
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

/// A message that the next byte belongs to.
#[derive(Clone, Copy)]
struct Level {
    layout: &'static Layout,
    /// Where it ends, in bytes from the start of the outermost message. No message ends after the one around
    /// it.
    end: usize,
}

/// Parses the messages of one call.
struct Meter {
    state: State,
    /// The decoder's limit for a message.
    max_bytes: usize,
    /// The message, the message in it that the next byte belongs to, and so on. The first `depth` are in use.
    levels: [Level; DEPTH],
    depth: usize,
    /// Bytes of the outermost message that were read.
    at: usize,
    /// Entries of the fields with limits in the current message, by [`Limit::counter`].
    entries: [usize; LIMITS],
    /// What the current message costs so far.
    cost: usize,
    target: CallTarget,
}

impl Meter {
    fn new(layout: &'static Layout, max_bytes: usize) -> Self {
        let state = State::Prefix { read: 0, length: 0 };
        let levels = [Level { layout, end: 0 }; DEPTH];
        let (entries, target) = ([0; LIMITS], CallTarget::default());
        Self { state, max_bytes, levels, depth: 1, at: 0, entries, cost: 0, target }
    }

    /// Parses the next bytes of the body. Returns the memory that they take, encoded and decoded. Calls
    /// `ended` with each message that ends.
    fn feed(&mut self, mut bytes: &[u8], mut ended: impl FnMut(MessageSize)) -> Result<usize, Fault> {
        let mut all = 0;
        while let [first, rest @ ..] = bytes {
            let mut cost = 1;
            match self.state {
                State::Refused => {
                    all += bytes.len();
                    break;
                }
                State::Prefix { read, length } => {
                    cost += self.prefix(read, length, *first);
                    bytes = rest;
                }
                State::Bytes { left, each } => {
                    let (now, later) = bytes.split_at(left.min(bytes.len()));
                    cost = now.len();
                    if each > 0 {
                        cost += each * ends(now);
                    }
                    bytes = later;
                    self.spend(now.len())?;
                    self.target.read(now);
                    match left - now.len() {
                        0 => self.next(),
                        left => self.state = State::Bytes { left, each },
                    }
                }
                State::Key(_) | State::Length(..) | State::Number(..) => {
                    if let Some(ShortHead { field, length }) = self.short(bytes) {
                        self.spend(2)?;
                        cost = 2 + self.delimited(field, length)?;
                        bytes = &bytes[2..];
                    } else {
                        self.spend(1)?;
                        cost += self.number(*first)?;
                        bytes = rest;
                    }
                }
            }
            all += cost;
            self.cost += cost;
            if self.is_between() {
                ended(MessageSize { bytes: self.at, cost: std::mem::take(&mut self.cost) });
            }
        }
        Ok(all)
    }

    /// Whether no part of the next message has arrived.
    fn is_between(&self) -> bool {
        matches!(self.state, State::Prefix { read: 0, .. })
    }

    /// Bytes of the innermost message that were not read yet.
    fn left(&self) -> usize {
        self.level().end - self.at
    }

    /// Adds a byte of a prefix. Returns the cost of the message that it begins.
    fn prefix(&mut self, read: u8, length: u32, byte: u8) -> usize {
        let length = if read == 0 { 0 } else { length << 8 | u32::from(byte) };
        self.state = State::Prefix { read: read + 1, length };
        if read < 4 {
            return 0;
        }
        (self.levels[0].end, self.at) = (length as usize, 0);
        self.entries = [0; LIMITS];
        self.target = CallTarget::default();
        let (state, cost) = match length as usize {
            0 => (State::Prefix { read: 0, length: 0 }, 0),
            message if message > self.max_bytes => (State::Refused, 0),
            _ => (State::Key(Varint::default()), self.levels[0].layout.spare),
        };
        self.state = state;
        cost
    }

    /// The innermost message.
    fn level(&self) -> &Level {
        &self.levels[self.depth - 1]
    }

    /// The field and its length, if the next two bytes are its key and its length, as in most cases. Reading
    /// both at once is faster.
    fn short(&self, bytes: &[u8]) -> Option<ShortHead> {
        match (self.state, bytes) {
            (State::Key(Varint { bits: 0, .. }), [key @ 8..0x80, length @ ..0x80, ..])
                if key & 7 == 2 && self.left() >= 2 =>
            {
                Some(ShortHead { field: u64::from(key >> 3), length: u64::from(*length) })
            }
            _ => None,
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
            State::Number(field, varint) => {
                let field = *field;
                if let Some(number) = varint.push(byte)? {
                    if let Field::Priority = self.level().layout.field(field) {
                        self.target.number(number);
                    }
                    self.next();
                    return Ok(0);
                }
            }
            State::Prefix { .. } | State::Bytes { .. } | State::Refused => {}
        }
        if self.left() == 0 {
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
            0 => State::Number(field, Varint::default()),
            1 => State::Bytes { left: 8, each: 0 },
            2 => State::Length(field, Varint::default()),
            5 => State::Bytes { left: 4, each: 0 },
            _ => return Err(Fault::Malformed("a group, which the protocol does not use")),
        };
        Ok(match self.level().layout.field(field) {
            // The decoder takes an entry of a map as a message even if its key says that it is a number.
            Field::Parameter(..) | Field::Flat(..) if key & 7 != 2 => {
                return Err(Fault::Malformed("an entry of a map that is not a message"));
            }
            // A number that is not packed costs one entry of its vector.
            Field::Fixed(each) | Field::Varints(each) if key & 7 != 2 => each,
            _ => 0,
        })
    }

    /// Begins the value of a field with this length. Returns its cost.
    fn delimited(&mut self, field: u64, length: u64) -> Result<usize, Fault> {
        let layout = self.level().layout;
        let length = usize::try_from(length).ok().filter(|length| *length <= self.left());
        let length = length.ok_or(Fault::Malformed("a field is longer than its message"))?;
        let mut each = 0;
        let cost = match layout.field(field) {
            Field::Other | Field::Priority => length,
            field @ Field::Model => {
                self.target.begin(field, length);
                length
            }
            field @ Field::Parameter(entry, limit) => {
                self.count(limit)?;
                self.target.begin(field, length);
                entry + length
            }
            Field::Slices(entry) => entry,
            Field::Flat(entry, limit) => {
                self.count(limit)?;
                entry + length
            }
            // Twice the encoded numbers, for a vector that grows by doubling.
            Field::Fixed(_) => 2 * length,
            Field::Varints(number) => {
                each = number;
                0
            }
            Field::Messages(entry, inner, limit) => {
                limit.map_or(Ok(()), |limit| self.count(limit))?;
                let cost = entry + inner.spare;
                match inner.growth {
                    Some(growth) if length <= SHORT => cost + growth * length,
                    _ => {
                        self.levels[self.depth] = Level { layout: inner, end: self.at + length };
                        self.depth += 1;
                        self.next();
                        return Ok(cost);
                    }
                }
            }
        };
        if length == 0 {
            self.next();
        } else {
            self.state = State::Bytes { left: length, each };
        }
        Ok(cost)
    }

    /// Counts an entry of a field that has a limit.
    fn count(&mut self, limit: &'static Limit) -> Result<(), Fault> {
        let entries = &mut self.entries[limit.counter];
        *entries += 1;
        if *entries > limit.most { Err(Fault::TooMany(limit)) } else { Ok(()) }
    }

    fn spend(&mut self, bytes: usize) -> Result<(), Fault> {
        if bytes > self.left() {
            return Err(Fault::Malformed("a field is longer than its message"));
        }
        self.at += bytes;
        Ok(())
    }

    /// Ends a field: the key of a field or the next message follows.
    fn next(&mut self) {
        self.target.end();
        while self.depth > 1 && self.left() == 0 {
            self.depth -= 1;
        }
        self.state = match self.left() {
            0 => State::Prefix { read: 0, length: 0 },
            _ => State::Key(Varint::default()),
        };
    }
}

#[cfg(test)]
pub(super) mod tests;
