//! Ids that identify a row among all tables of a model.

use bytemuck::{Pod, Zeroable};

use super::TableId;

/// A table and one of its rows, packed into one number. Ids are ordered by table, then by row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
#[repr(transparent)]
pub struct RowId(u64);

/// Low bits of the number that hold the row. The others hold the table.
const ROW_BITS: u32 = 48;

impl RowId {
    /// How many rows of a table have an id. No table of a schema has more.
    pub(crate) const MAX_ROWS: u64 = 1 << ROW_BITS;
    /// How many tables have ids for their rows. A schema has fewer.
    pub(crate) const MAX_TABLES: usize = 1 << (u64::BITS - ROW_BITS);

    /// The row must be one of a schema's table. Rows from files are compared with the schema before this.
    #[inline]
    #[must_use]
    pub fn new(table: TableId, row: u64) -> Self {
        debug_assert!(row < Self::MAX_ROWS && table.index() < Self::MAX_TABLES, "{table:?}, row {row}");
        Self(u64::from(table.0) << ROW_BITS | row)
    }

    /// The id with this packed number.
    #[inline(always)]
    pub(crate) fn from_number(number: u64) -> Self {
        Self(number)
    }

    #[inline]
    pub(crate) fn table(self) -> TableId {
        TableId((self.0 >> ROW_BITS) as u32)
    }

    #[inline]
    pub(crate) fn row(self) -> u64 {
        self.0 & (Self::MAX_ROWS - 1)
    }

    /// The packed number.
    #[inline(always)]
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}
