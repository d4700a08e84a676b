//! Criteo's click logs (Kaggle and Terabyte): tab-separated without a header. A line has a label, 13 integers
//! named `I1` to `I13`, and 26 strings named `C1` to `C26`. The files of the test days have no label.

use std::path::Path;

use memchr::memchr_iter;

use super::delimited::{Columns, Delimited, FirstLineError, Layout};
use super::{DatasetError, Input, Labels, ReadOptions};
use crate::schema::Schema;
use crate::schema::preset::{CRITEO_DENSE, CRITEO_FEATURES};

/// Number of fields of a line without a label.
const UNLABELLED: usize = CRITEO_DENSE + CRITEO_FEATURES;
/// Number of fields of a line with a label.
const LABELLED: usize = UNLABELLED + 1;

/// The field of each input of the schema, in a line without a label.
pub(crate) struct Criteo {
    labels: Labels,
    dense: Vec<usize>,
    features: Vec<usize>,
}

pub(crate) fn open(
    input: Input,
    schema: &Schema,
    options: ReadOptions,
) -> Result<Delimited<Criteo>, DatasetError> {
    let dense = schema.dense.iter().map(|d| index(&d.name, 'I', CRITEO_DENSE)).collect::<Result<_, _>>()?;
    let feature = |name: &str| Ok::<_, DatasetError>(CRITEO_DENSE + index(name, 'C', CRITEO_FEATURES)?);
    let features = schema.features.iter().map(|f| feature(&f.name)).collect::<Result<_, _>>()?;
    Delimited::open(Criteo { labels: options.labels, dense, features }, input, schema, options)
}

/// The index, from 0, of column `I7` or `C7` among the columns of its letter.
fn index(name: &str, letter: char, count: usize) -> Result<usize, DatasetError> {
    let number = name.strip_prefix(letter).filter(|digits| !digits.starts_with(['0', '+']));
    match number.and_then(|digits| digits.parse().ok()) {
        Some(number) if (1..=count).contains(&number) => Ok(number - 1),
        _ => Err(DatasetError::UnknownColumn {
            origin: "criteo-tsv".into(),
            input: name.into(),
            columns: format!("{letter}1 to {letter}{count}"),
        }),
    }
}

impl Layout for Criteo {
    const DELIMITER: u8 = b'\t';
    const HEADER: bool = false;
    const QUOTES: bool = false;

    fn columns(&self, _: &Path, first: &[u8]) -> Result<Columns, FirstLineError> {
        let got = 1 + memchr_iter(b'\t', first).count();
        let (count, expected) = match self.labels {
            Labels::Required => (LABELLED, format!("{LABELLED} fields with the label")),
            Labels::Expected => (LABELLED, format!("{LABELLED} fields, or {UNLABELLED} with --unlabelled")),
            Labels::None => (UNLABELLED, format!("{UNLABELLED} fields, or {LABELLED} without --unlabelled")),
        };
        if got != count {
            return Err(FirstLineError::Line(format!("expected {expected}, got {got}")));
        }
        let label = (count == LABELLED).then_some(0);
        let shift = usize::from(label.is_some());
        let shifted = |fields: &[usize]| fields.iter().map(|field| field + shift).collect();
        Ok(Columns { count, label, dense: shifted(&self.dense), features: shifted(&self.features) })
    }
}
