//! `model.toml`: the inputs of a model and what is computed from them.
//!
//! A schema is data: dense features with transforms, categorical features with hashing and pooling, tables
//! with sizes and defaults, and the architecture. Every version contains its schema, so that training and
//! serving hash and transform in the same way.
//!
//! The schema alone defines the layout of a model's input row: the dense values; then one pooled vector for
//! each feature, in order; then, for architectures with a wide part, one first-order weight for each feature.
//! [`Schema::lookups`] lists the pooled vectors with their columns.
//!
//! [`Schema::parse`] reads and validates (`check`), [`Schema::to_toml`] writes text that reads back equal
//! (`text`), [`Schema::encode`] applies hashing and transforms to raw samples (`encode`), and [`preset`] has
//! the schemas of the data sets that `flechette init` knows.

mod architecture;
mod check;
mod difference;
mod encode;
mod line;
pub mod preset;
mod text;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::mem::fold;
use crate::types::{Element, TableId};

pub use architecture::Architecture;
pub(crate) use check::{MAX_DIM, MAX_FEATURES, MAX_IDS, MAX_ROWS, SchemaError};
pub(crate) use encode::{AbsentIdError, EncodeError};

/// The content of `model.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// The computation from input row to score.
    pub architecture: Architecture,
    /// The loss that training minimises.
    #[serde(default)]
    pub(crate) loss: Loss,
    /// Numeric inputs, in order.
    #[serde(default)]
    pub dense: Vec<DenseFeature>,
    /// Categorical inputs, in order.
    #[serde(default)]
    pub features: Vec<Feature>,
    /// Embedding tables.
    #[serde(default)]
    pub tables: Vec<TableSchema>,
}

/// The loss that training minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Loss {
    /// Binary cross-entropy of the logit.
    #[default]
    BinaryCrossEntropy,
}

/// A numeric input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseFeature {
    /// Unique among the dense features.
    pub name: String,
    /// Turns raw values into the model's inputs.
    #[serde(default)]
    pub(crate) transform: Transform,
}

/// The transform from a raw dense value to the model's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Transform {
    /// No change.
    #[default]
    None,
    /// `ln(1 + max(x, 0))`.
    Log1p,
    /// `(x - mean) / std`.
    Standardize {
        /// Any finite number.
        mean: f32,
        /// Above 0.
        std: f32,
    },
}

impl Transform {
    /// The model's input for a raw value.
    #[must_use]
    #[inline]
    pub(crate) fn apply(self, raw: f32) -> f32 {
        match self {
            Self::None => raw,
            Self::Log1p => raw.max(0.0).ln_1p(),
            Self::Standardize { mean, std } => (raw - mean) / std,
        }
    }
}

/// The raw values of a dense feature that a model can be trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TrainableRange {
    transform: Transform,
    /// Of the model's input.
    pub limit: f32,
}

impl TrainableRange {
    pub(crate) fn has(self, raw: f32) -> bool {
        self.transform.apply(raw).abs() <= self.limit
    }
}

/// A categorical input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feature {
    /// Unique among the features.
    pub name: String,
    /// The table of its embedding rows.
    pub table: String,
    /// The dim-1 table of its first-order weights (DeepFM, Wide & Deep only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wide_table: Option<String>,
    /// How many ids of this feature a sample has.
    #[serde(default)]
    pub(crate) arity: Arity,
    /// How several rows become one vector.
    #[serde(default)]
    pub(crate) pooling: Pooling,
    /// How a raw string becomes an id. Without it, the feature accepts ids only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<Hash>,
}

/// How many ids of a feature a sample has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Arity {
    /// Exactly one.
    #[default]
    OneHot,
    /// 0 to `max`.
    MultiHot {
        /// Most ids in one sample.
        max: u32,
    },
}

/// How the rows of a sample's ids become one vector. An empty bag gives zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The sum, in the order of the ids.
    #[default]
    Sum,
    /// The sum divided by the number of rows.
    Mean,
}

/// `xxh3_64(bytes, seed) mod modulus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hash {
    /// Seed of XXH3.
    #[serde(default)]
    pub seed: u64,
    /// The number of ids; at most the table's rows.
    pub modulus: u64,
}

impl Hash {
    /// The id of a raw value.
    #[must_use]
    pub(crate) fn id(&self, value: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(value, self.seed) % self.modulus
    }
}

/// An embedding table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSchema {
    /// Unique among the tables; also the name of its file.
    pub name: String,
    /// Number of rows before lossy hashing. Ids are below this.
    pub rows: u64,
    /// Elements of a row.
    pub dim: usize,
    /// The type of stored elements. Training is always in f32.
    #[serde(default)]
    pub element: Element,
    /// What an id reads that the table does not hold.
    #[serde(default)]
    pub(crate) default: AbsentDefault,
    /// If given, the table has only `2^lossy_bits` rows and ids are hashed into them. Ids with the same hash
    /// share a row in training, store and cache (narrow flat keys, FLECHE section 3.1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lossy_bits: Option<u32>,
}

impl TableSchema {
    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.element.row_bytes(self.dim)
    }

    /// The row that an id reads. An id that the table does not hold reads the default row, or zeros (`None`).
    #[must_use]
    #[inline(always)]
    pub(crate) fn row_of(&self, id: u64) -> Option<u64> {
        let id = match self.default {
            _ if id < self.rows => id,
            AbsentDefault::Row(row) => row,
            AbsentDefault::Zeros | AbsentDefault::Error => return None,
        };
        Some(self.lossy_bits.map_or(id, |bits| fold(id, bits)))
    }

    /// Rows that the table stores: `rows`, or fewer if ids share rows.
    #[must_use]
    pub fn stored_rows(&self) -> u64 {
        self.lossy_bits.map_or(self.rows, |bits| 1 << bits)
    }
}

/// What an id reads that its table does not hold, because the id is not below the number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AbsentDefault {
    /// A row of zeros.
    #[default]
    Zeros,
    /// The row with this number.
    Row(u64),
    /// The request is refused.
    Error,
}

/// A pooled vector of the input row: `feature`, looked up in `table`, is written at `column` of the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Index of the feature in the schema and in a batch.
    pub feature: usize,
    /// The table that it reads.
    pub table: TableId,
    /// Elements of a row.
    pub dim: usize,
    /// Type of the stored elements.
    pub element: Element,
    /// How the rows of a sample are pooled.
    pub pooling: Pooling,
    /// First element of the vector in the input row.
    pub column: usize,
}

impl Schema {
    #[must_use]
    pub(crate) fn table_id(&self, name: &str) -> Option<TableId> {
        self.tables.iter().position(|t| t.name == name).map(|i| TableId(i as u32))
    }

    /// Dense values of a sample.
    #[must_use]
    pub fn dense_width(&self) -> usize {
        self.dense.len()
    }

    /// The checksum of the names of the dense inputs in their order. Never 0. A client that has the
    /// description of another version gets an error instead of scores of numbers in a wrong order.
    #[must_use]
    pub(crate) fn dense_order(&self) -> u64 {
        let mut hash = Xxh3::new();
        for dense in &self.dense {
            hash.update(dense.name.as_bytes());
            // No name has such a byte.
            hash.update(&[0xff]);
        }
        hash.digest().max(1)
    }

    /// The pooled vectors of the input row, in column order: one for each feature, then one for each feature
    /// with a wide table. Unknown table names are skipped; validation refuses them.
    #[must_use]
    pub fn lookups(&self) -> Vec<Lookup> {
        let ids: HashMap<&str, TableId> =
            self.tables.iter().enumerate().map(|(i, t)| (t.name.as_str(), TableId(i as u32))).collect();
        let deep = self.features.iter().map(|f| Some(f.table.as_str()));
        let wide = self.features.iter().map(|f| f.wide_table.as_deref());
        let mut column = self.dense_width();
        let mut lookups = Vec::new();
        for (i, table) in deep.enumerate().chain(wide.enumerate()) {
            let Some(&table) = table.and_then(|name| ids.get(name)) else { continue };
            let TableSchema { dim, element, .. } = self.tables[table.index()];
            let pooling = self.features[i].pooling;
            lookups.push(Lookup { feature: i, table, dim, element, pooling, column });
            column += dim;
        }
        lookups
    }

    /// Elements of one input row: dense values, pooled vectors and first-order weights.
    #[must_use]
    pub(crate) fn input_width(&self) -> usize {
        self.dense_width() + self.lookups().iter().map(|l| l.dim).sum::<usize>()
    }
}
