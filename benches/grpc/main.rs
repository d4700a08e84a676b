//! Throughput and latency of scoring over gRPC, beside three peers on the same core: a server that only
//! decodes the same native messages and answers with as many scores ("echo": what tonic can do), PyTorch
//! behind Triton's Python back end ("triton"), and the forward pass in a loop without a server ("forward").
//!
//! Every server runs on core 0, and one client on core 1: `h2load` (Debian's nghttp2-client), which sends a
//! recorded message again and again over 4 connections. Models are DLRM and DCN-v2 of `init` with 26 tables,
//! 13 dense inputs and initial weights, which the file of a peer reads too; ids are uniform, so nothing is
//! cached by the processor that a real request would not find there. All run in turn, `--rounds` times.
//!
//! `--rounds N` (3), `--seconds N` of a window (3), `--rows N` per table (100,000), `--only TEXT` of a
//! setting ("dlrm16, 1 sample"), `--triton PYTHON` with the packages of `triton_server.py`; without it that
//! peer is left out. `--json`.

#[path = "../harness/bare.rs"]
mod bare;
#[path = "../harness/mod.rs"]
mod harness;

mod client;
mod messages;
mod servers;

use std::path::Path;

use flechette::schema::Schema;
use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::trainer::initialise;
use flechette::trainer::optim::{self, Optimizer};

use client::{Load, Window};
use harness::{Options, Sorted};
use messages::Messages;
use servers::Servers;

const TABLES: usize = 26;
const DENSE: usize = 13;
const DIMS: [usize; 2] = [16, 32];

/// Samples of a request, and requests in flight on each connection.
const BATCHES: [(usize, usize); 4] = [(1, 16), (32, 4), (256, 2), (1024, 1)];

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    match options.value("--serve").as_deref() {
        Some("echo") => servers::echo(),
        Some("forward") => servers::forward(&options),
        Some(other) => anyhow::bail!("--serve: expected echo or forward, got {other}"),
        None => compare(&options),
    }
}

/// A model of the comparison.
struct Model {
    name: String,
    schema: Schema,
}

fn models(rows: usize) -> Vec<Model> {
    let shape = SyntheticShape { tables: TABLES, rows: rows as u64, dense: DENSE, multi_hot: None };
    let model =
        |(arch, kind, dim)| Model { name: format!("{arch}{dim}"), schema: synthetic(kind, dim, shape) };
    let kinds = [("dlrm", ArchKind::Dlrm), ("dcn", ArchKind::Dcnv2)];
    kinds.iter().flat_map(|&(arch, kind)| DIMS.map(|dim| model((arch, kind, dim)))).collect()
}

fn save(models: &[Model], dir: &Path) -> anyhow::Result<()> {
    for Model { name, schema } in models {
        initialise(schema, Optimizer::new(optim::OptimizerKind::Sgd, 0.1), 0)?.save(dir, name)?;
    }
    Ok(())
}

/// The columns of the table, in the order in which they are measured.
const SIDES: [&str; 5] = ["native", "kserve", "echo", "triton", "forward"];

/// The results of one side: a window for each round.
#[derive(Default)]
struct Side(Vec<Window>);

impl Side {
    fn rates(&self) -> Sorted {
        self.of(|window| window.rate)
    }

    fn of(&self, value: impl Fn(&Window) -> f64) -> Sorted {
        Sorted::of(self.0.iter().map(value))
    }

    /// The ratios of our rate to this one, by round.
    fn ratio(&self, ours: &Self) -> Sorted {
        Sorted::of(ours.0.iter().zip(&self.0).map(|(ours, theirs)| ours.rate / theirs.rate))
    }
}

fn compare(options: &Options) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let models = models(options.number("--rows", 100_000));
    save(&models, &dir.path().join("models"))?;
    println!("grpc: requests/s on one core, {}", harness::place());
    let servers = Servers::start(dir.path(), options)?;
    println!(
        "{:<24} {:>8} {:>10} {:>10} {:>8} {:>8} {:>8} {:>18}",
        "setting", "side", "requests/s", "samples/s", "p50 us", "p99 us", "p99.9 us", "native to it"
    );
    let mut rows = Vec::new();
    for model in &models {
        for (samples, streams) in BATCHES {
            let plural = if samples == 1 { "" } else { "s" };
            let setting = format!("{}, {samples} sample{plural}", model.name);
            if !options.wants(&setting) {
                continue;
            }
            let messages = Messages::new(&model.name, &model.schema, samples);
            servers.check(&messages)?;
            let load = Load { streams, seconds: options.number("--seconds", 3), dir: dir.path() };
            let sides = measure(&servers, &messages, &load, options)?;
            rows.extend(report(&setting, samples, &sides));
        }
    }
    println!("load after: {} (1, 5, 15 minutes)", harness::load());
    if options.json {
        println!("{}", serde_json::json!({ "bench": "grpc", "place": harness::place(), "rows": rows }));
    }
    Ok(())
}

/// A window of each side in turn, in each round.
fn measure(
    servers: &Servers,
    messages: &Messages,
    load: &Load<'_>,
    options: &Options,
) -> anyhow::Result<[Side; 5]> {
    let mut sides: [Side; 5] = Default::default();
    for _ in 0..options.number("--rounds", 3).max(1) {
        for (side, name) in sides.iter_mut().zip(SIDES) {
            if let Some(window) = servers.window(name, messages, load)? {
                side.0.push(window);
            }
        }
    }
    Ok(sides)
}

/// Prints the lines of a setting, and returns them as JSON.
fn report(setting: &str, samples: usize, sides: &[Side; 5]) -> Vec<serde_json::Value> {
    let mut rows = Vec::new();
    for (side, name) in sides.iter().zip(SIDES).filter(|(side, _)| !side.0.is_empty()) {
        let rate = side.rates().at(0.5);
        let times = [0, 1, 2].map(|i| side.of(|window| window.micros[i]).at(0.5));
        let ratio = side.ratio(&sides[0]);
        let [middle, least, most] = [0.5, 0.0, 1.0].map(|share| ratio.at(share));
        let [p50, p99, p999] = times;
        println!(
            "{setting:<24} {name:>8} {rate:>10.0} {:>10.0} {p50:>8.0} {p99:>8.0} {p999:>8.0} \
             {middle:>6.2} ({least:.2}-{most:.2})",
            rate * samples as f64,
        );
        rows.push(serde_json::json!({
            "setting": setting, "side": name, "rate": rate, "samples": samples, "p50_us": p50, "p99_us": p99,
            "p999_us": p999, "native_to_it": middle, "least": least, "most": most, "rounds": side.0.len(),
        }));
    }
    rows
}
