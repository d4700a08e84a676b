//! Registering series with a recorder.

use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, NoopRecorder, Recorder, SharedString,
    Unit,
};
use metrics_exporter_prometheus::PrometheusRecorder;

/// What keeps series, if anything does.
pub(super) fn recorded(recorder: Option<&PrometheusRecorder>) -> &dyn Recorder {
    recorder.map_or(&NoopRecorder, |recorder| recorder as &dyn Recorder)
}

/// Names and values.
pub(super) type SeriesLabels<'a> = &'a [(&'static str, &'a str)];

/// Registers gauges that are not shown, because another engine of the model sets those that are.
pub(super) struct WithoutGauges<'r>(pub &'r dyn Recorder);

impl Recorder for WithoutGauges<'_> {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        self.0.register_counter(key, metadata)
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.0.register_histogram(key, metadata)
    }
}

static METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// What registers with the recorder under a name.
pub(super) trait Series {
    fn register(recorder: &dyn Recorder, name: &'static str, labels: SeriesLabels) -> Self;
}

macro_rules! registers {
    ($($series:ident: $register:ident),+) => {$(
        impl Series for $series {
            fn register(recorder: &dyn Recorder, name: &'static str, labels: SeriesLabels) -> Self {
                let labels = labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned()));
                recorder.$register(&Key::from_parts(name, labels.collect::<Vec<_>>()), &METADATA)
            }
        }
    )+};
}

registers!(Counter: register_counter, Gauge: register_gauge, Histogram: register_histogram);
