//! Writes generated data in the format of Criteo Kaggle, for tests and for `flechette demo`. It has the
//! columns of the real file, their published numbers of distinct values, and their notation of ids. All
//! values are generated.

use std::io::{self, Write};

use super::random::{Purpose, Stream};
use super::{Description, Generator, Lengths, Skew};
use crate::schema::Schema;
use crate::schema::preset::{self, ArchKind};
use crate::types::{RawBatch, RawValues};

/// Distinct values of `C1` to `C26` of Criteo Kaggle, as public DLRM code lists them.
const CRITEO_VALUES: [u64; 26] = [
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992,
    5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];

/// The seed of a truth with Criteo's click rate, about a quarter.
const CRITEO_TRUTH: u64 = 15;

/// Samples of one batch.
const CHUNK: usize = 1024;

/// Writes `rows` lines in Criteo's format: label, 13 integers, 26 strings, tab-separated. Different seeds
/// give different samples of the same truth. As in the real file, fields are empty: id 0 of every fourth
/// string column, and every second integer that is 0.
///
/// # Errors
/// Errors of the writer.
pub fn write_criteo_tsv(rows: u64, seed: u64, mut out: impl Write) -> io::Result<()> {
    let schema = sized(preset::criteo(ArchKind::Dcn, 1, 1), &CRITEO_VALUES);
    for_each_row(&schema, description(rows, seed, CRITEO_TRUTH), |sample, number| {
        write!(out, "{}", sample.label)?;
        for (i, &value) in sample.dense.iter().enumerate() {
            if value == 0.0 && (number + i as u64).is_multiple_of(2) {
                write!(out, "\t")?;
            } else {
                write!(out, "\t{value}")?;
            }
        }
        for (i, &id) in sample.ids.iter().enumerate() {
            if id == 0 && i % 4 == 2 {
                write!(out, "\t")?;
            } else {
                write!(out, "\t{:08x}", text_word(i, id))?;
            }
        }
        writeln!(out)
    })?;
    out.flush()
}

/// Gives each feature's table as many rows as its column has values, without hashing.
fn sized(mut schema: Schema, values: &[u64]) -> Schema {
    for ((feature, table), &rows) in schema.features.iter_mut().zip(&mut schema.tables).zip(values) {
        table.rows = rows;
        feature.hash = None;
    }
    schema
}

fn description(rows: u64, seed: u64, truth: u64) -> Description {
    Description { rows, seed, skew: Skew::High, lengths: Lengths::Max, truth }
}

struct Sample<'a> {
    label: f32,
    dense: &'a [f32],
    ids: &'a [u64],
}

/// Generates one-hot samples and calls `write` with each and its number.
fn for_each_row(
    schema: &Schema,
    description: Description,
    mut write: impl FnMut(Sample<'_>, u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut generator = Generator::new(schema, description);
    let mut batch = RawBatch::default();
    let mut ids = Vec::new();
    let mut number = 0;
    let width = schema.dense_width();
    loop {
        generator.reset(&mut batch);
        let more = generator.append(CHUNK, &mut batch);
        let labels = batch.labels.as_deref().unwrap_or_default();
        for (s, &label) in labels.iter().enumerate() {
            ids.clear();
            ids.extend(batch.features.iter().map(|column| match &column.values {
                RawValues::Ids(ids) => ids[s],
                RawValues::Text { .. } => 0,
            }));
            write(Sample { label, dense: &batch.dense[s * width..(s + 1) * width], ids: &ids }, number)?;
            number += 1;
        }
        if !more {
            return Ok(());
        }
    }
}

/// The 32-bit value that stands for an id in the file, printed as 8 hex digits.
fn text_word(feature: usize, id: u64) -> u32 {
    Stream::new(0, Purpose::Text, feature as u64).word(id) as u32
}
