//! The rows of every table, the hottest first.

use super::super::trace::{Trace, TraceTable};
use super::RowCount;
use crate::schema::Schema;
use crate::types::TableId;

/// The rows of every table by descending count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ranked {
    /// In the order of the schema.
    pub tables: Vec<RankedTable>,
    /// The largest error of a count, which is never too low. Also the most accesses of a row that is missing
    /// here. 0 for exact counts.
    pub floor: u64,
}

/// The rows of one table by descending count and, among equals, ascending row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankedTable {
    /// The table's name.
    pub name: String,
    /// Row numbers.
    pub rows: Vec<u64>,
    /// Accesses of each row.
    pub counts: Vec<u64>,
}

/// A row of a table and its count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankedRow {
    /// Index of the table in [`Ranked::tables`].
    pub table: usize,
    /// Row number.
    pub row: u64,
    /// Accesses.
    pub count: u64,
}

impl RankedTable {
    fn of(name: String, counts: impl IntoIterator<Item = RowCount>) -> Self {
        let mut counts: Vec<RowCount> = counts.into_iter().collect();
        counts.sort_unstable_by_key(|counted| (std::cmp::Reverse(counted.count), counted.row));
        let (rows, counts) = counts.into_iter().map(|counted| (counted.row, counted.count)).unzip();
        Self { name, rows, counts }
    }

    /// The rows with their counts.
    pub(crate) fn counted(&self) -> impl ExactSizeIterator<Item = RowCount> + Clone {
        self.rows.iter().zip(&self.counts).map(|(&row, &count)| RowCount { row, count })
    }
}

impl Ranked {
    /// The exact counts of a trace.
    #[must_use]
    pub(crate) fn of(trace: &Trace) -> Self {
        let mut counts = vec![0u64; trace.rows.len()];
        trace.accesses.iter().for_each(|&key| counts[key as usize] += 1);
        let table = |table: &TraceTable| {
            let keys = table.keys.start as usize..table.keys.end as usize;
            let counted = trace.rows[keys.clone()].iter().zip(&counts[keys]);
            let counted = counted.map(|(&row, &count)| RowCount { row, count });
            RankedTable::of(table.name.clone(), counted)
        };
        Self { tables: trace.tables.iter().map(table).collect(), floor: 0 }
    }

    /// The rows of all tables, the hottest first; rows of equal count by table and row.
    #[must_use]
    pub(crate) fn hottest(&self) -> Vec<RankedRow> {
        let tables = self.tables.iter().enumerate();
        let mut all: Vec<RankedRow> = tables
            .flat_map(|(table, ranked)| {
                ranked.counted().map(move |RowCount { row, count }| RankedRow { table, row, count })
            })
            .collect();
        // The sort is stable, and the rows of each table are already in order.
        all.sort_by_key(|row| std::cmp::Reverse(row.count));
        all
    }

    /// The rows of the schema's tables, the hottest first. Tables are matched by name. Tables that the schema
    /// does not have, and rows past the end of their table, are left out.
    #[must_use]
    pub(crate) fn rows_of(&self, schema: &Schema) -> Vec<(TableId, RankedRow)> {
        let ids: Vec<Option<TableId>> =
            self.tables.iter().map(|ranked| schema.table_id(&ranked.name)).collect();
        let row = |row: RankedRow| {
            let table = ids[row.table]?;
            (row.row < schema.tables[table.index()].stored_rows()).then_some((table, row))
        };
        self.hottest().into_iter().filter_map(row).collect()
    }
}

#[cfg(test)]
mod tests;
