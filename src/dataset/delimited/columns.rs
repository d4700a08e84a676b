//! The columns of a file: from its header or its first good line. All files have labels, or none has.

use std::path::Path;

use crate::dataset::fields::Row;
use crate::dataset::layout::{Columns, FirstLineError, Layout};
use crate::dataset::{DatasetError, in_line};

/// What the files have in common.
pub(super) struct Header {
    pub(super) layout: Layout,
    /// Whether the files have labels; unknown before the first line.
    pub(super) labelled: Option<bool>,
}

impl Header {
    /// A file's columns. If they are not `known` yet, they are taken from this line: the header or the first
    /// good line.
    pub(super) fn columns_of<'a>(
        &mut self,
        known: &'a mut Option<Columns>,
        path: &Path,
        line: &Row<'_>,
    ) -> Result<&'a Columns, FirstLineError> {
        match known {
            Some(columns) => Ok(columns),
            None => {
                let columns = self.layout.columns(path, line)?;
                self.agree(&columns, path).map_err(FirstLineError::File)?;
                let (path, count) = (in_line(path), columns.count);
                match columns.label {
                    None if !self.layout.has_header() => {
                        tracing::info!("{path}: {count} fields per line, without a label")
                    }
                    label => tracing::debug!("{path}: {count} fields per line, label in field {label:?}"),
                }
                Ok(known.insert(columns))
            }
        }
    }

    /// Checks that this file has labels if and only if the files before it have labels.
    fn agree(&mut self, columns: &Columns, path: &Path) -> Result<(), DatasetError> {
        let here = columns.label.is_some();
        if *self.labelled.get_or_insert(here) != here {
            return Err(DatasetError::MixedLabels { path: path.to_owned(), labelled: here });
        }
        Ok(())
    }
}
