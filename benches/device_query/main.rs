//! The embedding layer through the cache on a GPU: FLECHE's experiments 6 to 10, as `cache_query` has them on the host.
//!
//! A layer takes a batch's ids and gives the pooled vectors in pinned memory of the host. Ours is what the engine
//! does: one probe and one gather for all tables, hits copied while the host writes the misses' rows. The
//! baselines take one of FLECHE's techniques away each, or all: a cache a table, with a query a table; one
//! cache with a query a table; hits that are not copied apart. Queries of several tables are launched by as many
//! threads as the setting says, because a baseline that waits for each table in turn would be a poor one. Every
//! side reads its misses from the same store in RAM.
//!
//! Beside every rate stands what share of the device's memory bandwidth it moves: bytes of rows read and of
//! output written, over what a copy within the device's memory reaches, measured first.
//!
//! Needs a GPU and says so where there is none. Built with the feature cusim, `--simulate` runs every
//! setting once on the simulator instead, small, to see that it runs: then no rate is said.
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
    /// Bytes a second; none where nothing is measured.
    ceiling: Option<f64>,
}

impl<D: Driver> Bench<D> {
    fn run(self) -> anyhow::Result<()> {
        let mut report = Report::new("device_query", "ids", "without the technique named", &self.options);
        self.tables(&mut report)?;
        self.batches(&mut report)?;
        self.cumulative(&mut report)?;
        self.skew(&mut report)?;
        self.dims(&mut report)?;
        report.finish();
        Ok(())
    }

    /// What is asked for: FLECHE's, or a little of it where it is only simulated.
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

    /// One setting: ours against a baseline of the same traffic and share of the rows.
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
        let share = pairs.ours().at(0.5) * traffic.bytes_an_id() / ceiling;
        report.add(format!("{setting} ({:.1}% of memory)", 100.0 * share), &pairs, None);
        Ok(())
    }

    /// Exp #6: 10,000 ids over so many tables, all of them hits.
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

    /// Exp #7: a cache of 5 %, batch sizes; hits copied apart or not.
    fn batches(&self, report: &mut Report) -> anyhow::Result<()> {
        for samples in [32, 128, 512, 2048, 8192] {
            let traffic = Traffic { samples, ..FULL };
            let setting = format!("#7 batch {samples}, coupled copy");
            self.add(report, &setting, traffic, 0.05, (Way::Flat, Way::Coupled))?;
        }
        Ok(())
    }

    /// Exp #8: each technique over what the one before has, all against a cache a table.
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

    /// Exp #9: power laws from flat to steep, a cache of 5 %.
    fn skew(&self, report: &mut Report) -> anyhow::Result<()> {
        for alpha in [0.5, 0.8, 1.2, 1.6, 2.0] {
            let traffic = Traffic { alpha, samples: 1024, ..FULL };
            let setting = format!("#9 alpha {alpha}, per-table by 8 threads");
            self.add(report, &setting, traffic, 0.05, (Way::Flat, Way::PerTable { threads: 8 }))?;
        }
        Ok(())
    }

    /// Exp #10: dims, a cache of 5 %.
    fn dims(&self, report: &mut Report) -> anyhow::Result<()> {
        for dim in [16, 32, 64, 128] {
            let traffic = Traffic { dim, samples: 1024, ..FULL };
            let setting = format!("#10 dim {dim}, per-table by 8 threads");
            self.add(report, &setting, traffic, 0.05, (Way::Flat, Way::PerTable { threads: 8 }))?;
        }
        Ok(())
    }
}

/// FLECHE's synthetic workload (section 6.1) whole: 40 tables of 250,000 rows of 32, alpha 1.2.
const FULL: Traffic = Traffic { rows: 250_000, ..Traffic::FLECHE };
