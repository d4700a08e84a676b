//! The report of a plan, as text and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::curve::{Curve, PAYING_GAIN};
use super::simulate::{CacheHits, Hits, Policy, SizeHits, simulate};
use super::trace::Trace;

/// Most bytes that a cached row takes in addition to its own: 20 in the index, 2 for admission.
pub(crate) const ENTRY_BYTES: f64 = 22.0;
/// The server's cache evicts until this share of its capacity is in use (its default low watermark).
const IN_USE: f64 = 0.9;
/// Default of `--sizes`: fractions of all distinct rows.
pub(crate) const DEFAULT_SIZES: [f64; 6] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
/// Most tables that get their own line in the text. The other tables share one line.
const MOST_TABLES: usize = 40;

/// A simulated trace.
#[derive(Debug)]
pub(crate) struct Plan<'t> {
    trace: &'t Trace,
    /// Hits by cache size, in the order of the given fractions.
    pub sizes: Vec<SizeHits>,
    /// Hit rate of the flat LRU cache at every size.
    pub curve: Curve,
}

impl<'t> Plan<'t> {
    /// Simulates caches of these fractions, 0 to 1, of the trace's distinct rows.
    #[must_use]
    pub(crate) fn of(trace: &'t Trace, fractions: &[f64], seed: u64) -> Self {
        Self { trace, sizes: simulate(trace, fractions, seed), curve: Curve::of(trace) }
    }

    /// The share of all accesses that are hits.
    #[must_use]
    pub(crate) fn rate(&self, hits: &Hits) -> f64 {
        hits.total() as f64 / self.trace.accesses.len().max(1) as f64
    }

    /// Distinct rows of the trace.
    #[must_use]
    pub(crate) fn rows(&self) -> usize {
        self.trace.rows.len()
    }

    /// Bytes of a cache for `rows` of the trace's rows, at their mean size, with index entries. For a sampled
    /// trace this is scaled up to all rows.
    #[must_use]
    pub(crate) fn bytes(&self, rows: usize) -> f64 {
        rows as f64 * (self.trace.mean_row_bytes() + ENTRY_BYTES) / self.trace.rate
    }

    /// The object that `plan --json` prints. The key `optimal` of a size is the rate of the optimal flat
    /// cache.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let rates = |hits: &CacheHits| -> serde_json::Map<String, Value> {
            Policy::ALL.iter().map(|&p| (p.name().to_owned(), json!(self.rate(hits.of(p))))).collect()
        };
        let size = |size: &SizeHits| {
            let mut per_table = rates(&size.per_table);
            per_table.insert("optimal".into(), json!(self.rate(&size.per_table.optimal)));
            json!({
                "fraction": size.fraction, "rows": size.rows, "flat": rates(&size.flat),
                "per_table": per_table, "optimal": self.rate(&size.flat.optimal),
            })
        };
        json!({
            "accesses": self.trace.accesses.len(), "ids": self.rows(),
            "sizes": self.sizes.iter().map(size).collect::<Vec<_>>(),
        })
    }

    /// The report as text.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let mut text = self.heading();
        text +=
            "\nflat cache of all tables: hit rate in % (server: the default policy of `flechette serve`)\n";
        text += &self.by_size(|size| &size.flat).lines();
        text += "\none static cache for each table, each with the same share of its rows: hit rate in %\n";
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
            let _ = writeln!(text, "{absent} ids are past the end of their table");
        }
        if *rate < 1.0 {
            let _ = writeln!(
                text,
                "a sample of {} % of the rows; memory is scaled up to all rows",
                percent(*rate)
            );
        }
        let all = self.curve.rate(usize::MAX);
        let _ = writeln!(
            text,
            "with room for every row ({}): {} %, since the first access of a row misses",
            bytes(self.bytes(self.rows())),
            percent(all)
        );
        text
    }

    fn by_size<'a>(&'a self, hits: impl Fn(&'a SizeHits) -> &'a CacheHits) -> Grid {
        let policies = Policy::ALL.iter().map(|policy| policy.name());
        let mut grid = Grid::new(["size %", "rows", "memory"].into_iter().chain(policies).chain(["optimal"]));
        for size in &self.sizes {
            let CacheHits { policies, optimal } = hits(size);
            let rates = policies.iter().chain([optimal]).map(|hits| points(self.rate(hits)));
            let about = [percent(size.fraction), size.rows.to_string(), bytes(self.bytes(size.rows))];
            grid.add(about.into_iter().chain(rates));
        }
        grid
    }

    fn by_table(&self, size: &SizeHits) -> Grid {
        let hits = [
            ("flat lru", size.flat.of(Policy::Lru)),
            ("flat server", size.flat.of(Policy::ServerDefault)),
            ("flat optimal", &size.flat.optimal),
            ("per-table lru", size.per_table.of(Policy::Lru)),
        ];
        let head = ["table", "rows", "accesses", "own cache"];
        let mut grid = Grid::new(head.into_iter().chain(hits.iter().map(|(name, _)| *name)));
        let mut order: Vec<usize> = (0..self.trace.tables.len()).collect();
        order.sort_by_key(|&t| std::cmp::Reverse(self.trace.tables[t].accesses));
        let (shown, others) = order.split_at(order.len().min(MOST_TABLES));
        let mut shown = shown.to_vec();
        shown.sort_unstable();
        let line = |name: String, tables: &[usize]| {
            let sum = |of: &dyn Fn(usize) -> u64| tables.iter().map(|&t| of(t)).sum::<u64>();
            let rows = sum(&|t| self.trace.tables[t].keys.len() as u64);
            let accesses = sum(&|t| self.trace.tables[t].accesses);
            let own_cache = sum(&|t| size.table_rows[t] as u64);
            let rate = |hits: &Hits| points(sum(&|t| hits.tables[t]) as f64 / accesses.max(1) as f64);
            let rates = hits.map(|(_, hits)| rate(hits));
            [name].into_iter().chain([rows, accesses, own_cache].map(|n| n.to_string())).chain(rates)
        };
        for t in shown {
            grid.add(line(self.trace.tables[t].name.clone(), &[t]));
        }
        if !others.is_empty() {
            grid.add(line(format!("{} others", others.len()), others));
        }
        grid
    }

    /// The size from which more memory gains little.
    fn advice(&self) -> String {
        let rows = self.curve.enough(PAYING_GAIN);
        let share = rows as f64 / self.rows().max(1) as f64;
        let bytes_in_all = self.bytes(rows);
        format!(
            "more memory stops paying at {rows} rows ({} % of all, {}, cache.bytes = {:.0}): from there \
             on, doubling a flat LRU cache gains less than {} % of the accesses; at this size it hits {} %\n",
            points(share),
            bytes(bytes_in_all),
            (bytes_in_all / IN_USE).ceil(),
            percent(PAYING_GAIN),
            points(self.curve.rate(rows)),
        )
    }
}

/// A table of text. The first column is left-aligned, the others are right-aligned.
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

/// A share as a percentage with up to three decimals.
pub(crate) fn percent(share: f64) -> String {
    let text = format!("{:.3}", share * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A share as a percentage with one decimal.
fn points(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// Bytes in a binary unit.
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
