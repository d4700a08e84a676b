//! Why the input tensors of a request are refused.

use std::fmt;

use crate::server::received::Malformed;

/// Why the tensors of a request are not a batch of the model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TensorError {
    #[error("message: malformed: {0}")]
    Malformed(#[from] Malformed),
    #[error("inputs[{at}]: malformed: {error}")]
    MalformedTensor { at: usize, error: Malformed },
    #[error("input {name:?}: the model has no such input")]
    Unknown { name: String },
    #[error("input {name:?}: missing")]
    Missing { name: String },
    #[error("input {name:?}: given more than once")]
    Duplicate { name: String },
    #[error("input {name:?}: shared memory is not supported")]
    SharedMemory { name: String },
    #[error("input {name:?}: datatype: expected {expected}, got {got:?}")]
    Datatype { name: String, expected: OneOf, got: String },
    #[error("input {name:?}: shape: expected {}, got {got}", .expected.pattern())]
    Shape { name: String, expected: Dims, got: Dims },
    #[error("input {name:?}: shape: expected at least 1 sample, got {got}")]
    NoSamples { name: String, got: i64 },
    #[error("input {name:?}: shape: limit {limit} samples (server.max_samples), got {got}")]
    TooManySamples { name: String, limit: usize, got: i64 },
    #[error("raw_input_contents: expected {inputs} entries, one per input, got {got}")]
    RawCount { inputs: usize, got: usize },
    #[error("input {name:?}: contents: expected none, because raw_input_contents is given")]
    BothContents { name: String },
    #[error("input {name:?}: contents: expected only {expected}, the field of its datatype")]
    ContentsField { name: String, expected: &'static str },
    #[error("input {name:?}: contents: expected {expected} elements for its shape, got {got}")]
    Count { name: String, expected: usize, got: usize },
    #[error("input {name:?}: raw contents: expected {expected} bytes for its shape, got {got}")]
    RawBytes { name: String, expected: usize, got: usize },
    #[error("input {name:?}: raw contents: element {element} needs {needed} bytes, {left} are left")]
    RawElement { name: String, element: usize, needed: usize, left: usize },
    #[error("input {name:?}: element {element}: expected an id of at least 0, got {got}")]
    NegativeId { name: String, element: usize, got: i64 },
    #[error("input {name:?}: element {element}: expected a length of at least 0, got {got}")]
    NegativeLength { name: String, element: usize, got: i32 },
    #[error("input {name:?}: expected a sum of {values}, the number of values of {feature:?}, got {sum}")]
    LengthSum { name: String, feature: String, values: usize, sum: u64 },
}

/// Datatypes in an error.
#[derive(Debug)]
pub(crate) struct OneOf(pub &'static [&'static str]);

impl fmt::Display for OneOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" or "))
    }
}

/// A shape in an error. In an expected shape, -1 means any size and is shown as `n`.
#[derive(Debug)]
pub(crate) struct Dims(pub Vec<i64>);

/// Most dimensions of a client's shape in an error.
const SHOWN: usize = 8;

impl Dims {
    /// Enough of a client's shape for an error.
    pub(crate) fn of(shape: &[i64]) -> Self {
        Self(shape.iter().take(SHOWN + 1).copied().collect())
    }

    fn pattern(&self) -> String {
        let shown = |size: &i64| if *size < 0 { "n".to_owned() } else { size.to_string() };
        format!("[{}]", self.0.iter().map(shown).collect::<Vec<_>>().join(", "))
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self.0.iter().take(SHOWN).map(i64::to_string).collect();
        let more = if self.0.len() > SHOWN { ", ..." } else { "" };
        write!(f, "[{}{more}]", shown.join(", "))
    }
}
