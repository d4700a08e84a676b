//! Traces drawn from distributions that were fitted to whole data sets. Accesses are independent, so hot ids
//! stay hot; in real traces the hot ids change over time.
//!
//! - **Criteo model**: for each of the 26 columns, `criteo_trace_model.json` gives the number of ids in the
//!   head, their mass (share of the accesses), and a Zipf-Mandelbrot tail. The distribution within the head
//!   is that of the counts in the sampled rows, as in the fit. The model has 33.7 M ids.
//! - **Avazu model**: the exact counts of every value that occurs at least 50 times in all 40 M rows. Each
//!   column also has a tail of the other ids, from 49 occurrences downwards, with the remaining mass.
//! - **Skews** on the table sizes of Criteo Kaggle: each table's hottest 2 % get 2 % (random), 8.5 % (low),
//!   30 % (medium) or 80 % (high) of its accesses. One more is FLECHE's synthetic workload: 40 tables of
//!   250,000 rows, exponent 1.2.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};

use flechette::dataset::synthetic::Skew;
use flechette::dataset::{self, Format, ReadOptions};
use flechette::planner::trace::TraceBuilder;
use flechette::schema::Schema;
use flechette::schema::preset::{self, AVAZU_FEATURES, ArchKind, SyntheticShape};
use flechette::types::{Batch, RawBatch, TableId};
use serde_json::Value;

use crate::harness::Draw;
use crate::{HASHED_ROWS, Named, Workload, data_folder};

/// Rows of Avazu's full training file.
const AVAZU_ROWS: f64 = 40_428_967.0;
/// Exponent of Avazu's tails by rank, 1 / (1.868 - 1). `avazu_full_frequency.json` has the 1.868.
const AVAZU_TAIL: f64 = 1.152;
/// Number of ids in each of Criteo Kaggle's columns C1 to C26 (`cardinalities.json`).
const CRITEO_IDS: [u64; 26] = [
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992,
    5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];

/// Every calibrated workload, with `samples` samples each.
pub fn workloads(samples: usize) -> anyhow::Result<Vec<Named>> {
    let skews =
        [("random", Skew::Uniform), ("low", Skew::Low), ("medium", Skew::Medium), ("high", Skew::High)];
    let mut all: Vec<Named> = Vec::new();
    for (name, files) in [("Criteo model", CRITEO_FILES), ("Avazu model", AVAZU_FILES)] {
        if let Some(missing) = files.iter().find(|file| !data_folder().join(file).is_file()) {
            eprintln!("SKIPPED: {name}: no {} (set FLECHETTE_DATA)", data_folder().join(missing).display());
            continue;
        }
        let columns = if name == "Criteo model" { criteo_columns } else { avazu_columns };
        let ahead = if name == "Criteo model" { 11.0 } else { 2.0 };
        all.push((name.into(), Box::new(move || Ok(draw(name, &columns()?, samples, Some(ahead))))));
    }
    for (skew_name, skew) in skews {
        let name = format!("Criteo's tables, skew {skew_name}");
        let owned = name.clone();
        all.push((
            name,
            Box::new(move || {
                let columns: Vec<Column> = CRITEO_IDS.iter().map(|&ids| Column::skewed(skew, ids)).collect();
                Ok(draw(&owned, &columns, samples, None))
            }),
        ));
    }
    let name = "FLECHE's 40 tables of 250,000, exponent 1.2";
    all.push((
        name.into(),
        Box::new(move || {
            let columns: Vec<Column> = (0..40).map(|_| Column::skewed(Skew::Alpha(1.2), 250_000)).collect();
            Ok(draw(name, &columns, samples, None))
        }),
    ));
    Ok(all)
}

const CRITEO_FILES: &[&str] =
    &["criteo_trace_model.json", "criteo_kaggle_train.tsv.zst", "criteo_kaggle_test.tsv.zst"];
const AVAZU_FILES: &[&str] = &["avazu_full_value_counts_ge50.csv.zst", "avazu_full_frequency.json"];

/// The distribution of one column's ids: each id of the head has its own probability, and those of the tail
/// follow `(rank + offset)^-exponent`.
struct Column {
    /// Cumulative probabilities of the ids `0..head.len()`.
    head: Vec<f64>,
    tail: Tail,
}

#[derive(Clone, Copy)]
struct Tail {
    ids: u64,
    exponent: f64,
    offset: f64,
}

impl Tail {
    /// The integral of the power law from rank 0 to `rank`.
    fn area(&self, rank: f64) -> f64 {
        let power = 1.0 - self.exponent;
        let at = |x: f64| if power.abs() < 1e-9 { x.ln() } else { x.powf(power) / power };
        at(rank + 1.0 + self.offset) - at(1.0 + self.offset)
    }

    fn rank(&self, share: f64) -> u64 {
        let power = 1.0 - self.exponent;
        let (start, area) = (1.0 + self.offset, share * self.area(self.ids as f64));
        let x = if power.abs() < 1e-9 {
            start * area.exp()
        } else {
            (start.powf(power) + area * power).powf(power.recip())
        };
        ((x - start) as u64).min(self.ids - 1)
    }
}

impl Column {
    fn new(counts: impl Iterator<Item = f64>, mass: f64, tail: Tail) -> Self {
        let counts: Vec<f64> = counts.collect();
        let all: f64 = counts.iter().sum();
        let mass = if tail.ids == 0 { 1.0 } else { mass };
        let mut sum = 0.0;
        let sum_up = |count: &f64| {
            sum += count / all * mass;
            sum
        };
        Self { head: counts.iter().map(sum_up).collect(), tail }
    }

    fn skewed(skew: Skew, ids: u64) -> Self {
        Self { head: vec![], tail: Tail { ids, exponent: skew.alpha(ids), offset: 0.0 } }
    }

    fn id(&self, draw: &mut Draw) -> u64 {
        let u = draw.uniform();
        let head = self.head.partition_point(|sum| *sum <= u) as u64;
        let mass = self.head.last().copied().unwrap_or(0.0);
        if (head as usize) < self.head.len() {
            return head;
        }
        if self.tail.ids == 0 {
            return head - 1;
        }
        head + self.tail.rank((u - mass) / (1.0 - mass))
    }
}

fn draw(name: &str, columns: &[Column], samples: usize, ahead: Option<f64>) -> Workload {
    let shape = SyntheticShape { tables: columns.len(), rows: 1, dense: 0, multi_hot: None };
    let mut trace = TraceBuilder::new(&preset::synthetic(ArchKind::Dcn, 16, shape));
    let mut words = Draw::new(7);
    for _ in 0..samples {
        for (t, column) in columns.iter().enumerate() {
            // Fails only if the trace has too many accesses, which needs an absurd `--samples`.
            let _ = trace.push(TableId(t as u32), column.id(&mut words));
        }
    }
    Workload { name: name.into(), trace: trace.finish(1.0), ahead }
}

fn json(file: &str) -> anyhow::Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(data_folder().join(file))?)?)
}

fn criteo_columns() -> anyhow::Result<Vec<Column>> {
    let model = json(CRITEO_FILES[0])?;
    let schema = preset::criteo(ArchKind::Dlrm, 16, HASHED_ROWS);
    let counts = sampled_counts(&schema)?;
    let column = |(i, counts): (usize, &Vec<f64>)| {
        let fit = &model["columns"][format!("C{}", i + 1)];
        let number = |key: &str| fit[key].as_f64().unwrap_or(0.0);
        let head = number("head_K") as usize;
        // Without a fitted tail, the remaining ids are uniform.
        let rest = (number("card") - number("head_K")).max(0.0) as u64;
        let tail = match fit["tail_support"].as_u64() {
            Some(ids) => Tail { ids, exponent: number("tail_exponent"), offset: number("tail_offset_q") },
            None => Tail { ids: rest, exponent: 0.0, offset: 0.0 },
        };
        Column::new(counts.iter().copied().take(head), number("head_mass"), tail)
    };
    Ok(counts.iter().enumerate().map(column).collect())
}

/// For each column, the counts of its ids in the sampled rows, highest first.
fn sampled_counts(schema: &Schema) -> anyhow::Result<Vec<Vec<f64>>> {
    let files = CRITEO_FILES[1..].iter().map(|file| data_folder().join(file)).collect::<Vec<_>>();
    let mut reader = dataset::open(Format::CriteoTsv, &files, schema, ReadOptions::default())?;
    let (mut raw, mut batch) = (RawBatch::default(), Batch::default());
    let mut counts: Vec<HashMap<u64, f64>> = vec![HashMap::new(); schema.features.len()];
    while reader.read(4096, &mut raw)? > 0 {
        schema.encode(&raw, &mut batch)?;
        for (counts, column) in counts.iter_mut().zip(&batch.features) {
            column.ids.iter().for_each(|&id| *counts.entry(id).or_default() += 1.0);
        }
    }
    let sorted = |counts: HashMap<u64, f64>| {
        let mut counts: Vec<f64> = counts.into_values().collect();
        counts.sort_by(|a, b| b.total_cmp(a));
        counts
    };
    Ok(counts.into_iter().map(sorted).collect())
}

fn avazu_columns() -> anyhow::Result<Vec<Column>> {
    let frequency = json(AVAZU_FILES[1])?;
    let file = std::fs::File::open(data_folder().join(AVAZU_FILES[0]))?;
    let plain = ruzstd::decoding::StreamingDecoder::new(BufReader::new(file))
        .map_err(|error| anyhow::anyhow!("{}: {error}", AVAZU_FILES[0]))?;
    let mut counts: HashMap<String, Vec<f64>> = HashMap::new();
    for line in BufReader::new(plain).lines().skip(1) {
        let line = line?;
        let (Some((field, _)), Some((_, total))) = (line.split_once(','), line.rsplit_once(',')) else {
            continue;
        };
        counts.entry(field.to_owned()).or_default().push(total.parse()?);
    }
    // The file of counts has no `hour`, so the model leaves it out: each of its 240 values is hot for one
    // hour.
    let column = |name: &&str| {
        let fit = &frequency["columns"][*name];
        let mut counts = counts.get(*name)?.clone();
        counts.sort_by(|a, b| b.total_cmp(a));
        let (ids, accesses) = (fit["tail_ids"].as_u64()?, fit["tail_accesses"].as_f64()?);
        Some(Column::new(counts.into_iter(), 1.0 - accesses / AVAZU_ROWS, avazu_tail(ids, accesses)))
    };
    Ok(AVAZU_FEATURES.iter().filter_map(column).collect())
}

/// A tail of `ids` ids with `accesses` accesses together, whose first id has 49. Bisection finds its offset.
fn avazu_tail(ids: u64, accesses: f64) -> Tail {
    let tail = |offset: f64| Tail { ids, exponent: AVAZU_TAIL, offset };
    let mass = |offset: f64| 49.0 * (1.0 + offset).powf(AVAZU_TAIL) * tail(offset).area(ids as f64);
    let (mut low, mut high) = (0.0, 1e9);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        *(if mass(middle) < accesses { &mut low } else { &mut high }) = middle;
    }
    tail(low)
}
