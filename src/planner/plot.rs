//! The plot of a plan: hit rate against cache size, as SVG.
//!
//! The axis of sizes is logarithmic. Solid lines are the flat policies and the optimum at the given sizes,
//! the dashed line is the per-table LRU, and the filled area is the flat LRU at every size. The legend is
//! beside the chart, so that it covers no line.

use std::io;

use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::element::DashedPathElement;
use plotters::prelude::*;

use super::curve::PAYING_GAIN;
use super::grid::percent;
use super::report::Plan;
use super::simulate::{Hits, SimulatedPolicy, SizeHits};
use crate::mem::bytes;

const SIZE: (u32, u32) = (1080, 500);
const CHART_WIDTH: u32 = 800;
const GREY: RGBColor = RGBColor(0x44, 0x44, 0x44);
/// How much of its colour the area has.
const AREA_MIX: f64 = 0.1;
/// Points of the filled area.
const CURVE_POINTS: usize = 400;

/// In the order of [`SimulatedPolicy::ALL`]. The palette is safe for colour-blind readers (Okabe and Ito,
/// "Color universal design", 2008).
const COLOURS: [RGBColor; SimulatedPolicy::ALL.len()] = [
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

type Page<'p> = DrawingArea<SVGBackend<'p>, plotters::coord::Shift>;

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

/// The axis of sizes, in rows.
#[derive(Clone, Copy)]
struct SizeAxis {
    least: f64,
    most: f64,
}

impl SizeAxis {
    fn of(plan: &Plan<'_>) -> Self {
        let most = plan.rows().max(2) as f64;
        let sizes = plan.sizes.iter().map(|size| size.rows as f64).filter(|rows| *rows >= 1.0);
        Self { least: sizes.fold(most / 100.0, f64::min).max(1.0).min(most / 2.0), most }
    }

    /// Shares of 1, 2 and 5 times a power of ten.
    fn ticks(self) -> Vec<f64> {
        let shares = (-6i32..=0).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
        shares.map(|share| share * self.most).filter(|at| (self.least..=self.most).contains(at)).collect()
    }

    /// The sizes of the filled area, at equal distances.
    fn curve_points(self) -> impl Iterator<Item = f64> {
        let step = (self.most / self.least).ln() / CURVE_POINTS as f64;
        (0..=CURVE_POINTS).map(move |i| self.least * (step * i as f64).exp())
    }
}

fn draw(plan: &Plan<'_>, page: &Page<'_>) -> Result<(), PlotError> {
    page.fill(&WHITE)?;
    let axis = SizeAxis::of(plan);
    let SizeAxis { least, most } = axis;
    let rows_axis = || (least..most).log_scale().with_key_points(axis.ticks());
    let (chart_page, legend_page) = page.split_horizontally(CHART_WIDTH);
    let mut chart = ChartBuilder::on(&chart_page)
        .caption("Hit rate by cache size", ("sans-serif", 16))
        .margin(12)
        .margin_right(40)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .top_x_label_area_size(44)
        .build_cartesian_2d(rows_axis(), 0.0..1.0)?
        .set_secondary_coord(rows_axis(), 0.0..1.0);
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .x_desc(format!("cache size, % of the {} distinct rows (log scale)", plan.rows()))
        .y_desc("hit rate, % of all accesses")
        .x_label_formatter(&|rows| format!("{} %", percent(rows / most)))
        .y_label_formatter(&|rate| format!("{:.0} %", rate * 100.0))
        .draw()?;
    chart
        .configure_secondary_axes()
        .x_desc("cache.bytes of a server")
        .x_label_formatter(&|rows| bytes(plan.bytes(*rows as usize)))
        .draw()?;

    let lru = axis.curve_points().map(|rows| (rows, plan.curve.rate(rows.round() as usize)));
    chart.draw_series(AreaSeries::new(lru, 0.0, COLOURS[SimulatedPolicy::Lru as usize].mix(AREA_MIX)))?;

    let all = series(plan);
    for Series { colour, dashed, points, .. } in &all {
        let points = points.iter().map(|&(rows, rate)| (rows.max(least), rate));
        chart.draw_series(points.clone().map(|at| Circle::new(at, 3, colour.filled())))?;
        let style = colour.stroke_width(2);
        match dashed {
            true => chart.draw_series(DashedLineSeries::new(points, 6, 4, style))?,
            false => chart.draw_series(LineSeries::new(points, style))?,
        };
    }
    let at = (plan.curve.enough(PAYING_GAIN) as f64).max(least);
    chart.draw_series(DashedLineSeries::new([(at, 0.0), (at, 1.0)], 2, 4, GREY.stroke_width(1)))?;
    legend(plan, &all, &legend_page)?;
    page.present()
}

/// Draws a sample and a text for everything in the chart.
fn legend(plan: &Plan<'_>, series: &[Series], page: &Page<'_>) -> Result<(), PlotError> {
    let mut tops = (80..).step_by(22);
    let mut text = |text: &str| -> Result<i32, PlotError> {
        let top = tops.next().unwrap_or_default();
        page.draw(&Text::new(text.to_owned(), (44, top - 5), ("sans-serif", 13)))?;
        Ok(top)
    };
    for Series { name, colour, dashed, .. } in series {
        let y = text(name)?;
        let (ends, style) = ([(4, y), (34, y)], colour.stroke_width(2));
        match dashed {
            true => page.draw(&DashedPathElement::new(ends, 6, 4, style))?,
            false => page.draw(&PathElement::new(ends, style))?,
        }
    }
    let y = text("a simulated size")?;
    page.draw(&Circle::new((19, y), 3, GREY.filled()))?;
    let y = text("flat lru at every size")?;
    page.draw(&Rectangle::new(
        [(4, y - 7), (34, y + 7)],
        COLOURS[SimulatedPolicy::Lru as usize].mix(AREA_MIX).filled(),
    ))?;
    let enough = plan.curve.enough(PAYING_GAIN);
    let share = percent((enough as f64 / plan.rows().max(1) as f64 * 1000.0).round() / 1000.0);
    let y = text(&format!("from {share} % ({}) on,", bytes(plan.bytes(enough))))?;
    text(&format!("doubling a flat lru gains < {} %", percent(PAYING_GAIN)))?;
    page.draw(&DashedPathElement::new([(19, y - 9), (19, y + 31)], 2, 4, GREY.stroke_width(1)))
}

/// The lines of the chart.
fn series(plan: &Plan<'_>) -> Vec<Series> {
    let of = |name: String, colour, dashed, hits: &dyn Fn(&SizeHits) -> &Hits| {
        let sizes = plan.sizes.iter().filter(|size| size.rows >= 1);
        let mut points: Vec<(f64, f64)> =
            sizes.map(|size| (size.rows as f64, plan.rate(hits(size)))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name, colour, dashed, points }
    };
    let flat = SimulatedPolicy::ALL.into_iter().zip(COLOURS);
    let flat = flat.map(|(p, colour)| of(format!("flat {}", p.name()), colour, false, &|s| s.flat.of(p)));
    let optimal = of("flat optimal (knows the future)".to_owned(), BLACK, false, &|size| &size.flat.optimal);
    let lru = COLOURS[SimulatedPolicy::Lru as usize];
    let per_table =
        of("lru, per-table caches".to_owned(), lru, true, &|size| size.per_table.of(SimulatedPolicy::Lru));
    flat.chain([optimal, per_table]).collect()
}

#[cfg(test)]
mod tests;
