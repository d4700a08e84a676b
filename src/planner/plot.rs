//! The plot of a plan: hit rate against cache size, written as SVG directly.
//!
//! The axis of sizes is logarithmic. Solid lines are the flat policies and the optimum at the given sizes,
//! the dashed line is the per-table LRU, and the filled area is the flat LRU at every size.

use std::fmt::Write;

use super::curve::PAYING_GAIN;
use super::report::{Plan, bytes, percent};
use super::simulate::{Hits, Policy, SizeHits};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
/// The edges of the plotting area.
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 660.0;
const BOTTOM: f64 = 410.0;
/// Points of the filled area.
const CURVE_POINTS: usize = 400;

/// In the order of [`Policy::ALL`]. The palette is safe for colour-blind readers (Okabe and Ito, "Color
/// universal design", 2008).
const COLOURS: [&str; Policy::ALL.len()] =
    ["#0072b2", "#e69f00", "#999999", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"];

/// Maps sizes and rates to coordinates.
struct Axes {
    /// Rows at the left edge.
    least: f64,
    /// Rows at the right edge.
    most: f64,
}

/// One line of the plot.
struct Series {
    name: String,
    colour: &'static str,
    dashed: bool,
    /// Cache size in rows and hit rate.
    points: Vec<(f64, f64)>,
}

impl Axes {
    fn x(&self, rows: f64) -> f64 {
        let share = (rows.max(self.least) / self.least).ln() / (self.most / self.least).ln();
        LEFT + (RIGHT - LEFT) * share
    }

    fn y(rate: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * rate
    }
}

/// The plot as an SVG document.
#[must_use]
pub(crate) fn svg(plan: &Plan<'_>) -> String {
    let most = plan.rows().max(2) as f64;
    let sizes = plan.sizes.iter().map(|size| size.rows as f64).filter(|rows| *rows >= 1.0);
    let least = sizes.fold(most / 100.0, f64::min).max(1.0).min(most / 2.0);
    let axes = Axes { least, most };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"60\" y=\"24\" font-size=\"15\">Hit rate against cache size, {} rows</text>\n",
        plan.rows()
    );
    grid(&mut svg, plan, &axes);
    area(&mut svg, plan, &axes);
    enough(&mut svg, plan, &axes);
    lines(&mut svg, plan, &axes);
    svg + "</svg>\n"
}

fn grid(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    for step in 0..=10u8 {
        let y = Axes::y(f64::from(step) / 10.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} %</text>",
            LEFT - 6.0,
            y + 4.0,
            u32::from(step) * 10,
        );
    }
    // Ticks at shares of 1, 2 and 5 times a power of ten.
    let ticks = (-6i32..=0).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    for share in ticks.filter(|share| (axes.least..=axes.most).contains(&(share * axes.most))) {
        let (rows, x) = (share * axes.most, axes.x(share * axes.most));
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} %</text>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#666\" font-size=\"9\">{}</text>",
            BOTTOM + 18.0,
            percent(share),
            BOTTOM + 32.0,
            bytes(plan.bytes(rows as usize)),
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">\
         cache size, share of all distinct rows (log scale)</text>",
        (LEFT + RIGHT) / 2.0,
        BOTTOM + 54.0
    );
}

/// Fills the area below the hit rate of flat LRU at every size.
fn area(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    let step = (axes.most / axes.least).ln() / CURVE_POINTS as f64;
    let rows = (0..=CURVE_POINTS).map(|i| axes.least * (step * i as f64).exp());
    let points: String = rows
        .map(|rows| format!("{:.1},{:.1} ", axes.x(rows), Axes::y(plan.curve.rate(rows.round() as usize))))
        .collect();
    let _ = writeln!(
        svg,
        "<polygon points=\"{LEFT},{BOTTOM} {points}{RIGHT},{BOTTOM}\" fill=\"{}\" fill-opacity=\"0.1\"/>",
        COLOURS[0]
    );
}

/// Draws a line at the size from which more memory gains little.
fn enough(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    let rows = plan.curve.enough(PAYING_GAIN);
    let x = axes.x(rows as f64);
    let _ = writeln!(
        svg,
        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\" stroke=\"#444\" \
         stroke-dasharray=\"2 4\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#444\">dotted: more stops paying</text>\
         <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#444\">at {} % ({})</text>",
        RIGHT + 12.0,
        TOP + 210.0,
        RIGHT + 12.0,
        TOP + 226.0,
        percent((rows as f64 / axes.most * 1000.0).round() / 1000.0),
        bytes(plan.bytes(rows)),
    );
}

fn lines(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    let series = |name: &str, colour, dashed, hits: &dyn Fn(&SizeHits) -> &Hits| {
        let sizes = plan.sizes.iter().filter(|size| size.rows >= 1);
        let mut points: Vec<(f64, f64)> =
            sizes.map(|size| (size.rows as f64, plan.rate(hits(size)))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: name.to_owned(), colour, dashed, points }
    };
    let flat = Policy::ALL.into_iter().zip(COLOURS);
    let flat =
        flat.map(|(p, colour)| series(&format!("flat {}", p.name()), colour, false, &|s| s.flat.of(p)));
    let optimal = series("flat optimal", "#000000", false, &|size| &size.flat.optimal);
    let lru_colour = COLOURS[Policy::Lru as usize];
    let per_table = series("per-table lru", lru_colour, true, &|size| size.per_table.of(Policy::Lru));
    for (place, series) in flat.chain([optimal, per_table]).enumerate() {
        line(svg, axes, &series, place);
    }
}

/// Draws a series, and its entry at index `place` of the legend.
fn line(svg: &mut String, axes: &Axes, series: &Series, place: usize) {
    let Series { name, colour, dashed, points } = series;
    let dash = if *dashed { " stroke-dasharray=\"6 4\"" } else { "" };
    let at = |&(rows, rate): &(f64, f64)| (axes.x(rows), Axes::y(rate));
    let path: String = points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1} ")).collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{dash}/>"
    );
    for (x, y) in points.iter().map(at) {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{colour}\"/>");
    }
    let (x, y) = (RIGHT + 12.0, TOP + 10.0 + 20.0 * place as f64);
    let _ = writeln!(
        svg,
        "<line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>\
         <text x=\"{}\" y=\"{}\">{name}</text>",
        x + 24.0,
        x + 32.0,
        y + 4.0
    );
}

#[cfg(test)]
mod tests;
