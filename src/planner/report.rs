//! What a plan says: as text to read, and as JSON to compute with.

use std::fmt::Write;

use serde_json::{Value, json};

use super::curve::{Curve, PAYING_GAIN};
use super::simulate::{Hits, Policy, SizeHits, simulate};
use super::trace::Trace;

/// Bytes that a cached row takes beside its own, at most: 20 of the index, 2 of the admission.
pub(crate) const ENTRY_BYTES: f64 = 22.0;
/// The share of its room that the server's cache keeps in use at least (its low watermark).
const IN_USE: f64 = 0.9;
/// Sizes that are planned when none are given: fractions of all distinct rows.
pub(crate) const DEFAULT_SIZES: [f64; 6] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
/// Tables that the text shows apart; the others are summed up.
const MOST_TABLES: usize = 40;

/// A simulated trace.
#[derive(Debug)]
pub(crate) struct Plan<'t> {
    trace: &'t Trace,
    /// In the order of the fractions that were asked for.
    pub sizes: Vec<SizeHits>,
    /// Flat LRU at every size.
    pub curve: Curve,
}

impl<'t> Plan<'t> {
    /// Simulates caches of these fractions, 0 to 1, of the trace's distinct rows.
    #[must_use]
    pub(crate) fn of(trace: &'t Trace, fractions: &[f64], seed: u64) -> Self {
        Self { trace, sizes: simulate(trace, fractions, seed), curve: Curve::of(trace) }
    }

    /// Hits over all accesses, 0 to 1.
    #[must_use]
    pub(crate) fn rate(&self, hits: &Hits) -> f64 {
        hits.total() as f64 / self.trace.accesses.len().max(1) as f64
    }

    /// All distinct rows of the trace.
    #[must_use]
    pub(crate) fn rows(&self) -> usize {
        self.trace.rows.len()
    }

    /// What a cache of so many of the trace's rows takes: the rows at their mean size and their index
    /// entries. Of a sampled trace, what it stands for: more by the share that was sampled.
    #[must_use]
    pub(crate) fn bytes(&self, rows: usize) -> f64 {
        rows as f64 * (self.trace.mean_row_bytes() + ENTRY_BYTES) / self.trace.rate
    }

    /// The contract of `plan --json`.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let rates = |hits: &[Hits]| -> Value {
            Policy::ALL
                .iter()
                .zip(hits)
                .map(|(p, hits)| (p.name().to_owned(), json!(self.rate(hits))))
                .collect()
        };
        let size = |size: &SizeHits| {
            json!({
                "fraction": size.fraction, "rows": size.rows, "flat": rates(&size.flat),
                "per_table": rates(&size.per_table), "optimal": self.rate(&size.optimal),
            })
        };
        json!({
            "accesses": self.trace.accesses.len(), "ids": self.rows(),
            "sizes": self.sizes.iter().map(size).collect::<Vec<_>>(),
        })
    }

    /// Everything, to be read.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let mut text = self.heading();
        text += "\nflat cache of all tables: hit rate in %\n";
        text += &self.by_size(|size| &size.flat).lines();
        text += "\nstatic cache a table, each the same share of its own rows: hit rate in %\n";
        text += &self.by_size(|size| &size.per_table).lines();
        for size in &self.sizes {
            let _ = writeln!(text, "\nby table at {} % of the rows: hit rate in %", percent(size.fraction));
            text += &self.by_table(size).lines();
        }
        text + "\n" + &self.advice()
    }

    fn heading(&self) -> String {
        let Trace { tables, accesses, samples, absent, rate, .. } = self.trace;
        let mut text = String::new();
        if *samples > 0 {
            let _ = write!(text, "{samples} samples, ");
        }
        let _ =
            writeln!(text, "{} accesses of {} rows of {} tables", accesses.len(), self.rows(), tables.len());
        if *absent > 0 {
            let _ = writeln!(text, "{absent} ids are past their table");
        }
        if *rate < 1.0 {
            let _ = writeln!(text, "a sample of {} % of the rows; bytes are of all of them", percent(*rate));
        }
        let all = self.curve.rate(usize::MAX);
        let _ = writeln!(
            text,
            "with room for every row ({}): {} %, as the first access of a row misses",
            bytes(self.bytes(self.rows())),
            percent(all)
        );
        text
    }

    fn by_size<'a>(&'a self, hits: impl Fn(&'a SizeHits) -> &'a [Hits]) -> Grid {
        let policies = Policy::ALL.iter().map(|policy| policy.name());
        let mut grid = Grid::new(["size %", "rows", "memory"].into_iter().chain(policies).chain(["optimal"]));
        for size in &self.sizes {
            let rates = hits(size).iter().chain([&size.optimal]).map(|hits| points(self.rate(hits)));
            let about = [percent(size.fraction), size.rows.to_string(), bytes(self.bytes(size.rows))];
            grid.add(about.into_iter().chain(rates));
        }
        grid
    }

    fn by_table(&self, size: &SizeHits) -> Grid {
        let mut grid =
            Grid::new(["table", "rows", "accesses", "cached apart", "flat lru", "per-table lru", "optimal"]);
        let mut order: Vec<usize> = (0..self.trace.tables.len()).collect();
        order.sort_by_key(|&t| std::cmp::Reverse(self.trace.tables[t].accesses));
        let (shown, others) = order.split_at(order.len().min(MOST_TABLES));
        let mut shown = shown.to_vec();
        shown.sort_unstable();
        let line = |name: String, tables: &[usize]| {
            let sum = |of: &dyn Fn(usize) -> u64| tables.iter().map(|&t| of(t)).sum::<u64>();
            let rows = sum(&|t| self.trace.tables[t].keys.len() as u64);
            let accesses = sum(&|t| self.trace.tables[t].accesses);
            let apart = sum(&|t| size.table_rows[t] as u64);
            let rate = |hits: &Hits| points(sum(&|t| hits.tables[t]) as f64 / accesses.max(1) as f64);
            let rates = [&size.flat[0], &size.per_table[0], &size.optimal].map(rate);
            [name].into_iter().chain([rows, accesses, apart].map(|n| n.to_string())).chain(rates)
        };
        for t in shown {
            grid.add(line(self.trace.tables[t].name.clone(), &[t]));
        }
        if !others.is_empty() {
            grid.add(line(format!("{} others", others.len()), others));
        }
        grid
    }

    /// Where more memory stops paying.
    fn advice(&self) -> String {
        let rows = self.curve.enough(PAYING_GAIN);
        let share = rows as f64 / self.rows().max(1) as f64;
        let bytes_in_all = self.bytes(rows);
        format!(
            "more memory stops paying at {rows} rows ({} % of them, {}, cache.bytes = {:.0}): from there on a flat \
             LRU cache twice as large never hits {} % of the accesses more; it hits {} % there\n",
            points(share),
            bytes(bytes_in_all),
            (bytes_in_all / IN_USE).ceil(),
            percent(PAYING_GAIN),
            points(self.curve.rate(rows)),
        )
    }
}

/// A table of text: the first column to the left, the others to the right.
struct Grid(Vec<Vec<String>>);

impl Grid {
    fn new<'a>(head: impl IntoIterator<Item = &'a str>) -> Self {
        Self(vec![head.into_iter().map(str::to_owned).collect()])
    }

    fn add(&mut self, line: impl IntoIterator<Item = String>) {
        self.0.push(line.into_iter().collect());
    }

    fn lines(&self) -> String {
        let columns = self.0[0].len();
        let width = |c: usize| self.0.iter().map(|line| line[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for line in &self.0 {
            for (c, (cell, width)) in line.iter().zip(&widths).enumerate() {
                let _ = match c {
                    0 => write!(text, "{cell:<width$}"),
                    _ => write!(text, "  {cell:>width$}"),
                };
            }
            text.push('\n');
        }
        text
    }
}

/// A share as a percentage, as short as it can be told to a thousandth of a point.
pub(crate) fn percent(share: f64) -> String {
    let text = format!("{:.3}", share * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A share as a percentage with one decimal, as the lines of a table have it.
fn points(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// Bytes, to be read.
pub(crate) fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = bytes;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{scaled:.0} B") } else { format!("{scaled:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests;
