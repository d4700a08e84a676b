//! The table of results, and the same as JSON.

use serde_json::{Value, json};

use crate::harness::{self, Sorted};
use crate::program::Bench;

/// Results, in the order in which they were measured.
pub struct Figures {
    settings: Value,
    load: String,
    rows: Vec<Value>,
}

impl Figures {
    /// Prints the heading.
    pub fn new(bench: &Bench) -> Self {
        println!("publish: {}", harness::place());
        println!("{bench:?}");
        println!(
            "{:<58} {:>9} {:>9} {:>9} {:>9} {:>4}  aim",
            "figure", "median", "p99", "least", "most", "n"
        );
        Self { settings: json!(format!("{bench:?}")), load: harness::load(), rows: Vec::new() }
    }

    /// Adds a figure and prints it. The 99th percentile of fewer than 50 values is the largest one.
    pub fn add(&mut self, figure: &str, aim: &str, values: &[f64]) {
        if values.is_empty() {
            println!("{figure:<58} nothing was measured");
        } else {
            let sorted = Sorted::of(values.iter().copied());
            let [median, p99, least, most] = [0.5, 0.99, 0.0, 1.0].map(|share| shown(sorted.at(share)));
            println!("{figure:<58} {median:>9} {p99:>9} {least:>9} {most:>9} {:>4}  {aim}", values.len());
        }
        self.rows.push(json!({ "figure": figure, "aim": aim, "values": values }));
    }

    /// Prints the load of the machine and, if asked for, the table as JSON.
    pub fn finish(self, as_json: bool) {
        println!("load {} before, {} after (1, 5, 15 minutes)", self.load, harness::load());
        if as_json {
            println!(
                "{}",
                json!({
                    "bench": "publish", "place": harness::place(), "settings": self.settings,
                    "load": [self.load, harness::load()], "rows": self.rows,
                })
            );
        }
    }
}

/// Four digits, or all digits of a large number.
fn shown(value: f64) -> String {
    let digits = if value.abs() < 10.0 { 3 } else { usize::from(value.abs() < 1000.0) };
    format!("{value:.digits$}")
}
