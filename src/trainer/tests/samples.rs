//! Generated schemas and samples with every special case of a lookup: shared tables, repeated rows in a bag,
//! empty bags, absent ids with every default, sums and means.

use crate::mem::SplitMix64;
use crate::schema::{AbsentDefault, Arity, Schema};
use crate::types::{Batch, Jagged, RawBatch, RawFeature, RawValues};

/// Every architecture, some with several shapes, as in `model.toml`.
pub(crate) const ARCHITECTURES: [&str; 7] = [
    "kind = \"dlrm\"\nbottom = [9]\ntop = [33, 6]",
    "kind = \"dcn\"\ncross_layers = 3\ndeep = [8, 40]",
    "kind = \"dcnv2\"\ncross_layers = 2\ndeep = [8]",
    "kind = \"dcnv2\"\ncross_layers = 2\nrank = 3\ndeep = [8, 6]",
    "kind = \"deepfm\"\ndeep = [8, 6]",
    "kind = \"wide_deep\"\ndeep = [40]",
    "kind = \"dlrm\"\nbottom = []\ntop = []",
];

/// Architectures for [`odd_schema`].
pub(crate) const ODD: [&str; 4] = [
    "kind = \"dlrm\"\nbottom = [3]\ntop = [2]",
    "kind = \"dcnv2\"\ncross_layers = 1\ndeep = [1]",
    "kind = \"deepfm\"\ndeep = []",
    "kind = \"wide_deep\"\ndeep = [1]",
];

const FEATURES: [(&str, &str, &str, &str); 5] = [
    ("user", "shared", "\"one_hot\"", "sum"),
    ("friend", "shared", "\"one_hot\"", "mean"),
    ("words", "words", "{ multi_hot = { max = 5 } }", "mean"),
    ("places", "shared", "{ multi_hot = { max = 4 } }", "sum"),
    ("strict", "strict", "\"one_hot\"", "sum"),
];

/// A schema with three dense inputs and [`FEATURES`], with dim 5.
pub(crate) fn schema(architecture: &str) -> Schema {
    let wide = architecture.contains("deepfm") || architecture.contains("wide_deep");
    let mut text = format!("[architecture]\n{architecture}\n");
    for i in 0..3 {
        text += &format!("[[dense]]\nname = \"d{i}\"\n");
    }
    for (name, table, arity, pooling) in FEATURES {
        text += &format!("[[features]]\nname = \"{name}\"\ntable = \"{table}\"\n");
        text += &format!("arity = {arity}\npooling = \"{pooling}\"\n");
        if wide {
            text += &format!("wide_table = \"wide_{table}\"\n");
        }
    }
    for (name, rows, default) in
        [("shared", 11, "\"zeros\""), ("words", 7, "{ row = 2 }"), ("strict", 4, "\"error\"")]
    {
        let mut table = |name: String, dim: usize| {
            text +=
                &format!("[[tables]]\nname = \"{name}\"\nrows = {rows}\ndim = {dim}\ndefault = {default}\n");
        };
        table(name.to_owned(), 5);
        if wide {
            table(format!("wide_{name}"), 1);
        }
    }
    Schema::parse(&text).unwrap()
}

/// The smallest schema: no dense input, one feature, one row, dim 1. The wide table is the table itself.
pub(crate) fn odd_schema(architecture: &str) -> Schema {
    let wide = architecture.contains("deepfm") || architecture.contains("wide_deep");
    let wide = if wide { "wide_table = \"only\"" } else { "" };
    Schema::parse(&format!(
        "[architecture]\n{architecture}\n[[features]]\nname = \"one\"\ntable = \"only\"\n{wide}\n\
         arity = {{ multi_hot = {{ max = 3 }} }}\n[[tables]]\nname = \"only\"\nrows = 1\ndim = 1\n"
    ))
    .unwrap()
}

struct Numbers(SplitMix64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Samples drawn from `seed`, and their labels.
pub(crate) fn generate(schema: &Schema, samples: usize, seed: u64) -> (Batch, Vec<f32>) {
    let mut numbers = Numbers(SplitMix64::new(seed));
    let dense = (0..samples * schema.dense_width()).map(|_| 2.0 * numbers.unit()).collect();
    let column = |feature: &crate::schema::Feature| {
        let table = schema.tables.iter().find(|t| t.name == feature.table).unwrap();
        // If the table accepts absent ids, two ids of the range are absent.
        let ids = table.rows + if table.default == AbsentDefault::Error { 0 } else { 2 };
        let mut column = Jagged::default();
        for _ in 0..samples {
            let count = match feature.arity {
                Arity::OneHot => 1,
                Arity::MultiHot { max } => numbers.below(u64::from(max) + 1),
            };
            column.push(&(0..count).map(|_| numbers.below(ids)).collect::<Vec<_>>());
        }
        column
    };
    let features = schema.features.iter().map(column).collect();
    let labels = (0..samples).map(|_| numbers.below(2) as f32).collect();
    (Batch { samples, dense, features, ..Batch::default() }, labels)
}

/// The same samples in the form of a file.
pub(crate) fn raw(schema: &Schema, samples: usize, seed: u64) -> RawBatch {
    let (batch, labels) = generate(schema, samples, seed);
    let features = batch.features.into_iter();
    let features = features.map(|f| RawFeature { offsets: f.offsets, values: RawValues::Ids(f.ids) });
    RawBatch { samples, dense: batch.dense, features: features.collect(), labels: Some(labels) }
}
