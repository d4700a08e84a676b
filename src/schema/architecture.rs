//! The architectures as data: sizes, requirements, text and presets. The layers of each architecture are
//! built by a file in `src/model/`.

use std::fmt::{self, Write};

use serde::{Deserialize, Serialize};

use super::check::{Fault, check_cross, check_hidden};
use crate::types::named;

/// An architecture with its hidden sizes. Inputs and outputs follow from the features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Architecture {
    /// DLRM: a bottom MLP over the dense values, pairwise dot products, and a top MLP.
    Dlrm {
        /// Hidden sizes of the bottom MLP. A last layer, to the tables' dim, follows.
        bottom: Vec<usize>,
        /// Hidden sizes of the top MLP. A last layer, to one logit, follows.
        top: Vec<usize>,
    },
    /// Deep & Cross, 2017: `x' = x0 (x . w) + b + x`, and a deep MLP.
    Dcn {
        /// Number of cross layers.
        cross_layers: usize,
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
    /// Deep & Cross v2: `x' = x0 * (W x + b) + x`, and a deep MLP.
    Dcnv2 {
        /// Number of cross layers.
        cross_layers: usize,
        /// Rank of `W = U V`; without it, W is one matrix.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<usize>,
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
    /// A factorisation machine and a deep MLP. Every feature names a wide table.
    Deepfm {
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
    /// A linear model and a deep MLP. Every feature names a wide table.
    WideDeep {
        /// Hidden sizes of the deep MLP.
        deep: Vec<usize>,
    },
}

/// How much smaller than the largest number the square of a product of inputs must be: the products are
/// multiplied by weights, and summed.
const TRAINABLE_MARGIN: f64 = 1024.0;

/// Inputs up to this may always be trained on: logarithms and standardised numbers are rarely larger.
const LEAST_LIMIT: f64 = 100.0;

impl Architecture {
    /// The largest input that a model can be trained on.
    ///
    /// A cross layer multiplies its input by that of the first one, and optimizers square gradients, which
    /// have such products as factors. So one larger input can make a loss, a weight or a state of the
    /// optimizer that is not finite, which ends the training.
    pub(super) fn largest_trainable(&self) -> f32 {
        let factors = match self {
            Self::Dcn { cross_layers, .. } | Self::Dcnv2 { cross_layers, .. } => cross_layers + 1,
            Self::Dlrm { .. } | Self::Deepfm { .. } | Self::WideDeep { .. } => 1,
        };
        let limit = (f64::from(f32::MAX) / TRAINABLE_MARGIN).powf(0.5 / factors as f64);
        // As errors show it.
        let digit = 10_f64.powf(limit.log10().floor() - 1.0);
        ((limit / digit).floor() * digit).max(LEAST_LIMIT) as f32
    }
}

/// The widths of a model's input, which determine the number of dense weights.
pub(super) struct InputWidths {
    /// Elements of the input row.
    pub all: usize,
    /// Number of dense values.
    pub dense: usize,
    /// Number of categorical features.
    pub features: usize,
    /// Elements of the first feature's vector.
    pub dim: usize,
}

impl Architecture {
    /// The kind of the architecture, without sizes.
    pub(crate) fn kind(&self) -> ArchKind {
        match self {
            Self::Dlrm { .. } => ArchKind::Dlrm,
            Self::Dcn { .. } => ArchKind::Dcn,
            Self::Dcnv2 { .. } => ArchKind::Dcnv2,
            Self::Deepfm { .. } => ArchKind::Deepfm,
            Self::WideDeep { .. } => ArchKind::WideDeep,
        }
    }

    pub(super) fn check_sizes(&self) -> Result<(), Fault> {
        match self {
            Self::Dlrm { bottom, top } => {
                check_hidden("bottom", bottom)?;
                check_hidden("top", top)
            }
            Self::Dcn { cross_layers, deep } => check_cross(*cross_layers, None, deep),
            Self::Dcnv2 { cross_layers, rank, deep } => check_cross(*cross_layers, *rank, deep),
            Self::Deepfm { deep } | Self::WideDeep { deep } => check_hidden("deep", deep),
        }
    }

    /// The number of dense weights.
    pub(super) fn weights(&self, inputs: &InputWidths) -> u128 {
        let input = inputs.all;
        match self {
            Self::Dlrm { bottom, top } => {
                let vectors = inputs.features + 1;
                let interaction = inputs.dim + vectors * (vectors - 1) / 2;
                mlp(inputs.dense, bottom, inputs.dim) + mlp(interaction, top, 1)
            }
            Self::Dcn { cross_layers, deep } => {
                (2 * input * cross_layers) as u128 + mlp(input, deep, 1) + input as u128
            }
            Self::Dcnv2 { cross_layers, rank, deep } => {
                let matrix = rank.map_or(input, |rank| 2 * rank) as u128 * input as u128;
                (matrix + input as u128) * *cross_layers as u128 + mlp(input, deep, 1) + input as u128
            }
            Self::Deepfm { deep } | Self::WideDeep { deep } => mlp(input, deep, 1),
        }
    }

    /// Writes the keys of `[architecture]` in `model.toml`.
    pub(super) fn write_toml(&self, f: &mut impl Write) -> fmt::Result {
        writeln!(f, "kind = \"{}\"", self.kind())?;
        match self {
            Self::Dlrm { bottom, top } => writeln!(f, "bottom = {bottom:?}\ntop = {top:?}"),
            Self::Dcn { cross_layers, deep } => writeln!(f, "cross_layers = {cross_layers}\ndeep = {deep:?}"),
            Self::Dcnv2 { cross_layers, rank, deep } => {
                writeln!(f, "cross_layers = {cross_layers}")?;
                if let Some(rank) = rank {
                    writeln!(f, "rank = {rank}")?;
                }
                writeln!(f, "deep = {deep:?}")
            }
            Self::Deepfm { deep } | Self::WideDeep { deep } => writeln!(f, "deep = {deep:?}"),
        }
    }
}

/// Weights and biases of a multilayer perceptron.
fn mlp(input: usize, hidden: &[usize], output: usize) -> u128 {
    let mut weights = 0;
    let mut from = input as u128;
    for &to in hidden.iter().chain([&output]) {
        weights += (from + 1) * to as u128;
        from = to as u128;
    }
    weights
}

/// An architecture without its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchKind {
    /// DLRM.
    Dlrm,
    /// Deep & Cross, 2017.
    Dcn,
    /// Deep & Cross v2.
    Dcnv2,
    /// DeepFM.
    Deepfm,
    /// Wide & Deep.
    WideDeep,
}

impl ArchKind {
    /// Whether every feature has first-order weights.
    pub(super) fn has_wide(self) -> bool {
        matches!(self, Self::Deepfm | Self::WideDeep)
    }

    /// Whether the vectors of different features are multiplied, so that all tables need the same dim.
    pub(super) fn needs_one_dim(self) -> bool {
        matches!(self, Self::Dlrm | Self::Deepfm)
    }

    /// The architecture with the sizes that `flechette init` writes.
    pub(super) fn preset(self) -> Architecture {
        let deep = vec![256, 128];
        match self {
            Self::Dlrm => Architecture::Dlrm { bottom: vec![64], top: deep },
            Self::Dcn => Architecture::Dcn { cross_layers: 3, deep },
            Self::Dcnv2 => Architecture::Dcnv2 { cross_layers: 3, rank: None, deep },
            Self::Deepfm => Architecture::Deepfm { deep },
            Self::WideDeep => Architecture::WideDeep { deep },
        }
    }
}

named! {
    ArchKind: Dlrm = "dlrm", Dcn = "dcn", Dcnv2 = "dcnv2", Deepfm = "deepfm", WideDeep = "wide_deep";
    UnknownArchitecture = UnknownArchitecture
}

/// No architecture has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown architecture {0:?}, expected {names}", names = ArchKind::names())]
pub struct UnknownArchitecture(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_input_depends_on_how_often_it_is_multiplied_with_itself() {
        let deep = vec![4];
        let cross = |cross_layers| Architecture::Dcnv2 { cross_layers, rank: None, deep: deep.clone() };
        let plain = Architecture::WideDeep { deep: deep.clone() }.largest_trainable();
        assert_eq!(plain, 5.7e17);
        assert_eq!(
            [1, 3, 10, 64].map(|layers| cross(layers).largest_trainable()),
            [7.5e8, 2.7e4, 100.0, 100.0]
        );
        // The squares of the products that a step computes.
        assert!((plain * plain).is_finite() && cross(3).largest_trainable().powi(8).is_finite());
    }
}
