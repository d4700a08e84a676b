//! The schemas of the data sets that `flechette init` knows. All have the same small layers: DLRM
//! bottom 64, top 256-128; three cross layers; deep 256-128.

pub use super::architecture::ArchKind;
use super::{Arity, DenseFeature, Feature, Hash, Pooling};
use super::{Loss, Schema, TableSchema, Transform};
use crate::types::Element;

/// Integer columns of a Criteo row, `I1` to `I13`.
pub(crate) const CRITEO_DENSE: usize = 13;
/// Categorical columns of a Criteo row, `C1` to `C26`.
pub(crate) const CRITEO_FEATURES: usize = 26;

/// Avazu's categorical columns: the 21 that public work uses, and `hour`, which makes the 22 tables of FLECHE
/// (table 2). `id`, which is unique, and `click`, the label, are left out.
pub const AVAZU_FEATURES: [&str; 22] = [
    "hour",
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    "C14",
    "C15",
    "C16",
    "C17",
    "C18",
    "C19",
    "C20",
    "C21",
];

/// Criteo (Kaggle and Terabyte): `I1` to `I13` with the transform log1p, and `C1` to `C26`. The strings of
/// each of these columns are hashed to a table of `rows` rows.
#[must_use]
pub fn criteo(kind: ArchKind, dim: usize, rows: u64) -> Schema {
    let dense = (1..=CRITEO_DENSE).map(|i| dense(format!("I{i}"), Transform::Log1p)).collect();
    let inputs = (1..=CRITEO_FEATURES).map(|i| Input::hashed(format!("C{i}"), rows));
    assemble(kind, dim, dense, inputs)
}

/// Avazu: no dense input, and the columns [`AVAZU_FEATURES`]. The strings of each column are hashed to a
/// table of `rows` rows.
#[must_use]
pub fn avazu(kind: ArchKind, dim: usize, rows: u64) -> Schema {
    let inputs = AVAZU_FEATURES.iter().map(|name| Input::hashed((*name).into(), rows));
    assemble(kind, dim, Vec::new(), inputs)
}

/// The columns of one's own data, by name.
#[derive(Clone, Debug, Default)]
pub struct OwnColumns {
    /// Dense inputs.
    pub dense: Vec<String>,
    /// Features.
    pub features: Vec<String>,
}

/// One's own data: dense inputs with the transform log1p, and features. The strings of each feature are
/// hashed to a table of `rows` rows.
#[must_use]
pub fn own(kind: ArchKind, dim: usize, rows: u64, columns: OwnColumns) -> Schema {
    let inputs = columns.dense.into_iter().map(|name| dense(name, Transform::Log1p)).collect();
    assemble(kind, dim, inputs, columns.features.into_iter().map(|name| Input::hashed(name, rows)))
}

/// The inputs of a synthetic data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticShape {
    /// Number of features. Each has its own table.
    pub tables: usize,
    /// Rows of each table.
    pub rows: u64,
    /// Number of dense inputs.
    pub dense: usize,
    /// Most ids per sample of each feature; `None`: one-hot.
    pub multi_hot: Option<u32>,
}

/// Generated data: dense inputs `D1`, `D2`, ... and features `F1`, `F2`, ... Ids are row numbers, without
/// hashing.
#[must_use]
pub fn synthetic(kind: ArchKind, dim: usize, shape: SyntheticShape) -> Schema {
    let arity = shape.multi_hot.map_or(Arity::OneHot, |max| Arity::MultiHot { max });
    let dense = (1..=shape.dense).map(|i| dense(format!("D{i}"), Transform::None)).collect();
    let input = |i| Input { name: format!("F{i}"), rows: shape.rows, arity, hash: None };
    assemble(kind, dim, dense, (1..=shape.tables).map(input))
}

impl Schema {
    /// The same model with stored elements of this type, in every table where that makes rows shorter. Tables
    /// of first-order weights keep their type.
    #[must_use]
    pub fn stored_as(mut self, element: Element) -> Self {
        for table in &mut self.tables {
            if element.row_bytes(table.dim) < Element::F32.row_bytes(table.dim) {
                table.element = element;
            }
        }
        self
    }
}

struct Input {
    name: String,
    rows: u64,
    arity: Arity,
    hash: Option<Hash>,
}

impl Input {
    fn hashed(name: String, rows: u64) -> Self {
        Self { name, rows, arity: Arity::OneHot, hash: Some(Hash { seed: 0, modulus: rows }) }
    }
}

fn dense(name: String, transform: Transform) -> DenseFeature {
    DenseFeature { name, transform }
}

fn assemble(
    kind: ArchKind,
    dim: usize,
    dense: Vec<DenseFeature>,
    inputs: impl Iterator<Item = Input>,
) -> Schema {
    let mut features = Vec::new();
    let mut tables = Vec::new();
    let mut wide_tables = Vec::new();
    for Input { name, rows, arity, hash } in inputs {
        let table = |name: &str, dim| TableSchema { name: name.into(), rows, dim, ..TableSchema::default() };
        let wide_table = kind.has_wide().then(|| format!("{name}_wide"));
        tables.push(table(&name, dim));
        wide_tables.extend(wide_table.as_deref().map(|name| table(name, 1)));
        let pooling = Pooling::Sum;
        features.push(Feature { table: name.clone(), name, wide_table, arity, pooling, hash });
    }
    tables.append(&mut wide_tables);
    Schema { architecture: kind.preset(), loss: Loss::default(), dense, features, tables }
}

#[cfg(test)]
mod tests;
