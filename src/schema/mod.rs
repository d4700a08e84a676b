//! `model.toml`: what a model's inputs are and what is computed from them.
//!
//! A schema is data: dense features with their transforms, categorical features with their
//! hashing and pooling, tables with their sizes and defaults, and the architecture. It travels
//! with every version, so that training and serving hash and transform by the same text.
//!
//! A model's input row is laid out by the schema alone: the dense values first, then one pooled
//! vector a feature, in order, and then, for architectures with a wide part, one first-order
//! weight a feature. [`Schema::lookups`] lists the pooled vectors with their columns.

//!
//! [`Schema::parse`] reads and validates (`check`), [`Schema::to_toml`] writes what it reads back
//! (`text`), [`Schema::encode`] applies hashing and transforms to raw samples (`encode`), and
//! [`preset`] holds the schemas of the data sets that `flechette init` knows.

mod check;
mod encode;
mod line;
pub mod preset;
mod text;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::mem::fold;
use crate::types::{Element, TableId};

pub(crate) use check::{MAX_DIM, MAX_FEATURES, MAX_IDS, MAX_ROWS, SchemaError};
pub(crate) use encode::EncodeError;

/// Everything `model.toml` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// What is computed from the inputs.
    pub architecture: Architecture,
    /// What training minimises.
    #[serde(default)]
    pub loss: Loss,
    /// Numeric inputs, in order.
    #[serde(default)]
    pub dense: Vec<DenseFeature>,
    /// Categorical inputs, in order.
    #[serde(default)]
    pub features: Vec<Feature>,
    /// Embedding tables.
    #[serde(default)]
    pub tables: Vec<Table>,
}

/// The layers and their sizes. Hidden sizes only: inputs and outputs follow from the features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Architecture {
    /// DLRM: a bottom MLP over the dense values ending at the tables' dim, pairwise dot products
    /// (lower triangle, dense first), a top MLP ending in one logit.
    Dlrm {
        /// Hidden sizes of the bottom MLP; the last layer, to the tables' dim, is implied.
        bottom: Vec<usize>,
        /// Hidden sizes of the top MLP; the last layer, to one logit, is implied.
        top: Vec<usize>,
    },
    /// Deep & Cross, 2017: `x' = x0 (x . w) + b + x`, beside a deep MLP.
    Dcn {
        /// How many cross layers.
        cross_layers: usize,
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
    /// Deep & Cross v2: `x' = x0 * (W x + b) + x`, beside a deep MLP.
    Dcnv2 {
        /// How many cross layers.
        cross_layers: usize,
        /// Rank of `W = U V`; a full matrix when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<usize>,
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
    /// A factorisation machine beside a deep MLP. Every feature names a wide table.
    Deepfm {
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
    /// A linear model beside a deep MLP. Every feature names a wide table.
    WideDeep {
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
}

/// What training minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Binary cross-entropy of the logit.
    #[default]
    BinaryCrossEntropy,
}

/// A numeric input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseFeature {
    /// Its name, unique among the dense features.
    pub name: String,
    /// What is done to a raw value.
    #[serde(default)]
    pub transform: Transform,
}

/// What is done to a raw dense value before the model sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transform {
    /// Nothing.
    #[default]
    None,
    /// `ln(1 + max(x, 0))`.
    Log1p,
    /// `(x - mean) / std`.
    Standardize {
        /// Subtracted first.
        mean: f32,
        /// Divided by; above 0.
        std: f32,
    },
}

impl Transform {
    /// What the model sees of a raw value.
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

/// A categorical input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feature {
    /// Its name, unique among the features.
    pub name: String,
    /// The table that holds its rows.
    pub table: String,
    /// The dim-1 table of its first-order weights (DeepFM, Wide & Deep only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wide_table: Option<String>,
    /// How many ids a sample has.
    #[serde(default)]
    pub arity: Arity,
    /// How several rows become one vector.
    #[serde(default)]
    pub pooling: Pooling,
    /// How a raw string becomes an id; without it only ids are taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<Hash>,
}

/// How many ids one sample has of a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arity {
    /// Exactly one.
    #[default]
    OneHot,
    /// From none to `max`.
    MultiHot {
        /// Most ids in one sample.
        max: u32,
    },
}

/// How the rows of one sample's ids become one vector. An empty bag is zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Their sum, added in id order.
    #[default]
    Sum,
    /// Their sum divided by their count.
    Mean,
}

/// `xxh3_64(bytes, seed) mod modulus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hash {
    /// Seed of XXH3.
    #[serde(default)]
    pub seed: u64,
    /// How many ids there are; at most the table's rows.
    pub modulus: u64,
}

impl Hash {
    /// The id of a raw value.
    #[must_use]
    pub fn id(&self, value: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(value, self.seed) % self.modulus
    }
}

/// An embedding table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Its name, unique among the tables; also its file's name.
    pub name: String,
    /// How many rows.
    pub rows: u64,
    /// Elements a row.
    pub dim: usize,
    /// How a version stores its rows' elements. Training is in f32 whatever this says.
    #[serde(default)]
    pub element: Element,
    /// What an id past the rows gets.
    #[serde(default)]
    pub default: AbsentDefault,
    /// Where given, the table holds only `2^lossy_bits` rows and ids are hashed into them: ids that
    /// meet share a row, in training, store and cache alike (FLECHE 3.1 with narrow flat keys).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lossy_bits: Option<u32>,
}

impl Table {
    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.element.row_bytes(self.dim)
    }

    /// The row that an id reads: its own, or the one that stands for absent ids; none reads as zeros.
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

    /// How many rows the table holds: one an id, unless ids share them.
    #[must_use]
    pub fn stored_rows(&self) -> u64 {
        self.lossy_bits.map_or(self.rows, |bits| 1 << bits)
    }
}

/// What an id that the table does not hold gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AbsentDefault {
    /// A row of zeros.
    #[default]
    Zeros,
    /// The row of this number.
    Row(u64),
    /// A refusal of the request.
    Error,
}

/// One pooled vector of the input row: feature `feature` looked up in `table`, written at
/// `column` of the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The feature's place in the schema, which is also its column of the batch.
    pub feature: usize,
    /// The table it reads.
    pub table: TableId,
    /// The table's row width.
    pub dim: usize,
    /// How the rows' elements are stored.
    pub element: Element,
    /// How its rows are pooled.
    pub pooling: Pooling,
    /// Where its vector begins in the input row.
    pub column: usize,
}

impl Schema {
    /// The table of this name.
    #[must_use]
    pub(crate) fn table_id(&self, name: &str) -> Option<TableId> {
        self.tables.iter().position(|t| t.name == name).map(|i| TableId(i as u32))
    }

    /// How many dense values a sample has.
    #[must_use]
    pub fn dense_width(&self) -> usize {
        self.dense.len()
    }

    /// Every pooled vector of the input row, in column order: one a feature, then one a feature
    /// with a wide table. A name that no table bears is skipped: validation refuses it.
    #[must_use]
    pub fn lookups(&self) -> Vec<Lookup> {
        let places: HashMap<&str, TableId> =
            self.tables.iter().enumerate().map(|(i, t)| (t.name.as_str(), TableId(i as u32))).collect();
        let deep = self.features.iter().map(|f| Some(f.table.as_str()));
        let wide = self.features.iter().map(|f| f.wide_table.as_deref());
        let mut column = self.dense_width();
        let mut lookups = Vec::new();
        for (i, table) in deep.enumerate().chain(wide.enumerate()) {
            let Some(&table) = table.and_then(|name| places.get(name)) else { continue };
            let Table { dim, element, .. } = self.tables[table.index()];
            let pooling = self.features[i].pooling;
            lookups.push(Lookup { feature: i, table, dim, element, pooling, column });
            column += dim;
        }
        lookups
    }

    /// Elements of one input row: dense values, pooled vectors and first-order weights.
    #[must_use]
    pub fn input_width(&self) -> usize {
        self.dense_width() + self.lookups().iter().map(|l| l.dim).sum::<usize>()
    }
}
