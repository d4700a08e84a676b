//! The embedding layer through the cache on a GPU: FLECHE's experiments 6 to 10. `cache_query` has the same
//! experiments on the host.
//!
//! A layer takes a batch's ids and returns the pooled vectors in pinned host memory. Our side does what the
//! engine does: one probe and one gather for all tables, with hits copied while the host writes the missing
//! rows. Each baseline lacks one or more of FLECHE's techniques: a cache and a query per table; one cache
//! with a query per table; no separate copy of hits. Queries of several tables are divided among the
//! setting's number of threads, because waiting for each table in turn would be a weak baseline. All sides
//! read their misses from stores in RAM with the same rows.
//!
//! Every rate is also reported as a share of the device's memory bandwidth: bytes of rows read and output
//! written, relative to a copy within the device's memory, which is measured first.
//!
//! Without a GPU this program prints a message and ends. With the feature cusim, `--simulate` runs a small
//! version of every setting once on the simulator, as a test, and prints no rates.
//!
//! `--pairs N` (11), `--window-ms N` (100), `--only TEXT`, `--json`.

#[path = "../harness/mod.rs"]
mod harness;
mod layer;
#[path = "../cache_query/traffic.rs"]
mod traffic;

use std::sync::Arc;

use flechette::device::cuda::{self, Driver};
use harness::{Options, Report};
use layer::{Layer, Way};
use traffic::Traffic;

fn main() -> anyhow::Result<()> {
    let options = Options::read(100);
    #[cfg(feature = "cusim")]
    if std::env::args().any(|arg| arg == "--simulate") {
        let driver = Arc::new(flechette::device::cusim::SimDriver::new(0, 1 << 30)?);
        return Bench { driver, options, ceiling: None }.run();
    }
    match cuda::open(0, None) {
        Err(error) => println!("SKIPPED: {error}"),
        Ok(device) => {
            println!("{device}");
            let driver = Arc::new(device);
            let ceiling = layer::copy_rate(&driver, &options)?;
            println!("a copy within the device's memory reads and writes {:.0} GB/s", ceiling * 1e-9);
            Bench { driver, options, ceiling: Some(ceiling) }.run()?;
        }
    }
    Ok(())
}

struct Bench<D: Driver> {
    driver: Arc<D>,
    options: Options,
    /// The bandwidth of the device's memory in bytes per second; `None` on the simulator.
    ceiling: Option<f64>,
}

impl<D: Driver> Bench<D> {
    fn run(self) -> anyhow::Result<()> {
        let baseline = "the baseline that the setting names";
        let mut report = Report::new("device_query", "ids", baseline, &self.options);
        self.tables(&mut report)?;
        self.batches(&mut report)?;
        self.cumulative(&mut report)?;
        self.skew(&mut report)?;
        self.dims(&mut report)?;
        report.finish();
        Ok(())
    }

    /// The given traffic; on the simulator, a smaller version of it.
    fn traffic(&self, traffic: Traffic) -> Traffic {
        if self.ceiling.is_some() {
            return traffic;
        }
        Traffic {
            tables: traffic.tables.min(6),
            rows: traffic.rows.min(500),
            samples: traffic.samples.min(24),
            ..traffic
        }
    }

    fn layer(&self, traffic: &Traffic, fraction: f64, way: Way) -> anyhow::Result<Layer<D>> {
        Layer::new(&self.driver, traffic, fraction, way)
    }

    /// Measures one setting: our side against a baseline with the same traffic and share of the rows.
    fn add(
        &self,
        report: &mut Report,
        setting: &str,
        traffic: Traffic,
        fraction: f64,
        (ours, theirs): (Way, Way),
    ) -> anyhow::Result<()> {
        if !self.options.wants(setting) {
            return Ok(());
        }
        let traffic = self.traffic(traffic);
        let (mut ours, mut theirs) =
            (self.layer(&traffic, fraction, ours)?, self.layer(&traffic, fraction, theirs)?);
        let Some(ceiling) = self.ceiling else {
            println!("{setting}: {} and {} ids", ours.next(), theirs.next());
            return Ok(());
        };
        let pairs = self
            .options
            .compare(|| self.options.rate(|| ours.next()), || self.options.rate(|| theirs.next()));
        let share = pairs.ours().at(0.5) * traffic.bytes_per_id() / ceiling;
        report.add(format!("{setting} ({:.1}% of memory)", 100.0 * share), &pairs, None);
        Ok(())
    }

    /// Exp #6: 10,000 ids, all hits, in 1 to 200 tables.
    fn tables(&self, report: &mut Report) -> anyhow::Result<()> {
        for tables in [1, 15, 26, 60, 200] {
            let rows = 2_000_000 / tables as u64;
            let traffic = Traffic { tables, rows, samples: 10_000 / tables, ..FULL };
            for threads in [1, 8] {
                let setting = format!("#6 tables {tables}, per-table by {threads} threads");
                self.add(report, &setting, traffic, 1.0, (Way::Flat, Way::PerTable { threads }))?;
            }
        }
        Ok(())
    }

    /// Exp #7: batch sizes, with a cache of 5 %. Compares hits that are copied while the host writes the
    /// missing rows with hits that are copied afterwards.
    fn batches(&self, report: &mut Report) -> anyhow::Result<()> {
        for samples in [32, 128, 512, 2048, 8192] {
            let traffic = Traffic { samples, ..FULL };
            let setting = format!("#7 batch {samples}, coupled copy");
            self.add(report, &setting, traffic, 0.05, (Way::Flat, Way::Coupled))?;
        }
        Ok(())
    }

    /// Exp #8: the techniques are added in turn. Each step is compared with one cache per table.
    fn cumulative(&self, report: &mut Report) -> anyhow::Result<()> {
        let traffic = Traffic { samples: 1024, ..FULL };
        let steps = [
            ("flat cache", Way::Apart { threads: 8 }),
            ("+ fused query", Way::Coupled),
            ("+ decoupled copy", Way::Flat),
        ];
        for (step, way) in steps {
            let setting = format!("#8 {step}, per-table by 8 threads");
            self.add(report, &setting, traffic, 0.05, (way, Way::PerTable { threads: 8 }))?;
        }
        Ok(())
    }

    /// Exp #9: power laws with increasing exponents, with a cache of 5 %.
    fn skew(&self, report: &mut Report) -> anyhow::Result<()> {
        for alpha in [0.5, 0.8, 1.2, 1.6, 2.0] {
            let traffic = Traffic { alpha, samples: 1024, ..FULL };
            let setting = format!("#9 alpha {alpha}, per-table by 8 threads");
            self.add(report, &setting, traffic, 0.05, (Way::Flat, Way::PerTable { threads: 8 }))?;
        }
        Ok(())
    }

    /// Exp #10: dims, with a cache of 5 %.
    fn dims(&self, report: &mut Report) -> anyhow::Result<()> {
        for dim in [16, 32, 64, 128] {
            let traffic = Traffic { dim, samples: 1024, ..FULL };
            let setting = format!("#10 dim {dim}, per-table by 8 threads");
            self.add(report, &setting, traffic, 0.05, (Way::Flat, Way::PerTable { threads: 8 }))?;
        }
        Ok(())
    }
}

/// FLECHE's synthetic workload in full size (section 6.1): 40 tables of 250,000 rows, dim 32, alpha 1.2.
const FULL: Traffic = Traffic { rows: 250_000, ..Traffic::FLECHE };
