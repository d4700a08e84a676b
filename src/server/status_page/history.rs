//! The last minutes of every model, for the plots of the status page.
//!
//! Every [`EVERY`], the server reads its own metrics page and keeps what the plots need ([`Totals`]). So the
//! plots show the same facts as `/metrics`, and a request costs nothing more. Memory is bounded: [`POINTS`]
//! readings of at most [`MODELS`] models, and [`CURVE`] points of the AUC of a trained model, whose distance
//! doubles when they are full.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use crate::metrics::{CODES, Page, SECONDS};
use crate::sync::EvenPoisoned;
use crate::types::unix_ms;

/// How often the metrics are read.
pub(crate) const EVERY: Duration = Duration::from_secs(5);

/// Readings that are kept: ten minutes.
const POINTS: usize = 121;

/// Readings of the last minute.
const MINUTE: usize = 12;

/// Most models, the first by name.
const MODELS: usize = 32;

/// Most points of the AUC of a trained model.
const CURVE: usize = 240;

/// A model as the history knows it.
pub(crate) struct PlottedModel {
    pub name: String,
    /// The names of its tables.
    pub tables: Vec<String>,
}

/// Counters of a model at one time.
#[derive(Clone, Debug, Default)]
struct Totals {
    served: f64,
    /// Requests that were answered with any other code.
    failed: f64,
    samples: f64,
    hits: f64,
    misses: f64,
    /// Samples that were trained in this process.
    trained: f64,
    /// Requests that took at most each of [`SECONDS`], and all requests.
    took: [f64; SECONDS.len() + 1],
}

impl Totals {
    fn read(page: &Page<'_>, PlottedModel { name, tables }: &PlottedModel) -> Self {
        let get = |metric: &str, labels: &[(&'static str, &str)]| {
            let labels = [&[("model", name.as_str())], labels].concat();
            page.get(metric, &labels).unwrap_or(0.0)
        };
        let of_code = |code: &str| get("flechette_requests_total", &[("code", code)]);
        let of_tables = |metric| tables.iter().map(|table| get(metric, &[("table", table)])).sum();
        let took = |at: usize| {
            let le = SECONDS.get(at).map_or("+Inf".to_owned(), f64::to_string);
            get("flechette_request_seconds_bucket", &[("le", &le)])
        };
        Self {
            served: of_code("OK"),
            failed: CODES.iter().filter(|code| **code != "OK").map(|code| of_code(code)).sum(),
            samples: get("flechette_batch_samples_sum", &[]),
            hits: of_tables("flechette_cache_hits_total"),
            misses: of_tables("flechette_cache_misses_total"),
            trained: get("flechette_training_samples_total", &[]),
            took: std::array::from_fn(took),
        }
    }
}

/// What happened between two readings, per second. `None` if there is nothing to compute it from.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Rates {
    requests_per_second: Option<f32>,
    failed_per_second: Option<f32>,
    samples_per_second: Option<f32>,
    p50_seconds: Option<f32>,
    p99_seconds: Option<f32>,
    hit_rate: Option<f32>,
    trained_per_second: Option<f32>,
}

impl Rates {
    fn between(then: &Totals, now: &Totals, seconds: f64) -> Self {
        // The counters of a model that was loaded again with other tables may be smaller.
        let grown = |of: fn(&Totals) -> f64| (of(now) - of(then)).max(0.0);
        let rate = |of| Some((grown(of) / seconds) as f32);
        let (hits, misses) = (grown(|totals| totals.hits), grown(|totals| totals.misses));
        let took: [f64; SECONDS.len() + 1] = std::array::from_fn(|at| now.took[at] - then.took[at]);
        Self {
            requests_per_second: rate(|totals| totals.served),
            failed_per_second: rate(|totals| totals.failed),
            samples_per_second: rate(|totals| totals.samples),
            p50_seconds: quantile(&took, 0.5),
            p99_seconds: quantile(&took, 0.99),
            hit_rate: (hits + misses > 0.0).then(|| (hits / (hits + misses)) as f32),
            trained_per_second: rate(|totals| totals.trained),
        }
    }
}

/// A quantile of a histogram, as Prometheus's `histogram_quantile` computes it: linear within a bucket.
fn quantile(took: &[f64; SECONDS.len() + 1], quantile: f64) -> Option<f32> {
    let all = took[SECONDS.len()];
    let rank = all * quantile;
    let at = took.iter().position(|below| *below >= rank).filter(|_| all > 0.0)?;
    let Some(upper) = SECONDS.get(at) else { return SECONDS.last().map(|last| *last as f32) };
    let (lower, before) = if at == 0 { (0.0, 0.0) } else { (SECONDS[at - 1], took[at - 1]) };
    let share = (rank - before) / (took[at] - before).max(f64::MIN_POSITIVE);
    Some((lower + (upper - lower) * share) as f32)
}

/// A measurement of the AUC.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CurvePoint {
    /// Samples that were trained before it.
    trained: f64,
    auc: f64,
}

impl Serialize for CurvePoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.trained, self.auc).serialize(serializer)
    }
}

/// The AUC over the samples that were trained.
#[derive(Debug, Default)]
struct Curve {
    points: Vec<CurvePoint>,
    readings: u64,
    /// One of `1 << halved` readings is a point.
    halved: u32,
}

impl Curve {
    fn add(&mut self, point: CurvePoint) {
        if self.points.last().is_some_and(|last| last.trained == point.trained) {
            return;
        }
        if self.readings.is_multiple_of(1 << self.halved) {
            self.points.push(point);
        }
        self.readings += 1;
        if self.points.len() == CURVE {
            let mut at = 0..;
            self.points.retain(|_| at.next().is_some_and(|at| at % 2 == 0));
            self.halved += 1;
        }
    }
}

/// The AUC of a model; `None` before the first measurement.
fn auc(page: &Page<'_>, model: &str) -> Option<CurvePoint> {
    let get = |name| page.get(name, &[("model", model)]);
    let auc = get("flechette_progressive_auc").filter(|auc| auc.is_finite())?;
    Some(CurvePoint { trained: get("flechette_training_samples_total")?, auc })
}

struct Point {
    at: Instant,
    unix_ms: u64,
    models: BTreeMap<String, Totals>,
}

impl Point {
    fn seconds_since(&self, then: &Self) -> f64 {
        self.at.duration_since(then.at).as_secs_f64().max(1e-3)
    }

    fn rates(&self, then: &Self, model: &str) -> Rates {
        match (then.models.get(model), self.models.get(model)) {
            (Some(before), Some(now)) => Rates::between(before, now, self.seconds_since(then)),
            _ => Rates::default(),
        }
    }
}

#[derive(Default)]
struct Kept {
    points: VecDeque<Point>,
    curves: BTreeMap<String, Curve>,
}

/// The last readings.
#[derive(Default)]
pub(crate) struct History(Mutex<Kept>);

/// The plots of a model. All arrays but the last one have an element for each of [`Plots::times`].
#[derive(Default, Serialize)]
pub(crate) struct ModelPlots {
    last_minute: Rates,
    intervals: Vec<Rates>,
    /// In JSON, each is an array of the samples trained and the AUC.
    auc: Vec<CurvePoint>,
}

/// The plots of all models.
#[derive(Serialize)]
pub(crate) struct Plots {
    /// The ends of the intervals between two readings, in milliseconds since 1970.
    times: Vec<u64>,
    models: BTreeMap<String, ModelPlots>,
}

impl History {
    fn locked(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().even_poisoned()
    }

    fn point(page: &Page<'_>, models: &[PlottedModel]) -> Point {
        let models = models.iter().take(MODELS);
        let models = models.map(|model| (model.name.clone(), Totals::read(page, model)));
        Point { at: Instant::now(), unix_ms: unix_ms(), models: models.collect() }
    }

    /// Keeps a reading.
    pub(crate) fn add(&self, page: &Page<'_>, models: &[PlottedModel]) {
        let point = Self::point(page, models);
        let mut kept = self.locked();
        for name in point.models.keys() {
            let Some(auc) = auc(page, name) else { continue };
            kept.curves.entry(name.clone()).or_default().add(auc);
        }
        kept.curves.retain(|name, _| point.models.contains_key(name));
        if kept.points.len() == POINTS {
            kept.points.pop_front();
        }
        kept.points.push_back(point);
    }

    /// The plots, whose last values are those of this reading.
    pub(crate) fn plots(&self, page: &Page<'_>, models: &[PlottedModel]) -> Plots {
        let now = Self::point(page, models);
        let kept = self.locked();
        let points = &kept.points;
        let times = points.iter().skip(1).map(|point| point.unix_ms).collect();
        let plots = |name: &String| {
            let intervals = points.iter().zip(points.iter().skip(1));
            let mut minute = points.iter().skip(points.len().saturating_sub(MINUTE));
            let minute = minute.find(|point| point.models.contains_key(name));
            let known = kept.curves.get(name).map_or(&[][..], |curve| &curve.points);
            let last = auc(page, name).filter(|last| known.last() != Some(last));
            ModelPlots {
                last_minute: minute.map_or_else(Rates::default, |then| now.rates(then, name)),
                intervals: intervals.map(|(then, now)| now.rates(then, name)).collect(),
                auc: known.iter().copied().chain(last).collect(),
            }
        };
        Plots { times, models: now.models.keys().map(|name| (name.clone(), plots(name))).collect() }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    fn models(count: usize) -> Vec<PlottedModel> {
        let model = |model| PlottedModel { name: format!("m{model:03}"), tables: vec!["t".to_owned()] };
        (0..count).map(model).collect()
    }

    #[test]
    fn quantiles_are_those_of_prometheus() {
        let mut took = [0.0; SECONDS.len() + 1];
        assert_eq!(quantile(&took, 0.5), None);
        // 10 requests of at most 50 us, 10 more of at most 100 us.
        took.fill(20.0);
        took[0] = 10.0;
        assert_eq!(quantile(&took, 0.5), Some(0.000_05));
        assert_eq!(quantile(&took, 0.75), Some(0.000_075));
        // All took longer than the last bound.
        let mut took = [0.0; SECONDS.len() + 1];
        took[SECONDS.len()] = 3.0;
        assert_eq!(quantile(&took, 0.99), Some(10.0));
    }

    #[test]
    fn readings_models_and_curves_are_bounded() {
        let history = History::default();
        for samples in 0..2000 {
            let text = format!(
                "flechette_progressive_auc{{model=\"m000\"}} 0.7\n\
                 flechette_training_samples_total{{model=\"m000\"}} {samples}\n"
            );
            history.add(&Page::read(&text), &models(100));
        }
        let plots = history.plots(&Page::read(""), &models(100));
        assert_eq!((plots.times.len(), plots.models.len()), (POINTS - 1, MODELS));
        let curve = &plots.models["m000"].auc;
        assert!((CURVE / 2..=CURVE).contains(&curve.len()), "{}", curve.len());
        assert_eq!(curve[0].trained, 0.0);
        let steps: Vec<f64> = curve.windows(2).map(|pair| pair[1].trained - pair[0].trained).collect();
        assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}");
    }

    #[test]
    fn rates_are_differences_of_two_readings() {
        let text = |requests: u32| {
            format!(
                "flechette_requests_total{{model=\"m000\",code=\"OK\"}} {requests}\n\
                 flechette_requests_total{{model=\"m000\",code=\"INTERNAL\"}} {requests}\n\
                 flechette_cache_hits_total{{model=\"m000\",table=\"t\"}} {}\n\
                 flechette_cache_misses_total{{model=\"m000\",table=\"t\"}} {requests}\n",
                3 * requests
            )
        };
        let history = History::default();
        history.add(&Page::read(&text(10)), &models(1));
        std::thread::sleep(Duration::from_millis(20));
        let rates = history.plots(&Page::read(&text(20)), &models(1)).models["m000"].last_minute;
        let requests = rates.requests_per_second.unwrap();
        assert!((1.0..500.0).contains(&requests), "{requests}");
        assert_eq!(rates.failed_per_second, Some(requests));
        assert_eq!((rates.hit_rate, rates.p50_seconds), (Some(0.75), None));
        let rates = history.plots(&Page::read(""), &models(1)).models["m000"].last_minute;
        assert_eq!(rates.requests_per_second, Some(0.0), "the counters are smaller than before");
    }
}
