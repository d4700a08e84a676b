//! One table of a working file: its shape, where its records lie, and what a row is before it is written.

use std::fmt;
use std::ops::Range;
use std::sync::RwLockReadGuard;

use super::bitmap::Bitmap;
use super::log::Log;
use super::stripes::Stripes;
use super::{First, WorkingError, WorkingTable};
use crate::rowlog::RowOrder;

/// The file's grid: each table starts on it.
const PAGE_BYTES: u64 = 4096;
/// Most bytes that one call reads, but at least one record.
pub(crate) const READ_BYTES: usize = 1 << 20;
/// Most bytes that one call writes, but at least one record. A long write makes the system keep its pages as one large
/// folio, and a small write into such a one costs a walk over all its blocks each time: on ext4 of Linux 6.18, 512 bytes
/// took 2.8 us in pages written by 4 KiB, 3.5 by 16 KiB and 33 by 1 MiB.
pub(crate) const WRITE_BYTES: usize = 16 << 10;
const WORD_BYTES: u64 = size_of::<f32>() as u64;

/// A table of a working file. Row `r` is `[weight(dim) | state 0 | state 1 ...]`, [`Self::width`] words of f32.
pub struct WorkingRows {
    rows: u64,
    dim: usize,
    states: Vec<(&'static str, usize)>,
    first: First,
    /// Whether `first` is a version's table with exactly these states.
    has_states: bool,
    width: usize,
    /// Where in the file it begins.
    begin: u64,
    layout: Layout,
}

/// How records lie in the file.
pub(crate) enum Layout {
    /// In the order in which they were written.
    Log(Log),
    /// In an order of rows; a row that was written is in its place.
    Placed {
        order: Option<RowOrder>,
        /// Which rows are in the file.
        written: Bitmap,
    },
}

/// A row of a request: where its record lies among the table's, and which one of the request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) place: u64,
    pub(crate) index: usize,
}

impl WorkingRows {
    /// The table, from byte `begin` of the file on.
    pub(crate) fn new(table: WorkingTable, begin: u64) -> Result<Self, WorkingError> {
        let WorkingTable { rows, dim, states, first, order } = table;
        let mut has_states = false;
        if let First::Version(version) = &first {
            let (expected, got) = ([rows, dim as u64], [version.rows(), version.dim() as u64]);
            if expected != got {
                return Err(WorkingError::First { expected, got });
            }
            has_states = version.states().iter().map(|s| (s.name(), s.width())).eq(states.iter().copied());
        }
        if let Some(order) = order.as_ref().filter(|order| order.rows() != rows) {
            return Err(WorkingError::Order { expected: rows, got: order.rows() });
        }
        let width = states.iter().try_fold(dim, |sum, &(_, width)| sum.checked_add(width));
        // Twice that, because a log takes more than its rows do.
        let bytes = width.and_then(|width| (width as u64 + 2).checked_mul(2 * WORD_BYTES)?.checked_mul(rows));
        // A file's length is a signed number of 64 bits.
        let end = bytes.and_then(|bytes| begin.checked_add(bytes)?.checked_next_multiple_of(PAGE_BYTES));
        let (Some(width), Some(_)) = (width, end.filter(|&end| end <= i64::MAX as u64)) else {
            return Err(WorkingError::TooLarge { rows, width: width.unwrap_or(usize::MAX) });
        };
        let log = if order.is_none() { Log::new(rows, width, begin)? } else { None };
        let layout = match log {
            Some(log) => Layout::Log(log),
            None => Layout::Placed { order, written: Bitmap::new(rows)? },
        };
        Ok(Self { rows, dim, states, first, has_states, width, begin, layout })
    }

    /// How many rows.
    #[must_use]
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Elements of a row's weight.
    #[must_use]
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Names of the states, and elements a row of each.
    #[must_use]
    pub(crate) fn states(&self) -> &[(&'static str, usize)] {
        &self.states
    }

    /// Words of f32 that a record has: the dim and the states' widths.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// By what order of rows its records lie, if any.
    #[must_use]
    pub(crate) fn order(&self) -> Option<&RowOrder> {
        match &self.layout {
            Layout::Placed { order, .. } => order.as_ref(),
            Layout::Log(_) => None,
        }
    }

    /// How its records lie.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Places that are looked up while this is held stay readable until it is dropped.
    pub(crate) fn hold(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match &self.layout {
            Layout::Log(log) => Some(log.hold()),
            Layout::Placed { .. } => None,
        }
    }

    /// Bytes of memory that grow with its rows.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let first = match &self.first {
            First::Version(table) if table.in_ram() => table.bytes(),
            _ => 0,
        };
        first
            + match &self.layout {
                Layout::Log(log) => log.memory_bytes(),
                Layout::Placed { order, written } => {
                    written.bytes() + order.as_ref().map_or(0, RowOrder::memory_bytes)
                }
            }
    }

    /// The byte of the file that its records end before, on the file's grid.
    pub(crate) fn end(&self) -> u64 {
        let end = match &self.layout {
            Layout::Log(log) => log.end(self.rows),
            Layout::Placed { .. } => self.offset(self.rows),
        };
        end.next_multiple_of(PAGE_BYTES)
    }

    /// Where in the file the record at this place begins.
    pub(crate) fn offset(&self, place: u64) -> u64 {
        // `new` has seen that this does not overflow up to the end.
        match &self.layout {
            Layout::Log(log) => log.offset(place),
            Layout::Placed { .. } => self.begin + place * self.width as u64 * WORD_BYTES,
        }
    }

    /// Where the record of this row lies; `None` where it was never written. It is good for as long as the table is held
    /// ([`Self::hold`]), or nobody writes it.
    #[inline]
    pub(crate) fn place(&self, stripes: &Stripes, row: u64) -> Option<u64> {
        match &self.layout {
            Layout::Log(log) => log.place(stripes, row).map(u64::from),
            Layout::Placed { order, written } => written.has(row).then(|| place_in(order.as_ref(), row)),
        }
    }

    /// The rows of a range that were written, ascending, and where each lies.
    pub(crate) fn written<'w>(
        &'w self,
        stripes: &'w Stripes,
        rows: Range<u64>,
    ) -> Box<dyn Iterator<Item = (u64, u64)> + 'w> {
        match &self.layout {
            Layout::Log(log) => Box::new(log.within(stripes, rows)),
            Layout::Placed { order, written } => {
                Box::new(written.within(rows).map(|row| (row, place_in(order.as_ref(), row))))
            }
        }
    }

    /// These rows in runs that lie near each other in the file: from the end of one to the next are no more than `gap`
    /// bytes, and from the first to the last none more than `most` save one record. `placed` is in the order of rows, and
    /// afterwards in that of places.
    pub(crate) fn runs<'p>(
        &self,
        placed: &'p mut [Placed],
        most: usize,
        gap: usize,
    ) -> impl Iterator<Item = &'p [Placed]> + use<'p> {
        if !matches!(self.layout, Layout::Placed { order: None, .. }) {
            placed.sort_unstable_by_key(|row| row.place);
        }
        let bytes = (self.width * size_of::<f32>()).max(1);
        let (most, gap) = ((most / bytes).max(1) as u64, (gap / bytes) as u64);
        let mut rest: &'p [Placed] = placed;
        std::iter::from_fn(move || {
            let first = rest.first()?.place;
            let near = |two: &[Placed]| two[1].place - two[0].place <= 1 + gap && two[1].place - first < most;
            let len = 1 + rest.windows(2).take_while(|two| near(two)).count();
            rest.split_off(..len)
        })
    }

    /// Writes over `record` what this row is before it is written.
    pub(crate) fn first_value(&self, row: u64, record: &mut [f32]) {
        let (weight, state) = record.split_at_mut(self.dim);
        state.fill(0.0);
        match &self.first {
            First::Uniform(uniform) => uniform.row(row, weight),
            First::Version(table) => {
                // The table has as many rows.
                table.row(row).into_iter().for_each(|bytes| table.element().decode(bytes, weight));
                let mut rest = state;
                for kept in table.states().iter().filter(|_| self.has_states) {
                    let (to, after) = rest.split_at_mut(kept.width());
                    to.copy_from_slice(&kept.as_slice()[row as usize * kept.width()..][..kept.width()]);
                    rest = after;
                }
            }
        }
    }
}

/// Where a row lies that has a place of its own.
pub(crate) fn place_in(order: Option<&RowOrder>, row: u64) -> u64 {
    order.map_or(row, |order| order.place(row))
}

impl fmt::Debug for WorkingRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("WorkingRows");
        debug.field("rows", &self.rows).field("dim", &self.dim).field("states", &self.states);
        debug.field("begin", &self.begin).finish_non_exhaustive()
    }
}
