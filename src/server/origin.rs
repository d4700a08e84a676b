//! What a call says of itself in its headers: an id, and the trace that it is a part of.
//!
//! `traceparent` and `tracestate` are those of [W3C Trace Context](https://www.w3.org/TR/trace-context/). A
//! `traceparent` that does not have their form is ignored, and then so is `tracestate`.

use std::borrow::Cow;
use std::fmt;

use tonic::codegen::http::{HeaderMap, HeaderName, HeaderValue};

/// The headers. A header is found faster by these than by its text.
static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
static TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");
static TRACE_STATE: HeaderName = HeaderName::from_static("tracestate");

/// Most characters of an id in the log.
const ID_CHARS: usize = 128;

/// The trace that a call is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceParent {
    pub trace: TraceId,
    /// The span of the caller.
    pub span: u64,
    /// Whether the caller records its span.
    pub sampled: bool,
}

/// The id of a trace, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceId(pub u128);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl TraceParent {
    /// Reads `traceparent`: version, trace, span and flags, in lowercase hexadecimal digits. Later versions
    /// may have more after the flags.
    fn parse(text: &[u8]) -> Option<Self> {
        let (known, more) = text.split_at_checked(55)?;
        let dashes = [2, 35, 52].iter().all(|at| known[*at] == b'-');
        let version = hex(&known[..2])?;
        let ends = more.is_empty() || version > 0 && more[0] == b'-';
        let (trace, span, flags) = (hex(&known[3..35])?, hex(&known[36..52])?, hex(&known[53..])?);
        let valid = dashes && ends && version != 0xff && trace != 0 && span != 0;
        valid.then_some(Self { trace: TraceId(trace), span: span as u64, sampled: flags & 1 == 1 })
    }
}

fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, byte| {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// Where a call comes from.
#[derive(Clone, Default)]
pub(crate) struct Origin {
    /// `x-request-id`.
    id: Option<HeaderValue>,
    pub parent: Option<TraceParent>,
    /// `tracestate`, which may come in several headers; none without a parent.
    #[cfg_attr(not(feature = "otel"), allow(dead_code))] // only spans have it
    pub state: Vec<HeaderValue>,
}

impl Origin {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let mut parents = headers.get_all(&TRACE_PARENT).iter();
        let parent = parents.next().filter(|_| parents.next().is_none());
        let parent = parent.and_then(|parent| TraceParent::parse(parent.as_bytes()));
        let state = || headers.get_all(&TRACE_STATE).iter().cloned().collect();
        let state = parent.map_or_else(Vec::new, |_| state());
        Self { id: headers.get(&REQUEST_ID).filter(|id| !id.is_empty()).cloned(), parent, state }
    }

    /// The id of a request for the log: its own, or that of its call, or that of its trace; or an empty text.
    pub(crate) fn id<'a>(&'a self, own: &'a str) -> Cow<'a, str> {
        let of_call = || self.id.as_ref().map(|id| String::from_utf8_lossy(id.as_bytes()));
        let given = Some(own).filter(|own| !own.is_empty()).map(Cow::Borrowed).or_else(of_call);
        match (given, self.parent) {
            (Some(given), _) => printable(given),
            (None, Some(parent)) => Cow::Owned(parent.trace.to_string()),
            (None, None) => Cow::Borrowed(""),
        }
    }
}

/// The first characters of a text, with a replacement for each that a terminal or a viewer of logs could take
/// for a new line or a command.
fn printable(text: Cow<'_, str>) -> Cow<'_, str> {
    // Only characters that are printed as they are stay one character.
    let printed = |c: char| c.is_ascii_graphic() || c == ' ' || c.escape_debug().len() == 1;
    if text.len() <= ID_CHARS && text.chars().all(printed) {
        return text;
    }
    let shown = text.chars().take(ID_CHARS).map(|c| if printed(c) { c } else { char::REPLACEMENT_CHARACTER });
    Cow::Owned(shown.collect())
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
