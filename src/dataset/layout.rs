//! How the lines of a text format are divided, and in which field each input of a schema is.
//!
//! Every text format is comma- or tab-separated and has named columns, which are found by their names. The
//! names are those of [`FieldOptions::columns`], those of the format, or those in the first line of each
//! file. So `criteo-tsv` is `tsv` with names for its 40 columns, and `avazu-csv` is `csv` with another label.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use memchr::memchr_iter;
use serde::{Deserialize, Serialize};

use super::fields::{Division, Row, listed_name, shown_name};
use super::{DatasetError, Format, Labels, ReadOptions, in_line};
use crate::schema::preset::{CRITEO_DENSE, CRITEO_FEATURES};
use crate::schema::{Arity, Feature, Schema, TrainableRange};

/// A column of this name is not read.
const NO_NAME: &str = "_";
/// Names that an error lists.
const LISTED: usize = 50;

/// What differs from the format's own way to name and divide the fields of a line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FieldOptions {
    /// Names of the fields of a file without a header. `_` is a field that is not read.
    pub columns: Option<Vec<String>>,
    /// Name of the label's column.
    pub label: Option<String>,
    /// The ASCII character between the ids of a multi-hot feature. Without it, a field is one id.
    pub separator: Option<char>,
}

impl FieldOptions {
    /// Checks that no option is given, because these data have no fields.
    ///
    /// # Errors
    /// The flag of an option that is given.
    pub(crate) fn check_unused(&self, data: &str) -> Result<(), DatasetError> {
        let given = [
            ("--columns", self.columns.is_some()),
            ("--label", self.label.is_some()),
            ("--separator", self.separator.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((flag, _)) => Err(DatasetError::flag(flag, format!("not used by {data}"))),
        }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Where the inputs of a schema are in a line: fields are indices from 0.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columns {
    /// Number of fields of a line.
    pub count: usize,
    pub label: Option<usize>,
    /// The field of each dense feature of the schema.
    pub dense: Vec<DenseField>,
    /// The field of each categorical feature of the schema.
    pub features: Vec<FeatureField>,
}

/// The field of a dense feature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DenseField {
    pub index: usize,
    /// For data to train on.
    pub trained: Option<TrainableRange>,
}

/// The field of a categorical feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FeatureField {
    pub index: usize,
    /// `None` if the field is one id.
    pub list: Option<List>,
}

/// How a field is divided into ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct List {
    pub separator: u8,
    /// Most ids.
    pub max: u32,
}

impl List {
    /// Number of ids in a field.
    pub(crate) fn count(self, field: &[u8]) -> usize {
        if field.is_empty() { 0 } else { 1 + memchr_iter(self.separator, field).count() }
    }
}

/// Why the columns cannot be taken from a first line.
pub(crate) enum FirstLineError {
    /// The line is malformed; the next one may be good.
    Line(String),
    /// The file cannot be read at all.
    File(DatasetError),
}

/// The layout of files.
pub(crate) struct Layout {
    pub division: Division,
    label: String,
    labels: Labels,
    dense: Vec<(String, Option<TrainableRange>)>,
    features: Vec<(String, Option<List>)>,
    /// `None`: the first line of each file names its columns.
    named: Option<Named>,
}

/// Columns that are the same in all files.
struct Named {
    columns: Columns,
    /// The number of fields, for an error.
    expected: String,
}

/// How the lines of a format are divided.
pub(crate) fn division(format: Format) -> Division {
    match format {
        Format::AvazuCsv | Format::Csv => Division { delimiter: b',', quotes: true },
        Format::CriteoTsv | Format::Tsv | Format::Synthetic => Division { delimiter: b'\t', quotes: false },
    }
}

/// The name of the label.
pub(crate) fn label_of(format: Format, options: &FieldOptions) -> String {
    let default = if format == Format::AvazuCsv { "click" } else { "label" };
    options.label.clone().unwrap_or_else(|| default.to_owned())
}

/// The names of Criteo's columns (Kaggle and Terabyte). The files of the test days have no label.
fn criteo_columns(label: &str) -> Vec<String> {
    let dense = (1..=CRITEO_DENSE).map(|i| format!("I{i}"));
    let features = (1..=CRITEO_FEATURES).map(|i| format!("C{i}"));
    [label.to_owned()].into_iter().chain(dense).chain(features).collect()
}

impl Layout {
    /// The layout of files of a text format, for the inputs of a schema.
    ///
    /// # Errors
    /// When an option is wrong, or names without a header lack a column of the schema.
    pub(crate) fn new(format: Format, schema: &Schema, options: &ReadOptions) -> Result<Self, DatasetError> {
        let ReadOptions { fields, labels, .. } = options;
        let label = label_of(format, fields);
        let wrong = |flag, reason: String| Err(DatasetError::flag(flag, reason));
        if !has_name(&label) {
            return wrong("--label", format!("expected the name of a column, got {label:?}"));
        }
        if let Some(other) = fields.separator.filter(|separator| !separator.is_ascii()) {
            return wrong("--separator", format!("expected an ASCII character, got {other:?}"));
        }
        let list = |feature: &Feature| match (fields.separator, feature.arity) {
            (Some(separator), Arity::MultiHot { max }) => Some(List { separator: separator as u8, max }),
            _ => None,
        };
        let features: Vec<_> = schema.features.iter().map(|f| (f.name.clone(), list(f))).collect();
        if fields.separator.is_some() && features.iter().all(|(_, list)| list.is_none()) {
            let reason = "the schema has no feature with several ids (arity = { multi_hot = ... })";
            return wrong("--separator", reason.to_owned());
        }
        let trained = |range| (*labels == Labels::Required).then_some(range);
        let dense = schema.dense.iter().zip(schema.trainable_ranges());
        let dense = dense.map(|(column, range)| (column.name.clone(), trained(range))).collect();
        let mut layout =
            Self { division: division(format), label, labels: *labels, dense, features, named: None };
        layout.named = match (&fields.columns, format) {
            (Some(columns), _) => Some(layout.without_header("--columns", columns)?),
            (None, Format::CriteoTsv) => {
                Some(layout.without_header(format.name(), &criteo_columns(&layout.label))?)
            }
            (None, _) => None,
        };
        Ok(layout)
    }

    /// Whether the first line of each file names its columns.
    pub(crate) fn has_header(&self) -> bool {
        self.named.is_none()
    }

    /// The columns of a file, from its first line.
    pub(crate) fn columns(&self, path: &Path, first: &Row<'_>) -> Result<Columns, FirstLineError> {
        let Some(Named { columns, expected }) = &self.named else { return self.of_header(path, first) };
        if first.len() != columns.count {
            return Err(FirstLineError::Line(format!("expected {expected}, got {}", first.len())));
        }
        Ok(columns.clone())
    }

    fn of_header(&self, path: &Path, header: &Row<'_>) -> Result<Columns, FirstLineError> {
        let names = header_names(header).map_err(FirstLineError::Line)?;
        check_unique(&names).map_err(FirstLineError::Line)?;
        let origin = format!("{}: header", in_line(path));
        let columns = self.find(&origin, &names).map_err(FirstLineError::File)?;
        if columns.label.is_none() && self.labels == Labels::Expected {
            tracing::warn!("{origin} has no column {:?}: the file is read without labels", self.label);
        }
        Ok(columns)
    }

    /// Finds the inputs among the columns of a file without a header. If it has no labels, the label's field
    /// is missing.
    fn without_header(&self, origin: &str, names: &[String]) -> Result<Named, DatasetError> {
        check_columns(names)?;
        let all = names.len();
        let has_label = names.contains(&self.label);
        let read = |name: &&str| self.labels != Labels::None || *name != self.label;
        let names: Vec<&str> = names.iter().map(String::as_str).filter(read).collect();
        let columns = self.find(origin, &names)?;
        let expected = match self.labels {
            _ if !has_label => format!("{all} fields"),
            Labels::Required => format!("{all} fields with the label"),
            Labels::Expected => format!("{all} fields, or {} with --unlabelled", all - 1),
            Labels::None => format!("{} fields, or {all} without --unlabelled", all - 1),
        };
        Ok(Named { columns, expected })
    }

    /// Finds the inputs among columns of these names. `origin` has the names.
    fn find(&self, origin: &str, names: &[&str]) -> Result<Columns, DatasetError> {
        let fields: HashMap<&str, usize> = names.iter().zip(0..).map(|(&name, i)| (name, i)).collect();
        let is_input = |name: &str| has_name(name) && name != self.label;
        let field = |name: &str| {
            fields.get(name).copied().filter(|_| is_input(name)).ok_or_else(|| DatasetError::UnknownColumn {
                origin: origin.to_owned(),
                input: name.to_owned(),
                columns: listed(names.iter().copied().filter(|name| is_input(name))),
            })
        };
        let label = fields.get(self.label.as_str()).copied().filter(|_| self.labels != Labels::None);
        if label.is_none() && self.labels == Labels::Required {
            return Err(DatasetError::NoLabels {
                origin: origin.to_owned(),
                column: self.label.clone(),
                columns: listed(names.iter().copied()),
            });
        }
        let dense = |(name, trained): &(String, _)| Ok(DenseField { index: field(name)?, trained: *trained });
        let feature = |(name, list): &(String, _)| Ok(FeatureField { index: field(name)?, list: *list });
        Ok(Columns {
            count: names.len(),
            label,
            dense: self.dense.iter().map(dense).collect::<Result<_, DatasetError>>()?,
            features: self.features.iter().map(feature).collect::<Result<_, DatasetError>>()?,
        })
    }
}

/// The names in a header.
///
/// # Errors
/// When it is not UTF-8.
pub(crate) fn header_names<'a>(header: &Row<'a>) -> Result<Vec<&'a str>, String> {
    let name = |field| std::str::from_utf8(field).map(str::trim);
    header.fields().map(name).collect::<Result<_, _>>().map_err(|_| "it is not UTF-8".to_owned())
}

/// Whether a column has a name, by which it can be found.
pub(crate) fn has_name(column: &str) -> bool {
    !column.is_empty() && column != NO_NAME
}

/// Checks that each name is that of one column.
///
/// # Errors
/// The name of two columns.
pub(crate) fn check_unique(names: &[&str]) -> Result<(), String> {
    let mut seen = HashSet::new();
    match names.iter().filter(|name| has_name(name)).find(|&&name| !seen.insert(name)) {
        None => Ok(()),
        Some(name) => Err(format!("column {} occurs twice", shown_name(name))),
    }
}

/// Checks the value of `--columns`.
///
/// # Errors
/// When a name is empty or occurs twice.
pub(crate) fn check_columns(names: &[String]) -> Result<(), DatasetError> {
    let wrong = |reason| DatasetError::flag("--columns", reason);
    if let Some(empty) = names.iter().position(String::is_empty) {
        let reason =
            format!("name {} is empty; the name of a field that is not read is {NO_NAME}", empty + 1);
        return Err(wrong(reason));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    check_unique(&names).map_err(wrong)
}

/// Names for an error.
pub(crate) fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut names = names.filter(|name| has_name(name));
    let listed = names.by_ref().take(LISTED).map(listed_name).collect::<Vec<_>>().join(", ");
    let more = names.count();
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}
