//! Criteo's click logs (Kaggle and Terabyte): tab-separated, no header; a label, 13 integers named
//! `I1` to `I13`, 26 strings named `C1` to `C26`. The files of the test days have no label.

use std::path::{Path, PathBuf};

use memchr::memchr_iter;

use super::delimited::{Columns, Delimited, Fault, Layout};
use super::{DatasetError, Limits};
use crate::schema::Schema;
use crate::schema::preset::{CRITEO_DENSE, CRITEO_FEATURES};

/// Fields of a line without a label.
const UNLABELLED: usize = CRITEO_DENSE + CRITEO_FEATURES;

/// Where the schema's inputs stand in a line without a label.
pub(crate) struct Criteo {
    dense: Vec<usize>,
    features: Vec<usize>,
}

pub(crate) fn open(
    paths: &[PathBuf],
    schema: &Schema,
    limits: Limits,
) -> Result<Delimited<Criteo>, DatasetError> {
    let dense = schema.dense.iter().map(|d| place(&d.name, 'I', CRITEO_DENSE)).collect::<Result<_, _>>()?;
    let place_feature = |name: &str| Ok(CRITEO_DENSE + place(name, 'C', CRITEO_FEATURES)?);
    let features = schema.features.iter().map(|f| place_feature(&f.name)).collect::<Result<_, _>>()?;
    let widths = (schema.dense.len(), schema.features.len());
    Delimited::open(Criteo { dense, features }, paths, widths, limits)
}

/// The place of column `I7` or `C7` among its kind.
fn place(name: &str, letter: char, count: usize) -> Result<usize, DatasetError> {
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

    fn columns(&self, _: &Path, first: &[u8]) -> Result<Columns, Fault> {
        let count = 1 + memchr_iter(b'\t', first).count();
        let label = match count {
            UNLABELLED => None,
            n if n == UNLABELLED + 1 => Some(0),
            _ => {
                let labelled = UNLABELLED + 1;
                let reason =
                    format!("expected {labelled} fields, or {UNLABELLED} without a label, got {count}");
                return Err(Fault::Line(reason));
            }
        };
        let shift = usize::from(label.is_some());
        let shifted = |places: &[usize]| places.iter().map(|place| place + shift).collect();
        Ok(Columns { count, label, dense: shifted(&self.dense), features: shifted(&self.features) })
    }
}
