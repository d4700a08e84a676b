//! The plot of a plan: hit rate against cache size, as SVG.
//!
//! The axis of sizes is logarithmic. Solid lines are the flat policies and the optimum at the given sizes,
//! the dashed line is the per-table LRU, and the filled area is the flat LRU at every size.

use std::io;

use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::prelude::*;

use super::curve::PAYING_GAIN;
use super::report::{Plan, bytes, percent};
use super::simulate::{Hits, Policy, SizeHits};

const SIZE: (u32, u32) = (860, 480);
/// Points of the filled area.
const CURVE_POINTS: usize = 400;

/// In the order of [`Policy::ALL`]. The palette is safe for colour-blind readers (Okabe and Ito, "Color
/// universal design", 2008).
const COLOURS: [RGBColor; Policy::ALL.len()] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

/// One line of the plot.
struct Series {
    name: String,
    colour: RGBColor,
    dashed: bool,
    /// Cache size in rows and hit rate.
    points: Vec<(f64, f64)>,
}

/// Why a plot was not drawn.
pub(crate) type PlotError = DrawingAreaErrorKind<io::Error>;

/// The plot as an SVG document.
///
/// # Errors
/// [`PlotError`] of the drawing library.
pub(crate) fn svg(plan: &Plan<'_>) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw(plan, &SVGBackend::with_string(&mut svg, SIZE).into_drawing_area())?;
    Ok(svg)
}

fn draw(
    plan: &Plan<'_>,
    page: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
) -> Result<(), PlotError> {
    page.fill(&WHITE)?;
    let most = plan.rows().max(2) as f64;
    let sizes = plan.sizes.iter().map(|size| size.rows as f64).filter(|rows| *rows >= 1.0);
    let least = sizes.fold(most / 100.0, f64::min).max(1.0).min(most / 2.0);
    // Ticks at shares of 1, 2 and 5 times a power of ten.
    let shares = (-6i32..=0).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    let ticks: Vec<_> = shares.map(|share| share * most).filter(|at| (least..=most).contains(at)).collect();
    let rows_axis = || (least..most).log_scale().with_key_points(ticks.clone());
    let mut chart = ChartBuilder::on(page)
        .caption(format!("Hit rate against cache size, {} rows", plan.rows()), ("sans-serif", 16))
        .margin(12)
        .margin_right(40)
        .x_label_area_size(44)
        .y_label_area_size(52)
        .top_x_label_area_size(24)
        .build_cartesian_2d(rows_axis(), 0.0..1.0)?
        .set_secondary_coord(rows_axis(), 0.0..1.0);
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .x_desc("cache size, share of all distinct rows (log scale)")
        .x_label_formatter(&|rows| format!("{} %", percent(rows / most)))
        .y_label_formatter(&|rate| format!("{:.0} %", rate * 100.0))
        .draw()?;
    chart.configure_secondary_axes().x_label_formatter(&|rows| bytes(plan.bytes(*rows as usize))).draw()?;

    let step = (most / least).ln() / CURVE_POINTS as f64;
    let sizes = (0..=CURVE_POINTS).map(|i| least * (step * i as f64).exp());
    let lru = sizes.map(|rows| (rows, plan.curve.rate(rows.round() as usize)));
    chart.draw_series(AreaSeries::new(lru, 0.0, COLOURS[0].mix(0.1)))?;

    for Series { name, colour, dashed, points } in series(plan) {
        let points = points.into_iter().map(|(rows, rate)| (rows.max(least), rate));
        chart.draw_series(points.clone().map(|at| Circle::new(at, 3, colour.filled())))?;
        let style = colour.stroke_width(2);
        let drawn = match dashed {
            true => chart.draw_series(DashedLineSeries::new(points, 6, 4, style))?,
            false => chart.draw_series(LineSeries::new(points, style))?,
        };
        drawn.label(name).legend(move |(x, y)| match dashed {
            true => PathElement::new([(x, y), (x + 6, y)], style),
            false => PathElement::new([(x, y), (x + 20, y)], style),
        });
    }

    let enough = plan.curve.enough(PAYING_GAIN);
    let (at, grey) = (enough as f64, RGBColor(0x44, 0x44, 0x44));
    let share = percent((at / most * 1000.0).round() / 1000.0);
    let line = [(at.max(least), 0.0), (at.max(least), 1.0)];
    chart
        .draw_series(DashedLineSeries::new(line, 2, 4, grey.stroke_width(1)))?
        .label(format!("dotted: past {share} % ({}), more gains little", bytes(plan.bytes(enough))))
        .legend(move |(x, y)| PathElement::new([(x + 10, y - 6), (x + 10, y + 6)], grey));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(0xdd, 0xdd, 0xdd))
        .draw()?;
    page.present()
}

fn series<'a>(plan: &'a Plan<'_>) -> impl Iterator<Item = Series> + 'a {
    let of = |name: String, colour, dashed, hits: &dyn Fn(&SizeHits) -> &Hits| {
        let sizes = plan.sizes.iter().filter(|size| size.rows >= 1);
        let mut points: Vec<(f64, f64)> =
            sizes.map(|size| (size.rows as f64, plan.rate(hits(size)))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name, colour, dashed, points }
    };
    let flat = Policy::ALL.into_iter().zip(COLOURS);
    let flat =
        flat.map(move |(p, colour)| of(format!("flat {}", p.name()), colour, false, &|s| s.flat.of(p)));
    let optimal = of("flat optimal".to_owned(), BLACK, false, &|size| &size.flat.optimal);
    let lru = COLOURS[Policy::Lru as usize];
    let per_table = of("per-table lru".to_owned(), lru, true, &|size| size.per_table.of(Policy::Lru));
    flat.chain([optimal, per_table])
}

#[cfg(test)]
mod tests;
