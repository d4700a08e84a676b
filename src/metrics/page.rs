//! The metrics page, read back: the series that the recorder holds can only be written.

use std::collections::BTreeMap;

use metrics_exporter_prometheus::formatting::sanitize_label_value;

use super::Labels;

/// The series of a metrics page, with their values.
pub(crate) struct Page<'p>(BTreeMap<&'p str, f64>);

impl<'p> Page<'p> {
    /// Reads what [`super::Metrics::render`] has written.
    pub(crate) fn read(text: &'p str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let series = lines.filter_map(|line| line.rsplit_once(' '));
        Self(series.filter_map(|(series, value)| Some((series, value.parse().ok()?))).collect())
    }

    /// The value of a series, with the labels in the order of the page. `None` if the page does not have it.
    pub(crate) fn get(&self, name: &str, labels: Labels) -> Option<f64> {
        let labels = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", sanitize_label_value(value)));
        let labels = labels.collect::<Vec<_>>().join(",");
        self.0.get(format!("{name}{{{labels}}}").as_str()).copied()
    }

    /// All series but the buckets of histograms. `None` stands for a value that JSON does not have, such as
    /// NaN.
    pub(crate) fn without_buckets(&self) -> BTreeMap<&'p str, Option<f64>> {
        let series = self.0.iter().filter(|(series, _)| !series.contains("_bucket{"));
        series.map(|(series, value)| (*series, Some(*value).filter(|value| value.is_finite()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_found_by_its_labels() {
        let text = "# HELP a_total b\na_total{model=\"x \\\" y\",code=\"OK\"} 7\nb NaN\n";
        let page = Page::read(text);
        assert_eq!(page.get("a_total", &[("model", "x \" y"), ("code", "OK")]), Some(7.0));
        assert_eq!(page.get("a_total", &[("model", "x")]), None);
        assert_eq!(page.without_buckets()["b"], None);
    }
}
