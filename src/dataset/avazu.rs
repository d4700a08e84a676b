//! Avazu's click log: comma-separated with a header. Any column may be an input, found by its name
//! in the header; `click` is the label, which the file of the test day does not have.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::delimited::{Columns, Delimited, Fault, Layout};
use super::{DatasetError, Limits};
use crate::schema::Schema;

/// The label's column.
const LABEL: &str = "click";

/// The inputs of the schema by name.
pub(crate) struct Avazu {
    dense: Vec<String>,
    features: Vec<String>,
}

pub(crate) fn open(
    paths: &[PathBuf],
    schema: &Schema,
    limits: Limits,
) -> Result<Delimited<Avazu>, DatasetError> {
    let dense = schema.dense.iter().map(|d| d.name.clone()).collect();
    let features = schema.features.iter().map(|f| f.name.clone()).collect();
    let widths = (schema.dense.len(), schema.features.len());
    Delimited::open(Avazu { dense, features }, paths, widths, limits)
}

impl Layout for Avazu {
    const DELIMITER: u8 = b',';
    const HEADER: bool = true;
    const QUOTES: bool = true;

    fn columns(&self, path: &Path, first: &[u8]) -> Result<Columns, Fault> {
        let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
        let names = std::str::from_utf8(first).map_err(|_| Fault::Line("is not UTF-8".into()))?;
        let mut places = HashMap::new();
        for (i, name) in names.split(',').map(|name| name.trim().trim_matches('"')).enumerate() {
            if places.insert(name, i).is_some() {
                return Err(Fault::Line(format!("column {name:?} stands twice")));
            }
        }
        let place = |name: &String| {
            let found = places.get(name.as_str()).filter(|_| name != LABEL).copied();
            found.ok_or_else(|| {
                Fault::File(DatasetError::UnknownColumn {
                    origin: path.display().to_string(),
                    input: name.clone(),
                    columns: names.trim().replace(',', ", "),
                })
            })
        };
        Ok(Columns {
            count: places.len(),
            label: places.get(LABEL).copied(),
            dense: self.dense.iter().map(place).collect::<Result<_, _>>()?,
            features: self.features.iter().map(place).collect::<Result<_, _>>()?,
        })
    }
}
