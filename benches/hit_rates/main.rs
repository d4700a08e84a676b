//! Hit rates (FLECHE Exp #4): the real flat cache, simulated policies, a static cache per table and the
//! optimal cache, on real and calibrated traces, at 5, 10 and 20 % of the distinct rows.
//!
//! Nothing is timed, so the figures are the same on every machine (up to rounding of logarithms). The
//! comparison:
//!
//! - A size is a share of the distinct rows of the trace. All caches start empty. `all` counts every access,
//!   including the first access to a row. `warm` counts only the second half of the accesses, as the paper
//!   counts only after a warm-up.
//! - `per-table lru` gives table t floor(share x its distinct rows), so a small table may get none.
//!   `per-table lru, 1+` gives every table at least one row, so it has a few rows more than the others.
//!   Goals compare `per-table lru` with the flat `lru`.
//! - `FlatCache` is `cache::FlatCache` with its default options. It gets the fewest bytes that have as many
//!   slots and index entries as the simulated caches have rows. Its watermarks make it hold 5 to 10 % fewer
//!   rows than they do. Evictions run between batches and not on a thread, so that runs are reproducible. A
//!   batch is one sample, which comes closest to the single accesses of the simulated caches. Another column
//!   has batches of 256 samples; if several samples of a batch miss the same row, it is fetched once and
//!   counts as one miss.
//!
//! `--only TEXT`, `--samples N` of calibrated traces (100,000), `--admission P` or `--misses N` (default: the
//! cache's default policy), `--json`. Real traces are read from `../shared/data` or `$FLECHETTE_DATA`.

mod calibrated;
#[path = "../harness/mod.rs"]
mod harness;
mod real_cache;

use std::path::PathBuf;

use flechette::cache::{AdmissionOption, CacheOptions};
use flechette::dataset::{self, Format, ReadOptions};
use flechette::planner::simulate::{Future, SimulatedPolicy, share};
use flechette::planner::trace::{Trace, TraceBuilder};
use flechette::schema::preset::{self, ArchKind};
use flechette::types::{Batch, RawBatch};
use harness::Options;
use rayon::prelude::*;

const POLICIES: usize = SimulatedPolicy::ALL.len();
const SIZES: [f64; 3] = [0.05, 0.1, 0.2];
/// Percentage points by which the real cache may be below the best policy.
const BEHIND: f64 = 3.0;
/// Rows of the hashed tables: enough that few ids share a row.
const HASHED_ROWS: u64 = 50_000_000;

/// A trace with one access per sample and table.
pub struct Workload {
    /// Its name in the output.
    pub name: String,
    /// The accesses.
    pub trace: Trace,
    /// Percentage points by which flat LRU should exceed per-table LRU; `None`: no goal.
    pub ahead: Option<f64>,
}

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    let samples = options.number("--samples", 100_000);
    let admission = match (options.value("--admission"), options.number("--misses", 0)) {
        (Some(p), _) => AdmissionOption::Probability { p: p.parse()?, seed: 0 },
        (None, 0) => CacheOptions::default().admission,
        (None, misses) => AdmissionOption::Frequency { misses: misses as u32 },
    };
    println!("# Hit rates in %, {}\n", harness::place());
    let (mut verdicts, mut rows) = (Vec::new(), Vec::new());
    for workload in real().into_iter().chain(calibrated::workloads(samples)?) {
        if !options.wants(&workload.0) {
            continue;
        }
        let workload = (workload.1)()?;
        let measured = measure(&workload, admission)?;
        print(&workload, &measured);
        for size in &measured {
            verdicts.extend(size.verdicts(&workload));
            rows.push(size.json(&workload));
        }
    }
    println!("## Goals\n\n| trace | size | goal | points | reached |\n|---|---|---|---|---|");
    verdicts.iter().for_each(|verdict| println!("{verdict}"));
    if options.json {
        println!("{}", serde_json::json!({"bench": "hit_rates", "place": harness::place(), "rows": rows}));
    }
    Ok(())
}

/// A workload's name, and the function that draws or reads it.
pub type Named = (String, Box<dyn Fn() -> anyhow::Result<Workload>>);

/// The folder of the real data sets.
pub fn data_folder() -> PathBuf {
    std::env::var_os("FLECHETTE_DATA").map_or_else(|| "../shared/data".into(), PathBuf::from)
}

/// Traces of the real click logs that are available.
fn real() -> Vec<Named> {
    let (criteo, avazu) = (Format::CriteoTsv, Format::AvazuCsv);
    let files = [
        ("Criteo Kaggle, first 10k", "criteo_kaggle_head10k.tsv.zst", criteo),
        ("Criteo Kaggle, sampled", "criteo_kaggle_train.tsv.zst", criteo),
        ("Criteo 1TB, first 10k", "criteo_terabyte_day0_head10k.tsv.zst", criteo),
        ("Avazu, first 10k", "avazu_head10k.csv.zst", avazu),
        ("Avazu, sampled", "avazu_train.csv.zst", avazu),
    ];
    let there = files.into_iter().filter(|(_, file, _)| {
        let found = data_folder().join(file).is_file();
        if !found {
            eprintln!("SKIPPED: no {} (set FLECHETTE_DATA)", data_folder().join(file).display());
        }
        found
    });
    let named = |(name, file, format): (&str, &'static str, Format)| -> Named {
        let owned = name.to_owned();
        (name.to_owned(), Box::new(move || read(&owned, file, format)))
    };
    there.map(named).collect()
}

fn read(name: &str, file: &str, format: Format) -> anyhow::Result<Workload> {
    let (schema, ahead) = match format {
        Format::AvazuCsv => (preset::avazu(ArchKind::Dlrm, 16, HASHED_ROWS), 2.0),
        _ => (preset::criteo(ArchKind::Dlrm, 16, HASHED_ROWS), 11.0),
    };
    let mut reader = dataset::open(format, &[data_folder().join(file)], &schema, ReadOptions::default())?;
    let (mut raw, mut batch) = (RawBatch::default(), Batch::default());
    let mut trace = TraceBuilder::new(&schema);
    while reader.read(4096, &mut raw)? > 0 {
        schema.encode(&raw, &mut batch)?;
        trace.append(&batch)?;
    }
    Ok(Workload { name: name.into(), trace: trace.finish(1.0), ahead: Some(ahead) })
}

/// Hit rates, from 0 to 1.
#[derive(Clone, Copy, Default)]
pub struct Rates {
    /// Over all accesses.
    pub all: f64,
    /// Over the second half of the accesses.
    pub warm: f64,
}

/// Counts the hits of both halves of a trace.
pub struct Tally {
    accesses: usize,
    seen: usize,
    hits: [u64; 2],
}

impl Tally {
    /// A tally for this trace, without accesses yet.
    pub fn of(trace: &Trace) -> Self {
        Self { accesses: trace.accesses.len(), seen: 0, hits: [0; 2] }
    }

    /// Adds the next accesses; `hits` of them were hits.
    pub fn add(&mut self, accesses: usize, hits: u64) {
        self.hits[usize::from(self.seen >= self.accesses / 2)] += hits;
        self.seen += accesses;
    }

    /// The hit rates so far.
    pub fn rates(&self) -> Rates {
        let half = (self.accesses - self.accesses / 2) as f64;
        let [cold, warm] = self.hits.map(|hits| hits as f64);
        Rates { all: (cold + warm) / self.accesses as f64, warm: warm / half }
    }
}

/// The results of all caches with one size on one trace.
struct Size {
    share: f64,
    rows: usize,
    flat: Vec<Rates>,
    per_table: Rates,
    per_table_one: Rates,
    optimal: Rates,
    real: real_cache::Run,
    real_batched: real_cache::Run,
}

#[derive(Clone, Copy)]
enum Job {
    Flat(SimulatedPolicy),
    /// With at least this many rows per table.
    PerTable(usize),
    Optimal,
    Real(usize),
}

#[derive(Clone, Copy)]
enum Got {
    Simulated(Rates),
    Real(real_cache::Run),
}

fn measure(workload: &Workload, admission: AdmissionOption) -> anyhow::Result<Vec<Size>> {
    let trace = &workload.trace;
    let future = Future::of(&trace.accesses, trace.keys());
    let others = [Job::PerTable(0), Job::PerTable(1), Job::Optimal, Job::Real(1), Job::Real(256)];
    let jobs: Vec<Job> = SimulatedPolicy::ALL.into_iter().map(Job::Flat).chain(others).collect();
    let all: Vec<(f64, Job)> = SIZES.iter().flat_map(|&s| jobs.iter().map(move |&job| (s, job))).collect();
    let run = |&(fraction, job): &(f64, Job)| -> anyhow::Result<Got> {
        let rows = share(fraction, trace.keys());
        Ok(match job {
            Job::Flat(policy) => Got::Simulated(flat(trace, policy, rows)),
            Job::PerTable(least) => Got::Simulated(per_table(trace, fraction, least)),
            Job::Optimal => {
                let mut tally = Tally::of(trace);
                future.run(&trace.accesses, trace.keys(), rows, |_, hit| tally.add(1, hit.into()));
                Got::Simulated(tally.rates())
            }
            Job::Real(samples) => Got::Real(real_cache::run(trace, rows, samples, admission)?),
        })
    };
    let got = all.par_iter().map(run).collect::<anyhow::Result<Vec<Got>>>()?;
    let simulated = |got: &Got| match got {
        Got::Simulated(rates) => *rates,
        Got::Real(run) => run.rates,
    };
    let real = |got: &Got| match got {
        Got::Simulated(rates) => real_cache::Run { rates: *rates, ..Default::default() },
        Got::Real(run) => *run,
    };
    let size = |(&fraction, got): (&f64, &[Got])| Size {
        share: fraction,
        rows: share(fraction, trace.keys()),
        flat: got[..POLICIES].iter().map(simulated).collect(),
        per_table: simulated(&got[POLICIES]),
        per_table_one: simulated(&got[POLICIES + 1]),
        optimal: simulated(&got[POLICIES + 2]),
        real: real(&got[POLICIES + 3]),
        real_batched: real(&got[POLICIES + 4]),
    };
    Ok(SIZES.iter().zip(got.chunks(jobs.len())).map(size).collect())
}

fn flat(trace: &Trace, policy: SimulatedPolicy, rows: usize) -> Rates {
    let mut cache = policy.cache(rows, trace.keys(), 1);
    let mut tally = Tally::of(trace);
    trace.accesses.iter().for_each(|&key| tally.add(1, cache.access(key).into()));
    tally.rates()
}

fn per_table(trace: &Trace, fraction: f64, least: usize) -> Rates {
    let cache = |table: &flechette::planner::trace::TraceTable| {
        let keys = table.keys.len() as u32;
        SimulatedPolicy::Lru.cache(share(fraction, keys).max(least), keys, 1)
    };
    let mut caches: Vec<_> = trace.tables.iter().map(cache).collect();
    let tables = trace.table_of_keys();
    let mut tally = Tally::of(trace);
    for &key in &trace.accesses {
        let table = tables[key as usize] as usize;
        tally.add(1, caches[table].access(key - trace.tables[table].keys.start).into());
    }
    tally.rates()
}

impl Size {
    /// The best of LRU, LFU, ARC, S3-FIFO and W-TinyLFU.
    fn best(&self) -> (SimulatedPolicy, Rates) {
        let policies = SimulatedPolicy::ALL.into_iter().zip(self.flat.iter().copied());
        let able = policies.filter(|(policy, _)| {
            !matches!(policy, SimulatedPolicy::Random | SimulatedPolicy::ServerDefault)
        });
        able.max_by(|a, b| a.1.all.total_cmp(&b.1.all)).unwrap_or((SimulatedPolicy::Lru, Rates::default()))
    }

    fn verdicts(&self, workload: &Workload) -> Vec<String> {
        let line = |goal: String, got: f64, reached: bool| {
            let reached = if reached { "yes" } else { "**no**" };
            format!("| {} | {} % | {goal} | {got:.1} | {reached} |", workload.name, self.share * 100.0)
        };
        let points = |a: f64, b: f64| 100.0 * (a - b);
        let behind = points(self.best().1.all, self.real.rates.all);
        let goal = format!("FlatCache at most {BEHIND} points behind the best");
        let mut lines = vec![line(goal, behind, behind <= BEHIND)];
        if let Some(goal) = workload.ahead {
            let ahead = points(self.flat[0].all, self.per_table.all);
            lines.push(line(format!("flat LRU {goal} points over per-table LRU"), ahead, ahead >= goal));
            let ahead = points(self.real.rates.all, self.per_table.all);
            lines.push(line(format!("FlatCache {goal} points over per-table LRU"), ahead, ahead >= goal));
        }
        lines
    }

    fn json(&self, workload: &Workload) -> serde_json::Value {
        let rates = |r: Rates| serde_json::json!({"all": r.all, "warm": r.warm});
        let flat: serde_json::Map<String, serde_json::Value> = SimulatedPolicy::ALL
            .iter()
            .zip(&self.flat)
            .map(|(p, r)| (p.name().to_owned(), rates(*r)))
            .collect();
        serde_json::json!({
            "trace": workload.name, "accesses": workload.trace.accesses.len(),
            "ids": workload.trace.rows.len(), "fraction": self.share, "rows": self.rows, "flat": flat,
            "per_table": rates(self.per_table), "per_table_one": rates(self.per_table_one),
            "optimal": rates(self.optimal), "flat_cache": rates(self.real.rates),
            "flat_cache_256": rates(self.real_batched.rates), "flat_cache_mean_rows": self.real.mean_rows,
        })
    }
}

fn print(workload: &Workload, sizes: &[Size]) {
    let Trace { accesses, rows, tables, .. } = &workload.trace;
    println!(
        "## {}: {} accesses of {} rows of {} tables\n",
        workload.name,
        accesses.len(),
        rows.len(),
        tables.len()
    );
    let policies: Vec<&str> = SimulatedPolicy::ALL.iter().map(|policy| policy.name()).collect();
    println!(
        "| size | counted | {} | FlatCache | rows held | batches of 256 | per-table lru | per-table lru, 1+ \
         | optimal | best - FlatCache | optimal - FlatCache | flat lru - per-table |",
        policies.join(" | ")
    );
    println!("|{}", "---|".repeat(policies.len() + 11));
    for size in sizes {
        for (counted, of) in [("all", (|r: Rates| r.all) as fn(Rates) -> f64), ("warm", |r: Rates| r.warm)] {
            let p = |rates: Rates| format!("{:.1}", 100.0 * of(rates));
            let d = |a: Rates, b: Rates| format!("{:.1}", 100.0 * (of(a) - of(b)));
            let flat: Vec<String> = size.flat.iter().map(|rates| p(*rates)).collect();
            let real = size.real.rates;
            println!(
                "| {} %: {} | {counted} | {} | {} | {:.0} | {} | {} | {} | {} | {} ({}) | {} | {} |",
                size.share * 100.0,
                size.rows,
                flat.join(" | "),
                p(real),
                size.real.mean_rows,
                p(size.real_batched.rates),
                p(size.per_table),
                p(size.per_table_one),
                p(size.optimal),
                d(size.best().1, real),
                size.best().0.name(),
                d(size.optimal, real),
                d(size.flat[0], size.per_table),
            );
        }
    }
    println!();
}
