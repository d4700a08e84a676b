//! Reads and validates `model.toml`. An invalid schema is refused with the line and the reason.
//!
//! Validation works on the typed [`Schema`], so that it also covers schemas made in code. It names a fault by
//! a path such as `tables[3].rows`; `line.rs` finds the line of a path.

use std::collections::{HashMap, HashSet};

use super::architecture::InputWidths;
use super::line::{line_of, locate};
use super::{AbsentDefault, Arity, Feature, Schema, TableSchema, Transform};
use crate::types::RowId;

/// Most rows of a table.
pub(crate) const MAX_ROWS: u64 = 1 << 48;
/// Most elements of a row.
pub(crate) const MAX_DIM: usize = 4096;
/// Most categorical features, and most dense ones.
pub(crate) const MAX_FEATURES: usize = 10_000;
/// Most tables: two for each feature.
const MAX_TABLES: usize = 2 * MAX_FEATURES;
// The trainer packs the table and row of any schema into one number, a `RowId`.
const _: () = assert!(MAX_ROWS <= RowId::MAX_ROWS && MAX_TABLES <= RowId::MAX_TABLES);
/// Largest hidden layer, and largest rank of a cross layer.
const MAX_HIDDEN: usize = 65_536;
/// Most hidden layers of an MLP, and most cross layers.
const MAX_LAYERS: usize = 64;
/// Most ids of a feature in a sample.
pub(crate) const MAX_IDS: u32 = 65_536;
/// Longest name in bytes: a file name must hold it and an extension.
const MAX_NAME: usize = 128;
/// Most elements of an input row.
const MAX_INPUT: usize = 1 << 20;
/// Most dense weights of the architecture.
const MAX_WEIGHTS: u128 = 1 << 31;

/// Why a schema is refused. Lines count from 1; a field is a path such as `tables[3].rows`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the fields
pub enum SchemaError {
    /// The text is not TOML, or has other keys or types than a schema.
    #[error("line {line}: {reason}")]
    Form { line: usize, reason: String },
    /// A value in the text is invalid.
    #[error("line {line}: {field}: {reason}")]
    Text { line: usize, field: String, reason: String },
    /// A value of a schema that was made in code is invalid.
    #[error("{field}: {reason}")]
    Value { field: String, reason: String },
}

impl Schema {
    /// Reads and validates the text of a `model.toml`.
    ///
    /// # Errors
    /// [`SchemaError`] with the line and the reason.
    pub fn parse(text: &str) -> Result<Self, SchemaError> {
        let schema: Self = toml::from_str(text).map_err(|error| SchemaError::Form {
            line: line_of(text, error.span().map_or(0, |span| span.start)),
            reason: error.message().lines().collect::<Vec<_>>().join("; "),
        })?;
        schema.faults().map_err(|Fault { field, reason }| SchemaError::Text {
            line: line_of(text, locate(text, &field)),
            field,
            reason,
        })?;
        Ok(schema)
    }

    /// Validates a schema that was made in code.
    ///
    /// # Errors
    /// [`SchemaError::Value`] for the first fault.
    pub fn check(&self) -> Result<(), SchemaError> {
        self.faults().map_err(|Fault { field, reason }| SchemaError::Value { field, reason })
    }

    fn faults(&self) -> Result<(), Fault> {
        check_count("dense", self.dense.len(), MAX_FEATURES)?;
        check_count("features", self.features.len(), MAX_FEATURES)?;
        check_count("tables", self.tables.len(), MAX_TABLES)?;
        check_names("dense", self.dense.iter().map(|d| d.name.as_str()))?;
        check_names("features", self.features.iter().map(|f| f.name.as_str()))?;
        check_names("tables", self.tables.iter().map(|t| t.name.as_str()))?;
        for (i, dense) in self.dense.iter().enumerate() {
            check_transform(i, dense.transform)?;
        }
        for (i, table) in self.tables.iter().enumerate() {
            check_table(i, table)?;
        }
        if self.features.is_empty() {
            return fault("features", "at least one is needed, got none");
        }
        let tables: HashMap<&str, &TableSchema> = self.tables.iter().map(|t| (t.name.as_str(), t)).collect();
        for (i, feature) in self.features.iter().enumerate() {
            check_feature(i, feature, &tables)?;
        }
        self.architecture.check_sizes()?;
        check_wide(self, &tables)?;
        check_dims(self, &tables)?;
        check_weights(self, &tables)
    }
}

/// A fault and its path of keys and indices.
pub(crate) struct Fault {
    field: String,
    reason: String,
}

fn fault<T>(field: impl Into<String>, reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { field: field.into(), reason: reason.into() })
}

fn check_count(list: &str, count: usize, max: usize) -> Result<(), Fault> {
    if count > max { fault(list, format!("must have at most {max} entries, got {count}")) } else { Ok(()) }
}

fn check_range(
    field: impl FnOnce() -> String,
    value: u64,
    range: std::ops::RangeInclusive<u64>,
) -> Result<(), Fault> {
    if range.contains(&value) {
        return Ok(());
    }
    fault(field(), format!("must be between {} and {}, got {value}", range.start(), range.end()))
}

fn check_names<'a>(list: &str, names: impl Iterator<Item = &'a str>) -> Result<(), Fault> {
    let mut seen = HashSet::new();
    for (i, name) in names.enumerate() {
        let field = || format!("{list}[{i}].name");
        if name.is_empty() || name.len() > MAX_NAME {
            return fault(field(), format!("must have 1 to {MAX_NAME} bytes, got {}", name.len()));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        if name.starts_with('.') || !name.chars().all(plain) {
            let rule = "letters, digits, '_', '.' and '-' only, and no '.' first";
            return fault(field(), format!("{name:?} cannot be a file name: {rule}"));
        }
        if !seen.insert(name) {
            return fault(field(), format!("{name:?} is the name of an earlier entry"));
        }
    }
    Ok(())
}

fn check_transform(i: usize, transform: Transform) -> Result<(), Fault> {
    let Transform::Standardize { mean, std } = transform else { return Ok(()) };
    let field = |key| format!("dense[{i}].transform.standardize.{key}");
    if !mean.is_finite() {
        return fault(field("mean"), format!("must be finite, got {mean}"));
    }
    if !std.is_finite() || std <= 0.0 {
        return fault(field("std"), format!("must be finite and above 0, got {std}"));
    }
    Ok(())
}

fn check_table(i: usize, table: &TableSchema) -> Result<(), Fault> {
    check_range(|| format!("tables[{i}].rows"), table.rows, 1..=MAX_ROWS)?;
    check_range(|| format!("tables[{i}].dim"), table.dim as u64, 1..=MAX_DIM as u64)?;
    if let Some(bits) = table.lossy_bits {
        // With more bits the table would have more rows than ids.
        let most = u64::from(table.rows.ilog2());
        check_range(|| format!("tables[{i}].lossy_bits"), u64::from(bits), 0..=most)?;
    }
    match table.default {
        AbsentDefault::Row(row) if row >= table.rows => {
            let reason = format!("row {row} is not in table {:?}, which has {} rows", table.name, table.rows);
            fault(format!("tables[{i}].default"), reason)
        }
        _ => Ok(()),
    }
}

fn check_feature(i: usize, feature: &Feature, tables: &HashMap<&str, &TableSchema>) -> Result<(), Fault> {
    if let Arity::MultiHot { max } = feature.arity {
        let field = || format!("features[{i}].arity.multi_hot.max");
        check_range(field, u64::from(max), 1..=u64::from(MAX_IDS))?;
    }
    let read = [("table", Some(feature.table.as_str())), ("wide_table", feature.wide_table.as_deref())];
    for (key, name) in read {
        let Some(name) = name else { continue };
        let Some(table) = tables.get(name) else {
            return fault(format!("features[{i}].{key}"), format!("no table is named {name:?}"));
        };
        let Some(hash) = feature.hash else { continue };
        let field = || format!("features[{i}].hash.modulus");
        if hash.modulus == 0 || hash.modulus > table.rows {
            let limit = format!("must be between 1 and the {} rows of table {name:?}", table.rows);
            return fault(field(), format!("{limit}, got {}", hash.modulus));
        }
    }
    Ok(())
}

pub(super) fn check_hidden(key: &str, sizes: &[usize]) -> Result<(), Fault> {
    check_count(&format!("architecture.{key}"), sizes.len(), MAX_LAYERS)?;
    for (i, &size) in sizes.iter().enumerate() {
        check_range(|| format!("architecture.{key}[{i}]"), size as u64, 1..=MAX_HIDDEN as u64)?;
    }
    Ok(())
}

pub(super) fn check_cross(layers: usize, rank: Option<usize>, deep: &[usize]) -> Result<(), Fault> {
    check_range(|| "architecture.cross_layers".into(), layers as u64, 1..=MAX_LAYERS as u64)?;
    check_range(|| "architecture.rank".into(), rank.unwrap_or(1) as u64, 1..=MAX_HIDDEN as u64)?;
    if deep.is_empty() {
        return fault("architecture.deep", "at least one hidden size is needed, got none");
    }
    check_hidden("deep", deep)
}

/// Checks that every feature has a wide table if the architecture has a wide part, and that otherwise no
/// feature has one.
fn check_wide(schema: &Schema, tables: &HashMap<&str, &TableSchema>) -> Result<(), Fault> {
    let wide = schema.architecture.kind().has_wide();
    for (i, feature) in schema.features.iter().enumerate() {
        let field = || format!("features[{i}].wide_table");
        let name = schema.architecture.kind();
        match feature.wide_table.as_deref() {
            Some(_) if !wide => return fault(field(), format!("architecture {name} has no wide part")),
            None if wide => {
                return fault(
                    field(),
                    format!("missing: architecture {name} needs a wide table per feature"),
                );
            }
            None => {}
            Some(table) => {
                let dim = tables.get(table).map_or(0, |t| t.dim);
                if dim != 1 {
                    return fault(field(), format!("table {table:?} must have dim 1, got {dim}"));
                }
            }
        }
    }
    Ok(())
}

/// Checks that all features have the same dim if the architecture multiplies vectors of different features.
fn check_dims(schema: &Schema, tables: &HashMap<&str, &TableSchema>) -> Result<(), Fault> {
    if !schema.architecture.kind().needs_one_dim() {
        return Ok(());
    }
    let dim_of = |feature: &Feature| tables.get(feature.table.as_str()).map_or(0, |t| t.dim);
    let mut dims = schema.features.iter().map(dim_of).enumerate();
    let Some((_, first)) = dims.next() else { return Ok(()) };
    match dims.find(|&(_, dim)| dim != first) {
        None => Ok(()),
        Some((i, dim)) => {
            let name = schema.architecture.kind();
            let table = &schema.features[i].table;
            let reason = format!(
                "architecture {name} needs tables of the same dim: {table:?} has {dim}, the first has {first}"
            );
            fault(format!("features[{i}].table"), reason)
        }
    }
}

/// Limits the input row and the number of dense weights, and so the memory of the dense part.
fn check_weights(schema: &Schema, tables: &HashMap<&str, &TableSchema>) -> Result<(), Fault> {
    let input = schema.input_width();
    if input > MAX_INPUT {
        return fault(
            "features",
            format!("an input row has {input} elements, at most {MAX_INPUT} are allowed"),
        );
    }
    let dim = schema.features.first().and_then(|f| tables.get(f.table.as_str())).map_or(0, |t| t.dim);
    let (dense, features) = (schema.dense_width(), schema.features.len());
    let weights = schema.architecture.weights(&InputWidths { all: input, dense, features, dim });
    if weights > MAX_WEIGHTS {
        return fault(
            "architecture",
            format!("has {weights} dense weights, at most {MAX_WEIGHTS} are allowed"),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
