//! Writes generated data in the format of the real files, for tests and for `flechette demo`. It has the
//! columns of Criteo Kaggle and Avazu, their published numbers of distinct values, and their notation of ids.
//! All values are generated.

use std::io::{self, Write};

use super::random::{Purpose, Stream};
use super::{Description, Generator, Lengths, Skew};
use crate::schema::Schema;
use crate::schema::preset::{self, AVAZU_FEATURES, ArchKind};
use crate::types::{RawBatch, RawValues};

/// Distinct values of `C1` to `C26` of Criteo Kaggle, as public DLRM code lists them.
const CRITEO_VALUES: [u64; 26] = [
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992,
    5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];

/// Distinct values of [`AVAZU_FEATURES`].
const AVAZU_VALUES: [u64; 22] = [
    240, 7, 7, 4737, 7745, 26, 8552, 559, 36, 2_686_408, 6_729_486, 8251, 5, 4, 2626, 8, 9, 435, 4, 68, 172,
    60,
];

/// The seed of a truth with Criteo's click rate, about a quarter.
const CRITEO_TRUTH: u64 = 15;
/// The seed of a truth with Avazu's click rate, about 17 %.
const AVAZU_TRUTH: u64 = 1;

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

/// Writes a header and `rows` lines in Avazu's format. Different seeds give different samples of the same
/// truth. Unlike in the real file, lines are not ordered by `hour`.
///
/// # Errors
/// Errors of the writer.
pub fn write_avazu_csv(rows: u64, seed: u64, mut out: impl Write) -> io::Result<()> {
    let schema = sized(preset::avazu(ArchKind::Dcn, 1, 1), &AVAZU_VALUES);
    writeln!(out, "id,click,{}", AVAZU_FEATURES.join(","))?;
    for_each_row(&schema, description(rows, seed, AVAZU_TRUTH), |sample, number| {
        write!(out, "{},{}", Stream::new(seed, Purpose::Text, u64::MAX).word(number), sample.label)?;
        for (i, (&id, name)) in sample.ids.iter().zip(AVAZU_FEATURES).enumerate() {
            match name {
                "hour" => write!(out, ",1410{:02}{:02}", 21 + id / 24, id % 24)?,
                // C1, C14 to C21, positions and types are written as numbers, the other columns in hex.
                name if name.starts_with('C') => write!(out, ",{}", 100 + id)?,
                "banner_pos" | "device_type" | "device_conn_type" => write!(out, ",{id}")?,
                _ => write!(out, ",{:08x}", text_word(i, id))?,
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
