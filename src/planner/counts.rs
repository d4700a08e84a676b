//! How often each row is asked for: counted in one pass, ranked, and kept in a file, for whoever fills
//! a cache before its first request or puts rows out by rank.
//!
//! **Counting** is exact while the distinct rows stay within a limit. Past it the rows of the lower half
//! of the counts are forgotten and counting goes on: what is forgotten had at most [`Counts::floor`]
//! accesses, a row that comes back starts from there, and so a count is at most the floor too high and
//! never too low, and every row with more accesses than the floor is there (the idea of Lossy
//! Counting, Manku and Motwani, VLDB 2002, with the limit given instead of the error).
//!
//! **The file** is safetensors: for each table of the schema `<table>.rows` and `<table>.counts`, u64 of
//! one dimension and of the same length, by descending count and, among equals, ascending row. Its
//! metadata are `format = "flechette-counts"`, `version = "1"` and `floor`, 0 where the counts are
//! exact.
//!
//! ```no_run
//! # fn main() -> Result<(), flechette::planner::counts::CountsError> {
//! use flechette::planner::counts::Ranked;
//! let ranked = Ranked::read("ids.safetensors".as_ref())?;
//! if let Some(table) = ranked.table("C3") {
//!     let hottest = table.rows.first(); // and table.counts.first() accesses
//! }
//! for row in ranked.hottest() { /* over all tables, the hottest first */ }
//! # Ok(()) }
//! ```

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};

use super::ids::RowMap;
use super::trace::Trace;
use crate::schema::Schema;
use crate::types::TableId;

const FORMAT: &str = "flechette-counts";
const VERSION: &str = "1";

/// A counts file that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CountsError {
    /// The system refused.
    #[error("counts: {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is no counts file, or a damaged one.
    #[error("counts: {}: {reason}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What was expected and what was got.
        reason: String,
    },
}

/// Counts in the making.
#[derive(Debug)]
pub struct Counts {
    tables: Vec<(String, RowMap<u64>)>,
    rows: usize,
    limit: usize,
    floor: u64,
}

impl Counts {
    /// No accesses of the tables of a schema. At most `limit` distinct rows, but at least one, are
    /// counted apart, of about 24 bytes each.
    #[must_use]
    pub fn new(schema: &Schema, limit: usize) -> Self {
        let tables = schema.tables.iter().map(|t| (t.name.clone(), RowMap::default())).collect();
        Self { tables, rows: 0, limit: limit.max(1), floor: 0 }
    }

    /// Counts one access; `table` is one of the schema's.
    pub fn add(&mut self, table: TableId, row: u64) {
        let counts = &mut self.tables[table.index()].1;
        if let Some(count) = counts.get_mut(&row) {
            *count += 1;
            return;
        }
        if self.rows == self.limit {
            self.forget();
        }
        self.tables[table.index()].1.insert(row, self.floor + 1);
        self.rows += 1;
    }

    /// The most accesses that a row which is not here may have had, and by which a count may be too
    /// high: 0 while all is exact.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Forgets at least half of the rows.
    fn forget(&mut self) {
        let mut counts: Vec<u64> = self.tables.iter().flat_map(|(_, rows)| rows.values().copied()).collect();
        let middle = counts.len() / 2;
        self.floor = *counts.select_nth_unstable(middle).1;
        self.rows = 0;
        for (_, rows) in &mut self.tables {
            rows.retain(|_, count| *count > self.floor);
            self.rows += rows.len();
        }
    }

    /// All rows by rank.
    #[must_use]
    pub fn ranked(self) -> Ranked {
        let floor = self.floor;
        let tables = self.tables.into_iter().map(|(name, counts)| RankedTable::of(name, counts));
        Ranked { tables: tables.collect(), floor }
    }
}

/// The rows of every table by descending count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranked {
    /// In the order of the schema.
    pub tables: Vec<RankedTable>,
    /// As [`Counts::floor`].
    pub floor: u64,
}

/// The rows of one table by descending count and, among equals, ascending row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankedTable {
    /// Its name.
    pub name: String,
    /// Its rows.
    pub rows: Vec<u64>,
    /// How often each was asked for.
    pub counts: Vec<u64>,
}

/// One row of one table, and how often it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankedRow {
    /// The table's place in [`Ranked::tables`].
    pub table: usize,
    /// The row.
    pub row: u64,
    /// Its accesses.
    pub count: u64,
}

impl RankedTable {
    fn of(name: String, counts: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut counts: Vec<(u64, u64)> = counts.into_iter().collect();
        counts.sort_unstable_by_key(|&(row, count)| (std::cmp::Reverse(count), row));
        let (rows, counts) = counts.into_iter().unzip();
        Self { name, rows, counts }
    }
}

impl Ranked {
    /// The exact counts of a trace.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let mut counts = vec![0u64; trace.rows.len()];
        trace.accesses.iter().for_each(|&key| counts[key as usize] += 1);
        let table = |table: &super::trace::TraceTable| {
            let keys = table.keys.start as usize..table.keys.end as usize;
            let counted = trace.rows[keys.clone()].iter().copied().zip(counts[keys].iter().copied());
            RankedTable::of(table.name.clone(), counted)
        };
        Self { tables: trace.tables.iter().map(table).collect(), floor: 0 }
    }

    /// The table of this name.
    #[must_use]
    pub fn table(&self, name: &str) -> Option<&RankedTable> {
        self.tables.iter().find(|table| table.name == name)
    }

    /// The rows of all tables, the hottest first; among equals by table and row.
    #[must_use]
    pub fn hottest(&self) -> Vec<RankedRow> {
        let rows = |(table, ranked): (usize, &'_ RankedTable)| {
            let pairs: Vec<_> = ranked.rows.iter().copied().zip(ranked.counts.iter().copied()).collect();
            pairs.into_iter().map(move |(row, count)| RankedRow { table, row, count })
        };
        let mut all: Vec<RankedRow> = self.tables.iter().enumerate().flat_map(rows).collect();
        // Stable, and each table's rows are in order.
        all.sort_by_key(|row| std::cmp::Reverse(row.count));
        all
    }

    /// Writes the file, over what stands there.
    ///
    /// # Errors
    /// [`CountsError`] with what the system says.
    pub fn write(&self, path: &Path) -> Result<(), CountsError> {
        let columns = |table: &RankedTable| {
            [("rows", &table.rows), ("counts", &table.counts)].map(|(column, values)| {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (format!("{}.{column}", table.name), values.len(), bytes)
            })
        };
        let columns: Vec<(String, usize, Vec<u8>)> = self.tables.iter().flat_map(columns).collect();
        let form = |reason: String| CountsError::Form { path: path.into(), reason };
        let view = |(name, len, bytes)| match TensorView::new(Dtype::U64, vec![len], bytes) {
            Ok(view) => Ok((name, view)),
            Err(error) => Err(form(error.to_string())),
        };
        let views = columns.iter().map(|(name, len, bytes)| view((name.as_str(), *len, bytes.as_slice())));
        let views = views.collect::<Result<Vec<_>, _>>()?;
        let names = self.tables.iter().map(|table| table.name.as_str());
        let names = serde_json::Value::from_iter(names).to_string();
        let floor = self.floor.to_string();
        let about = [("format", FORMAT), ("version", VERSION), ("floor", &floor), ("tables", &names)];
        let about = about.map(|(key, value)| (key.to_owned(), value.to_owned()));
        serialize_to_file(views, Some(HashMap::from(about)), path).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => CountsError::Io { path: path.into(), source },
            other => form(other.to_string()),
        })
    }

    /// Reads a file that [`Ranked::write`] wrote, or anyone else.
    ///
    /// # Errors
    /// [`CountsError`] where it is not of the form that this module's page gives.
    pub fn read(path: &Path) -> Result<Self, CountsError> {
        let io = |source| CountsError::Io { path: path.into(), source };
        let bytes = std::fs::read(path).map_err(io)?;
        parse(&bytes).map_err(|reason| CountsError::Form { path: path.into(), reason })
    }
}

fn parse(bytes: &[u8]) -> Result<Ranked, String> {
    let (_, about) = SafeTensors::read_metadata(bytes).map_err(|e| format!("no safetensors file: {e}"))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| format!("no safetensors file: {e}"))?;
    let about = about.metadata().clone().unwrap_or_default();
    let said = |key: &str| about.get(key).map_or("", String::as_str);
    if (said("format"), said("version")) != (FORMAT, VERSION) {
        let (format, version) = (said("format"), said("version"));
        return Err(format!("expected format {FORMAT:?} {VERSION}, got {format:?} {version}"));
    }
    let floor =
        said("floor").parse().map_err(|_| format!("floor: expected a number, got {:?}", said("floor")))?;
    let names: Vec<String> =
        serde_json::from_str(said("tables")).map_err(|e| format!("tables: expected a list of names: {e}"))?;
    let table = |name: String| {
        let column = |column: &str| column_of(&tensors, &format!("{name}.{column}"));
        let (rows, counts) = (column("rows")?, column("counts")?);
        if rows.len() != counts.len() {
            return Err(format!("table {name:?}: {} rows, {} counts", rows.len(), counts.len()));
        }
        if let Some(at) = counts.windows(2).position(|two| two[0] < two[1]) {
            return Err(format!("table {name:?}: counts rise at place {}", at + 1));
        }
        Ok(RankedTable { name, rows, counts })
    };
    Ok(Ranked { tables: names.into_iter().map(table).collect::<Result<_, _>>()?, floor })
}

fn column_of(tensors: &SafeTensors<'_>, name: &str) -> Result<Vec<u64>, String> {
    let view = tensors.tensor(name).map_err(|_| format!("no tensor {name:?}"))?;
    if view.dtype() != Dtype::U64 || view.shape().len() != 1 {
        let (got, shape) = (view.dtype(), view.shape());
        return Err(format!("tensor {name:?}: expected U64 of one dimension, got {got:?} of {shape:?}"));
    }
    Ok(view.data().as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::trace::tests::{accesses, trace};
    use super::*;
    use crate::schema::preset::{self, Kind, SyntheticShape};
    use proptest::prelude::*;

    fn schema() -> Schema {
        let shape = SyntheticShape { tables: 3, rows: 1000, dense: 0, multi_hot: None };
        preset::synthetic(Kind::Dcn, 4, shape)
    }

    fn counted(wanted: &[(u32, u64)], limit: usize) -> Counts {
        let mut counts = Counts::new(&schema(), limit);
        wanted.iter().for_each(|&(table, row)| counts.add(TableId(table), row));
        counts
    }

    proptest! {
        #[test]
        fn counts_are_exact_and_ranked_while_they_fit(wanted in accesses(300)) {
            let ranked = counted(&wanted, 1000).ranked();
            prop_assert_eq!(&ranked, &Ranked::of(&trace(&wanted)));
            prop_assert_eq!(ranked.floor, 0);
            for (t, table) in ranked.tables.iter().enumerate() {
                for (&row, &count) in table.rows.iter().zip(&table.counts) {
                    let wanted = wanted.iter().filter(|a| **a == (t as u32, row)).count();
                    prop_assert_eq!(count, wanted as u64);
                }
                let ranks = table.rows.iter().zip(&table.counts);
                prop_assert!(ranks.map(|(&r, &c)| (std::cmp::Reverse(c), r)).is_sorted());
            }
            let hottest = ranked.hottest();
            prop_assert!(hottest.is_sorted_by_key(|r| (std::cmp::Reverse(r.count), r.table, r.row)));
            prop_assert_eq!(hottest.iter().map(|r| r.count).sum::<u64>(), wanted.len() as u64);
        }

        #[test]
        fn past_the_limit_counts_err_by_the_floor_at_most(wanted in accesses(300), limit in 1usize..20) {
            let mut counts = Counts::new(&schema(), limit);
            for (i, &(table, row)) in wanted.iter().enumerate() {
                counts.add(TableId(table), row);
                prop_assert!(counts.rows <= limit);
                let floor = counts.floor();
                for distinct in &wanted[..=i] {
                    let exact = wanted[..=i].iter().filter(|a| *a == distinct).count() as u64;
                    match counts.tables[distinct.0 as usize].1.get(&distinct.1) {
                        Some(&count) => prop_assert!((exact..=exact + floor).contains(&count)),
                        None => prop_assert!(exact <= floor),
                    }
                }
            }
        }

        #[test]
        fn a_file_reads_back_as_it_was_written(wanted in accesses(100), limit in 1usize..40) {
            let ranked = counted(&wanted, limit).ranked();
            let file = tempfile::NamedTempFile::new().unwrap();
            ranked.write(file.path()).unwrap();
            prop_assert_eq!(Ranked::read(file.path()).unwrap(), ranked);
        }

        #[test]
        fn a_damaged_file_is_an_error_or_another_file_and_never_a_panic(
            wanted in accesses(20), at in any::<prop::sample::Index>(), byte: u8, cut: bool,
        ) {
            let file = tempfile::NamedTempFile::new().unwrap();
            counted(&wanted, 40).ranked().write(file.path()).unwrap();
            let mut bytes = std::fs::read(file.path()).unwrap();
            let at = at.index(bytes.len());
            if cut {
                bytes.truncate(at);
                prop_assert!(parse(&bytes).is_err());
            } else {
                bytes[at] = byte;
                let _ = parse(&bytes);
            }
        }
    }

    #[test]
    fn a_file_of_something_else_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "table,row,count").unwrap();
        let error = Ranked::read(file.path()).unwrap_err().to_string();
        assert!(error.starts_with("counts: ") && error.contains("no safetensors file"), "{error}");
        let about = HashMap::from([("format".to_owned(), "weights".to_owned())]);
        serialize_to_file(Vec::<(&str, TensorView<'_>)>::new(), Some(about), file.path()).unwrap();
        let error = Ranked::read(file.path()).unwrap_err().to_string();
        assert!(error.contains("expected format \"flechette-counts\" 1, got \"weights\""), "{error}");
    }
}
