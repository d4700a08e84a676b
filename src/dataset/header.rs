//! The names of the columns of one's own data, from which a schema is made.

use std::path::Path;

use super::fields::Fields;
use super::layout::{check_columns, check_unique, division, header_names};
use super::lines::{Line, Lines};
use super::{DatasetError, Format, ReadOptions, Stop, in_line, source};

/// The names of a file's columns: `given`, or those of its header.
///
/// # Errors
/// [`DatasetError`] when the file cannot be read, or its first line does not have these columns.
pub(crate) fn column_names(
    format: Format,
    path: Option<&Path>,
    given: Option<&[String]>,
) -> Result<Vec<String>, DatasetError> {
    given.map_or(Ok(()), check_columns)?;
    let Some(path) = path else { return Ok(given.unwrap_or_default().to_vec()) };
    let limit = ReadOptions::default().line_bytes;
    let mut lines = Lines::new(source::open(path, &Stop::default())?, limit);
    let wrong = |reason: String| DatasetError::Header { path: path.to_owned(), reason };
    let read = lines.next().map_err(|cause| DatasetError::Read { path: path.to_owned(), line: 0, cause })?;
    let first = match read {
        None => return Err(wrong("the file is empty".to_owned())),
        Some(Line::TooLong) => return Err(wrong(format!("longer than {limit} bytes"))),
        Some(Line::Text(first)) => first,
    };
    let mut fields = Fields::default();
    let row = fields.split(division(format), first).map_err(wrong)?;
    let Some(given) = given else {
        let names = header_names(&row).map_err(wrong)?;
        check_unique(&names).map_err(wrong)?;
        return Ok(names.into_iter().map(str::to_owned).collect());
    };
    let (expected, got) = (given.len(), row.len());
    if expected != got {
        let reason = format!("{expected} fields are named, but line 1 of {} has {got}", in_line(path));
        return Err(DatasetError::flag("--columns", reason));
    }
    Ok(given.to_vec())
}
