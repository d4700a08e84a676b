//! The harness of all benches: alternating windows, ratios, and a report with the machine and the date.
//!
//! Absolute rates mean little on a shared machine, so every result is a ratio to a baseline that is measured
//! in the same run. Both sides run in turn in short windows, and each pair of consecutive windows gives one
//! ratio. So a disturbance that is longer than a window affects both sides of a pair. The result is the
//! median of the ratios, printed with its spread.

// Each bench uses a part of this module.
#![allow(dead_code)]

pub mod program;
pub mod replay;

use std::time::{Duration, Instant, SystemTime};

use flechette::mem::SplitMix64;

/// The options of a bench, from its command line. `--bench`, which cargo adds, is ignored.
pub struct Options {
    /// Whether the output ends with one JSON object on one line.
    pub json: bool,
    /// Number of pairs of windows. Published results need at least 9.
    pub pairs: usize,
    /// Length of a window.
    pub window: Duration,
    words: Vec<String>,
}

impl Options {
    /// Reads `--json`, `--pairs N`, `--window-ms N` and `--only TEXT`.
    pub fn read(window_ms: usize) -> Self {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let json = words.iter().any(|word| word == "--json");
        let mut options = Self { json, pairs: 0, window: Duration::ZERO, words };
        options.pairs = options.number("--pairs", 11).max(1);
        options.window = Duration::from_millis(options.number("--window-ms", window_ms).max(1) as u64);
        options
    }

    /// The value of a flag: the word after it.
    pub fn value(&self, flag: &str) -> Option<String> {
        self.words.iter().skip_while(|word| *word != flag).nth(1).cloned()
    }

    /// The value of a flag as a number, or the default.
    pub fn number(&self, flag: &str, default: usize) -> usize {
        self.value(flag).and_then(|value| value.parse().ok()).unwrap_or(default)
    }

    /// Whether to run a setting. `--only TEXT` selects the settings with `TEXT` in their names.
    pub fn wants(&self, setting: &str) -> bool {
        self.value("--only").is_none_or(|part| setting.contains(&part))
    }

    /// Calls `work` until a window is over. `work` returns how many units it did. Returns units per second.
    pub fn rate(&self, mut work: impl FnMut() -> u64) -> f64 {
        let (began, mut units) = (Instant::now(), 0);
        while began.elapsed() < self.window {
            units += work();
        }
        units as f64 / began.elapsed().as_secs_f64()
    }

    /// Runs one warm-up window of each side, then pairs of windows. The first side of a pair alternates. The
    /// sides return units per second.
    pub fn compare(&self, mut ours: impl FnMut() -> f64, mut baseline: impl FnMut() -> f64) -> Pairs {
        ours();
        baseline();
        let pair = |i| match i % 2 {
            0 => (ours(), baseline()),
            _ => {
                let theirs = baseline();
                (ours(), theirs)
            }
        };
        Pairs((0..self.pairs).map(pair).collect())
    }
}

/// The rates of each pair of windows: ours and the baseline's.
pub struct Pairs(Vec<(f64, f64)>);

impl Pairs {
    /// Our rates.
    pub fn ours(&self) -> Sorted {
        Sorted::of(self.0.iter().map(|pair| pair.0))
    }

    /// For benches that measure pairs without [`Options::compare`].
    pub fn of(pairs: Vec<(f64, f64)>) -> Self {
        Self(pairs)
    }
}

/// Sorted numbers, for quantiles.
pub struct Sorted(Vec<f64>);

impl Sorted {
    /// Sorts at least one number.
    pub fn of(numbers: impl Iterator<Item = f64>) -> Self {
        let mut numbers: Vec<f64> = numbers.collect();
        numbers.sort_by(f64::total_cmp);
        Self(numbers)
    }

    /// The quantile `share`, from 0 to 1.
    pub fn at(&self, share: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * share).round() as usize]
    }
}

/// A row of the report: one setting.
struct Row {
    setting: String,
    ratio: Sorted,
    ours: Sorted,
    baseline: Sorted,
    goal: Option<f64>,
}

/// The results of a bench: a table with a row per setting.
pub struct Report {
    bench: &'static str,
    unit: &'static str,
    baseline: &'static str,
    json: bool,
    load: String,
    rows: Vec<Row>,
}

impl Report {
    /// A report of `unit` per second, compared with `baseline`. Prints the heading with machine and date.
    pub fn new(bench: &'static str, unit: &'static str, baseline: &'static str, options: &Options) -> Self {
        let load = load();
        println!("{bench}: {unit}/s, ours against {baseline}");
        println!("{}", place());
        println!("{} pairs of {} ms windows in turn", options.pairs, options.window.as_millis());
        println!(
            "{:<34} {:>6} {:>6} {:>13} {:>13} {:>12} {:>12} {:>6}",
            "setting", "ratio", "best", "quartiles", "least-most", "ours", "baseline", "goal"
        );
        Self { bench, unit, baseline, json: options.json, load, rows: Vec::new() }
    }

    /// Adds and prints a row.
    pub fn add(&mut self, setting: String, pairs: &Pairs, goal: Option<f64>) {
        let ratio = Sorted::of(pairs.0.iter().map(|(ours, theirs)| ours / theirs));
        let ours = Sorted::of(pairs.0.iter().map(|pair| pair.0));
        let baseline = Sorted::of(pairs.0.iter().map(|pair| pair.1));
        println!(
            "{setting:<34} {:>6.3} {:>6.3} {:>6.3}-{:<6.3} {:>6.3}-{:<6.3} {:>12.0} {:>12.0} {:>6}",
            ratio.at(0.5),
            ours.at(1.0) / baseline.at(1.0),
            ratio.at(0.25),
            ratio.at(0.75),
            ratio.at(0.0),
            ratio.at(1.0),
            ours.at(0.5),
            baseline.at(0.5),
            goal.map_or(String::new(), |goal| format!("{goal:.2}")),
        );
        self.rows.push(Row { setting, ratio, ours, baseline, goal });
    }

    /// Prints the meaning of the columns and, with `--json`, the table as JSON.
    pub fn finish(self) {
        println!("ratio: median of the pairs; best: fastest window against fastest; rates: medians");
        println!("load {} before, {} after (1, 5, 15 minutes)", self.load, load());
        if !self.json {
            return;
        }
        let rows = self.rows.iter().map(|row| {
            serde_json::json!({
                "setting": row.setting, "ratio": row.ratio.at(0.5), "goal": row.goal,
                "quartiles": [row.ratio.at(0.25), row.ratio.at(0.75)],
                "least": row.ratio.at(0.0), "most": row.ratio.at(1.0),
                "best": row.ours.at(1.0) / row.baseline.at(1.0),
                "ours": row.ours.at(0.5), "baseline": row.baseline.at(0.5), "pairs": row.ratio.0.len(),
            })
        });
        let rows: Vec<_> = rows.collect();
        println!(
            "{}",
            serde_json::json!({
                "bench": self.bench, "unit": format!("{}/s", self.unit), "baseline": self.baseline,
                "place": place(), "load": [self.load, load()], "rows": rows,
            })
        );
    }
}

/// The machine and the time: processor, cores, load and date.
pub fn place() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let name = name.unwrap_or("unknown processor");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{name}, {cores} cores; load {}; {} UTC", load(), date())
}

/// Load averages over 1, 5 and 15 minutes.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Today, in UTC, by the civil-from-days algorithm (Howard Hinnant, "chrono-Compatible Low-Level
/// Date Algorithms").
fn date() -> String {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let days = seconds as i64 / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

/// Draws ranks from a bounded power law, `P(rank) ~ rank^-alpha`, by inverting its continuous form.
pub struct PowerLaw {
    power: f64,
    mass: f64,
    ranks: u64,
}

impl PowerLaw {
    /// Ranks from 0, the most frequent, to `ranks` exclusive.
    pub fn new(alpha: f64, ranks: u64) -> Self {
        let (power, end) = (1.0 - alpha, 1.0 + ranks as f64);
        let mass = if power.abs() < 1e-9 { end.ln() } else { (end.powf(power) - 1.0) / power };
        Self { power, mass, ranks }
    }

    /// The next rank.
    pub fn rank(&self, draw: &mut Draw) -> u64 {
        let (area, power) = (draw.uniform() * self.mass, self.power);
        let x = if power.abs() < 1e-9 { area.exp() } else { (1.0 + area * power).powf(power.recip()) };
        // Rounding may give `ranks`, which is out of range.
        (x as u64 - 1).min(self.ranks - 1)
    }
}

/// Random numbers, the same in every run.
pub struct Draw(SplitMix64);

impl Draw {
    /// Each seed gives another stream.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed.wrapping_mul(0xd134_2543_de82_ef95)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// A number from 0 to 1 exclusive.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}
