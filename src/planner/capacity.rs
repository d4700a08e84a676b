//! How many replicas a rate of scores needs, and what each of them reads, for each size of the cache.
//!
//! A replica is a server with a cache and all tables. `R` scores/s are wanted, a score looks up `a` rows, and
//! the share `m` of the lookups misses the cache. Then
//!
//! ```text
//! missed rows/s = R a m
//! disk reads/s  = R a (sum over tables t of m_t pages(b_t))   m_t: misses in t, as a share of all lookups
//! pages(b)      = 1 + (b - gcd(b, 4096)) / 4096               b: bytes of a row
//! replicas      = max(ceil(R / r), ceil(disk reads/s / d))    r scores/s, d disk reads/s of one replica
//! ```
//!
//! `pages(b)` is the mean number of 4 KiB pages that a row touches: rows lie one after the other from the
//! beginning of a page, so a row begins at each multiple of gcd(b, 4096) in a page equally often. If tables
//! are in memory, a miss reads no disk.
//!
//! It is assumed that each replica sees the mix of requests of the trace, and that its disk serves every
//! missed row. Fewer reads are needed if pages of tables stay in memory, or if requests of a batch miss the
//! same row. If the tables are `s` times as large as those of the trace's model, a cache of `s` times the
//! bytes is assumed to have the same hit rate.

use serde_json::{Value, json};

use super::grid::{Grid, count, percent, points};
use super::report::Plan;
use super::simulate::{Hits, SimulatedPolicy};
use super::trace::Trace;
use crate::mem::bytes;

/// Bytes of one read of a mapped table.
const PAGE_BYTES: usize = 4096;
/// The policy whose hit rates are used: that of `serve`.
const POLICY: SimulatedPolicy = SimulatedPolicy::ServerDefault;

/// What is wanted, and what one replica can do.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    pub scores_per_s: f64,
    /// Rows that a score looks up.
    pub rows_per_score: f64,
    pub replica_scores_per_s: f64,
    /// Reads of 4 KiB that the disk of a replica does; `None` if it has the tables in memory.
    pub replica_reads_per_s: Option<f64>,
    pub table_bytes: f64,
    /// Size of these tables relative to those of the trace's model.
    pub scale: f64,
}

/// What a lookup costs on average.
#[derive(Clone, Copy, Debug)]
struct Misses {
    /// The share of lookups that miss.
    share: f64,
    /// Pages of the missed rows.
    pages: f64,
}

/// What all replicas need with one size of the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Need {
    missed_rows_per_s: f64,
    disk_reads_per_s: f64,
    replicas_by_compute: u64,
    /// 0 if tables are in memory.
    replicas_by_disk: u64,
}

/// The mean number of pages that a row touches.
fn pages(row_bytes: usize) -> f64 {
    let (mut gcd, mut rest) = (PAGE_BYTES, row_bytes);
    while rest > 0 {
        (gcd, rest) = (rest, gcd % rest);
    }
    1.0 + (row_bytes - gcd.min(row_bytes)) as f64 / PAGE_BYTES as f64
}

impl Misses {
    fn of(trace: &Trace, hits: &Hits) -> Self {
        let lookups = trace.accesses.len().max(1) as f64;
        let tables = trace.tables.iter().zip(&hits.tables);
        let missed = tables.map(|(table, hits)| ((table.accesses - hits) as f64 / lookups, table.row_bytes));
        let add = |sum: Self, (share, row_bytes): (f64, usize)| Self {
            share: sum.share + share,
            pages: sum.pages + share * pages(row_bytes),
        };
        missed.fold(Self { share: 0.0, pages: 0.0 }, add)
    }
}

impl Need {
    fn replicas(&self) -> u64 {
        self.replicas_by_compute.max(self.replicas_by_disk).max(1)
    }

    /// The part of one replica.
    fn each(&self, of_all: f64) -> f64 {
        of_all / self.replicas() as f64
    }
}

impl Demand {
    fn need(&self, misses: Misses) -> Need {
        let lookups_per_s = self.scores_per_s * self.rows_per_score;
        let disk_reads_per_s = self.replica_reads_per_s.map_or(0.0, |_| lookups_per_s * misses.pages);
        let by_disk = self.replica_reads_per_s.map_or(0.0, |reads| disk_reads_per_s / reads);
        Need {
            missed_rows_per_s: lookups_per_s * misses.share,
            disk_reads_per_s,
            replicas_by_compute: (self.scores_per_s / self.replica_scores_per_s).ceil() as u64,
            replicas_by_disk: by_disk.ceil() as u64,
        }
    }

    /// By size of the plan: the cache of a replica, its hit rate, and what is needed.
    fn sizes(&self, plan: &Plan<'_>) -> Vec<AtSize> {
        let size = |size: &super::simulate::SizeHits| {
            let misses = Misses::of(plan.trace, size.flat.of(POLICY));
            let cache_bytes = (plan.bytes(size.rows) * self.scale).ceil();
            AtSize { fraction: size.fraction, cache_bytes, misses, need: self.need(misses) }
        };
        plan.sizes.iter().map(size).collect()
    }

    /// Bytes of the cache, and of the tables if they are in memory.
    fn replica_memory(&self, cache_bytes: f64) -> f64 {
        cache_bytes + if self.replica_reads_per_s.is_some() { 0.0 } else { self.table_bytes }
    }

    /// The object `capacity` of `plan --json`.
    pub(super) fn json(&self, plan: &Plan<'_>) -> Value {
        let size = |AtSize { fraction, cache_bytes, misses, need }: &AtSize| {
            let memory = self.replica_memory(*cache_bytes);
            let page_bytes = PAGE_BYTES as f64;
            json!({
                "fraction": fraction, "cache_bytes": *cache_bytes as u64, "hit_rate": 1.0 - misses.share,
                "missed_rows_per_s": need.missed_rows_per_s, "disk_reads_per_s": need.disk_reads_per_s,
                "disk_bytes_per_s": need.disk_reads_per_s * page_bytes,
                "replicas_by_compute": need.replicas_by_compute, "replicas_by_disk": need.replicas_by_disk,
                "replicas": need.replicas(), "memory_bytes": memory * need.replicas() as f64,
                "replica": {
                    "missed_rows_per_s": need.each(need.missed_rows_per_s),
                    "disk_reads_per_s": need.each(need.disk_reads_per_s),
                    "disk_bytes_per_s": need.each(need.disk_reads_per_s) * page_bytes,
                    "memory_bytes": memory,
                },
            })
        };
        json!({
            "scores_per_s": self.scores_per_s, "rows_per_score": self.rows_per_score,
            "replica_scores_per_s": self.replica_scores_per_s,
            "replica_reads_per_s": self.replica_reads_per_s, "table_bytes": self.table_bytes,
            "sizes": self.sizes(plan).iter().map(size).collect::<Vec<_>>(),
        })
    }

    /// The table of the report.
    pub(super) fn text(&self, plan: &Plan<'_>) -> String {
        let on_disk = self.replica_reads_per_s.is_some();
        let place = if on_disk { "on the disk" } else { "in the memory" };
        let mut text = format!(
            "{} scores/s of {:.1} rows each; {} of tables {place} of each replica\n\
             missed: rows/s of all replicas; each: rows/s of one",
            count(self.scores_per_s),
            self.rows_per_score,
            bytes(self.table_bytes),
        );
        if on_disk {
            text += ", which its disk serves by these reads/s and B/s";
        }
        text += "\n";
        let mut head = vec!["size %", "cache", "hit %", "missed", "each"];
        head.extend(if on_disk { &["reads", "B/s", "compute", "disk"][..] } else { &[] });
        let mut grid = Grid::new(head.into_iter().chain(["replicas", "memory"]));
        for AtSize { fraction, cache_bytes, misses, need } in self.sizes(plan) {
            let mut line = vec![
                percent(fraction),
                bytes(cache_bytes),
                points(1.0 - misses.share),
                count(need.missed_rows_per_s),
            ];
            line.push(count(need.each(need.missed_rows_per_s)));
            if on_disk {
                let reads = need.each(need.disk_reads_per_s);
                line.extend([count(reads), bytes(reads * PAGE_BYTES as f64)]);
                line.extend([need.replicas_by_compute, need.replicas_by_disk].map(|n| n.to_string()));
            }
            let memory = self.replica_memory(cache_bytes) * need.replicas() as f64;
            grid.add(line.into_iter().chain([need.replicas().to_string(), bytes(memory)]));
        }
        text += &grid.lines();
        text += if on_disk {
            "replicas: the larger of what compute and disk need; memory: of all caches"
        } else {
            "memory: of all caches and tables"
        };
        text += &format!("; hit %: policy {}\n", POLICY.name());
        text
    }
}

/// One size of the cache.
struct AtSize {
    fraction: f64,
    cache_bytes: f64,
    misses: Misses,
    need: Need,
}

#[cfg(test)]
mod tests;
