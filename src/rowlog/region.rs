//! One table of a working file: its shape, the places of its records, and the first values of its rows.

use std::fmt;
use std::ops::Range;
use std::sync::RwLockReadGuard;

use super::bitmap::Bitmap;
use super::log::{Log, RowPlace};
use super::stripes::Stripes;
use super::{First, WorkingError, WorkingTable};
use crate::rowlog::RowOrder;
use crate::store::RecordLayout;

/// Each table, and each part of one, begins at a multiple of this in the file.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Most bytes that one call reads, except that it reads at least one record.
pub(crate) const READ_BYTES: usize = 1 << 20;
/// Most bytes that one call writes, except that it writes at least one record. After a long write the kernel
/// keeps the pages as one large folio, and each small write into a large folio walks all of its blocks: on
/// ext4 of Linux 6.18, writing 512 bytes took 2.8 us in pages written by 4 KiB, 3.5 us by 16 KiB and 33 us by
/// 1 MiB.
pub(crate) const WRITE_BYTES: usize = 16 << 10;
const WORD_BYTES: u64 = size_of::<f32>() as u64;

/// A table of a working file.
pub struct WorkingRows {
    rows: u64,
    record: RecordLayout<'static>,
    first: First,
    /// Whether `first` is a version's table with exactly these states.
    has_states: bool,
    /// Elements of a record.
    width: usize,
    /// Offset in the file.
    begin: u64,
    layout: Layout,
}

/// Where records are in the file.
pub(crate) enum Layout {
    /// In the order of their last writes.
    Log(Log),
    /// At a fixed place per row.
    Placed {
        order: Option<RowOrder>,
        /// Which rows are in the file.
        written: Bitmap,
    },
}

/// A row of a request: the place of its record in the table, and its index in the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) place: u64,
    pub(crate) index: usize,
}

impl WorkingRows {
    /// A table at offset `begin` of the file.
    pub(crate) fn new(table: WorkingTable, begin: u64) -> Result<Self, WorkingError> {
        let WorkingTable { rows, record, first, order } = table;
        let mut has_states = false;
        if let First::Version(version) = &first {
            let (expected, got) = ([rows, record.dim as u64], [version.rows(), version.dim() as u64]);
            if expected != got {
                return Err(WorkingError::First { expected, got });
            }
            has_states = version.record_layout().states == record.states;
        }
        if let Some(order) = order.as_ref().filter(|order| order.rows() != rows) {
            return Err(WorkingError::Order { expected: rows, got: order.rows() });
        }
        let width = record.checked_width();
        // An upper bound for both layouts. The factor 2 is for the garbage of a log, the 2 words for its
        // index.
        let bytes = width.and_then(|width| (width as u64 + 2).checked_mul(2 * WORD_BYTES)?.checked_mul(rows));
        // The length of a file is a signed 64-bit number.
        let end = bytes.and_then(|bytes| begin.checked_add(bytes)?.checked_next_multiple_of(PAGE_BYTES));
        let (Some(width), Some(_)) = (width, end.filter(|&end| end <= i64::MAX as u64)) else {
            return Err(WorkingError::TooLarge { rows, width: width.unwrap_or(usize::MAX) });
        };
        let log = if order.is_none() { Log::new(rows, width, begin)? } else { None };
        let layout = match log {
            Some(log) => Layout::Log(log),
            None => Layout::Placed { order, written: Bitmap::new(rows)? },
        };
        Ok(Self { rows, record, first, has_states, width, begin, layout })
    }

    #[must_use]
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The weights and the states of a row.
    #[must_use]
    pub(crate) fn record(&self) -> &RecordLayout<'static> {
        &self.record
    }

    /// f32 elements of a record.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Places that are looked up while this lock is held stay readable until it is released. Fixed places
    /// need no lock.
    pub(crate) fn hold(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match &self.layout {
            Layout::Log(log) => Some(log.hold()),
            Layout::Placed { .. } => None,
        }
    }

    /// The offset in the file at which the table ends, page-aligned.
    pub(crate) fn end(&self) -> u64 {
        let end = match &self.layout {
            Layout::Log(log) => log.end(self.rows),
            Layout::Placed { .. } => self.offset(self.rows),
        };
        end.next_multiple_of(PAGE_BYTES)
    }

    /// The offset in the file of the record at this place.
    pub(crate) fn offset(&self, place: u64) -> u64 {
        // `new` has checked that this does not overflow.
        match &self.layout {
            Layout::Log(log) => log.offset(place),
            Layout::Placed { .. } => self.begin + place * self.width as u64 * WORD_BYTES,
        }
    }

    /// The place of the record of this row; `None` if it was never written. Valid while [`Self::hold`]'s lock
    /// is held, or while the table is not written.
    #[inline]
    pub(crate) fn place(&self, stripes: &Stripes, row: u64) -> Option<u64> {
        match &self.layout {
            Layout::Log(log) => log.place(stripes, row).map(u64::from),
            Layout::Placed { order, written } => written.has(row).then(|| place_in(order.as_ref(), row)),
        }
    }

    /// The written rows of a range, ascending, each with its place.
    pub(crate) fn written<'w>(
        &'w self,
        stripes: &'w Stripes,
        rows: Range<u64>,
    ) -> Box<dyn Iterator<Item = RowPlace> + 'w> {
        match &self.layout {
            Layout::Log(log) => Box::new(log.within(stripes, rows)),
            Layout::Placed { order, written } => {
                let place = |row| RowPlace { row, place: place_in(order.as_ref(), row) };
                Box::new(written.within(rows).map(place))
            }
        }
    }

    /// Sorts `placed`, which is in ascending order of rows, by place, and groups it into runs of neighbours
    /// in the file. Gaps within a run are at most `gap` bytes. A run is at most `most` bytes, or one
    /// record.
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

    /// Writes the first value of a row to `record`.
    pub(crate) fn first_value(&self, row: u64, record: &mut [f32]) {
        let (weight, state) = record.split_at_mut(self.record.dim);
        state.fill(0.0);
        match &self.first {
            First::Uniform(uniform) => uniform.row(row, weight),
            First::Version(table) => {
                // `new` has checked that the table has this row.
                table.row(row).into_iter().for_each(|bytes| table.element().decode(bytes, weight));
                let mut rest = state;
                for (kind, kept) in table.states().iter().enumerate().filter(|_| self.has_states) {
                    let (to, after) = rest.split_at_mut(kept.width());
                    to.copy_from_slice(table.state(kind, row));
                    rest = after;
                }
            }
        }
    }
}

/// The fixed place of a row.
pub(crate) fn place_in(order: Option<&RowOrder>, row: u64) -> u64 {
    order.map_or(row, |order| order.place(row))
}

impl fmt::Debug for WorkingRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("WorkingRows");
        debug.field("rows", &self.rows).field("record", &self.record);
        debug.field("begin", &self.begin).finish_non_exhaustive()
    }
}
