//! The embedding layer through the cache on the host device: FLECHE's experiments 6 to 10.
//!
//! A layer takes a batch's ids and writes the pooled vectors of each sample into one row. Our side does what
//! the engine does: one query over all tables in the flat cache, with rows read in place, and misses read
//! from the store and offered to the cache. Each baseline (`baseline.rs`) lacks one or more of FLECHE's
//! techniques: a static cache and a query per table; the flat cache with a query per table; hits copied
//! during the query; no unified index (no pointers). The store is in memory, and both sides run on one
//! thread, so neither side waits.
//!
//! Every rate is also reported as a share of the memory bandwidth: bytes of rows read and output written,
//! relative to a sequential read by one thread, which is measured first.
//!
//! `--pairs N` (11), `--window-ms N` (100), `--only TEXT`, `--json`.

mod baseline;
#[path = "../harness/mod.rs"]
mod harness;
mod layer;
mod traffic;

use harness::{Options, Report};
use layer::Layer;
use traffic::Traffic;

fn main() -> anyhow::Result<()> {
    let options = Options::read(100);
    let ceiling = layer::sequential_read(&options);
    println!("one thread reads {:.1} GB/s sequentially", ceiling * 1e-9);
    let mut report = Report::new("cache_query", "ids", "the baseline that the setting names", &options);
    tables(&options, &mut report, ceiling)?;
    batches(&options, &mut report, ceiling)?;
    cumulative(&options, &mut report, ceiling)?;
    skew(&options, &mut report, ceiling)?;
    dims(&options, &mut report, ceiling)?;
    scaling(&options, &mut report)?;
    report.finish();
    Ok(())
}

/// Measures one setting: our side against a baseline with the same traffic and cache size.
fn add(
    options: &Options,
    report: &mut Report,
    ceiling: f64,
    setting: &str,
    (ours, theirs): (&Layer, &Layer),
) {
    if !options.wants(setting) {
        return;
    }
    let (mut mine, mut other) = (ours.runner(), theirs.runner());
    let pairs = options.compare(|| options.rate(|| mine.next()), || options.rate(|| other.next()));
    let share = pairs.ours().at(0.5) * ours.traffic.bytes_per_id() / ceiling;
    report.add(format!("{setting} ({:.0}% of memory)", 100.0 * share), &pairs, None);
}

/// Exp #6: 10,000 ids, all hits, in 1 to 200 tables.
fn tables(options: &Options, report: &mut Report, ceiling: f64) -> anyhow::Result<()> {
    for tables in [1, 15, 26, 60, 200] {
        let traffic =
            Traffic { tables, rows: 2_000_000 / tables as u64, samples: 10_000 / tables, ..Traffic::FLECHE };
        let flat = Layer::flat(&traffic, 1.0)?;
        let per_table = Layer::per_table(&traffic, 1.0)?;
        let setting = format!("#6 tables {tables}, per-table");
        add(options, report, ceiling, &setting, (&flat, &per_table));
    }
    Ok(())
}

/// Exp #7: batch sizes, with a cache of 5 %. Compares reading hits in place with copying them during the
/// query, and a cache with pointers with one without.
fn batches(options: &Options, report: &mut Report, ceiling: f64) -> anyhow::Result<()> {
    for samples in [32, 128, 512, 2048, 8192] {
        let traffic = Traffic { samples, ..Traffic::FLECHE };
        let ours = Layer::flat(&traffic, 0.05)?;
        let coupled = Layer::coupled(&traffic, 0.05)?;
        add(options, report, ceiling, &format!("#7 batch {samples}, coupled copy"), (&ours, &coupled));
        let pointed = Layer::pointed(&traffic, 0.05)?;
        add(options, report, ceiling, &format!("#7 batch {samples}, no pointers"), (&pointed, &ours));
    }
    Ok(())
}

/// Exp #8: the techniques are added in turn. Each step is compared with one static cache per table.
fn cumulative(options: &Options, report: &mut Report, ceiling: f64) -> anyhow::Result<()> {
    let traffic = Traffic { samples: 1024, ..Traffic::FLECHE };
    let baseline = Layer::per_table(&traffic, 0.05)?;
    let steps = [
        ("flat cache", Layer::apart(&traffic, 0.05)?),
        ("+ one lookup", Layer::coupled(&traffic, 0.05)?),
        ("+ copy apart", Layer::flat(&traffic, 0.05)?),
        ("+ unified index", Layer::pointed(&traffic, 0.05)?),
    ];
    for (step, layer) in &steps {
        add(options, report, ceiling, &format!("#8 {step}, per-table"), (layer, &baseline));
    }
    Ok(())
}

/// Exp #9: power laws with increasing exponents, with a cache of 5 %.
fn skew(options: &Options, report: &mut Report, ceiling: f64) -> anyhow::Result<()> {
    for alpha in [0.5, 0.8, 1.2, 1.6, 2.0] {
        let traffic = Traffic { alpha, samples: 1024, ..Traffic::FLECHE };
        let (ours, theirs) = (Layer::flat(&traffic, 0.05)?, Layer::per_table(&traffic, 0.05)?);
        add(options, report, ceiling, &format!("#9 alpha {alpha}, per-table"), (&ours, &theirs));
    }
    Ok(())
}

/// Exp #10: dims, with a cache of 5 %.
fn dims(options: &Options, report: &mut Report, ceiling: f64) -> anyhow::Result<()> {
    for dim in [16, 32, 64, 128] {
        let traffic = Traffic { dim, samples: 1024, rows: 60_000, ..Traffic::FLECHE };
        let (ours, theirs) = (Layer::flat(&traffic, 0.05)?, Layer::per_table(&traffic, 0.05)?);
        add(options, report, ceiling, &format!("#10 dim {dim}, per-table"), (&ours, &theirs));
    }
    Ok(())
}

/// Two threads against one, all hits. Hits take no lock, so the rate should nearly double.
fn scaling(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let setting = "scaling, 2 threads against 1";
    if !options.wants(setting) {
        return Ok(());
    }
    let traffic = Traffic { samples: 256, ..Traffic::FLECHE };
    let layer = Layer::flat(&traffic, 1.0)?;
    let run = |threads: usize| {
        std::thread::scope(|scope| {
            let worker = || {
                let mut runner = layer.runner();
                options.rate(|| runner.next())
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().map(|w| w.join().unwrap_or(0.0)).sum()
        })
    };
    report.add(setting.to_owned(), &options.compare(|| run(2), || run(1)), Some(1.8));
    Ok(())
}
