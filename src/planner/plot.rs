//! A plan as a drawing: hit rate against size, as SVG written by hand.
//!
//! The sizes stand on a logarithmic axis. Lines are the flat policies and the optimal at the sizes that
//! were asked for, dashed the per-table LRU; the area below is flat LRU at every size.

use std::fmt::Write;

use super::curve::PAYING_GAIN;
use super::report::{Plan, bytes, percent};
use super::simulate::{Hits, Policy, SizeHits};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
/// The drawing area: left, top, right, bottom.
const AREA: (f64, f64, f64, f64) = (60.0, 40.0, 660.0, 410.0);
/// Points of the curve at most.
const CURVE_POINTS: usize = 400;

/// By policy, then the optimal, then the per-table LRU. Told apart by those who see fewer colours too
/// (Okabe and Ito, "Color universal design", 2008).
const COLOURS: [&str; 8] =
    ["#0072b2", "#e69f00", "#999999", "#009e73", "#cc79a7", "#d55e00", "#000000", "#0072b2"];

/// Where a size and a rate lie.
struct Axes {
    /// Rows at the left edge and at the right one.
    least: f64,
    most: f64,
}

impl Axes {
    fn x(&self, rows: f64) -> f64 {
        let share = (rows.max(self.least) / self.least).ln() / (self.most / self.least).ln();
        AREA.0 + (AREA.2 - AREA.0) * share
    }

    fn y(rate: f64) -> f64 {
        AREA.3 - (AREA.3 - AREA.1) * rate
    }
}

/// Draws a plan.
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
    let (left, top, right, bottom) = AREA;
    for step in 0..=10u8 {
        let y = Axes::y(f64::from(step) / 10.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} %</text>",
            left - 6.0,
            y + 4.0,
            u32::from(step) * 10,
        );
    }
    // Ticks at 1, 2 and 5 times a power of ten of the rows' share.
    let ticks = (-6i32..=0).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    for share in ticks.filter(|share| (axes.least..=axes.most).contains(&(share * axes.most))) {
        let (rows, x) = (share * axes.most, axes.x(share * axes.most));
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} %</text>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#666\" font-size=\"9\">{}</text>",
            bottom + 18.0,
            percent(share),
            bottom + 32.0,
            bytes(plan.bytes(rows as usize)),
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">cache size, share of all distinct rows (log scale)</text>",
        (left + right) / 2.0,
        bottom + 54.0
    );
}

/// Flat LRU at every size.
fn area(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    let step = (axes.most / axes.least).ln() / CURVE_POINTS as f64;
    let rows = (0..=CURVE_POINTS).map(|i| axes.least * (step * i as f64).exp());
    let points: String = rows
        .map(|rows| format!("{:.1},{:.1} ", axes.x(rows), Axes::y(plan.curve.rate(rows.round() as usize))))
        .collect();
    let (left, _, right, bottom) = AREA;
    let _ = writeln!(
        svg,
        "<polygon points=\"{left},{bottom} {points}{right},{bottom}\" fill=\"{}\" fill-opacity=\"0.1\"/>",
        COLOURS[0]
    );
}

/// Where more memory stops paying.
fn enough(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    let rows = plan.curve.enough(PAYING_GAIN);
    let (x, (_, top, right, bottom)) = (axes.x(rows as f64), AREA);
    let _ = writeln!(
        svg,
        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#444\" stroke-dasharray=\"2 4\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#444\">dotted: more stops paying</text>\
         <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#444\">at {} % ({})</text>",
        right + 12.0,
        top + 190.0,
        right + 12.0,
        top + 206.0,
        percent((rows as f64 / axes.most * 1000.0).round() / 1000.0),
        bytes(plan.bytes(rows)),
    );
}

fn lines(svg: &mut String, plan: &Plan<'_>, axes: &Axes) {
    let flat = |p: usize| move |size: &SizeHits| size.flat[p].clone();
    for (p, policy) in Policy::ALL.iter().enumerate() {
        line(svg, plan, axes, &format!("flat {}", policy.name()), p, &flat(p));
    }
    let others = Policy::ALL.len();
    line(svg, plan, axes, "optimal", others, &|size| size.optimal.clone());
    line(svg, plan, axes, "per-table lru", others + 1, &|size| size.per_table[0].clone());
}

fn line(
    svg: &mut String,
    plan: &Plan<'_>,
    axes: &Axes,
    name: &str,
    place: usize,
    hits: &dyn Fn(&SizeHits) -> Hits,
) {
    let mut points: Vec<(f64, f64)> =
        plan.sizes.iter().map(|size| (size.rows as f64, plan.rate(&hits(size)))).collect();
    points.retain(|point| point.0 >= 1.0);
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let at = |&(rows, rate): &(f64, f64)| (axes.x(rows), Axes::y(rate));
    let (colour, dash) = (COLOURS[place], if place == 7 { " stroke-dasharray=\"6 4\"" } else { "" });
    let path: String = points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1} ")).collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{dash}/>"
    );
    for (x, y) in points.iter().map(at) {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{colour}\"/>");
    }
    let (x, y) = (AREA.2 + 12.0, AREA.1 + 10.0 + 20.0 * place as f64);
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
