//! The report of a plan, as text and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::capacity::Demand;
use super::curve::{Curve, PAYING_GAIN};
use super::grid::{Grid, percent, points};
use super::simulate::{CacheHits, Hits, SimulatedPolicy, SizeHits, simulate};
use super::trace::Trace;
use crate::mem::bytes;

/// Most bytes that a cached row takes in addition to its own: 20 in the index, 2 for admission.
const ENTRY_BYTES: f64 = 22.0;
/// The server's cache evicts until this share of its capacity is in use (its default low watermark).
const IN_USE: f64 = 0.9;
/// Default of `--sizes`: fractions of all distinct rows.
pub(crate) const DEFAULT_SIZES: [f64; 6] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
/// Most tables that get their own line in the text. The other tables share one line.
const MOST_TABLES: usize = 40;

/// What is reported of each table: the name, and the hits at a size.
type OfTables = (&'static str, fn(&SizeHits) -> &Hits);
const OF_TABLES: [OfTables; 4] = [
    ("flat lru", |size| size.flat.of(SimulatedPolicy::Lru)),
    ("flat server", |size| size.flat.of(SimulatedPolicy::ServerDefault)),
    ("flat optimal", |size| &size.flat.optimal),
    ("per-table lru", |size| size.per_table.of(SimulatedPolicy::Lru)),
];

/// A simulated trace.
#[derive(Debug)]
pub(crate) struct Plan<'t> {
    pub trace: &'t Trace,
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

    /// The `cache.bytes` of a server whose cache always has room for `rows` of the trace's rows, at their
    /// mean size. For a sampled trace this is scaled up to all rows.
    #[must_use]
    pub(crate) fn bytes(&self, rows: usize) -> f64 {
        let used = rows as f64 * (self.trace.mean_row_bytes() + ENTRY_BYTES) / self.trace.rate;
        (used / IN_USE).ceil()
    }

    /// The object that `plan --json` prints. The key `optimal` of a size is the rate of the optimal flat
    /// cache.
    #[must_use]
    pub(crate) fn json(&self, demand: Option<&Demand>) -> Value {
        let rates = |hits: &CacheHits| -> serde_json::Map<String, Value> {
            SimulatedPolicy::ALL
                .iter()
                .map(|&p| (p.name().to_owned(), json!(self.rate(hits.of(p)))))
                .collect()
        };
        let size = |size: &SizeHits| {
            let mut per_table = rates(&size.per_table);
            per_table.insert("optimal".into(), json!(self.rate(&size.per_table.optimal)));
            json!({
                "fraction": size.fraction, "rows": size.rows, "bytes": self.bytes(size.rows) as u64,
                "flat": rates(&size.flat), "per_table": per_table, "optimal": self.rate(&size.flat.optimal),
            })
        };
        let enough = self.curve.enough(PAYING_GAIN);
        let mut json = json!({
            "accesses": self.trace.accesses.len(), "ids": self.rows(),
            "enough": {
                "rows": enough, "bytes": self.bytes(enough) as u64, "hit_rate": self.curve.rate(enough),
            },
            "sizes": self.sizes.iter().map(size).collect::<Vec<_>>(),
            "tables": (0..self.trace.tables.len()).map(|t| self.table_json(t)).collect::<Vec<_>>(),
        });
        if let Some(demand) = demand {
            json["capacity"] = demand.json(self);
        }
        json
    }

    /// A table of the trace, with its hit rates at each size.
    fn table_json(&self, t: usize) -> Value {
        let table = &self.trace.tables[t];
        let size = |size: &SizeHits| {
            let rate = |hits: &Hits| json!(hits.tables[t] as f64 / table.accesses.max(1) as f64);
            let mut json: serde_json::Map<String, Value> = OF_TABLES
                .iter()
                .map(|(name, hits)| (name.replace([' ', '-'], "_"), rate(hits(size))))
                .collect();
            json.insert("own_cache".to_owned(), json!(size.table_rows[t]));
            json
        };
        json!({
            "name": table.name, "row_bytes": table.row_bytes, "rows": table.keys.len(),
            "accesses": table.accesses, "sizes": self.sizes.iter().map(size).collect::<Vec<_>>(),
        })
    }

    /// The report as text: the flat cache, and what `demand` needs.
    #[must_use]
    pub(crate) fn text(&self, demand: Option<&Demand>) -> String {
        let mut text = self.heading();
        text +=
            "\nflat cache of all tables: hit rate in % (server: the default policy of `flechette serve`)\n";
        text += &self.by_size(|size| &size.flat).lines();
        text = text + "\n" + &self.advice();
        if let Some(demand) = demand {
            text = text + "\n" + &demand.text(self);
        }
        text
    }

    /// The hit rates of per-table caches, and those of each table, as text.
    #[must_use]
    pub(crate) fn tables_text(&self) -> String {
        let mut text =
            "\na cache of its own for each table, with the same share of its rows: hit rate in %\n"
                .to_owned();
        text += &self.by_size(|size| &size.per_table).lines();
        for size in &self.sizes {
            let _ = writeln!(text, "\nby table at {} % of the rows: hit rate in %", percent(size.fraction));
            text += &self.by_table(size).lines();
        }
        text
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
        let policies = SimulatedPolicy::ALL.iter().map(|policy| policy.name());
        let mut grid =
            Grid::new(["size %", "rows", "cache.bytes"].into_iter().chain(policies).chain(["optimal"]));
        for size in &self.sizes {
            let CacheHits { policies, optimal } = hits(size);
            let rates = policies.iter().chain([optimal]).map(|hits| points(self.rate(hits)));
            let about = [percent(size.fraction), size.rows.to_string(), bytes(self.bytes(size.rows))];
            grid.add(about.into_iter().chain(rates));
        }
        grid
    }

    fn by_table(&self, size: &SizeHits) -> Grid {
        let head = ["table", "rows", "accesses", "own cache"];
        let mut grid = Grid::new(head.into_iter().chain(OF_TABLES.map(|(name, _)| name)));
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
            let rates = OF_TABLES.map(|(_, hits)| rate(hits(size)));
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
        let cache = self.bytes(rows);
        format!(
            "more memory stops paying at {rows} rows ({} % of all), cache.bytes = {cache} ({}):\n\
             it hits {} % with lru; doubling it or any larger cache gains less than {} % of the accesses\n",
            points(share),
            bytes(cache),
            points(self.curve.rate(rows)),
            percent(PAYING_GAIN),
        )
    }
}

#[cfg(test)]
mod tests;
