//! Avazu's click log: comma-separated with a header. Any column may be an input and is found by its name in
//! the header. The column `click` is the label; the file of the test day has no such column.

use std::collections::HashMap;
use std::path::Path;

use super::delimited::{Columns, Delimited, FirstLineError, Layout};
use super::{DatasetError, Input, Labels, ReadOptions};
use crate::schema::Schema;

/// Name of the label's column.
const LABEL: &str = "click";

/// The names of the schema's inputs.
pub(crate) struct Avazu {
    labels: Labels,
    dense: Vec<String>,
    features: Vec<String>,
}

pub(crate) fn open(
    input: Input,
    schema: &Schema,
    options: ReadOptions,
) -> Result<Delimited<Avazu>, DatasetError> {
    let dense = schema.dense.iter().map(|d| d.name.clone()).collect();
    let features = schema.features.iter().map(|f| f.name.clone()).collect();
    Delimited::open(Avazu { labels: options.labels, dense, features }, input, schema, options)
}

impl Avazu {
    /// The index of the label's field in a file with these columns; `None` without labels.
    fn label(&self, path: &Path, fields: &HashMap<&str, usize>) -> Result<Option<usize>, FirstLineError> {
        match (self.labels, fields.get(LABEL)) {
            (Labels::None, _) => Ok(None),
            (_, Some(&field)) => Ok(Some(field)),
            (Labels::Expected, None) => {
                let path = path.display();
                tracing::warn!("{path}: the header has no column {LABEL:?}: the file is read without labels");
                Ok(None)
            }
            (Labels::Required, None) => {
                let error = DatasetError::NoLabels { path: path.to_owned(), column: LABEL };
                Err(FirstLineError::File(error))
            }
        }
    }
}

impl Layout for Avazu {
    const DELIMITER: u8 = b',';
    const HEADER: bool = true;
    const QUOTES: bool = true;

    fn columns(&self, path: &Path, first: &[u8]) -> Result<Columns, FirstLineError> {
        let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
        let names = std::str::from_utf8(first).map_err(|_| FirstLineError::Line("it is not UTF-8".into()))?;
        let mut fields = HashMap::new();
        for (i, name) in names.split(',').map(|name| name.trim().trim_matches('"')).enumerate() {
            if fields.insert(name, i).is_some() {
                return Err(FirstLineError::Line(format!("column {name:?} occurs twice")));
            }
        }
        let field = |name: &String| {
            let found = fields.get(name.as_str()).filter(|_| name != LABEL).copied();
            found.ok_or_else(|| {
                FirstLineError::File(DatasetError::UnknownColumn {
                    origin: path.display().to_string(),
                    input: name.clone(),
                    columns: names.trim().replace(',', ", "),
                })
            })
        };
        Ok(Columns {
            count: fields.len(),
            label: self.label(path, &fields)?,
            dense: self.dense.iter().map(field).collect::<Result<_, _>>()?,
            features: self.features.iter().map(field).collect::<Result<_, _>>()?,
        })
    }
}
