//! Tables and numbers of the reports as text.

use std::fmt::Write;

/// A table of text. The first column is left-aligned, the others are right-aligned.
pub(super) struct Grid(Vec<Vec<String>>);

impl Grid {
    pub(super) fn new<'a>(head: impl IntoIterator<Item = &'a str>) -> Self {
        Self(vec![head.into_iter().map(str::to_owned).collect()])
    }

    pub(super) fn add(&mut self, line: impl IntoIterator<Item = String>) {
        self.0.push(line.into_iter().collect());
    }

    pub(super) fn lines(&self) -> String {
        let columns = self.0[0].len();
        let width = |c: usize| self.0.iter().map(|line| line[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for line in &self.0 {
            for (c, (cell, width)) in line.iter().zip(&widths).enumerate() {
                let _ = match c {
                    0 => write!(text, "{cell:<width$}"),
                    _ => write!(text, "  {cell:>width$}"),
                };
            }
            text.push('\n');
        }
        text
    }
}

/// A share as a percentage with up to three decimals.
pub(crate) fn percent(share: f64) -> String {
    let text = format!("{:.3}", share * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A share as a percentage with one decimal.
pub(super) fn points(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// A number with three digits and a unit of 1000s, such as `5.20 M`.
pub(super) fn count(number: f64) -> String {
    const UNITS: [&str; 5] = ["", " K", " M", " G", " T"];
    let mut unit = 0;
    let mut scaled = number;
    while scaled >= 999.5 && unit + 1 < UNITS.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    let decimals = match scaled {
        _ if unit == 0 || scaled >= 99.95 => 0,
        _ if scaled >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.decimals$}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_in_plain_units() {
        assert_eq!(percent(0.005), "0.5");
        assert_eq!(percent(1.0), "100");
        let counts = [7.0, 999.4, 999.6, 5_200_000.0, 12_345.0, 999_950_000.0].map(count);
        assert_eq!(counts, ["7", "999", "1.00 K", "5.20 M", "12.3 K", "1.00 G"]);
    }
}
