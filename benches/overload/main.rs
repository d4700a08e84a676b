//! Goodput under overload, with the real program: `serve` on one core, `load` on another.
//!
//! First the capacity: scored requests per second of clients in a closed loop. Then an open loop at a
//! multiple of it, with a timeout. Goodput is the number of requests per second that are scored within the
//! timeout of their client, counted from when each is due. The peak is the highest goodput of the rates up to
//! the capacity.
//!
//! A server must receive a call to refuse it. So each round also measures what a refusal costs a bare tonic
//! server ([`refusing`]), and from it the goodput of a server with such refusals: in a second of its core,
//! `scored / capacity + refused x cost = 1`.
//!
//! `--arch NAME` (dlrm), `--rows N` per table (700,000; 26 tables of dim 16), `--batch N` samples of a
//! request (64), `--seconds S` of a load (5), `--rounds N` (3), `--json`.

#[path = "../harness/bare.rs"]
mod bare;
#[path = "../harness/mod.rs"]
mod harness;
mod refusing;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::Context;
use serde_json::{Value, json};

use harness::program::{Serving, output, pinned, program};
use harness::{Options, Sorted};
use refusing::Refusing;

const TABLES: usize = 26;

/// Timeouts of the clients, in seconds.
const TIMEOUTS: [f64; 2] = [0.1, 1.0];

/// Rates up to the capacity, which show the peak, and beyond it.
const BELOW: [f64; 2] = [0.8, 1.0];
const BEYOND: [f64; 3] = [2.0, 3.0, 5.0];

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    if let Some(of) = options.value("--refuse-as") {
        return refusing::serve(of);
    }
    let number = |flag, default| options.number(flag, default).max(1);
    let (rows, batch, seconds) = (number("--rows", 700_000), number("--batch", 64), number("--seconds", 5));
    let arch = options.value("--arch").unwrap_or_else(|| "dlrm".to_owned());
    println!("overload: {}", harness::place());
    println!("{arch}, {TABLES} tables of {rows} rows, {batch} samples a request, loads of {seconds} s");
    println!(
        "{:<34} {:>10} {:>20} {:>20} {:>14}",
        "timeout, rate to the capacity", "goodput", "to the peak", "of bare tonic", "p99 to peak's"
    );
    let dir = tempfile::tempdir()?;
    let models = dir.path().join("models").display().to_string();
    let config = dir.path().join("model.toml");
    let init =
        format!("init --dataset synthetic --arch {arch} --dim 16 --rows {rows} --tables {TABLES} --dense 13");
    std::fs::write(&config, output(program(&init))?)?;
    let train = format!("--model-config {} --data rows=1024,seed=1,skew=1.2", config.display());
    let train = format!("train --format synthetic --batch 128 --models {models} --name m {train}");
    output(program(&train))?;
    let serve = format!("serve --models {models} --grpc 127.0.0.1:0 --http 127.0.0.1:0");
    let Serving { process: _process, grpc, log, .. } = Serving::start(pinned(0, &serve))?;
    std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
    let refusing = Refusing::start(grpc)?;
    let load_at = |at: SocketAddr, flags: &str| load(at, (batch, seconds), flags);
    let load = |flags: &str| load_at(grpc, flags);
    let mut results = BTreeMap::<(usize, usize), Vec<[f64; 4]>>::new();
    let mut refusals = Vec::new();
    for _ in 0..number("--rounds", 3) {
        let capacity = load("--concurrency 16 --warmup 1")?.goodput;
        let flood = format!("--rate {:.0} --timeout 1 --outstanding 100000", 3.0 * capacity);
        let refusal =
            refusing.seconds_of_a_refusal(|| load_at(refusing.address, &flood).map(|report| report.sent))?;
        refusals.push(1e6 * refusal);
        // Of a core, what refusing as many calls as it can score would take.
        let share = capacity * refusal;
        for (t, timeout) in TIMEOUTS.iter().enumerate() {
            let at = |times: f64| {
                load(&format!("--rate {:.0} --timeout {timeout} --outstanding 100000", capacity * times))
            };
            let mut peak = Loaded { goodput: 0.0, p99_us: 0.0, sent: 0.0 };
            for times in BELOW {
                let loaded = at(times)?;
                if loaded.goodput > peak.goodput {
                    peak = loaded;
                }
            }
            for (r, &times) in BEYOND.iter().enumerate() {
                let Loaded { goodput, p99_us, .. } = at(times)?;
                let bare = (1.0 - times * share).max(0.0) / (1.0 - share);
                let ratios = [goodput, goodput / peak.goodput, p99_us / peak.p99_us, bare];
                results.entry((t, r)).or_default().push(ratios);
            }
        }
    }
    let mut figures = Vec::new();
    for ((t, r), values) in &results {
        let column = |i: usize| Sorted::of(values.iter().map(|value| value[i]));
        let [goodput, to_peak, p99, bare] = [0, 1, 2, 3].map(column);
        let [to_peak, bare] =
            [to_peak, bare].map(|of| format!("{:.2} ({:.2} to {:.2})", of.at(0.5), of.at(0.0), of.at(1.0)));
        let (timeout, times) = (TIMEOUTS[*t], BEYOND[*r]);
        let name = format!("{timeout} s, {times}");
        println!("{name:<34} {:>10.0} {to_peak:>20} {bare:>20} {:>14.2}", goodput.at(0.5), p99.at(0.5));
        figures.push(json!({ "timeout_s": timeout, "rate": times, "goodput_ratio_p99ratio_bare": values }));
    }
    let refusals = Sorted::of(refusals.into_iter());
    println!(
        "a bare refusal: {:.1} us ({:.1} to {:.1})",
        refusals.at(0.5),
        refusals.at(0.0),
        refusals.at(1.0)
    );
    if options.json {
        println!("{}", json!({ "bench": "overload", "place": harness::place(), "rows": figures }));
    }
    Ok(())
}

/// The result of a load.
struct Loaded {
    goodput: f64,
    p99_us: f64,
    /// Requests that were sent.
    sent: f64,
}

fn load(grpc: SocketAddr, (batch, seconds): (usize, usize), flags: &str) -> anyhow::Result<Loaded> {
    let line = format!(
        "load --addr http://{grpc} --model m --format synthetic --batch {batch} --requests 2000 --json \
         --seconds {seconds} {flags} rows={},seed=3,skew=1.2",
        2000 * batch
    );
    // It fails if any request fails, but prints its report.
    let output = pinned(1, &line).output()?;
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{line}: {}", String::from_utf8_lossy(&output.stderr)))?;
    let number = |key: &str| report[key].as_f64().with_context(|| key.to_owned());
    Ok(Loaded { goodput: number("goodput_per_s")?, p99_us: number("p99_us")?, sent: number("sent")? })
}
