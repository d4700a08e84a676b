//! How a row is laid out: as it is served ([`RowFormat`]), and as a record of a trainer ([`RecordLayout`]).
//!
//! A record has the weights of a row, followed by each of its optimizer states, all f32. Trainers and their
//! working files hold records; a version has a tensor for the weights and one for each state.

use crate::types::Element;

/// The elements of a row, without its states.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowFormat {
    pub element: Element,
    /// Elements of the row.
    pub dim: usize,
}

impl RowFormat {
    pub(crate) fn row_bytes(self) -> usize {
        self.element.row_bytes(self.dim)
    }
}

/// One kind of optimizer state of the rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape<'a> {
    /// PyTorch's name: `sum`, `exp_avg`, ...
    pub name: &'a str,
    /// Elements per row: the table's dim or 1.
    pub width: usize,
}

impl<'a> StateShape<'a> {
    /// A state of this name, with this many elements per row.
    #[must_use]
    pub const fn new(name: &'a str, width: usize) -> Self {
        Self { name, width }
    }
}

/// The layout of the records of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordLayout<'a> {
    /// Weights per row.
    pub dim: usize,
    /// The states, in the order in which they follow the weights.
    pub states: Vec<StateShape<'a>>,
}

impl RecordLayout<'_> {
    /// Elements of a record.
    #[must_use]
    pub fn width(&self) -> usize {
        self.dim + self.states.iter().map(|state| state.width).sum::<usize>()
    }

    /// As [`Self::width`]; `None` if the number is too large.
    pub(crate) fn checked_width(&self) -> Option<usize> {
        self.states.iter().try_fold(self.dim, |sum, state| sum.checked_add(state.width))
    }

    /// Bytes of a record.
    pub(crate) fn bytes(&self) -> usize {
        self.width() * size_of::<f32>()
    }
}
