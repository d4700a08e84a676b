//! What publishing costs training: samples per second, and how long the next step waits for a cut.

use std::fs;

use crate::figures::Figures;
use crate::harness::Sorted;
use crate::in_turn;
use crate::program::{BATCH, Bench, Trained, steady_data};

/// Where the rows are, and the flags for that.
const PLACES: [(&str, &str); 2] = [("in memory", ""), ("scratchpad", "--scratchpad 0.2")];

pub fn measure(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    PLACES.iter().try_for_each(|&(place, flags)| measure_at(bench, figures, place, flags))
}

fn measure_at(bench: &Bench, figures: &mut Figures, place: &str, flags: &str) -> anyhow::Result<()> {
    let every = bench.every.as_secs_f64();
    // Half an interval more than the window, because the last version is left out.
    let speed = run(bench, BATCH * bench.steps, flags)?.samples_per_s;
    let samples = (speed * (bench.window.as_secs_f64() + every / 2.0)) as usize / BATCH * BATCH;
    let publishing = format!("{flags} --publish-every {every}s");
    let (mut ratios, mut rates, mut deltas) = (Vec::new(), Vec::new(), Vec::new());
    let mut between = Vec::new();
    for round in 0..bench.rounds {
        let with = || run(bench, samples, &publishing);
        let without = || run(bench, samples, flags);
        let (with, without) = in_turn(round, with, without)?;
        ratios.push(with.samples_per_s / without.samples_per_s);
        rates.push(without.samples_per_s);
        // The last version of a run is written after its last step, so no step waits for it.
        let during = with.published.len().saturating_sub(1);
        let seconds = BATCH as f64 / with.samples_per_s;
        let pairs = with.published[..during].windows(2);
        between.extend(pairs.map(|pair| (pair[1].steps - pair[0].steps) * seconds));
        deltas.extend(with.published.into_iter().take(during));
    }
    let step_ms = 1e3 * BATCH as f64 / Sorted::of(rates.iter().copied()).at(0.5);
    let pauses: Vec<f64> = deltas.iter().map(|delta| delta.pause_ms / step_ms).collect();
    let rows: Vec<f64> = deltas.iter().map(|delta| delta.rows).collect();
    let took: Vec<f64> = deltas.iter().map(|delta| delta.took_ms / 1e3).collect();
    figures.add(&format!("{place}: samples/s with versions, to none"), ">= 0.9", &ratios);
    figures.add(&format!("{place}: samples/s without versions"), "", &rates);
    figures.add(&format!("{place}: mean step, ms"), "", &[step_ms]);
    figures.add(&format!("{place}: wait for a cut, in steps"), "p99 < 2", &pauses);
    figures.add(&format!("{place}: rows of a version"), "", &rows);
    figures.add(&format!("{place}: seconds between versions"), "", &between);
    figures.add(&format!("{place}: from the cut until written, s"), "", &took);
    Ok(())
}

/// Trains on from version 1.
fn run(bench: &Bench, samples: usize, flags: &str) -> anyhow::Result<Trained> {
    let models = bench.first_version("training")?;
    let trained = bench.train(&models, &format!("--from latest --data {} {flags}", steady_data(samples, 4)));
    fs::remove_dir_all(models)?;
    trained
}
