//! The time of a training step on the host, depending on where its rows are. The working file is on disk
//! (ScratchPipe, figures 12 and 13; flags give the dimensions and lookups of figure 15, the look-ahead
//! windows of cDLRM's figure 3, and the cache ratios of the frequency-aware cache's figure 9).
//!
//! - **no cache**: every step reads its rows from the file and writes them back in place;
//! - **static cache**: the most frequent rows stay in the scratchpad (they are loaded at the start, and the
//!   least frequent rows are evicted first); each step reads its other rows from their places in the file and
//!   writes them back there; stages do not overlap;
//! - **pipeline off**: the scratchpad, but a batch is planned only after the previous one has trained:
//!   ScratchPipe's straw man;
//! - **pipeline on**: the scratchpad with overlapped stages;
//! - **all in memory**: all rows are in tables in memory, and reading and casting are overlapped: the lower
//!   bound of a step.
//!
//! All modes train the same bytes on the same batches. A round is a number of steps of each mode, and a
//! ratio compares two modes of one round. All rows are written to the file before the measurement, so that
//! steps read them from the file. Whether such a read reaches the disk depends on the page cache; `--limit
//! BYTES` runs the program in a memory control group, which keeps the page cache small (needs root).
//!
//! The dense layers are ScratchPipe's default, DLRM MLPerf (section V): bottom 512-256-dim, top
//! 1024-1024-512-256-1. With `--dense small` they are 128-dim and 256-64-1, so that rows take most of a
//! step's time.
//!
//! Counts of rows are means per step over the counted rounds: distinct rows of a batch (a split batch counts
//! the distinct rows of each part), rows read from the file, rows written to it, and the bytes of both. A
//! step must move these bytes even if the move is overlapped. So there is a bound for the time of a step:
//! the time with all rows in memory, plus one copy of each moved row by all compute threads. The rate of one
//! thread is measured with copies of random records from and to a table of 1 GiB. The work time of each
//! stage per step, without waits, is printed too (figure 12); overlapped stages slow each other down where
//! they share resources.
//!
//! With `--static-layout log` the static cache writes to a log, as the pipeline does, instead of in place.
//! The remaining difference is the gain from a cache that follows the data, and from overlap.
//!
//! `--tables N` (8), `--rows N` (1,000,000), `--dim N` (128), `--lookups N` (20), `--batch N` (2048),
//! `--steps N` per round (24), `--warm N` steps before them (4), `--settle N` steps before the first round
//! (12), `--pairs N` rounds (5), `--skews random,low,medium,high`, `--sizes 0.02,0.1`, `--lookahead N`,
//! `--policy P` (lru; lfu uses counts of the batches), `--dense mlperf|small`, `--only TEXT` in a mode's
//! name (pipeline on always runs), `--threads N` that compute (2), `--row-threads N` that move rows (4),
//! `--staging BYTES` (1 GiB), `--dir DIR`, `--json`.

mod harness;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flechette::rowlog::RowOrder;
use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::schema::{Architecture, Schema};
use flechette::trainer::optim::{self, Optimizer};
use flechette::trainer::{
    Data, Pipeline, PipelineRows, PipelineSettings, PlanStats, Progress, ReferenceTrainer, RowFrequency,
    ScratchpadPolicy, ScratchpadSize, StageName, TrainState, WorkingFileOptions, initialise,
    initialise_on_disk, run_in_memory,
};
use flechette::types::{RawBatch, RawValues, TableId};
use harness::replay::{self, Replay};
use harness::{Options, Sorted};

/// Number of batches that are generated and then repeated.
const POOL: usize = 48;

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    if let Some(limit) = options.value("--limit") {
        limit_memory(&limit)?;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.number("--threads", 2)).build()?;
    pool.install(|| run(&options))
}

fn run(options: &Options) -> anyhow::Result<()> {
    let shape = Shape::read(options)?;
    println!("train_pipeline: ms per step; ratio to pipeline on in the same round (least, quartiles, most);");
    println!("cpu: time on all processors; rows and MB: per step");
    println!("{}", harness::place());
    println!("{shape:?}, {} threads, SGD", options.number("--threads", 2));
    let list = |flag: &str, default: &str| options.value(flag).unwrap_or(default.into());
    let (skews, sizes) = (list("--skews", "random,low,medium,high"), list("--sizes", "0.02,0.1"));
    let mut reports = Vec::new();
    for skew in skews.split(',') {
        let batches = Arc::new(shape.batches(skew)?);
        for size in sizes.split(',') {
            reports.push(compare(&shape, skew, size.parse()?, &batches, options)?);
        }
    }
    println!("load {} at the end", harness::load());
    if options.json {
        let report = serde_json::json!({
            "bench": "train_pipeline", "unit": "ms per step", "place": harness::place(), "rows": reports });
        println!("{report}");
    }
    Ok(())
}

/// The shape of the model and of its batches.
#[derive(Debug)]
struct Shape {
    tables: usize,
    rows: u64,
    dim: usize,
    lookups: u32,
    batch: usize,
    /// Hidden sizes, without the last layers (to dim, and to one logit).
    bottom: &'static [usize],
    top: &'static [usize],
}

impl Shape {
    fn read(options: &Options) -> anyhow::Result<Self> {
        let (bottom, top): (&[usize], &[usize]) = match options.value("--dense").as_deref() {
            None | Some("mlperf") => (&[512, 256], &[1024, 1024, 512, 256]),
            Some("small") => (&[128], &[256, 64]),
            Some(other) => anyhow::bail!("--dense {other}: small or mlperf"),
        };
        Ok(Self {
            tables: options.number("--tables", 8),
            rows: options.number("--rows", 1_000_000) as u64,
            dim: options.number("--dim", 128),
            lookups: options.number("--lookups", 20) as u32,
            batch: options.number("--batch", 2048),
            bottom,
            top,
        })
    }

    fn schema(&self) -> Schema {
        let multi_hot = (self.lookups > 1).then_some(self.lookups);
        let shape = SyntheticShape { tables: self.tables, rows: self.rows, dense: 13, multi_hot };
        let mut schema = synthetic(ArchKind::Dlrm, self.dim, shape);
        schema.architecture = Architecture::Dlrm { bottom: self.bottom.to_vec(), top: self.top.to_vec() };
        schema
    }

    /// Batches with this skew and exactly `lookups` ids per feature and sample.
    fn batches(&self, skew: &str) -> anyhow::Result<Vec<RawBatch>> {
        let skew = if skew == "random" { "uniform" } else { skew };
        let one_hot = Shape { lookups: 1, ..*self }.schema();
        replay::draw(&one_hot, skew, (self.batch, self.lookups as usize), POOL)
    }
}

/// One of the modes that the module comment lists.
struct Mode {
    name: &'static str,
    trained: Trained,
    replay: Replay,
    /// Milliseconds per step, for each round.
    times: Vec<f64>,
    /// Milliseconds of processor time per step, summed over processors, for each round. Other programs on the
    /// machine affect it less than `times`.
    cpu_times: Vec<f64>,
    /// Plan's counts and each stage's work time before the first counted round.
    before: PlanStats,
    worked_before: Vec<Duration>,
}

enum Trained {
    InMemory(Box<ReferenceTrainer>),
    /// If the flag is set, the scratchpad is emptied after each step.
    OnDisk(Box<(Pipeline, TrainState)>, bool),
}

impl Mode {
    /// Plan's counts so far; all 0 in the mode with every row in memory.
    fn stats(&self) -> PlanStats {
        match &self.trained {
            Trained::InMemory(_) => PlanStats::default(),
            Trained::OnDisk(on_disk, _) => on_disk.0.stats(),
        }
    }

    /// Each stage's work time; empty if there are no stages.
    fn worked(&self) -> Vec<Duration> {
        match &self.trained {
            Trained::InMemory(_) => Vec::new(),
            Trained::OnDisk(on_disk, _) => on_disk.0.worked().map(|(_, time)| time).collect(),
        }
    }

    /// Takes `warm` + `steps` steps and times the last `steps`. In the first ones, the stages of the pipeline
    /// fill, and the sync has made pages of the file clean, which costs time when they are written again.
    fn round(&mut self, batch: usize, (warm, steps): (u64, u64)) -> anyhow::Result<()> {
        // So that this round does not wait for disk writes of the previous one.
        rustix::fs::sync();
        let reader = &mut self.replay;
        let (mut taken, mut began) = (0, None);
        let mut observer = |_: &Progress<'_>| {
            taken += 1;
            if taken == warm {
                began = Some((Instant::now(), cpu_seconds()));
            }
        };
        match &mut self.trained {
            Trained::InMemory(reference) => {
                run_in_memory(reference, Data { reader, batch, steps: warm + steps }, observer)?;
            }
            Trained::OnDisk(on_disk, clear) => {
                let (pipeline, train_state) = &mut **on_disk;
                let times = if *clear { warm + steps } else { 1 };
                for _ in 0..times {
                    let data = Data { reader, batch, steps: (warm + steps) / times };
                    pipeline.run(train_state, data, &mut observer)?;
                    if *clear {
                        pipeline.clear()?;
                    }
                }
            }
        }
        let (took, cpu) = began.map_or((f64::NAN, f64::NAN), |(began, cpu)| {
            (began.elapsed().as_secs_f64(), cpu_seconds() - cpu)
        });
        self.times.push(took * 1e3 / steps as f64);
        self.cpu_times.push(cpu * 1e3 / steps as f64);
        Ok(())
    }
}

fn compare(
    shape: &Shape,
    skew: &str,
    size: f64,
    batches: &Arc<Vec<RawBatch>>,
    options: &Options,
) -> anyhow::Result<serde_json::Value> {
    let steps = options.number("--steps", 24) as u64;
    let mut modes = modes(shape, size, batches, options)?;
    let warm = options.number("--warm", 4) as u64;
    // A round that is not counted, long enough to fill the scratchpads. With a larger `--settle` the log also
    // reaches its final size: it grows to one and a half times the bytes of the rows before it reuses space.
    let settle = options.number("--settle", 12) as u64;
    for mode in &mut modes {
        mode.round(shape.batch, (settle, steps))?;
        (mode.times, mode.cpu_times) = Default::default();
        (mode.before, mode.worked_before) = (mode.stats(), mode.worked());
    }
    for round in 0..options.pairs {
        for at in 0..modes.len() {
            let mode = (at + round) % modes.len();
            modes[mode].round(shape.batch, (warm, steps))?;
        }
    }
    let on = modes.iter().find(|m| m.name == "pipeline on");
    let (on, cpu_on) = on.map(|m| (m.times.clone(), m.cpu_times.clone())).unwrap_or_default();
    println!("skew {skew}, scratchpad {size}:");
    let in_memory = modes.iter().find(|m| m.name == "all in memory");
    // Copies are measured only if this mode runs: the bound needs its time, and under `--limit` there may be
    // no memory for the table of 1 GiB.
    let in_memory = in_memory.map(|m| {
        let move_ms = 1e3 * seconds_per_move(shape.dim) / options.number("--threads", 2) as f64;
        (Sorted::of(m.times.iter().copied()).at(0.5), move_ms)
    });
    let mut rows = Vec::new();
    for mode in &modes {
        let ratios = |times: &[f64], on: &[f64]| Sorted::of(times.iter().zip(on).map(|(time, on)| time / on));
        let (ratio, cpu_ratio) = (ratios(&mode.times, &on), ratios(&mode.cpu_times, &cpu_on));
        let (time, cpu) =
            (Sorted::of(mode.times.iter().copied()), Sorted::of(mode.cpu_times.iter().copied()));
        let moved = Moved::of(mode, (warm + steps) * mode.times.len() as u64);
        println!(
            "  {:<16} {:>8.1} ms   {:>6.2} times pipeline on ({:.2}, {:.2} to {:.2}, {:.2})   cpu {:.0} \
             ms ({:.2}; {:.2} to {:.2})   {}",
            mode.name,
            time.at(0.5),
            ratio.at(0.5),
            ratio.at(0.0),
            ratio.at(0.25),
            ratio.at(0.75),
            ratio.at(1.0),
            cpu.at(0.5),
            cpu_ratio.at(0.5),
            cpu_ratio.at(0.0),
            cpu_ratio.at(1.0),
            moved.as_ref().map_or(String::new(), Moved::to_string)
        );
        let steps = (warm + steps) * mode.times.len() as u64;
        let worked = mode.worked().into_iter().zip(&mode.worked_before);
        let worked = worked.map(|(now, before)| (now - *before).as_secs_f64() * 1e3 / steps as f64);
        let worked: Vec<_> = StageName::ALL.into_iter().map(StageName::name).zip(worked).collect();
        if !worked.is_empty() {
            let times = worked.iter().map(|(stage, ms)| format!("{stage} {ms:.1}"));
            println!("  {:<16} {:>8}    worked: {}", "", "", times.collect::<Vec<_>>().join(", "));
        }
        let bound = in_memory.zip(moved.as_ref()).map(|((ms, move_ms), moved)| {
            let moving = (moved.rows_in + moved.rows_out) * move_ms;
            println!(
                "  {:<16} {:>8.2} times all in memory; the bound by its moved rows is {:.2} ({moving:.1} ms)",
                "",
                time.at(0.5) / ms,
                1.0 + moving / ms
            );
            1.0 + moving / ms
        });
        rows.push(serde_json::json!({ "mode": mode.name, "ms": time.at(0.5), "ratio": ratio.at(0.5),
            "least": ratio.at(0.0), "most": ratio.at(1.0),
            "cpu_ms": cpu.at(0.5), "cpu_ratio": cpu_ratio.at(0.5),
            "rounds": mode.times.len(), "moved": moved, "bound": bound,
            "worked_ms": worked.into_iter().collect::<std::collections::BTreeMap<_, _>>() }));
    }
    Ok(serde_json::json!({ "skew": skew, "size": size, "modes": rows }))
}

/// What a mode moved in the counted rounds. Rows and bytes are means per step, bubbles and splits are totals.
#[derive(serde::Serialize)]
struct Moved {
    distinct_rows: f64,
    rows_in: f64,
    rows_out: f64,
    bytes: f64,
    hit_rate: f64,
    bubbles: u64,
    splits: u64,
}

impl Moved {
    /// `None` for the mode with all rows in memory.
    fn of(mode: &Mode, steps: u64) -> Option<Self> {
        let Trained::OnDisk(on_disk, clear) = &mode.trained else { return None };
        let (now, before) = (mode.stats(), mode.before);
        let (hits, fills) = (now.hits - before.hits, now.fills - before.fills);
        // `Pipeline::clear` writes every row in the scratchpad to the file. Plan does not count these writes.
        let evictions = if *clear { fills } else { now.evictions - before.evictions };
        // All tables have the same dim.
        let record = on_disk.0.store().tables()[0].width() * size_of::<f32>();
        let per_step = |count: u64| count as f64 / steps as f64;
        Some(Self {
            distinct_rows: per_step(hits + fills),
            rows_in: per_step(fills),
            rows_out: per_step(evictions),
            bytes: per_step(fills + evictions) * record as f64,
            hit_rate: hits as f64 / (hits + fills).max(1) as f64,
            bubbles: now.bubbles - before.bubbles,
            splits: now.splits - before.splits,
        })
    }
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { distinct_rows, rows_in, rows_out, bytes, hit_rate, bubbles, splits } = self;
        write!(f, "hits {hit_rate:.3} of {distinct_rows:.0} rows; {rows_in:.0} in, {rows_out:.0} out, ")?;
        write!(f, "{:.2} MB; {bubbles} bubbles, {splits} splits", bytes / 1e6)
    }
}

/// Makes the trainer of a mode.
type Make<'a> = Box<dyn Fn() -> anyhow::Result<Trained> + 'a>;

fn modes(
    shape: &Shape,
    size: f64,
    batches: &Arc<Vec<RawBatch>>,
    options: &Options,
) -> anyhow::Result<Vec<Mode>> {
    let (schema, sgd) = (shape.schema(), Optimizer::new(optim::OptimizerKind::Sgd, 0.01));
    let dir = options.value("--dir").map_or_else(std::env::temp_dir, PathBuf::from);
    let settings = PipelineSettings {
        policy: options.value("--policy").map_or(Ok(ScratchpadPolicy::Lru), |name| name.parse())?,
        scratchpad: ScratchpadSize::Fraction(size),
        lookahead: options.number("--lookahead", 1),
        staging_bytes: options.number("--staging", 1 << 30),
        threads: options.number("--row-threads", 4),
        ..PipelineSettings::default()
    };
    let on_disk = |settings: PipelineSettings, orders| {
        let (train_state, store) =
            initialise_on_disk(&schema, sgd, 0, WorkingFileOptions { dir: &dir, orders })?;
        write_all(&store)?;
        let frequencies = (settings.policy == ScratchpadPolicy::Lfu).then(|| frequencies(batches));
        let rows = PipelineRows { file: store, frequencies };
        anyhow::Ok(Box::new((Pipeline::new(&train_state, rows, settings)?, train_state)))
    };
    // An empty ranking keeps rows in ascending order: each has a fixed place in the file.
    let place = |_| anyhow::Ok(Some(RowOrder::hottest_first(schema.tables[0].stored_rows(), &[])?));
    let in_place = || (0..shape.tables).map(place).collect::<anyhow::Result<Vec<_>>>();
    let in_log = options.value("--static-layout").as_deref() == Some("log");
    let off = PipelineSettings { overlap: false, ..settings.clone() };
    let static_cache = PipelineSettings { policy: ScratchpadPolicy::Lfu, ..off.clone() };
    let makers: [(&'static str, Make<'_>); 5] = [
        ("no cache", Box::new(|| Ok(Trained::OnDisk(on_disk(off.clone(), in_place()?)?, true)))),
        (
            "static cache",
            Box::new(|| {
                let orders = if in_log { vec![] } else { in_place()? };
                Ok(Trained::OnDisk(on_disk(static_cache.clone(), orders)?, false))
            }),
        ),
        ("pipeline off", Box::new(|| Ok(Trained::OnDisk(on_disk(off.clone(), vec![])?, false)))),
        ("pipeline on", Box::new(|| Ok(Trained::OnDisk(on_disk(settings.clone(), vec![])?, false)))),
        ("all in memory", Box::new(|| Ok(Trained::InMemory(Box::new(initialise(&schema, sgd, 0)?))))),
    ];
    let mut modes = Vec::new();
    for (name, make) in makers {
        if options.wants(name) || name == "pipeline on" {
            let replay = Replay::of(batches);
            modes.push(Mode {
                name,
                trained: make()?,
                replay,
                times: Vec::new(),
                cpu_times: Vec::new(),
                before: PlanStats::default(),
                worked_before: Vec::new(),
            });
        }
    }
    Ok(modes)
}

/// Writes the initial value of every row to the file, so that steps read rows instead of computing them.
fn write_all(store: &flechette::rowlog::WorkingFile) -> anyhow::Result<()> {
    for t in 0..store.tables().len() {
        let table = TableId(t as u32);
        let width = store.tables()[t].width();
        store.for_each_chunk(table, |first, records| {
            let rows: Vec<u64> = (first..first + (records.len() / width) as u64).collect();
            store.write(table, &rows, records)
        })?;
    }
    Ok(())
}

/// Mean seconds for one thread to copy a record out of a large table or into it.
fn seconds_per_move(words: usize) -> f64 {
    const MOVED: usize = 1 << 18;
    let rows = (1_usize << 28) / words.max(1);
    let mut table = vec![1.0_f32; rows * words];
    let mut staging = vec![1.0_f32; MOVED * words];
    let mut draws = 1_u64;
    let mut draw = || {
        draws = draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (draws >> 33) as usize % rows * words
    };
    let began = Instant::now();
    for record in staging.chunks_exact_mut(words) {
        record.copy_from_slice(&table[draw()..][..words]);
    }
    for record in staging.chunks_exact(words) {
        table[draw()..][..words].copy_from_slice(record);
    }
    std::hint::black_box(&table);
    began.elapsed().as_secs_f64() / (2 * MOVED) as f64
}

/// Processor time of this process so far, in seconds.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// How often each row occurs in the batches, the most frequent first.
fn frequencies(batches: &[RawBatch]) -> Vec<RowFrequency> {
    let mut counts: HashMap<(u32, u64), u64> = HashMap::new();
    for batch in batches {
        for (feature, t) in batch.features.iter().zip(0..) {
            let RawValues::Ids(ids) = &feature.values else { continue };
            ids.iter().for_each(|&id| *counts.entry((t, id)).or_default() += 1);
        }
    }
    let used = |((t, row), count)| RowFrequency { table: TableId(t), row, count };
    let mut rows: Vec<RowFrequency> = counts.into_iter().map(used).collect();
    rows.sort_unstable_by_key(|used| (std::cmp::Reverse(used.count), used.table, used.row));
    rows
}

/// Moves this process into a new control group (version 1) with this memory limit.
fn limit_memory(limit: &str) -> anyhow::Result<()> {
    let group = PathBuf::from(format!("/sys/fs/cgroup/memory/flechette-bench-{}", std::process::id()));
    std::fs::create_dir(&group)?;
    std::fs::write(group.join("memory.limit_in_bytes"), limit)?;
    std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())?;
    println!("memory is limited to {limit} bytes, including the page cache");
    Ok(())
}
