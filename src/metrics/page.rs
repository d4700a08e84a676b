//! The metrics page: sorts its series, and parses it back. The recorder's series are write-only, so values
//! are read from the page.

use std::collections::{BTreeMap, BTreeSet};

use metrics_exporter_prometheus::formatting::sanitize_label_value;

use super::register::SeriesLabels;

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
    pub(crate) fn get(&self, name: &str, labels: SeriesLabels) -> Option<f64> {
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

/// Sorts the metrics by their names and their series by their labels, so that two pages can be compared by
/// eye and by `diff`. Leaves out the series of the cache of models that never had one: all of them are 0.
pub(super) fn arranged(text: &str) -> String {
    let values = || text.lines().filter_map(|line| line.rsplit_once(' '));
    let used: BTreeSet<&str> = values()
        .filter(|(_, value)| *value != "0")
        .filter_map(|(series, _)| model_of_cache(series))
        .collect();
    let shown = |line: &str| {
        let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
        model_of_cache(series).is_none_or(|model| used.contains(model))
    };
    let mut metrics: Vec<_> = text
        .split("\n\n")
        .map(|metric| {
            let (comments, mut series): (Vec<_>, Vec<_>) =
                metric.lines().partition(|line| line.starts_with('#'));
            series.retain(|line| shown(line));
            // The lines of one histogram stay in their order.
            series.sort_by_key(|line| labels(line));
            (comments, series)
        })
        .filter(|(_, series)| !series.is_empty())
        .collect();
    metrics.sort_unstable();
    let lines = metrics.iter().flat_map(|(comments, series)| comments.iter().chain(series));
    lines.flat_map(|line| [*line, "\n"]).collect()
}

/// The label of the model, if this is a series of its cache.
fn model_of_cache(series: &str) -> Option<&str> {
    let (_, labels) = series.strip_prefix("flechette_cache_")?.split_once('{')?;
    // The model is the first label. A comma in its name is not followed by the name of a label.
    labels.split_once(",table=").or_else(|| labels.rsplit_once('}')).map(|(model, _)| model)
}

/// The labels of a series, without the bound of a bucket.
fn labels(series: &str) -> &str {
    let (name, rest) = series.split_once('{').unwrap_or_default();
    let labels = rest.rsplit_once('}').unwrap_or_default().0;
    // Other labels may end in these letters too, such as `table`. The bound is the last one.
    let bound = labels.rsplit_once("le=\"").filter(|_| name.ends_with("_bucket"));
    bound.map_or(labels, |(others, _)| others.trim_end_matches(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_sorted_and_a_model_that_never_had_a_cache_has_none_of_the_cache() {
        let page = "# TYPE flechette_z histogram\n\
            flechette_z_bucket{model=\"b\",le=\"1\"} 1\nflechette_z_bucket{model=\"b\",le=\"+Inf\"} 2\n\
            flechette_z_sum{model=\"b\"} 3\nflechette_z_count{model=\"b\"} 2\n\
            flechette_z_bucket{model=\"a\",le=\"1\"} 1\nflechette_z_bucket{model=\"a\",le=\"+Inf\"} 2\n\
            flechette_z_sum{model=\"a\"} 3\nflechette_z_count{model=\"a\"} 2\n\n\
            # TYPE flechette_cache_capacity_bytes gauge\n\
            flechette_cache_capacity_bytes{model=\"b\"} 9\nflechette_cache_capacity_bytes{model=\"a\"} 0\n\
            flechette_cache_capacity_bytes{model=\"unloaded\"} 0\n\n\
            # TYPE flechette_cache_entries gauge\nflechette_cache_entries{model=\"a\"} 0\n\n\
            # TYPE flechette_cache_hits_total counter\n\
            flechette_cache_hits_total{model=\"b\",table=\"t2\"} 1\n\
            flechette_cache_hits_total{model=\"b\",table=\"x,le=\"} 1\n\
            flechette_cache_hits_total{model=\"b\",table=\"t1\"} 1\n\
            flechette_cache_hits_total{model=\"unloaded\",table=\"t\"} 1\n\
            flechette_cache_hits_total{model=\"a\",table=\"t\"} 0\n\n";
        let arranged = arranged(page);
        let series: Vec<_> = arranged.lines().filter(|line| !line.starts_with('#')).collect();
        let expected = [
            "flechette_cache_capacity_bytes{model=\"b\"} 9",
            "flechette_cache_capacity_bytes{model=\"unloaded\"} 0",
            "flechette_cache_hits_total{model=\"b\",table=\"t1\"} 1",
            "flechette_cache_hits_total{model=\"b\",table=\"t2\"} 1",
            "flechette_cache_hits_total{model=\"b\",table=\"x,le=\"} 1",
            "flechette_cache_hits_total{model=\"unloaded\",table=\"t\"} 1",
            "flechette_z_bucket{model=\"a\",le=\"1\"} 1",
            "flechette_z_bucket{model=\"a\",le=\"+Inf\"} 2",
            "flechette_z_sum{model=\"a\"} 3",
            "flechette_z_count{model=\"a\"} 2",
            "flechette_z_bucket{model=\"b\",le=\"1\"} 1",
            "flechette_z_bucket{model=\"b\",le=\"+Inf\"} 2",
            "flechette_z_sum{model=\"b\"} 3",
            "flechette_z_count{model=\"b\"} 2",
        ];
        assert_eq!(series, expected);
        assert_eq!(arranged.lines().filter(|line| line.starts_with('#')).count(), 3);
    }

    #[test]
    fn a_series_is_found_by_its_labels() {
        let text = "# HELP a_total b\na_total{model=\"x \\\" y\",code=\"OK\"} 7\nb NaN\n";
        let page = Page::read(text);
        assert_eq!(page.get("a_total", &[("model", "x \" y"), ("code", "OK")]), Some(7.0));
        assert_eq!(page.get("a_total", &[("model", "x")]), None);
        assert_eq!(page.without_buckets()["b"], None);
    }
}
